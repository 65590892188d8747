"""HTML for notebooks, in the colours of the front end's theme. Everything from the user's side is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ..model import Card, Finding, Findings, LateWorker, LoaderState, RunReport, Snapshot, Stall, StopReport
from . import text

_FONT = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:var(--jp-ui-font-size1,13px)"
_INK = "color:var(--jp-ui-font-color1,inherit)"
# twice: in a notebook that is not trusted, front ends take out colours that are variables
_PALE = "color:#808080;color:var(--jp-ui-font-color2,#808080)"
_LINE = "border-bottom:1px solid var(--jp-border-color2,#e0e0e0)"
_WARN = "border-left:3px solid #c77700;border-left:3px solid var(--jp-warn-color1,#c77700)"
_ERROR = "border-left:3px solid #d9443f;border-left:3px solid var(--jp-error-color1,#d9443f)"
_CALM = "border-left:3px solid #808080;border-left:3px solid var(--jp-border-color1,#808080)"
_CODE_FONT = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,12px)"
_PRE = f"{_CODE_FONT};background:none;margin:0"
_FOLD = f'<summary style="cursor:pointer;{_PALE}">'
_LONGEST_STACK = 200
_EDGES = {"error": _ERROR, "warning": _WARN}
_COLOURS = {
    "stopped": "color:#c77700;color:var(--jp-warn-color1,#c77700)",
    "blocked": "color:#c77700;color:var(--jp-warn-color1,#c77700)",
    "dead": "color:#d9443f;color:var(--jp-error-color1,#d9443f)",
    "broken": "color:#d9443f;color:var(--jp-error-color1,#d9443f)",
}


def status(snapshot: Snapshot) -> str:
    """Draw the table of live loaders and workers."""
    parts = [] if snapshot.guarding else [note("loaderguard is off; <code>%loaderguard on</code> resumes.")]
    parts += [_loader(loader, snapshot.taken) for loader in snapshot.loaders]
    parts.append(note(escape(text.summary(snapshot))))
    return f'<div style="{_FONT};{_INK};line-height:1.5">{"".join(parts)}</div>'


def _loader(loader: LoaderState, now: float) -> str:
    *words, activity = (escape(word) for word in text.facts(loader))
    facts = " · ".join([*words, _word(activity)])
    head = f'<b>{escape(text.clip(loader.name))}</b> <span style="{_PALE}">{facts}</span>'
    rows = "".join(_row(row) for row in text.worker_rows(loader, now))
    if not rows:
        return f'<div style="margin:2px 0 8px">{head}</div>'
    names = "".join(
        f'<th scope="col" style="{_cell(column)};{_PALE};font-weight:normal;{_LINE}">{name}</th>'
        for column, name in enumerate(text.WORKER_COLUMNS)
    )
    table = f'<table style="border-collapse:collapse;margin:2px 0 10px;width:auto"><thead><tr>{names}</tr></thead>'
    return f'<div style="margin:2px 0">{head}</div>{table}<tbody>{rows}</tbody></table>'


def _row(cells: tuple[str, ...]) -> str:
    drawn = "".join(
        f'<td style="{_cell(column)}">{_word(escape(cell)) if column == 2 else escape(cell)}</td>'
        for column, cell in enumerate(cells)
    )
    return f'<tr style="background:none">{drawn}</tr>'


def _cell(column: int) -> str:
    align = "left" if column in text.WORD_COLUMNS else "right"
    return f"text-align:{align};padding:1px 14px 1px 0;font-variant-numeric:tabular-nums;white-space:nowrap"


def _word(word: str) -> str:
    colour = _COLOURS.get(word)
    return f'<span style="{colour};font-weight:600">{word}</span>' if colour else word


def note(markup: str) -> str:
    """Draw a line in a pale colour."""
    return f'<div style="{_PALE}">{markup}</div>'


def pale(markup: str) -> str:
    """Draw words in a pale colour."""
    return f'<span style="{_PALE}">{markup}</span>'


def block(markup: str) -> str:
    """Draw something in the front end's font and colour."""
    return f'<div style="{_FONT};{_INK};line-height:1.5;margin:4px 0">{markup}</div>'


def fold(title: str, markup: str) -> str:
    """Draw something that opens at a click."""
    return f"<details>{_FOLD}{title}</summary>{markup}</details>"


def code(line: str) -> str:
    """Draw a line of code; it is escaped."""
    return f'<pre style="{_PRE};user-select:all;white-space:pre-wrap">{escape(line)}</pre>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], bold: int | None = None) -> str:
    """Draw a table of figures, one row of it in bold; everything is escaped."""
    side = "text-align:right;padding:1px 14px 1px 0;font-variant-numeric:tabular-nums;white-space:nowrap"
    names = "".join(
        f'<th scope="col" style="{side};{_PALE};font-weight:normal;{_LINE}">{escape(name)}</th>' for name in header
    )
    lines = []
    for number, row in enumerate(rows):
        weight = ";font-weight:600" if number == bold else ""
        cells = "".join(f'<td style="{side}{weight}">{escape(cell)}</td>' for cell in row)
        lines.append(f'<tr style="background:none">{cells}</tr>')
    style = "border-collapse:collapse;margin:2px 0 8px;width:auto;color:inherit;font-size:inherit"
    head = f'<table style="{style}"><thead><tr>{names}</tr></thead>'
    return f"{head}<tbody>{''.join(lines)}</tbody></table>"


def stall(stall: Stall) -> str:
    """Draw the stall card: what does not come, who is late, at which line, and the stack folded below."""
    is_over = stall.came_after_seconds is not None or stall.ended is not None
    edge = _CALM if is_over else _WARN
    head = f'<div style="font-weight:600">{escape(text.headline(stall))}</div>'
    cell = f" · cell {stall.cell}" if stall.cell is not None else ""
    line = note(f"limit {stall.limit_seconds:g} s{cell}")
    workers = "".join(_late_worker(worker) for worker in stall.workers)
    if is_over:
        workers = f"<details>{_FOLD}what was late</summary>{workers}</details>"
    style = f"{_FONT};{_INK};line-height:1.5;{edge};padding:2px 0 4px 12px;margin:4px 0"
    return f'<div style="{style}">{head}{line}{workers}</div>'


def _late_worker(worker: LateWorker) -> str:
    first, *rest = (escape(text.clean(line)) for line in text.late_words(worker))
    first = first.replace(escape(worker.name), f"<b>{escape(worker.name)}</b>", 1)
    lines = "".join(f"<div>{_code(line)}</div>" for line in rest)
    shown = "\n".join(text.clean(line) for line in worker.stack.splitlines()[:_LONGEST_STACK])
    stack = (
        f'<details>{_FOLD}stack, most recent call first</summary><pre style="{_PRE}">{escape(shown)}</pre></details>'
    )
    return f'<div style="margin:6px 0 0">{first}</div>{lines}{stack if worker.frames else ""}'


def _code(line: str) -> str:
    """Draw a line of the user's code as such."""
    mark, _, rest = line.partition(" ")
    return f'<code style="{_PRE};display:inline-block">{rest}</code>' if mark == "›" else line


def card(card: Card) -> str:
    """Draw an error explained."""
    head = f'<div style="font-weight:600">{escape(text.clean(card.title))}</div>'
    facts = "".join(f"<div>{escape(text.clean(fact))}</div>" for fact in card.facts)
    style = f"{_FONT};{_INK};line-height:1.5;{_WARN};padding:2px 0 4px 12px;margin:4px 0"
    return f'<div style="{style}">{head}{facts}<div>→ {escape(text.clean(card.fix))}</div></div>'


def stacks(found: Mapping[int, str]) -> str:
    """Draw the stacks of workers, folded."""
    parts = []
    for written in found.values():
        head, *lines = (text.clean(line) for line in written.splitlines())
        shown = escape("\n".join(lines[:_LONGEST_STACK]))
        fold = f'<summary style="cursor:pointer">{escape(head)}</summary>'
        parts.append(f'<details open>{fold}<pre style="{_PRE}">{shown}</pre></details>')
    body = "".join(parts) or note("no live workers")
    return f'<div style="{_FONT};{_INK};line-height:1.5">{body}</div>'


def findings(found: Findings) -> str:
    """Draw what the doctor found: a card for each finding, then what was checked and run."""
    head = f'<div style="font-weight:600">{escape(text.findings_head(found))}</div>'
    cards = "".join(_finding(one) for one in found)
    foot = "".join(note(escape(text.clean(line))) for line in text.findings_foot(found))
    return f'<div style="{_FONT};{_INK};line-height:1.5;margin:4px 0">{head}{cards}{foot}</div>'


def _finding(finding: Finding) -> str:
    title, evidence, fix = (escape(text.clean(line.strip())) for line in text.finding_lines(finding))
    edge = _EDGES.get(finding.severity, _CALM)
    lines = f'<div style="font-weight:600">{title}</div><div>{evidence}</div><div>{fix}</div>'
    return f'<div style="{edge};padding:2px 0 4px 12px;margin:6px 0">{lines}</div>'


def run(report: RunReport) -> str:
    """Draw the closing lines."""
    return "".join(_line(line) for line in text.run(report).splitlines())


def stop(report: StopReport) -> str:
    """Draw what a stop did."""
    return _line(text.stop(report))


def line(words: str) -> str:
    """Draw a line that tells something."""
    return _line(text.clean(words))


def _line(line: str) -> str:
    return f'<div style="{_FONT};{_INK}">{escape(line)}</div>'
