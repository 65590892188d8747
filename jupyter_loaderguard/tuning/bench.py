"""The visits of one `tune`: which settings, in which order, and when it is enough."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..lending.loan import Order, lend
from ..lending.serial import LockCensus, Serial
from ..lending.subject import Subject
from ..timing import TuneProgress, TuneRow
from ..views import text
from .aside import visit_aside, why_not_aside
from .choice import choose, margin_of
from .limits import Limit, Needs, candidates, copied_bytes, fits, most_workers, usable_cpus
from .visit import Setting, Visit, restart_seconds, visit

SLICES, LONGEST_SLICE = 12, 2.0
"""Into how many slices the time is divided; and how long one is at most."""
NO_GAIN_TWICE = 2
CLOSE_SHARE = 0.85
"""Of the fastest: a setting that may be as fast as this, by the middle half of its blocks, is a contender."""
WAIT_SHARE = IDLE_SHARE = 0.1
"""Loading further ahead can matter if the loop waits while workers have nothing to do, each for more than this."""
START_SHARE = 0.03
"""Persistent workers can matter if the start of the workers is more than this of an epoch."""
PREFETCHES = (4, 8)
MOST_PERSISTENT = 3
"""With how many numbers of workers it is tried to let them stay, from the highest on."""
STOP_SECONDS = 0.5
MOST_SKIPPED = 2000
"""Batches that are left out because an earlier visit has loaded them; who loads more in a slice reads no disk."""


@dataclass
class _Measured:
    """All visits with one setting."""

    blocks: list[tuple[int, float]] = field(default_factory=list)
    waited: float = 0.0
    stepped: float = 0.0
    steps: int = 0
    first_batch_seconds: float = 0.0
    idle_share: float | None = None
    worker_bytes: int = 0
    epochs: int = 0

    def add(self, found: Visit) -> None:
        self.blocks += found.blocks
        self.waited += found.waited
        self.stepped += found.stepped
        self.steps += found.steps
        self.first_batch_seconds = self.first_batch_seconds or found.first_batch_seconds or 0.0
        self.epochs += found.epochs
        self.idle_share = found.idle_share
        self.worker_bytes = max(self.worker_bytes, found.worker_bytes)


class Bench:
    """Where settings are measured."""

    def __init__(
        self,
        subject: Subject,
        max_workers: int | None,
        budget: float,
        began: float,
        step: Callable[[Any], Any] | None,
        show: Callable[[TuneProgress | None], None],
    ) -> None:
        self._subject, self._max, self._budget, self._began = subject, max_workers, budget, began
        self._step, self._show = step, show
        self.until = began + budget - min(STOP_SECONDS, 0.2 * budget)
        self._slice = min(LONGEST_SLICE, budget / SLICES)
        self._prefetch = subject.prefetch or 2
        self._needs = Needs()
        self._measured: dict[Setting, _Measured] = {}
        self._censuses: dict[int, LockCensus] = {}
        self._doing = ""
        self._taken_aside = 0
        self._failure = ""
        self._is_empty = False
        self.limit: Limit = usable_cpus()
        self.stopped = ""
        """Why not all was measured."""
        self.remarks: list[str] = []
        self.persistent = subject.is_persistent
        self._saved: tuple[float, float] | None = None
        """What persistent workers save of an epoch, and how long that is."""

    @property
    def has_step(self) -> bool:
        """Whether the time of a training step is part of it."""
        return self._step is not None

    def run(self, order: Order) -> None:
        """Climb, look again at what is close, then try what else can matter."""
        if order.remark:
            self._remark(f"workers were measured with {order.remark}")
        self._climb(order)
        self._revisit(order)
        self._try_persistent_streams(order)
        if not self.stopped and self.rows():
            best = choose(self.rows(), margin_of(self.rows()))
            if best.num_workers:
                self._try_prefetch(order, best)
                self._try_persistent(order, best)

    def stop_early(self, why: str) -> None:
        """Note that not all was measured."""
        self.stopped = self.stopped or why

    def serial(self) -> Serial | None:
        """Return the lock that workers wait for, if they do."""
        found = [verdict for _, census in sorted(self._censuses.items()) if (verdict := census.verdict()) is not None]
        return found[-1] if found else None

    def why_nothing(self) -> str:
        """Say why nothing could be measured."""
        if self._failure:
            return f"the loader failed: {self._failure}"
        if self._is_empty:
            return "the loader gives no batch, so nothing could be measured"
        if self._measured:
            why = self.stopped or self.limit.why
            return f"the step could not be measured: it runs on batches that workers load, and {why}"
        return (
            f"no two batches came within {text.seconds(self._budget)}, so nothing could be measured; pass more seconds"
        )

    # -- visits ---------------------------------------------------------------------------------

    def _climb(self, order: Order) -> None:
        """Measure without workers, then with more and more of them, until that no longer pays."""
        self._needs.worker_bytes = copied_bytes(self._subject, self._method())
        without_gain = 0
        for workers in candidates(most_workers(self._max, self._prefetch, self._needs).workers):
            self.limit = most_workers(self._max, self._prefetch, self._needs)
            if workers > self.limit.workers or self._is_over():
                break
            before = max((row.batches_per_second for row in self.rows()), default=0.0)
            row = self._visit(self._setting(workers, self._prefetch), order)
            if row is None and workers:
                break
            gained = row is not None and row.batches_per_second > before * (1 + max(0.02, 2 * row.noise))
            without_gain = 0 if gained or workers < NO_GAIN_TWICE else without_gain + 1
            if without_gain == NO_GAIN_TWICE:
                break

    def _setting(self, workers: int, prefetch: int | None, persistent: bool = False) -> Setting:
        is_persistent = persistent or (self._subject.is_iterable and self._subject.is_persistent)
        return Setting(workers, prefetch, is_persistent) if workers else Setting(0)

    def _method(self) -> str:
        method = self._subject.method
        return method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]

    def _revisit(self, order: Order) -> None:
        """Measure what is close once more, in the opposite order, so that the machine's moods even out."""
        for turn in range(2):
            close = self._contenders()
            if self.stopped or len(close) < 2 or self._is_over(1.5 * len(close) * self._slice):
                return
            for setting in reversed(close) if turn == 0 else close:
                if not self._is_over():
                    self._visit(setting, order)

    def _contenders(self) -> list[Setting]:
        """Return the settings that may be the fastest, by what has been measured so far."""
        rows = {setting: row for setting in self._measured if (row := self._row(setting)) is not None}
        top = max(rows.values(), key=lambda row: row.batches_per_second, default=None)
        return [setting for setting, row in rows.items() if top is not None and row.high >= CLOSE_SHARE * top.low]

    def _visit(self, setting: Setting, order: Order) -> TuneRow | None:
        """Measure one setting; None if it gave nothing."""
        self._doing = text.count(setting.workers, "worker") + (
            f", prefetch_factor={setting.prefetch}" if setting.prefetch not in (None, self._prefetch) else ""
        )
        self._doing += ", persistent" if setting.persistent else ""
        found = self._visit_aside(order) if not setting.workers else self._visit_workers(setting, order)
        if found is None:
            return None
        self._needs.batch_bytes = max(self._needs.batch_bytes, found.tensor_bytes)
        if setting.workers:
            self._needs.worker_bytes = max(self._needs.worker_bytes, found.worker_bytes)
        if found.failure is not None:
            self._failure = (
                f"{found.failure.kind}: {found.failure.message.splitlines()[0] if found.failure.message else ''}"
            )
            why = f"the loader failed with {self._doing} ({self._failure})"
            if setting.workers:
                self.stop_early(why)
            else:  # a dataset may want workers
                self._remark(why)
        if found.is_short_of_memory:
            self.limit = Limit(max(0, setting.workers - 1), f"memory ran short with {self._doing}")
            self.stop_early(self.limit.why)
            return None
        self._is_empty = self._is_empty or found.is_empty
        self._keep(setting, found)
        if not found.blocks and found.failure is None and setting.workers:
            why = "an epoch ended without a batch" if found.is_empty else "no two rounds of batches came in time"
            self.stop_early(f"{why} with {self._doing}")
        elif not found.blocks and found.failure is None and not found.is_empty:
            self._remark("num_workers=0 was not measured: no two batches came in time without workers")
        if order.keys is not None and not setting.workers:
            order.keys.skip(min(found.steps, MOST_SKIPPED))  # last: an interrupt may end it
        return self._row(setting)

    def _keep(self, setting: Setting, found: Visit) -> None:
        if found.blocks and found.failure is None:
            self._measured.setdefault(setting, _Measured()).add(found)

    def _visit_aside(self, order: Order) -> Visit | None:
        why = why_not_aside()
        if why:
            self._remark(f"num_workers=0 was not measured: {why}")
            return None
        skip = self._taken_aside + (order.keys.taken if order.keys is not None else 0)
        found = Visit()
        try:
            visit_aside(found, self._subject, self._slice, self._deadline(), skip, self._tell)
        except KeyboardInterrupt:
            self._keep(Setting(0), found)
            raise
        self._taken_aside += found.steps
        kernels = sys.modules["torch"].get_num_threads()
        if found.threads is not None and found.threads < kernels:
            self._remark(
                f"num_workers=0 was measured with 1 thread of torch's; the kernel has {kernels}, and may be faster"
            )
        return found

    def _remark(self, words: str) -> None:
        if words not in self.remarks:
            self.remarks.append(words)

    def _visit_workers(self, setting: Setting, order: Order) -> Visit:
        census = self._censuses.setdefault(setting.workers, LockCensus(setting.workers))
        return visit(self._subject, setting, order, self._slice, self._deadline(), self._step, census, self._tell)

    def _deadline(self) -> float:
        """Return until when a visit may last, if batches take long: others are to have their time too."""
        now = time.monotonic()
        share = 0.5 if not self._measured else 1.0
        return min(self.until, now + max(3 * self._slice, share * (self.until - now)))

    def _is_over(self, reserve: float = 0.0) -> bool:
        """Tell whether there is no time for another visit."""
        if self.stopped:
            return True
        if time.monotonic() + reserve + 0.5 * self._slice < self.until:
            return False
        if not reserve:
            self.stop_early(f"time was up after {text.seconds(self._budget)}")
        return True

    def _tell(self) -> None:
        left = max(0.0, self.until - time.monotonic())
        self._show(TuneProgress(self._doing, min(1.0, 1 - left / self._budget), left))

    # -- what else can matter -------------------------------------------------------------------

    def _try_prefetch(self, order: Order, best: TuneRow) -> None:
        """Load further ahead, if the loop waits although workers have nothing to do."""
        if best.wait_share < WAIT_SHARE or (best.idle_share or 0.0) < IDLE_SHARE:
            return
        fastest = best.batches_per_second
        for prefetch in (one for one in PREFETCHES if one > self._prefetch):
            if self._is_over(self._slice) or not fits(best.num_workers, prefetch, self._needs):
                return
            row = self._visit(self._setting(best.num_workers, prefetch, best.persistent_workers), order)
            if row is None or row.batches_per_second < fastest * (1 + max(0.02, 2 * row.noise)) or self._is_over():
                return
            # or the machine's mood has changed
            usual = self._visit(self._setting(best.num_workers, self._prefetch, best.persistent_workers), order)
            if usual is None or row.batches_per_second < 1.02 * usual.batches_per_second:
                return
            fastest = row.batches_per_second

    def _try_persistent_streams(self, order: Order) -> None:
        """Let workers stay for the next epoch, if the stream is so short that they had to start again."""
        short = [
            setting
            for setting, measured in self._measured.items()
            if measured.epochs and setting.workers and not setting.persistent
        ]
        for setting in sorted(short, key=lambda one: -one.workers)[:MOST_PERSISTENT]:
            if self._is_over(self._slice):
                return
            self._visit(replace(setting, persistent=True), order)

    def _try_persistent(self, order: Order, best: TuneRow) -> None:
        """Measure how soon a second epoch begins with persistent workers, if their start counts in an epoch."""
        batches = self._batches_per_epoch()
        if self.persistent or not batches or order.keys is None or self._is_over(2 * best.first_batch_seconds):
            return
        epoch = batches / best.batches_per_second
        start = best.first_batch_seconds - 1 / best.batches_per_second
        if start < START_SHARE * epoch:
            return
        self._doing = "persistent workers"
        self._tell()
        saved = best.first_batch_seconds - self._restart_seconds(order, best)
        if saved > START_SHARE * epoch:
            self.persistent, self._saved = True, (saved, epoch + best.first_batch_seconds)

    def _restart_seconds(self, order: Order, best: TuneRow) -> float:
        """Return how long the first batch of a second epoch takes, with workers that are there already."""
        name = next(name for name, part in order.options.items() if part is order.keys)
        short = Order({**order.options, name: _Few(order.keys, best.num_workers)})
        loader = lend(self._subject, best.num_workers, short, best.prefetch_factor, persistent=True)
        return restart_seconds(loader, self.until, self._tell)

    def _batches_per_epoch(self) -> int | None:
        loader = self._subject.loader
        if self._subject.is_iterable:
            return None
        try:
            return len(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
        except Exception:  # noqa: BLE001 - the user's sampler; an unknown length is no error
            return None

    def persistent_words(self, best: TuneRow) -> str:
        """Say what persistent workers are worth."""
        alike = (row for row in self.rows() if replace(row, persistent_workers=True).setting == best.setting)
        usual = next((row for row in alike if not row.persistent_workers), None)
        if best.persistent_workers and usual is not None:
            rate = text.rate(usual.batches_per_second)
            return f"; with persistent_workers=True, without it {rate}: the stream is short, and workers start again"
        if self._saved is None or not best.num_workers:
            return ""
        saved, epoch = self._saved
        return f"; persistent_workers=True saves {text.seconds(saved)} of an epoch of {text.seconds(epoch)}"

    # -- rows -----------------------------------------------------------------------------------

    def rows(self) -> tuple[TuneRow, ...]:
        """Return what has been measured so far, by workers."""
        rows = [row for setting in self._measured if (row := self._row(setting)) is not None]
        return tuple(sorted(rows, key=lambda row: row.setting))

    def _row(self, setting: Setting) -> TuneRow | None:
        measured = self._measured.get(setting)
        if measured is None:
            return None
        blocks = self._blocks(setting, measured)
        if not blocks:
            return None
        rates = [batches / took for batches, took in blocks]
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
        middle = typical_rate(blocks)
        seconds = sum(took for _, took in measured.blocks)
        passed = measured.waited + measured.stepped
        return TuneRow(
            num_workers=setting.workers,
            prefetch_factor=setting.prefetch,
            persistent_workers=setting.persistent,
            batches_per_second=middle,
            low=min(low, middle),
            high=max(high, middle),
            blocks=tuple(rates),
            batches=sum(batches for batches, _ in measured.blocks),
            seconds=seconds,
            first_batch_seconds=measured.first_batch_seconds,
            wait_share=measured.waited / passed if passed else 1.0,
            idle_share=measured.idle_share if setting.workers else None,
            worker_bytes=measured.worker_bytes or None,
            remark="loading and step were measured apart, and added" if self.has_step and not setting.workers else "",
        )

    def _blocks(self, setting: Setting, measured: _Measured) -> list[tuple[int, float]]:
        """Return batches and seconds of each block; without workers the step comes after each batch, and is added."""
        added = 0.0
        if self.has_step and not setting.workers:
            stepped = [one for key, one in self._measured.items() if key.workers and one.steps]
            if not stepped:
                return []
            added = sum(one.stepped for one in stepped) / sum(one.steps for one in stepped)
        return [(batches, took + batches * added) for batches, took in measured.blocks if batches and took > 0]


def typical_rate(blocks: list[tuple[int, float]]) -> float:
    """Return batches per second, without the fastest and the slowest eighth of the blocks.

    Not the median of their rates: batches come in bursts, so that a short block may have one too many.
    """
    ordered = sorted(blocks, key=lambda block: block[0] / block[1])
    cut = len(ordered) // 8
    kept = ordered[cut : len(ordered) - cut]
    return sum(batches for batches, _ in kept) / sum(took for _, took in kept)


class _Few:
    """A sampler that gives a few keys at a time."""

    def __init__(self, keys: Any, number: int) -> None:
        self._keys, self._number = keys, number

    def __iter__(self) -> Any:
        for _, key in zip(range(self._number), self._keys, strict=False):
            yield key
