"""The timeline: seconds of something in each of a fixed number of bins."""

from __future__ import annotations

BINS = 240


class Curve:
    """Seconds of something in each bin of the timeline."""

    def __init__(self) -> None:
        self.seconds = [0.0] * BINS

    def add(self, amount: float, since: float, until: float, width: float) -> None:
        """Spread an amount over the time in which it came about."""
        first, last = int(since / width), min(int(until / width), BINS - 1)
        if amount <= 0 or first > last:
            return
        if first == last:
            self.seconds[first] += amount
            return
        share = amount / (until - since)
        for number in range(first, last + 1):
            self.seconds[number] += share * (min(until, (number + 1) * width) - max(since, number * width))

    def halve(self) -> None:
        """Make the bins twice as wide."""
        pairs = zip(self.seconds[::2], self.seconds[1::2], strict=True)
        self.seconds = [one + other for one, other in pairs] + [0.0] * (BINS // 2)

    def shares(self, until: float, width: float) -> tuple[float, ...]:
        """Return what share of each bin it was, up to a moment."""
        used = min(BINS, int(until / width) + 1)
        ends = [min(width, until - number * width) for number in range(used)]
        parts = zip(self.seconds, ends, strict=False)
        return tuple(round(min(1.0, seconds / length), 3) for seconds, length in parts if length > 0)
