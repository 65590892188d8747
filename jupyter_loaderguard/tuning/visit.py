"""One visit: a copy of the loader runs with one setting for a while, and how fast it is is measured in parts.

NOTE [ Whole rounds ]
Workers deliver in turn, so batches come in rounds of as many as there are workers. Measuring begins when the first
round is complete, which leaves the start out, and ends with a complete round. The rounds are summed up in blocks
of about the same length: how far these differ is the noise of the machine.

NOTE [ Whole epochs ]
A stream that ends in the time of a visit begins again, and its workers start again: that is part of how fast it is. So
its blocks are whole epochs, from `iter()` to the end; with persistent workers, without the first one. What is left at
the end of the visit is not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from .. import machine, usage
from ..errors import LoaderGuardError
from ..guarding import guard
from ..lending.batch import count_storages
from ..lending.failure import Failure, describe_failure
from ..lending.loan import Order, lend, unwarned
from ..lending.serial import LockCensus
from ..lending.subject import Subject
from ..registry import Record, Run, registry

BLOCKS = 8
GRACE_SECONDS = 0.2
TICK_SECONDS = 0.01
SHOW_SECONDS = 0.5
LITTLE_SHARE = 0.15
"""Of the memory that was available before: when less is left, the visit ends."""
MOST_LOOKS = 150
_END = object()


@dataclass(frozen=True)
class Setting:
    """What is tried."""

    workers: int
    prefetch: int | None = None
    persistent: bool = False
    """Only of a stream: all other loaders are measured in one long epoch."""


@dataclass
class Visit:
    """What was measured."""

    marks: list[float] = field(default_factory=list)
    """When each batch was done with, of the present epoch."""
    blocks: list[tuple[int, float]] = field(default_factory=list)
    """Batches and seconds."""
    waited: float = 0.0
    stepped: float = 0.0
    steps: int = 0
    first_batch_seconds: float | None = None
    tensor_bytes: int = 0
    worker_bytes: int = 0
    idle_share: float | None = None
    failure: Failure | None = None
    epochs: int = 0
    """Whole ones, of a stream."""
    rest: tuple[int, float] = (0, 0.0)
    """Batches and seconds of whole epochs that are not yet a block."""
    is_empty: bool = False
    """Whether an epoch ended without a batch."""
    is_short_of_memory: bool = False
    threads: int | None = None
    """How many threads torch had in the fork that loaded."""

    def sum_up(self, workers: int, seconds: float) -> None:
        """Make blocks of whole rounds of what was measured since the epoch began. See NOTE [ Whole rounds ]."""
        if self.epochs:
            if self.rest[0]:
                self._add(*self.rest, seconds / BLOCKS)
            return
        rounds = self.marks[max(1, workers) - 1 :: max(1, workers)]
        self.marks = []
        if len(rounds) < 2:
            return
        least, first = seconds / BLOCKS, 0
        for last in range(1, len(rounds)):
            took = rounds[last] - rounds[first]
            if took >= least or last == len(rounds) - 1:
                self._add((last - first) * max(1, workers), took, least)
                first = last

    def end_epoch(self, took: float, seconds: float, is_persistent: bool) -> None:
        """Count a whole epoch of a stream. See NOTE [ Whole epochs ]."""
        batches, before = self.rest if self.epochs > 1 or not is_persistent else (0, 0.0)  # not the first one
        self.rest = batches + len(self.marks), before + took
        self.epochs += 1
        self.marks = []
        if self.rest[1] >= seconds / BLOCKS and (self.epochs > 1 or not is_persistent):
            self.blocks.append(self.rest)
            self.rest = 0, 0.0

    def _add(self, batches: int, took: float, least: float) -> None:
        if took < 0.5 * least and self.blocks:  # a rest, which says little alone
            earlier_batches, earlier_took = self.blocks.pop()
            batches, took = batches + earlier_batches, took + earlier_took
        self.blocks.append((batches, took))


def visit(
    subject: Subject,
    setting: Setting,
    order: Order,
    seconds: float,
    until: float,
    step: Callable[[Any], Any] | None,
    census: LockCensus,
    show: Callable[[], None],
) -> Visit:
    """Run a copy of the loader with workers for some seconds; a batch that takes longer is awaited until `until`."""
    found = Visit()
    with guard(stall_seconds=3600, on_stall="warn", grace_seconds=GRACE_SECONDS, refresh_seconds=60) as run:
        watcher = _Watcher(run, until, census, show)
        try:
            _iterate(found, subject, setting, order, seconds, step, watcher)
        finally:
            watcher.end()
    found.is_short_of_memory = watcher.is_short_of_memory
    lanes = [lane for one in run.report.times for lane in one.lanes] if run.report else []
    found.idle_share = sum(lane.idle for lane in lanes) / len(lanes) if lanes else None
    return found


def _iterate(
    found: Visit,
    subject: Subject,
    setting: Setting,
    order: Order,
    seconds: float,
    step: Callable[[Any], Any] | None,
    watcher: _Watcher,
) -> None:
    loader = lend(subject, setting.workers, order, setting.prefetch, setting.persistent)
    started = began = perf_counter()
    try:
        iterator = _begin(loader)
        watcher.may_stop = True
        while not watcher.is_done:
            since = perf_counter()
            batch = next(iterator, _END)
            now = perf_counter()
            if batch is _END:
                if not found.marks:
                    found.is_empty = True
                    break
                if subject.is_iterable:
                    found.end_epoch(now - began, seconds, setting.persistent)
                else:
                    found.sum_up(setting.workers, seconds)
                began = perf_counter()
                watcher.may_stop = setting.persistent  # not while its workers start
                iterator = _begin(loader)
                watcher.may_stop = True
                found.waited += perf_counter() - since
                continue
            if found.first_batch_seconds is None:
                found.first_batch_seconds = now - started
                found.tensor_bytes = count_storages(batch)[1]
                watcher.begin(seconds)
            found.waited += now - since
            if step is not None:
                watcher.is_stepping = True
                step(batch)
                watcher.is_stepping = False
                found.stepped += perf_counter() - now
            found.steps += 1
            del batch
            found.marks.append(perf_counter())
        found.worker_bytes = watcher.worker_bytes()  # as long as there is an iterator
    except Exception as error:
        if watcher.is_stepping:
            raise  # the user's own, of the step
        if not (watcher.is_time_up and isinstance(error, LoaderGuardError)):
            found.failure = describe_failure(error)
    if order.keys is not None and order.keys.failure is not None:
        found.failure = order.keys.failure
    found.sum_up(setting.workers, seconds)


def _begin(loader: Any) -> Iterator[Any]:
    """Begin an epoch; what its workers warn of is seen when the user's own loader runs."""
    with unwarned():
        return iter(loader)


def restart_seconds(loader: Any, until: float, show: Callable[[], None]) -> float:
    """Return how long the first batch of a loader's second epoch takes; endless if it does not come in time."""
    with guard(stall_seconds=3600, on_stall="warn", grace_seconds=GRACE_SECONDS, refresh_seconds=60) as run:
        watcher = _Watcher(run, until, LockCensus(0), show)
        watcher.may_stop = True
        try:
            for _ in _begin(loader):
                pass
            since = perf_counter()
            next(_begin(loader), None)
            return perf_counter() - since
        except Exception:  # noqa: BLE001 - time is up, or the loader fails: then nothing is claimed
            return float("inf")
        finally:
            watcher.end()


class _Watcher:
    """The thread beside a visit: ends it when time is up, and looks for locks and for the memory that is left."""

    def __init__(self, run: Run, until: float, census: LockCensus, show: Callable[[], None]) -> None:
        self._run, self._until, self._census, self._show = run, until, census, show
        self._available = machine.look().memory_available_bytes
        self._enough: float | None = None
        self._looks = 0
        self._next_show = 0.0
        self._ended = threading.Event()
        self.may_stop = self.is_done = self.is_time_up = self.is_short_of_memory = self.is_stepping = False
        self._thread = threading.Thread(target=self._watch, name="loaderguard-tune", daemon=True)
        self._thread.start()

    def begin(self, seconds: float) -> None:
        """Note that the first batch has come: so many seconds from now on are enough."""
        self._enough = time.monotonic() + seconds

    def end(self) -> None:
        """Look no longer."""
        self._ended.set()
        self._thread.join()

    def worker_bytes(self) -> int:
        """Return the memory that one worker holds for itself; the most of the first ones."""
        workers = [worker for record in self._run.born for worker in record.alive()]
        return max((usage.private_bytes(worker.pid) for worker in workers[:2]), default=0)

    def _watch(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            try:
                self._tick(time.monotonic())
            except Exception:  # noqa: BLE001 - a look must not keep the visit from its end
                self.is_done = True

    def _tick(self, now: float) -> None:
        self.is_done = self.is_done or (self._enough is not None and now >= self._enough)
        live = [record for record in self._run.born if record.workers and not record.is_over()]
        if now >= self._until and not self.is_time_up:
            self.is_done = True
            if self.may_stop and live:
                self.is_time_up = True
                registry.stop(live, "tune's time is up", 0.0)
        elif live and self._enough is not None and not self.is_done and self._looks < MOST_LOOKS:
            self._look_for_locks(live[-1])
        if now >= self._next_show:
            self._next_show = now + SHOW_SECONDS
            self._show()
            self._look_at_memory()

    def _look_for_locks(self, record: Record) -> None:
        self._looks += 1
        pairs = zip(list(record.workers), list(record.slots), strict=False)
        self._census.look((handle.pid, slot) for handle, slot in pairs if slot is not None)

    def _look_at_memory(self) -> None:
        if machine.look().memory_available_bytes < LITTLE_SHARE * self._available:
            self.is_short_of_memory = True
            self._until = 0.0
