"""Where the time of a guarded run went: each loader's loop above its workers, as SVG and as bars of text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..model import RunReport
from ..timing import EpochTime, LoaderTime, WorkerTime
from . import html, text
from .drawing import INK, bars, paint, path, picture, resample, steps, words

COLUMNS, POINTS = 48, 160
MOST_LANES, MOST_EPOCHS = 16, 8
_WIDTH, _LEFT, _RIGHT = 760, 78, 236
_LOOP, _LANE, _GAP, _AXIS = 30, 13, 5, 18
_LABELS = ("waiting", "computing", "loading")
_HEAD = ("epoch", "batches", "waiting", "in the loop", "first batch")


def report(report: RunReport) -> str:
    """Draw a report as text: the closing lines, then each loader."""
    parts = [text.run(report)]
    for loader in report.times:
        parts += ["", *_loader_text(loader, report.seconds)]
    return "\n".join([*parts, *([_peaks(report)] if report.times else [])])


def report_html(report: RunReport) -> str:
    """Draw a report for a notebook."""
    loaders = "".join(_loader_html(loader, report.seconds) for loader in report.times)
    foot = html.note(escape(_peaks(report))) if report.times else ""
    return html.block(f"{html.run(report)}{loaders}{foot}")


def _peaks(report: RunReport) -> str:
    memory = f"peak {text.size(report.peak_bytes)} in workers" if report.peak_bytes else ""
    shm = f"at most {text.size(report.peak_shm_bytes)} of /dev/shm in use" if report.peak_shm_bytes else ""
    return " · ".join(part for part in (memory, shm) if part)


# -- words ------------------------------------------------------------------------------------------


def _title(loader: LoaderTime) -> str:
    return f"{text.clip(loader.name)} ({text.clip(loader.dataset)})"


def _facts(loader: LoaderTime) -> list[str]:
    """Return what there is to say about a loader, a few words each."""
    size = f" of {text.size(loader.batch_bytes)}" if loader.batch_bytes else ""
    epochs = text.count(len(loader.epochs) + loader.epochs_before, "epoch")
    facts = [f"{text.count(loader.batches, 'batch', 'batches')}{size} in {epochs}"]
    if loader.first_batch_seconds is not None:
        facts.append(f"first batch after {_time(loader.first_batch_seconds)}")
    if loader.wait_p50 is not None and loader.wait_p95 is not None and loader.wait_p99 is not None:
        waits = f"{_time(loader.wait_p50)} (p50), {_time(loader.wait_p95)} (p95), {_time(loader.wait_p99)} (p99)"
        facts.append(f"wait for a batch: {waits}")
    return facts


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.000995 else text.seconds(seconds)


def _loop_words(loader: LoaderTime, seconds: float) -> str:
    waiting, looping = (
        100 * min(1.0, part / seconds) if seconds else 0.0 for part in (loader.wait_seconds, loader.loop_seconds)
    )
    return f"{waiting:.0f} % waiting, {looping:.0f} % computing"


def _lane_words(lane: WorkerTime) -> str:
    return f"{100 * lane.busy:.0f} % busy, {100 * lane.blocked:.0f} % blocked, {100 * lane.idle:.0f} % idle"


def _more(loader: LoaderTime) -> str:
    hidden = loader.lanes[MOST_LANES:]
    if not hidden:
        return ""
    loading = 100 * sum(lane.busy + lane.blocked for lane in hidden) / len(hidden)
    return f"{text.count(len(hidden), 'more worker')}, with a task {loading:.0f} % of the time"


def _slowest(loader: LoaderTime) -> str:
    shown = [f"{text.clean(one.index, 40)} ({_time(one.seconds)}{_by(one.worker_id)})" for one in loader.slowest]
    return f"slowest samples: {', '.join(shown)}" if shown else ""


def _by(worker_id: int | None) -> str:
    return "" if worker_id is None else f", worker {worker_id}"


def _epoch_rows(loader: LoaderTime) -> list[tuple[str, ...]]:
    """Return the cells of the epochs' table, under _HEAD; the latest ones."""
    numbered = list(enumerate(loader.epochs, loader.epochs_before))[-MOST_EPOCHS:]
    return [_epoch_row(number, epoch) for number, epoch in numbered]


def _epoch_row(number: int, epoch: EpochTime) -> tuple[str, ...]:
    first = "–" if epoch.first_batch_seconds is None else _time(epoch.first_batch_seconds)
    return str(number), f"{epoch.batches:,}", _time(epoch.wait_seconds), _time(epoch.loop_seconds), first


# -- text -------------------------------------------------------------------------------------------


def _loader_text(loader: LoaderTime, seconds: float) -> list[str]:
    lines = [_title(loader), *_facts(loader)]
    lines.append(f"{'loop':9} {bars(resample(loader.waiting, COLUMNS))}  {_loop_words(loader, seconds)}")
    for lane in loader.lanes[:MOST_LANES]:
        lines.append(f"{f'worker {lane.worker_id}':9} {bars(resample(lane.load, COLUMNS))}  {_lane_words(lane)}")
    lines += [line for line in (_more(loader), _slowest(loader)) if line]
    rows = _epoch_rows(loader)
    if len(rows) > 1:
        lines += text.table(_HEAD, rows)
    return [lines[0], *(f"  {line.rstrip()}" for line in lines[1:])]


# -- SVG --------------------------------------------------------------------------------------------


def _loader_html(loader: LoaderTime, seconds: float) -> str:
    facts = html.pale(escape(" · ".join(_facts(loader))))
    head = f'<div style="margin-top:8px"><b>{escape(_title(loader))}</b> {facts}</div>'
    more, slow = (html.note(escape(line)) if line else "" for line in (_more(loader), _slowest(loader)))
    rows = _epoch_rows(loader)
    epochs = html.fold("epochs", html.table(_HEAD, rows)) if len(rows) > 1 else ""
    return f"{head}{_picture(loader, seconds)}{more}{slow}{epochs}"


def _picture(loader: LoaderTime, seconds: float) -> str:
    """Draw the loop above its workers, on one axis of time."""
    lanes = loader.lanes[:MOST_LANES]
    body = [_legend(bool(lanes)), _loop(loader, seconds)]
    top = 20.0 + _LOOP + _GAP
    for lane in lanes:
        body.append(_lane(lane, top))
        top += _LANE + _GAP
    body.append(_axis(seconds, top))
    label = f"{_title(loader)}: {_loop_words(loader, seconds)}"
    return picture(_WIDTH, top + _AXIS, label, "".join(body))


def _legend(has_lanes: bool) -> str:
    shown, parts = _LABELS if has_lanes else _LABELS[:2], []
    for number, label in enumerate(shown):
        x = _LEFT + 92 * number
        parts.append(f'<rect x="{x}" y="3" width="9" height="9" style="{paint(label)}"/>{words(x + 13, 11, label)}')
    return "".join(parts)


def _loop(loader: LoaderTime, seconds: float) -> str:
    """Draw the loop's body from below, and its waiting on top of that."""
    looping, waiting = resample(loader.looping, POINTS), resample(loader.waiting, POINTS)
    both = [one + other for one, other in zip(looping, waiting, strict=True)]
    bottom = 20.0 + _LOOP
    return "".join(
        [
            words(_LEFT - 6, bottom - _LOOP / 2 + 4, "loop", anchor="end"),
            _area(both, bottom, _LOOP, "waiting"),
            _area(looping, bottom, _LOOP, "computing"),
            words(_WIDTH - _RIGHT + 8, bottom - _LOOP / 2 + 4, _loop_words(loader, seconds)),
        ]
    )


def _lane(lane: WorkerTime, top: float) -> str:
    bottom = top + _LANE
    return "".join(
        [
            words(_LEFT - 6, bottom - 3, f"worker {lane.worker_id}", anchor="end"),
            _area(resample(lane.load, POINTS), bottom, _LANE, "loading"),
            words(_WIDTH - _RIGHT + 8, bottom - 3, _lane_words(lane)),
        ]
    )


def _area(values: Sequence[float], bottom: float, height: float, colour: str) -> str:
    width = _WIDTH - _LEFT - _RIGHT
    ground = f'<path d="M{_LEFT} {bottom:.1f}h{width}" style="fill:none;stroke-opacity:.5;{paint("line", "stroke")}"/>'
    return ground + path(steps(values, _LEFT, width, bottom, height), paint(colour))


def _axis(seconds: float, top: float) -> str:
    width = _WIDTH - _LEFT - _RIGHT
    marks = [(0.0, "start"), (0.5, "middle"), (1.0, "end")]
    return "".join(
        words(_LEFT + place * width, top + 9, _time(place * seconds) if place else "0", INK, anchor, 10)
        for place, anchor in marks
    )
