"""Rates: what changed between looks at the registry, and the memory of workers, which takes long to look at."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from . import usage
from .model import LoaderState, Snapshot, WorkerState
from .registry import registry

WINDOW = 5
"""Over how many looks a rate is taken: a loop of one batch in two seconds does not flicker between 0 and 1."""
BARS, BAR_SECONDS = 30, 6.0
"""A loader's curve: three minutes."""
MEMORY_SHARE = 0.003
"""How much of a CPU may go into looking at memory: the figure takes a walk over all pages of a process."""
NEW_PER_LOOK = 4


@dataclass(frozen=True)
class _Look:
    at: float
    loaders: dict[int, LoaderState]
    samples: dict[int, int]
    cpu: dict[int, float]


@dataclass
class _Curve:
    """Batches per second in the last minutes; the last bar is still growing."""

    since: float
    batches: int
    bars: deque[float] = field(default_factory=lambda: deque(maxlen=BARS))

    def add(self, now: float, batches: int) -> tuple[float, ...]:
        seconds = now - self.since
        rate = max(0, batches - self.batches) / seconds if seconds > 0 else 0.0
        if seconds >= BAR_SECONDS:
            self.bars.append(round(rate, 1))
            self.since, self.batches = now, batches
            return tuple(self.bars)
        return (*self.bars, round(rate, 1))[-BARS:]


class Meter:
    """Looks at the registry again and again, and adds to each snapshot how fast things go."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque(maxlen=WINDOW)
        self._curves: dict[int, _Curve] = {}
        self._memory: dict[int, tuple[int, int]] = {}
        """The private memory of each worker at the last look, and its anonymous memory then."""
        self._next_memory = 0.0
        self._turn = 0

    def look(self, usual_seconds: float) -> Snapshot:
        """Return a snapshot with rates over the last looks, which are usually so far apart."""
        now, at = registry.snapshot(), time.perf_counter()
        if self._looks and at - self._looks[-1].at > 3 * usual_seconds:
            self._looks.clear()  # there was a rest, which is not part of a rate
        alive = [worker for worker in now.workers if worker.state != "dead"]
        self._look_at_memory([worker.pid for worker in alive])
        look = _Look(
            at,
            {loader.loader_id: loader for loader in now.loaders},
            {worker.pid: worker.samples for worker in alive},
            {worker.pid: usage.cpu_seconds(worker.pid) for worker in alive},
        )
        self._curves = {key: curve for key, curve in self._curves.items() if key in look.loaders}
        measured = tuple(self._loader(loader, look) for loader in now.loaders)
        self._looks.append(look)
        return replace(now, loaders=measured)

    def _loader(self, loader: LoaderState, look: _Look) -> LoaderState:
        workers = tuple(self._worker(worker, look) for worker in loader.workers)
        curve = self._curves.setdefault(loader.loader_id, _Curve(look.at, loader.batches))
        loader = replace(loader, workers=workers, history=curve.add(look.at, loader.batches))
        past = next((one for one in self._looks if loader.loader_id in one.loaders), None)
        if past is None:
            return loader
        before, seconds = past.loaders[loader.loader_id], look.at - past.at
        return replace(
            loader,
            batches_per_second=(loader.batches - before.batches) / seconds,
            wait_share=min(1.0, max(0.0, (loader.wait_seconds - before.wait_seconds) / seconds)),
        )

    def _worker(self, worker: WorkerState, look: _Look) -> WorkerState:
        if worker.state == "dead":
            return worker
        worker = replace(
            worker,
            private_bytes=self._private_bytes(worker.pid),
            descriptors=usage.descriptor_count(worker.pid),
        )
        past = next((one for one in self._looks if worker.pid in one.cpu), None)
        if past is None:
            return worker
        seconds = look.at - past.at
        return replace(
            worker,
            samples_per_second=max(0.0, (worker.samples - past.samples[worker.pid]) / seconds),
            cpu_percent=max(0.0, 100 * (look.cpu[worker.pid] - past.cpu[worker.pid]) / seconds),
        )

    def _look_at_memory(self, pids: list[int]) -> None:
        """Look at the memory of new workers, and of the others in turn, no longer than is cheap."""
        self._memory = {pid: held for pid, held in self._memory.items() if pid in pids}
        for pid in [pid for pid in pids if pid not in self._memory][:NEW_PER_LOOK]:
            self._walk(pid)
        since = time.perf_counter()
        if pids and since >= self._next_memory:
            self._turn += 1
            self._walk(pids[self._turn % len(pids)])
            self._next_memory = since + (time.perf_counter() - since) / MEMORY_SHARE

    def _walk(self, pid: int) -> None:
        self._memory[pid] = usage.private_bytes(pid), usage.anonymous_bytes(pid)

    def _private_bytes(self, pid: int) -> int | None:
        """Return what a worker had at the last look, and what it has got for itself since, which is quickly asked."""
        if pid not in self._memory:
            return None
        private, anonymous = self._memory[pid]
        return max(0, private + usage.anonymous_bytes(pid) - anonymous)
