"""What a benchmark gives back, and how it is summed up."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Figure:
    """One row of the table."""

    what: str
    plain: str
    guarded: str
    bound: str
    holds: bool
    samples: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def spread(samples: list[float], unit: str = "s", digits: int = 2) -> str:
    """Return the median with the middle half of the samples."""
    low, middle, high = quartiles(samples)
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f}–{high:.{digits}f}, n={len(samples)})"


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def interleave(first: Callable[[], T], second: Callable[[], T], pairs: int) -> tuple[list[T], list[T]]:
    """Measure two things in turn, in changing order, so that the machine's moods hit both."""
    ones: list[T] = []
    twos: list[T] = []
    for number in range(pairs):
        order = ((first, ones), (second, twos)) if number % 2 else ((second, twos), (first, ones))
        for measure, samples in order:
            samples.append(measure())
    return ones, twos
