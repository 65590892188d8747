"""A guarded cell or block: which loaders it used, and what they did in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..allowance import Allowance
from ..model import Event, LoaderState, RunReport, Snapshot, Stall
from .cell import Territory
from .record import Record

if TYPE_CHECKING:
    from . import Registry

MOST_LOADERS = 10
"""How many are kept of a cell that used more."""


@dataclass
class Sums:
    """What one loader did in a run: its latest iterators, and sums of those that are over."""

    records: list[Record] = field(default_factory=list)
    workers: int = 0
    batches: int = 0
    wait_seconds: float = 0.0

    def take_in(self, record: Record) -> None:
        """Begin with another iterator; what is over becomes a sum, so that a run does not grow with its epochs."""
        for done in [one for one in self.records if one.is_over()]:
            self.records.remove(done)
            self.workers = max(self.workers, len(done.workers))
            self.batches += done.batches
            self.wait_seconds += done.wait_seconds
        self.records.append(record)

    def most_workers(self) -> int:
        """Return how many workers it had at most."""
        return max([self.workers, *(len(record.workers) for record in self.records)])


class Run:
    """A guarded cell or `with guard()` block while it runs: counts what its loaders do."""

    def __init__(
        self,
        registry: Registry,
        grace_seconds: float,
        keep: bool,
        refresh_seconds: float,
        stall_seconds: float,
        on_stall: str,
        allowance: Allowance,
    ) -> None:
        self._registry = registry
        self.allowance = allowance
        self.grace_seconds = grace_seconds
        self.keep = keep
        self.stall_seconds = stall_seconds
        self.on_stall = on_stall
        self.stalls: list[Stall] = []
        self._since, self._seconds = time.perf_counter(), 0.0
        self.territory = Territory()
        self._before = {record: (record.batches, record.wait_seconds) for record in self._registry.all()}
        self._sums: dict[int, Sums] = {}  # epochs of one loader: their weak references are one object
        self._gone, self._gone_loaders = Sums(), 0
        """Of loaders that are gone, and how many these are."""
        self._next_clearing = 2 * MOST_LOADERS
        from ..accounts import Accounts  # only now: it is not needed to load the extension

        self.accounts = Accounts(refresh_seconds)
        for record in self._before:
            self.accounts.join(record)
        self.report: RunReport | None = None
        self._registry.runs.append(self)
        self._registry.mark += 1  # other rules hold now for loaders that are in use
        self.accounts.start()

    def take_in(self, record: Record) -> None:
        """Count an iterator that is born in this run."""
        if len(self._sums) >= self._next_clearing:
            self._clear_gone()
        self._sums.setdefault(id(record.loader), Sums()).take_in(record)
        self.accounts.add(record)

    def _clear_gone(self) -> None:
        """Make sums of the loaders that are gone; but for the latest ones, which are shown."""
        for key, sums in list(self._sums.items())[:-MOST_LOADERS]:
            if all(record.loader() is None and record.is_over() for record in sums.records):
                del self._sums[key]
                self._gone_loaders += 1
                self._gone.workers += sums.most_workers()
                self._gone.batches += self._batches(sums)
                self._gone.wait_seconds += self._waited(sums)
        self._next_clearing = 2 * max(MOST_LOADERS, len(self._sums))

    @property
    def born(self) -> list[Record]:
        """The iterators that were born in this run; of each loader, those that are alive, and the latest one."""
        return [record for sums in list(self._sums.values()) for record in list(sums.records)]

    def has(self, record: Record) -> bool:
        """Tell whether an iterator was born in this run."""
        sums = self._sums.get(id(record.loader))
        return sums is not None and record in sums.records

    def end(self) -> None:
        """Stop the sampling thread; the counters stay as they are."""
        self._seconds = time.perf_counter() - self._since
        if self in self._registry.runs:
            self._registry.runs.remove(self)
            self._registry.mark += 1
        self.accounts.end()

    def summary(self) -> Snapshot:
        """Return what its loaders did, for what stays in a saved notebook.

        Workers that the guard had to stop are there as they were before that.
        """
        now, seconds = self._registry.snapshot(), time.perf_counter() - self._since
        groups = self._used()
        loaders = [self._sum_up(sums, seconds) for sums in groups[-MOST_LOADERS:]]
        events = [event for event in now.events if event.at >= now.taken - seconds]
        before = len(groups) + self._gone_loaders - len(loaders)
        if before:
            events.append(Event(now.taken, f"{before:,} more loaders were used before these"))
        return replace(now, loaders=tuple(loaders), events=tuple(events))

    def _sum_up(self, sums: Sums, seconds: float) -> LoaderState:
        """Say what a loader did in this run."""
        latest = sums.records[-1]
        final = latest.final
        last = final or self._registry.state_of(latest)
        batches, waited = self._batches(sums), self._waited(sums)
        return replace(
            last,
            batches=batches,
            batches_total=last.batches_total if batches == last.batches - last.batches_before else None,
            batches_before=0,
            wait_seconds=waited,
            workers=final.workers if final else (),
            capacity=0,
            activity=f"stopped: {latest.stopped_by}" if final else "done",
            in_use=True,
            batches_per_second=batches / seconds if seconds else None,
            wait_share=min(1.0, waited / seconds) if seconds else None,
        )

    def make_report(self) -> RunReport:
        """Sum up, after the workers have been stopped or kept."""
        used = self._used()
        self.report = RunReport(
            loaders=len(used) + self._gone_loaders,
            workers=sum(sums.most_workers() for sums in used) + self._gone.workers,
            batches=sum(map(self._batches, used)) + self._gone.batches,
            seconds=self._seconds,
            wait_seconds=sum(map(self._waited, used)) + self._gone.wait_seconds,
            peak_bytes=self.accounts.peak_bytes,
            left=sum(len(record.alive()) for record in self.born),
            stalls=tuple(self.stalls),
            retries=self.allowance.retries,
            skipped=tuple(self.allowance.skipped),
            retried=tuple(self.allowance.retried),
            remarks=tuple(self.allowance.remarks),
            times=self.accounts.sum_up(self._since + self._seconds, self._registry.name),
            bin_seconds=self.accounts.bin_seconds,
            peak_shm_bytes=self.accounts.peak_shm_bytes,
        )
        return self.report

    def _used(self) -> list[Sums]:
        """Return the loaders that were iterated in this run, or made in it."""
        used: dict[int, Sums] = {}
        for record, (batches, _) in self._before.items():
            if record.batches > batches:
                used.setdefault(id(record.loader), Sums()).records.append(record)
        for key, sums in self._sums.items():
            earlier = used[key].records if key in used else []
            used[key] = replace(sums, records=[*earlier, *sums.records])
        return list(used.values())

    def _waited(self, sums: Sums) -> float:
        return sums.wait_seconds + sum(one.wait_seconds - self._before.get(one, (0, 0.0))[1] for one in sums.records)

    def _batches(self, sums: Sums) -> int:
        return sums.batches + sum(one.batches - self._before.get(one, (0, 0.0))[0] for one in sums.records)
