"""Workers that wait for one lock: counted in many looks, and the lock named by its path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..waits import LOCK, waits_for
from ..worker.locks import LockPlace
from ..worker.slot import LOCKS, Slot

FEWEST_LOOKS = 25
LOST_SHARE = 0.5
"""Of what the workers beyond the first could do: this much has to be lost to waiting."""


@dataclass(frozen=True)
class Serial:
    """Most workers wait for one lock."""

    lock: str
    """Its path from the dataset, or its file if it is a lock on one."""
    workers: int
    waiting: float
    """How many of them waited at a time."""
    looks: int


class LockCensus:
    """Counts who waits for which lock, by the system call that each worker is in at the moment of a look."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._places: dict[int, dict[int, str]] = {}
        self._waiting: Counter[str] = Counter()
        self._looks = 0

    def look(self, workers: Iterable[tuple[int, Slot]]) -> None:
        """Look at the workers, given by pid and slot."""
        if self._workers < 2:
            return
        self._looks += 1
        for pid, slot in workers:
            lock = self._awaited(pid, slot)
            if lock is not None:
                self._waiting[lock] += 1

    def _awaited(self, pid: int, slot: Slot) -> str | None:
        doing = waits_for(pid, pid)
        if doing.kind != LOCK:
            return None
        if pid not in self._places:
            table = [LockPlace(*row) for row in slot.read_text(LOCKS) or []]
            self._places[pid] = {place.address: place.path for place in table if place.kind != "threading"}
        return self._places[pid].get(doing.address) if doing.address else doing.detail or None

    def verdict(self) -> Serial | None:
        """Return the lock that most workers waited for, if they did so most of the time."""
        if self._looks < FEWEST_LOOKS or not self._waiting:
            return None
        (lock, waits), *_ = self._waiting.most_common(1)
        waiting = waits / self._looks
        return (
            Serial(lock, self._workers, waiting, self._looks) if waiting >= LOST_SHARE * (self._workers - 1) else None
        )
