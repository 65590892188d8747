"""Small parts of drawings: paths and words of inline SVG in the colours of the front end's theme, and bars of text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

# each colour twice: in a notebook that is not trusted, front ends take out those that are variables
COLOURS = {
    "waiting": "#c77700;{0}:var(--jp-warn-color1,#c77700)",
    "computing": "#1976d2;{0}:var(--jp-brand-color1,#1976d2)",
    "loading": "#2e7d32;{0}:var(--jp-success-color1,#2e7d32)",
    "pale": "#808080;{0}:var(--jp-ui-font-color2,#808080)",
    "line": "#808080;{0}:var(--jp-border-color1,#808080)",
}
INK = "fill:#808080;fill:var(--jp-ui-font-color1,currentColor)"
_BARS = " ▁▂▃▄▅▆▇█"


def paint(colour: str, what: str = "fill") -> str:
    """Return a style in one of the colours."""
    return f"{what}:{COLOURS[colour].format(what)}"


def resample(values: Sequence[float], number: int) -> list[float]:
    """Return at most so many values that stand for these: means of neighbours, or the values themselves."""
    if len(values) <= number:
        return list(values)
    edges = [round(place * len(values) / number) for place in range(number + 1)]
    parts = [values[first:last] for first, last in pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


def bars(values: Sequence[float]) -> str:
    """Draw shares from 0 to 1 as bars of text; what is more than nothing is seen."""
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, max(value > 0.005, round(top * value)))] for value in values)


def steps(values: Sequence[float], left: float, width: float, bottom: float, height: float) -> str:
    """Return the path of an area of bars, one beside the other."""
    wide = width / max(1, len(values))
    parts = [f"M{left:.1f} {bottom:.1f}"]
    for number, value in enumerate(values, 1):
        parts.append(f"V{bottom - height * min(1.0, value):.1f}H{left + number * wide:.1f}")
    return f"{''.join(parts)}V{bottom:.1f}Z"


def path(shape: str, style: str) -> str:
    """Return a path."""
    return f'<path d="{shape}" style="{style}"/>'


def words(x: float, y: float, said: str, style: str = INK, anchor: str = "start", size: int = 11) -> str:
    """Return a text; what is said is escaped."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" style="{style}">{escape(said)}</text>'
    )


def picture(width: int, height: float, label: str, body: str) -> str:
    """Return an inline SVG that becomes smaller in a narrow place, and tells a screen reader what it shows."""
    style = "display:block;max-width:100%;height:auto;font-family:var(--jp-ui-font-family,system-ui,sans-serif)"
    size = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}" '
        f'style="{style}">{body}</svg>'
    )
