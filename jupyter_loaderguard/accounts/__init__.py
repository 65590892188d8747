"""Where the time of a guarded run goes: how long its loops wait for data, and what the workers do meanwhile.

NOTE [ Cheap and bounded ]
For each batch there is one call, `Account.note`: a bucket of a histogram, and two comparisons. Everything else is
looked at by a thread, often at first and more seldom as the run gets longer: sums that the record and the workers'
slots keep anyway. What is kept does not grow with the number of batches: a timeline has a fixed number of bins,
which become twice as wide when they do not suffice; of waits the longest are kept, of samples the slowest, of
epochs the latest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from .. import machine, usage
from ..seam import INCOMPLETE, shield
from ..timing import LoaderTime
from .account import Account
from .curve import BINS

FIRST_BIN_SECONDS = 0.025
FIRST_LOOK_SECONDS = 0.05
LOOK_SHARE = 20
"""How many times longer than a look at the workers' memory the pause after it is."""
MOST_LOADERS = 10
LOCK_SECONDS = 0.5


class Accounts:
    """All loaders of one run, and the thread that looks at them."""

    def __init__(self, refresh_seconds: float) -> None:
        """Look at the memory of the workers as often as this, and at all else oftener."""
        self.began, self.clock = perf_counter(), time.monotonic()
        self.bin_seconds = FIRST_BIN_SECONDS
        self.peak_bytes = 0
        self.peak_shm_bytes = 0
        self.loaders_before = 0
        """How many loaders were dropped because there were many."""
        self._accounts: dict[int, Account] = {}
        self._told = self.began
        self._refresh_seconds = refresh_seconds
        self._records: list[Any] = []
        self._older: dict[Any, int] = {}
        """Iterators that are older than the run, with the batches that they had given."""
        self._next_memory = self.began + FIRST_LOOK_SECONDS
        self._ended = threading.Event()
        self._lock = threading.RLock()
        """Held for a look: the thread, and whoever ends an iterator, must not count the same seconds twice."""
        self._thread = threading.Thread(target=self._watch, name="loaderguard-accounts", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def end(self) -> None:
        """Take the last look; afterwards nothing changes any more."""
        self._ended.set()
        self._thread.join()
        with shield(INCOMPLETE):
            self._tick(perf_counter())
        for record in self._records:
            with shield(INCOMPLETE):
                self.close(record)

    def close(self, record: Any) -> None:
        """Take leave of an iterator while its workers are there; one that ends in a wait is left when that is over."""
        is_waiting = record.waiting_since is not None and not self._ended.is_set()
        with self._looking():
            for account in [one for one in record.accounts if one.accounts is self]:
                account.take_last_look(record)
                if not is_waiting:
                    account.leave(record, perf_counter())
        if is_waiting:
            return
        record.accounts = tuple(one for one in record.accounts if one.accounts is not self)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Look alone; but an iterator must end also if another look never does, e.g. because of a fork in it."""
        is_alone = self._lock.acquire(timeout=LOCK_SECONDS)
        try:
            yield
        finally:
            if is_alone:
                self._lock.release()

    # -- loaders --------------------------------------------------------------------------------

    def add(self, record: Any) -> None:
        """Take an iterator in as it is born."""
        account = self._attach(record)
        account.begin_epoch(record, perf_counter())

    def join(self, record: Any) -> None:
        """Take an iterator in that is older than the run."""
        account = self._attach(record)
        account.join(record, perf_counter())
        self._older[record] = record.batches

    def _attach(self, record: Any) -> Account:
        account = self._accounts.get(id(record.loader))  # epochs of one loader: their weak references are one object
        if account is None:
            self._make_room()
            account = self._accounts[id(record.loader)] = Account(self, record)
        account.record = record
        record.accounts = (*record.accounts, account)
        self._records = [one for one in self._records if one.accounts]
        self._records.append(record)
        return account

    def _make_room(self) -> None:
        """Drop the oldest loader that is not in use, if there are many."""
        done = [key for key, account in self._accounts.items() if not account.open]
        if len(self._accounts) >= MOST_LOADERS and done:
            del self._accounts[done[0]]
            self.loaders_before += 1

    def sum_up(self, until: float, name: Callable[[Any], str]) -> tuple[LoaderTime, ...]:
        """Return what is known of each loader that gave a batch, or was waited for."""
        used = [account for account in self._accounts.values() if account.batches or account.wait_seconds]
        return tuple(account.sum_up(until - self.began, name(account.record)) for account in used)

    # -- the thread -----------------------------------------------------------------------------

    def span(self, now: float) -> tuple[float, float, float]:
        """Return the time since the last look, as seconds of the timeline, and how wide its bins are."""
        return self._told - self.began, now - self.began, self.bin_seconds

    def _watch(self) -> None:
        while not self._ended.wait(max(FIRST_BIN_SECONDS, self.bin_seconds)):
            with shield(INCOMPLETE):
                self._tick(perf_counter())
                self._look_at_memory(perf_counter())

    def _tick(self, now: float) -> None:
        accounts = list(self._accounts.values())
        with self._looking():
            while now - self.began >= BINS * self.bin_seconds:
                self.bin_seconds *= 2
                for account in accounts:
                    account.halve()
            for account in accounts:
                account.tick(now)
            self._told = now
        self.peak_shm_bytes = max(self.peak_shm_bytes, machine.shm_used_bytes())

    def _look_at_memory(self, now: float) -> None:
        """Look how much memory the workers hold, as often as is cheap: the figure takes a walk over their pages."""
        if now < self._next_memory:
            return
        used = [record for record in self._records if record.batches > self._older.get(record, -1)]
        workers = [worker for record in used for worker in record.alive()]
        self.peak_bytes = max(self.peak_bytes, sum(usage.private_bytes(worker.pid) for worker in workers))
        usual = self._refresh_seconds if self.peak_bytes else FIRST_LOOK_SECONDS
        took = perf_counter() - now
        self._next_memory = now + took + max(usual, LOOK_SHARE * took)
