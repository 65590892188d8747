"""What workers do, by the notes in their slots and by the CPU time that the system counts."""

from __future__ import annotations

from typing import Any

from .. import usage
from ..timing import WorkerTime
from ..worker.slot import LOADING, Progress
from .curve import Curve

SCHEDULED_SECONDS = 0.2
"""How often it is asked how much CPU time workers had: it takes a file each."""


class _Lane:
    """The workers with one number."""

    def __init__(self) -> None:
        self.seconds = self.loading = self.blocked = self.looked_at = 0.0
        self.samples = 0
        self.curve = Curve()


class _Seen:
    """What a worker had noted at the last look at it."""

    def __init__(self, at: float, loading: float, samples: int) -> None:
        self.at, self.loading, self.samples = at, loading, samples
        self.scheduled: tuple[float, float, float] | None = None
        """When it was asked how much CPU time it wanted, how much that was, and how long it had been loading."""


class Lanes:
    """The workers of one loader in one run, by their numbers."""

    def __init__(self, clock: Any) -> None:
        """Keep them; `clock` is the run's Accounts, which knows when it began and how wide its bins are."""
        self._clock = clock
        self._lanes: dict[int, _Lane] = {}
        self._seen: dict[tuple[int, int], _Seen] = {}
        self.workers = 0

    def join(self, record: Any, at: float) -> None:
        """Begin to count in the middle of the life of a record's workers."""
        for number, slot in enumerate(record.slots):
            if slot is not None:
                self._see(record, number, slot.read(), at)

    def look(self, record: Any, at: float, is_last: bool = False) -> None:
        """Look at the notes of a record's workers, as long as these live."""
        self.workers = max(self.workers, len(record.workers))
        for number, (worker, slot) in enumerate(zip(list(record.workers), list(record.slots), strict=False)):
            if slot is not None and worker.is_alive():
                self._look_at_worker(record, number, worker.pid, slot.read(), at, is_last)

    def forget(self, record: Any) -> None:
        """Take leave of a record's workers."""
        for key in [key for key in self._seen if key[0] == record.loader_id]:
            del self._seen[key]

    def _look_at_worker(self, record: Any, number: int, pid: int, progress: Progress, at: float, is_last: bool) -> None:
        if not progress.ready:
            return
        lane = self._lanes.setdefault(number, _Lane())
        before = self._seen.get((record.loader_id, number)) or _Seen(max(progress.ready, self._clock.clock), 0.0, 0)
        seen = self._see(record, number, progress, at)
        seconds, loading = max(0.0, at - before.at), max(0.0, seen.loading - before.loading)
        lane.seconds += seconds
        lane.loading += min(loading, seconds)
        lane.samples += max(0, seen.samples - before.samples)
        _, until, width = self._clock.span(self._clock.began + at - self._clock.clock)
        lane.curve.add(min(loading, seconds), max(0.0, until - seconds), until, width)
        seen.scheduled = before.scheduled
        if before.scheduled is None or is_last or at - before.scheduled[0] >= SCHEDULED_SECONDS:
            self._look_at_cpu(lane, seen, pid)

    def _see(self, record: Any, number: int, progress: Progress, at: float) -> _Seen:
        current = max(0.0, at - progress.began) if progress.phase == LOADING else 0.0
        position = max(0, progress.position) if progress.phase == LOADING else 0
        seen = _Seen(at, progress.busy_seconds + current, progress.samples + position)
        self._seen[record.loader_id, number] = seen
        return seen

    def _look_at_cpu(self, lane: _Lane, seen: _Seen, pid: int) -> None:
        """Tell computing from waiting, in the time in which a worker had a task."""
        wanted = usage.scheduled_seconds(pid)
        if wanted is None:
            return
        if seen.scheduled is not None:
            loading = max(0.0, seen.loading - seen.scheduled[2])
            lane.looked_at += loading
            lane.blocked += max(0.0, loading - (wanted - seen.scheduled[1]))
        seen.scheduled = seen.at, wanted, seen.loading

    def halve(self) -> None:
        """Make the bins twice as wide."""
        for lane in self._lanes.values():
            lane.curve.halve()

    def sum_up(self, until: float) -> tuple[WorkerTime, ...]:
        """Return what is known of each number, up to a moment."""
        return tuple(self._sum_up(number, lane, until) for number, lane in sorted(self._lanes.items()))

    def _sum_up(self, number: int, lane: _Lane, until: float) -> WorkerTime:
        seconds = max(lane.seconds, lane.loading)
        loading = lane.loading / seconds if seconds else 0.0
        blocked = loading * min(1.0, lane.blocked / lane.looked_at) if lane.looked_at else 0.0
        load = lane.curve.shares(until, self._clock.bin_seconds)
        return WorkerTime(number, seconds, loading - blocked, blocked, 1.0 - loading, lane.samples, load)
