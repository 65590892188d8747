"""The slowest samples of a worker's epoch, in its slot: ten places of a fixed size; the least slow one gives way."""

from __future__ import annotations

import struct
from typing import Any

from ..samples import key_text

PLACES = 10
_PLACE = struct.Struct("dd64s")
REGION_BYTES = PLACES * _PLACE.size


class SlowSamples:
    """Keeps the slowest in the worker that writes; a sample that is not slower than `floor` is none of them."""

    def __init__(self, memory: memoryview[int]) -> None:
        self._memory = memory
        self._seconds = [0.0] * PLACES
        self.floor = 0.0

    def note(self, key: Any, began: float, ended: float, number: int) -> float:
        """Note a slow sample; one without a key is named by its number in the stream. Return the new floor."""
        place = self._seconds.index(self.floor)
        self._seconds[place] = ended - began
        text = f"{number} of its stream" if key is None else key_text(key)
        _PLACE.pack_into(self._memory, place * _PLACE.size, ended - began, began, text.encode("utf-8", "replace")[:64])
        self.floor = min(self._seconds)
        return self.floor

    def clear(self) -> None:
        """Begin afresh, with an epoch."""
        self._seconds = [0.0] * PLACES
        self.floor = 0.0
        self._memory[:] = bytes(REGION_BYTES)


def read_slowest(region: bytes) -> list[tuple[float, float, str]]:
    """Return what is noted there, the slowest first: seconds, when it began on the monotonic clock, the key as text."""
    found = [
        (seconds, began, text.rstrip(b"\0").decode("utf-8", "ignore"))
        for seconds, began, text in _PLACE.iter_unpack(region)
        if seconds > 0
    ]
    return sorted(found, reverse=True)
