"""The live board: one table for the widget, small enough to be sent anew each second; and what stays of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from ..model import Event, LoaderState, Snapshot, WorkerState
from . import text

COLUMNS = ("worker", "pid", "state", "sample", "for", "samples/s", "CPU", "memory", "files")
WORD_COLUMNS = (2, 3)
FOLD_ABOVE = 8
"""More workers than this are summed up in a row, but for those that are not well."""
UNWELL = ("stalled", "stopped", "dead")
DATA_BOUND = 0.2
"""From this share of its time on that a loop waits for data, it is called data-bound."""
_BARS = "▁▂▃▄▅▆▇█"
_EVENTS = 5
_NAME = 40

# each colour twice: in a notebook that is not trusted, front ends take out those that are variables
_STYLES = {
    "lgb": "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:var(--jp-ui-font-size1,13px);"
    "line-height:1.5;color:var(--jp-ui-font-color1,inherit);overflow-x:auto;font-variant-numeric:tabular-nums",
    "p": "color:#808080;color:var(--jp-ui-font-color2,#808080)",
    "n": "display:inline-block;min-width:5.5em;white-space:nowrap",
    "s": "color:#1976d2;color:var(--jp-brand-color1,#1976d2);white-space:pre",
    "w": "text-align:left",
    "starting": "color:#00838f;color:var(--jp-info-color0,#00838f)",
    "done": "color:#808080;color:var(--jp-ui-font-color2,#808080)",
    "idle": "color:#808080;color:var(--jp-ui-font-color2,#808080)",
    "full": "color:#1976d2;color:var(--jp-brand-color1,#1976d2)",
    "loading": "color:#2e7d32;color:var(--jp-success-color0,#2e7d32)",
    "stalled": "color:#c77700;color:var(--jp-warn-color1,#c77700);font-weight:600",
    "stopped": "color:#c77700;color:var(--jp-warn-color1,#c77700);font-weight:600",
    "dead": "color:#d9443f;color:var(--jp-error-color1,#d9443f);font-weight:600",
}
_TAGS = {
    "table": "border-collapse:collapse;margin:2px 0 8px;width:auto",
    "tr": "background:none",
    "th": "font-weight:normal;border-bottom:1px solid #bbb;border-bottom:1px solid var(--jp-border-color2,#bbb);"
    "color:#808080;color:var(--jp-ui-font-color2,#808080);padding:1px 12px 1px 0;text-align:right;white-space:nowrap",
    "td": "padding:1px 12px 1px 0;text-align:right;white-space:nowrap",
    "progress": "width:8em;height:.7em;vertical-align:middle;accent-color:var(--jp-brand-color1,#1976d2)",
}
_WIDTHS = (3, 4.5, 4.5, 5, 4, 4.5, 3.5, 4, 2.5)
STYLE = "".join(
    [
        *(f".lgb {tag}{{{style}}}\n" for tag, style in _TAGS.items()),
        *(f".lgb .{name},.{name}.lgb{{{style}}}\n" for name, style in _STYLES.items()),
        *(f".lgb th:nth-child({number}){{min-width:{width}em}}\n" for number, width in enumerate(_WIDTHS, 1)),
        ".lgb td{max-width:14em;overflow:hidden;text-overflow:ellipsis}\n",
        ".lgb{container-type:inline-size}\n",
        "@container (max-width:580px){.lgb table{font-size:11px}\n",
        ".lgb th:nth-child(n){padding-right:6px;min-width:0}.lgb td{padding-right:6px;max-width:8em}}\n",
    ]
)
"""For the live widget, which sends it once. What stays has it in each tag: front ends take style sheets out."""


_TAG = re.compile(r'<(\w+)( [^>]*?)??(?: class="([\w ]*)")?>')  # what is not ours is escaped, and no tag


def board(snapshot: Snapshot, is_folded: bool = True, is_live: bool = True) -> str:
    """Draw loaders, workers, the machine and the latest events; if it is not live, without empty columns."""
    loaders = [loader for loader in snapshot.loaders if loader.workers or loader.activity != "idle"]
    parts = [f"<div>{_head(loader)}</div>{_workers(loader, is_folded, is_live)}" for loader in loaders]
    if not snapshot.guarding:
        parts.append('<div class="p">loaderguard is off; %loaderguard on resumes</div>')
    elif not parts:
        parts.append('<div class="p">no loader is alive</div>')
    parts.append(f'<div class="p">{escape(text.machine(snapshot.machine))}</div>')
    told = warning(snapshot)
    parts += [_event(event) for event in snapshot.events[-_EVENTS:] if not (is_live and event is told)]
    return f'<div class="lgb">{"".join(parts)}</div>'


def warning(snapshot: Snapshot) -> Event | None:
    """Return what is wrong at this moment, to be said aloud."""
    is_late = any(loader.stalled for loader in snapshot.loaders)
    warnings = [event for event in snapshot.events if event.is_warning]
    return warnings[-1] if is_late and warnings else None


def static(snapshot: Snapshot) -> str:
    """Draw the board as it stays in a saved notebook."""
    return with_styles(board(snapshot, is_folded=False, is_live=False))


def with_styles(drawn: str) -> str:
    """Write the styles of classes into the tags themselves."""
    return _TAG.sub(_with_style, drawn)


def _with_style(found: re.Match[str]) -> str:
    """Write the styles of a tag's name and classes into it."""
    tag, attributes, classes = found[1], found[2] or "", (found[3] or "").split()
    styles = [style for style in (_TAGS.get(tag), *(_STYLES.get(name) for name in classes)) if style]
    return f'<{tag}{attributes} style="{";".join(styles)}">' if styles else f"<{tag}{attributes}>"


def _head(loader: LoaderState) -> str:
    name = f"<b>{escape(text.clean(loader.name, _NAME))}</b>"
    words = [text.clean(loader.dataset, _NAME), text.batches(loader)]
    parts = [f'{name} <span class="p">{escape(" · ".join(words))}</span>']
    done, total = loader.batches - loader.batches_before, loader.batches_total
    if total and done <= total:
        parts.append(f'<progress aria-label="batches" max="{total}" value="{done}"></progress>')
    if loader.batches_per_second is not None:
        parts.append(f'<span class="n">{text.rate(loader.batches_per_second)} batches/s</span>')
    parts.append(f'<b class="n">{bound(loader)}</b>' if bound(loader) else "")
    if loader.capacity:
        parts.append(f'<span class="p">{loader.ready} of {loader.capacity} ready</span>')
    if len(loader.history) > 1 and any(loader.history):
        parts.append(f'<span class="s">{sparkline(loader.history)}</span>')
    return "&ensp;".join(part for part in parts if part)


def bound(loader: LoaderState) -> str:
    """Say in a word and a figure whether the loop waits for its data."""
    if loader.wait_share is None or loader.activity in ("idle", "broken") or not loader.in_use:
        return ""
    share = f"{100 * loader.wait_share:.0f} %"
    return f"data-bound {share}" if loader.wait_share >= DATA_BOUND else f"compute-bound ({share} waiting)"


def sparkline(values: tuple[float, ...]) -> str:
    """Draw values as bars of text."""
    top = max(values, default=0.0)
    return "".join(_BARS[round((len(_BARS) - 1) * value / top)] for value in values) if top else ""


def _workers(loader: LoaderState, is_folded: bool, is_live: bool) -> str:
    if not loader.workers:
        return ""
    folds = is_folded and len(loader.workers) > FOLD_ABOVE
    well = [worker for worker in loader.workers if worker.word not in UNWELL]
    columns = range(len(COLUMNS)) if is_live else _used_columns(loader)
    rows = [_row(worker, columns) for worker in loader.workers if not folds or worker.word in UNWELL]
    if folds and well:
        rows.append(_sum_row(well))
    head = "".join(f'<th scope="col"{_class(column)}>{COLUMNS[column]}' for column in columns)
    return f"<table><thead><tr>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _used_columns(loader: LoaderState) -> list[int]:
    rows = [cells_of(worker) for worker in loader.workers]
    return [column for column in range(len(COLUMNS)) if any(row[column] for row in rows)]


def _class(column: int, word: str = "") -> str:
    return f' class="w {word}"' if word else ' class="w"' if column in WORD_COLUMNS else ""


def _row(worker: WorkerState, columns: Iterable[int]) -> str:
    cells = cells_of(worker)
    drawn = "".join(
        f"<td{_class(column, worker.word if column == 2 else '')}>{escape(cells[column])}" for column in columns
    )
    return f"<tr>{drawn}"


def cells_of(worker: WorkerState) -> tuple[str, ...]:
    """Return what is said of a worker, under COLUMNS."""
    if worker.state == "dead":
        return str(worker.worker_id), str(worker.pid), worker.word, "", "", "", "", "", ""
    return (
        str(worker.worker_id),
        str(worker.pid),
        worker.word,
        text.clean(worker.sample or "", 24),
        text.seconds(worker.sample_seconds) if worker.sample_seconds >= 0.1 else "",
        "" if worker.samples_per_second is None else text.rate(worker.samples_per_second),
        "" if worker.cpu_percent is None else f"{worker.cpu_percent:.0f} %",
        "" if worker.private_bytes is None else text.size(worker.private_bytes),
        "" if worker.descriptors is None else str(worker.descriptors),
    )


def _sum_row(workers: list[WorkerState]) -> str:
    """Sum up workers that are well."""
    words = sorted({worker.word for worker in workers})
    states = ", ".join(f"{sum(worker.word == word for worker in workers)} {word}" for word in words)
    speed = sum(worker.samples_per_second or 0 for worker in workers)
    cpu = sum(worker.cpu_percent or 0 for worker in workers)
    held = [worker.private_bytes for worker in workers if worker.private_bytes is not None]
    memory = text.size(sum(held)) if len(held) == len(workers) else ""
    files = sum(worker.descriptors or 0 for worker in workers)
    return (
        f'<tr><td colspan="2">{text.count(len(workers), "worker")}<td colspan="3" class="w">{escape(states)}'
        f"<td>{text.rate(speed)}<td>{cpu:.0f} %<td>{memory}<td>{files or ''}"
    )


def _event(event: Event) -> str:
    return f'<div class="p">{escape(text.event(event))}</div>'
