"""One loader in one run: what its iterators tell, and what the run's thread sees. See NOTE [ Cheap and bounded ]."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from math import log2
from typing import Any

from ..seam import INCOMPLETE, say
from ..timing import EpochTime, LoaderTime, SlowSample, Wait
from ..worker.observed import bytes_of
from .curve import Curve
from .lanes import Lanes

MOST_EPOCHS, MOST_WAITS, MOST_SAMPLES = 100, 512, 10
MOST_PARTS = 10_000
"""A batch that has more of them, e.g. numbers in lists, is not weighed: it would be felt in the loop."""
STEPS, OFFSET = 32, 1000
"""Buckets of the histogram for each doubling of a wait; and what makes their numbers positive."""
SHORTEST_WAIT = 1e-9


class _Epoch:
    """An epoch that goes on."""

    def __init__(self, record: Any, began: float) -> None:
        self.began = began
        since = record.waiting_since
        earlier = max(0.0, began - since) if since is not None else 0.0  # of a wait that is under way
        self.batches_before, self.wait_before = record.batches, record.wait_seconds + earlier
        self.first_at: float | None = None
        """When the loop had its first batch."""
        self.wait_at_first = 0.0
        self.first_seconds: float | None = None
        self.is_older = False
        """Whether it is older than the run."""

    def waited(self, record: Any, now: float) -> float:
        """Return how long the loop has waited."""
        since = record.waiting_since
        return float(record.wait_seconds - self.wait_before + (max(0.0, now - since) if since is not None else 0.0))

    def looped(self, record: Any, now: float) -> float:
        """Return how long the loop's body has run."""
        if self.first_at is None:
            return 0.0
        return max(0.0, now - self.first_at - (self.waited(record, now) - self.wait_at_first))


class Account:
    """One loader in one run."""

    def __init__(self, accounts: Any, record: Any) -> None:
        self.accounts, self.record = accounts, record
        """The latest record of the loader: it knows its name."""
        self.batches = self.epochs_before = 0
        self.open: dict[Any, _Epoch] = {}
        self.pending: dict[Any, _Epoch] = {}
        """Those of them whose first batch has not come."""
        self.epochs: deque[EpochTime] = deque(maxlen=MOST_EPOCHS)
        self.wait_seconds = self.loop_seconds = 0.0
        """Of epochs that are over."""
        self.first_batch_seconds: float | None = None
        self.waiting, self.looping = Curve(), Curve()
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._floor = 0.0
        self._waits: list[tuple[float, float]] = []
        self._sizes: list[int] = []
        self._next_size = 1
        self._lanes = Lanes(accounts)
        self._slowest: dict[tuple[float, float, int | None], str] = {}
        self._told = (0.0, 0.0)

    # -- told by the iterator -------------------------------------------------------------------

    def note(self, record: Any, since: float, now: float, batch: Any) -> None:
        """Note that a batch has come. This runs for every batch, hence the plain style."""
        try:
            waited = now - since
            self._counts[int(log2(waited) * STEPS + OFFSET) if waited > SHORTEST_WAIT else 0] += 1
            if waited > self._floor:
                self._keep(since, waited)
            self.batches += 1
            if self.batches == self._next_size:
                self._weigh(batch)
            if self.pending:
                self._note_first(record, now)
        except Exception as error:  # noqa: BLE001 - the loop goes on; not a Shield, which would be felt here
            say(INCOMPLETE, error)

    def _keep(self, since: float, waited: float) -> None:
        """Keep a wait; when there are many, the longer half of them. Other threads may do the same."""
        self._waits.append((since, waited))
        if len(self._waits) >= 2 * MOST_WAITS:
            self._waits = kept = sorted(self._waits, key=lambda wait: wait[1])[-MOST_WAITS:]
            self._floor = kept[0][1]

    def _weigh(self, batch: Any) -> None:
        """See how large a batch is; of the first, the second, the fourth and so on."""
        self._next_size *= 2
        size = bytes_of(batch, MOST_PARTS)
        if size is not None:
            self._sizes.append(size)

    def _note_first(self, record: Any, now: float) -> None:
        epoch = self.pending.pop(record, None)
        if epoch is not None:
            epoch.first_at, epoch.first_seconds = now, None if epoch.is_older else now - epoch.began
            epoch.wait_at_first = epoch.waited(record, now)
            if self.first_batch_seconds is None:
                self.first_batch_seconds = epoch.first_seconds

    def begin_epoch(self, record: Any, now: float) -> None:
        """Note that an epoch begins."""
        self.end_epoch(record, now)
        self.open[record] = self.pending[record] = _Epoch(record, now)

    def join(self, record: Any, now: float) -> None:
        """Go along with an iterator that is older than the run, from now on."""
        self._lanes.join(record, time.monotonic())
        epoch = self.open[record] = _Epoch(record, now)
        epoch.is_older = True
        if record.is_in_epoch:
            epoch.first_at = now
        else:
            self.pending[record] = epoch

    def end_epoch(self, record: Any, now: float) -> None:
        """Note that an epoch has ended."""
        epoch = self.open.pop(record, None)  # first: the thread that looks must not count it twice
        self.pending.pop(record, None)
        if epoch is None:
            return
        self._collect_slowest(record)
        waited, looped = epoch.waited(record, now), epoch.looped(record, now)
        self.wait_seconds += waited
        self.loop_seconds += looped
        began, batches = epoch.began - self.accounts.began, record.batches - epoch.batches_before
        if batches or waited:
            self.epochs_before += len(self.epochs) == MOST_EPOCHS
            self.epochs.append(EpochTime(began, now - epoch.began, batches, waited, looped, epoch.first_seconds))

    def take_last_look(self, record: Any) -> None:
        """Look at an iterator's workers as long as they, and their notes, are there."""
        self._lanes.look(record, time.monotonic(), is_last=True)
        self._collect_slowest(record)

    def leave_workers(self, record: Any) -> None:
        """Take leave of an iterator's workers, which are to be replaced by others."""
        self.take_last_look(record)
        self._lanes.forget(record)

    def leave(self, record: Any, now: float) -> None:
        """Take leave of an iterator."""
        self.end_epoch(record, now)
        self._lanes.forget(record)

    def _collect_slowest(self, record: Any) -> None:
        """Take the slowest samples from the slots, which begin afresh with the next epoch."""
        for number, slot in enumerate(list(record.slots)):
            for seconds, began, text in slot.read_slowest() if slot is not None else ():
                if began >= self.accounts.clock:  # or it was before the run
                    self._slowest[seconds, began, number if record.workers else None] = text
        keys = sorted(self._slowest, key=lambda key: key[:2], reverse=True)[:MOST_SAMPLES]
        self._slowest = {key: self._slowest[key] for key in keys}

    # -- looked at by the thread ----------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Put what has come since the last look into the timeline."""
        waited = self.wait_seconds + sum(epoch.waited(record, now) for record, epoch in list(self.open.items()))
        looped = self.loop_seconds + sum(epoch.looped(record, now) for record, epoch in list(self.open.items()))
        since, until, width = self.accounts.span(now)
        self.waiting.add(waited - self._told[0], since, until, width)
        self.looping.add(looped - self._told[1], since, until, width)
        self._told = max(waited, self._told[0]), max(looped, self._told[1])
        for record in list(self.open):
            self._lanes.look(record, time.monotonic())

    def halve(self) -> None:
        """Make the bins twice as wide."""
        for part in (self.waiting, self.looping, self._lanes):
            part.halve()

    # -- told to the report ---------------------------------------------------------------------

    def sum_up(self, until: float, name: str) -> LoaderTime:
        """Return what is known, as frozen data."""
        width, began = self.accounts.bin_seconds, self.accounts.began
        p50, p95, p99 = (self._percentile(share) for share in (0.5, 0.95, 0.99))
        waits = sorted(sorted(self._waits, key=lambda wait: wait[1])[-MOST_WAITS:])
        return LoaderTime(
            name=name,
            dataset=self.record.dataset,
            workers=self._lanes.workers,
            batches=self.batches,
            wait_seconds=self.wait_seconds,
            loop_seconds=self.loop_seconds,
            first_batch_seconds=self.first_batch_seconds,
            wait_p50=p50,
            wait_p95=p95,
            wait_p99=p99,
            batch_bytes=round(sum(self._sizes) / len(self._sizes)) if any(self._sizes) else None,
            epochs=tuple(self.epochs),
            epochs_before=self.epochs_before,
            lanes=self._lanes.sum_up(until),
            slowest=tuple(self._sum_up_sample(*key, text) for key, text in self._slowest.items()),
            waiting=self.waiting.shares(until, width),
            looping=self.looping.shares(until, width),
            longest_waits=tuple(_wait(since - began, seconds) for since, seconds in waits),
        )

    def _percentile(self, share: float) -> float | None:
        """Return the wait that this share of all waits was shorter than; the middle of its bucket."""
        left = share * sum(self._counts.values())
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return float(2 ** ((bucket + 0.5 - OFFSET) / STEPS))
        return None

    def _sum_up_sample(self, seconds: float, began: float, number: int | None, text: str) -> SlowSample:
        return SlowSample(text, seconds, number, began - self.accounts.clock)


def _wait(began: float, seconds: float) -> Wait:
    """Return as much of a wait as there was in the run."""
    return Wait(max(0.0, began), seconds + min(0.0, began))
