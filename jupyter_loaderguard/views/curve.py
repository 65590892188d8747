"""What `tune` measured: a table, the curve with its spread, the recommendation and the line to paste."""

from __future__ import annotations

from html import escape

from ..timing import Drawing, TuneProgress, TuneResult, TuneRow
from . import html, text
from .drawing import INK, paint, path, picture, words

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 210, 60, 14, 34
_COLUMNS = 40
_BAR = 24
_STAY = " persistent"


def result(result: TuneResult) -> str:
    """Draw the result as text."""
    table = text.table(_head(result), [_cells(row) for row in result.rows])
    lines = [f"loaderguard: {text.clean(result.reason)}", f"  {text.clean(result.code)}", ""]
    return "\n".join(
        [*lines, *(f"  {line}" for line in table), "", _bars(result), *(f"  {one}" for one in _foot(result))]
    )


def result_html(result: TuneResult) -> str:
    """Draw the result for a notebook."""
    head = f'<div style="font-weight:600">{escape(text.clean(result.reason))}</div>{html.code(text.clean(result.code))}'
    best = result.rows.index(result.best_row)
    table = html.table(_head(result), [_cells(row) for row in result.rows], bold=best)
    foot = "".join(html.note(escape(line)) for line in _foot(result))
    return html.block(f"{head}{table}{_picture(result)}{foot}")


def draw(result: TuneResult) -> Drawing:
    """Draw the curve, with its spread."""
    return Drawing(_picture(result), _bars(result))


def progress(state: TuneProgress) -> str:
    """Draw how far it is, as a line."""
    done = round(_BAR * state.share)
    bar = "#" * done + "-" * (_BAR - done)
    return f"loaderguard: tune [{bar}] {state.doing} · at most {text.seconds(state.seconds_left)} left"


def progress_html(state: TuneProgress) -> str:
    """Draw how far it is."""
    style = "width:12em;vertical-align:middle"
    bar = f'<progress aria-label="tune" max="1" value="{state.share:.3f}" style="{style}"></progress>'
    said = f"{state.doing} · at most {text.seconds(state.seconds_left)} left"
    return html.block(f"loaderguard: tune&ensp;{bar}&ensp;{html.pale(escape(said))}")


def _unit(result: TuneResult) -> str:
    return "steps/s" if result.has_step else "batches/s"


def _head(result: TuneResult) -> tuple[str, ...]:
    return "num_workers", "prefetch_factor", _unit(result), "middle half", "first batch", "loop waits", "workers idle"


def _cells(row: TuneRow) -> tuple[str, ...]:
    return (
        f"{row.num_workers}{_STAY if row.persistent_workers else ''}",
        "–" if row.prefetch_factor is None else str(row.prefetch_factor),
        text.rate(row.batches_per_second),
        f"{text.rate(row.low)} to {text.rate(row.high)}",
        text.seconds(row.first_batch_seconds),
        f"{100 * row.wait_share:.0f} %" if row.num_workers else "–",
        "–" if row.idle_share is None else f"{100 * row.idle_share:.0f} %",
    )


def _foot(result: TuneResult) -> list[str]:
    """Say how it was measured."""
    apart = (
        ["num_workers=0: the sum of loading and step, measured apart"] if any(row.remark for row in result.rows) else []
    )
    ended = "" if result.is_complete else f"; stopped early: {text.clean(result.limited_by)}"
    margin = f"differences below {100 * result.margin:.0f} % are taken for noise"
    taken = f"{text.clean(result.loader)}, measured in {text.seconds(result.seconds)}; {margin}{ended}"
    return [taken, *apart, *(text.clean(one) for one in result.remarks)]


def _bars(result: TuneResult) -> str:
    """Draw the rates as bars of text, with their spread."""
    top = max(row.high for row in result.rows) or 1.0
    lines, width = [], max(6, *(len(_name(row)) for row in result.rows))
    for row in result.rows:
        low, middle, high = (round(_COLUMNS * value / top) for value in (row.low, row.batches_per_second, row.high))
        bar = "█" * low + "▓" * max(0, middle - low) + "░" * max(0, high - middle)
        mark = "←" if row is result.best_row else ""
        rate = f"{text.rate(row.batches_per_second)} {_unit(result)}"
        lines.append(f"  {_name(row):>{width}}  {bar:<{_COLUMNS}}  {rate} {mark}".rstrip())
    return "\n".join(lines)


def _name(row: TuneRow) -> str:
    ahead = "" if row.prefetch_factor in (None, 2) else f"×{row.prefetch_factor}"
    return f"{row.num_workers}{ahead}{_STAY if row.persistent_workers else ''}"


def _picture(result: TuneResult) -> str:
    """Draw the rates over the numbers of workers, the middle half around them, and every block."""
    rows = result.rows
    top = 1.1 * max(max(row.blocks) for row in rows)
    label = f"{_unit(result)} by num_workers: " + ", ".join(
        f"{_name(row)}: {text.rate(row.batches_per_second)}" for row in rows
    )
    places = [_LEFT + (number + 0.5) * (_WIDTH - _LEFT) / len(rows) for number in range(len(rows))]
    body = [_axes(result, top), _band(rows, places, top)]
    body += [_point(row, x, top, row is result.best_row) for row, x in zip(rows, places, strict=True)]
    return picture(_WIDTH, _HEIGHT, label, "".join(body))


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


def _axes(result: TuneResult, top: float) -> str:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _y(share * top / 1.1, top)
        parts.append(path(f"M{_LEFT} {y:.1f}H{_WIDTH}", f"fill:none;stroke-opacity:.4;{paint('line', 'stroke')}"))
        parts.append(words(_LEFT - 6, y + 4, text.rate(share * top / 1.1) if share else "0", anchor="end", size=10))
    has_ahead = any(row.prefetch_factor not in (None, 2) for row in result.rows)
    across = "num_workers × prefetch_factor" if has_ahead else "num_workers"
    parts.append(words(_LEFT - 6, 10, _unit(result), anchor="end", size=10))
    parts.append(words((_LEFT + _WIDTH) / 2, _HEIGHT - 4, across, anchor="middle", size=10))
    return "".join(parts)


def _band(rows: tuple[TuneRow, ...], places: list[float], top: float) -> str:
    """Draw the spread as a band, and the rates as a line in it."""
    points = list(zip(places, rows, strict=True))
    above = [f"{x:.1f} {_y(row.high, top):.1f}" for x, row in points]
    below = [f"{x:.1f} {_y(row.low, top):.1f}" for x, row in reversed(points)]
    line = "L".join(f"{x:.1f} {_y(row.batches_per_second, top):.1f}" for x, row in points)
    band = path(f"M{'L'.join(above + below)}Z", f"fill-opacity:.25;{paint('computing')}")
    return band + path(f"M{line}", f"fill:none;stroke-width:1.5;{paint('computing', 'stroke')}")


def _point(row: TuneRow, x: float, top: float, is_best: bool) -> str:
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{_y(value, top):.1f}" r="1.6" style="fill-opacity:.55;{paint("pale")}"/>'
        for value in row.blocks[:40]
    )
    y = _y(row.batches_per_second, top)
    colour = paint("loading" if is_best else "computing")
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if is_best else 3.5}" style="{colour}"/>'
    name = words(x, _HEIGHT - 18, _name(row), INK + (";font-weight:600" if is_best else ""), "middle")
    return dots + dot + name + words(x + 8, y - 6, text.rate(row.batches_per_second), size=10)
