"""The slowest samples of a worker's epoch, in its slot: ten places of a fixed size; the least slow one gives way."""

from __future__ import annotations

import struct
from typing import Any

from ..samples import quick_text

PLACES = 10
_PLACE = struct.Struct("dd64s")
REGION_BYTES = PLACES * _PLACE.size


class SlowSamples:
    """Keeps the slowest in the worker that writes; a sample that is not slower than `floor` is none of them."""

    def __init__(self, memory: memoryview[int] | None = None, least_seconds: float = 0.0) -> None:
        """Keep them in this piece of a slot; without one, in memory of its own, once it is needed."""
        self._memory: Any = memory
        self._seconds = [0.0] * PLACES
        self.floor = self._least_seconds = least_seconds

    def note(self, key: Any, began: float, ended: float, number: int) -> float:
        """Note a slow sample; one without a key is named by its number in the stream. Return the new floor."""
        place = self._seconds.index(min(self._seconds))
        self._seconds[place] = ended - began
        text = f"{number} of its stream" if key is None else quick_text(key, number)
        if self._memory is None:
            self._memory = bytearray(REGION_BYTES)
        _PLACE.pack_into(self._memory, place * _PLACE.size, ended - began, began, text.encode("utf-8", "replace")[:64])
        self.floor = max(self._least_seconds, min(self._seconds))
        return self.floor

    def region(self) -> bytes:
        """Return the memory for `read_slowest`."""
        return bytes(self._memory or b"")

    def clear(self) -> None:
        """Begin afresh, with an epoch."""
        self._seconds = [0.0] * PLACES
        self.floor = self._least_seconds
        self._memory[:] = bytes(REGION_BYTES)


def read_slowest(region: bytes) -> list[tuple[float, float, str]]:
    """Return what is noted there, the slowest first: seconds, when it began on the monotonic clock, the key as text."""
    found = [
        (seconds, began, text.rstrip(b"\0").decode("utf-8", "ignore"))
        for seconds, began, text in _PLACE.iter_unpack(region)
        if seconds > 0
    ]
    return sorted(found, reverse=True)
