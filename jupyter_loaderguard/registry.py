"""What is alive: loaders, workers, cells and guarded runs. The only place where live state changes.

A Record is made when an iterator is born and leaves when its workers are stopped. It holds the
iterator weakly, so that the guard never keeps one alive. There is no lock: the collector may run
`__del__`, and so a stop, in the middle of any of our lines, also in the same thread. Single dict
operations are atomic, and whoever pops a record from `records` is the one who stops it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

from . import interrupts, machine, processes
from .allowance import Allowance
from .entries import LONGEST_TEXT, LoaderEntry, WorkerEntry
from .errors import LoaderStalled
from .ledger import Ledger
from .model import Ending, Event, LoaderState, RunReport, Snapshot, Stall, StopReport, WorkerState
from .processes import Handle
from .quarantine import LeftOut
from .reaper import Reaper
from .samples import Manner, key_text, locate
from .worker.slot import CAPS, IDLE, LOADING, PHASES, RESUMING, STARTING, Progress, Slot

if TYPE_CHECKING:
    from .accounts.account import Account
    from .timing import TuneProgress


class Control(Protocol):
    """What the registry asks of an iterator; torch_adapter knows how."""

    def ask_to_leave(self, iterator: Any) -> None:
        """Tell the workers that they are no longer needed, without waiting for them."""

    def release(self, iterator: Any, record: Record) -> None:
        """Give back queues, threads and semaphores, and let the loader start afresh."""

    def dataset(self, iterator: Any, loader: Any) -> Any:
        """Return the dataset."""

    def has_finished(self, iterator: Any, number: int) -> bool:
        """Tell whether a worker has no more to do, and may end: one of an iterable dataset."""

    def count_delivered(self, iterator: Any) -> int:
        """Return how many batches of the present epoch have been delivered."""

    def awaited(self, iterator: Any) -> tuple[int | None, list[int]]:
        """Return the batch that the loop waits for, and the workers one of which has to bring it."""

    def worker_of(self, iterator: Any, task: int) -> int | None:
        """Return the worker that was given a task."""

    def count_ready(self, iterator: Any) -> int:
        """Return how many batches are loaded and wait to be taken."""

    def is_asking_sampler(self, frame: FrameType | None) -> bool:
        """Tell whether a thread, by its innermost frame, asks a sampler for the next keys."""


BATCH, END, BEGAN, ERROR = "batch", "end of the epoch", "beginning of an epoch", "error"
RETRIED = "replaced"
"""How a wait for data ends."""
MOST_LOADERS = 10
"""How many are kept of a cell that used more."""
LENT = "_loaderguard_lent"
"""An attribute of loaders that are copies of the user's: they count in the run that they are made for, and no other."""
REAP_SECONDS = 0.1
STOP_SECONDS = 10
"""More than a stop by another thread takes, its grace included."""
IDLE_IN_A_POOL = {("concurrent.futures.thread", "_worker"), ("multiprocessing.pool", "worker")}


class Territory:
    """The threads whose work belongs to a cell or a run: the one that began it, and those that got to work since.

    These are threads that were started since, and those that were idle in a pool at that time.
    """

    def __init__(self) -> None:
        self.own = threading.current_thread()
        frames = sys._current_frames()
        busy = [thread for thread in threading.enumerate() if not _is_idle(frames.get(thread.ident or 0))]
        self._earlier = weakref.WeakSet(busy)

    def includes(self, thread: threading.Thread) -> bool:
        """Tell whether a thread is one of them."""
        return thread is self.own or thread not in self._earlier


def _is_idle(frame: FrameType | None) -> bool:
    return frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in IDLE_IN_A_POOL


def work_of(frame: FrameType | None) -> frozenset[CodeType]:
    """Return the functions that a thread is in, but for those that only run threads."""
    codes = set()
    while frame is not None:
        if frame.f_globals.get("__name__") not in ("threading", "concurrent.futures.thread", "multiprocessing.pool"):
            codes.add(frame.f_code)
        frame = frame.f_back
    return frozenset(codes)


@dataclass(eq=False)
class Cell:
    """One cell that runs or ran, in the thread that runs it."""

    number: int | None
    thread: int
    outer: Cell | None = None
    is_interrupted: bool = False
    run: Run | None = None
    outlet: Any = None
    """Where its output goes."""
    has_interrupt: Callable[[], bool] = lambda: False
    """Tells, from any thread, whether a SIGINT has come since it began, or the cell around it."""
    allowance: Allowance | None = None
    """Of a cell without a run, once it is needed."""
    territory: Territory = field(default_factory=Territory)
    began: float = field(default_factory=time.time)


@dataclass(eq=False)
class Record:
    """One iterator over a DataLoader, from its birth to its end."""

    loader_id: int
    control: Control
    iterator: Callable[[], Any]
    loader: Callable[[], Any]
    loader_type: str
    dataset: str
    is_persistent: bool
    cell: Cell | None
    thread: int
    work: frozenset[CodeType]
    """What that thread was doing when it began to use the loader."""
    started: float
    start_method: str | None = None
    workers: list[Handle] = field(default_factory=list)
    births: list[float] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    """The Process objects of the workers, also of one whose start was interrupted before torch knew of it."""
    batches: int = 0
    wait_seconds: float = 0.0
    waiting_since: float | None = None
    is_in_epoch: bool = False
    is_broken: bool = False
    judged_at: int | None = 0
    """How many cells had failed when it was last asked who still holds it; None if it had a name since."""
    fates: dict[int, str] = field(default_factory=dict)
    """What became of workers that were stopped one by one."""
    stopped_by: str | None = None
    """Why the guard stopped it; None if it lives, or ended by itself."""
    last_cell: Cell | None = None
    mark: int = -1
    """`registry.mark` when this was noted."""
    manner: Manner = field(default_factory=Manner)
    prefetch: int = 2
    lengths: tuple[int | None, int | None] = (None, None)
    """Of the dataset and of an epoch in batches, where they are known."""
    last_name: str | None = None
    """Its name in the notebook, when it had one."""
    stop_under_way: tuple[int, threading.Event] | None = None
    """The thread that stops it, and what is set when it has."""
    final: LoaderState | None = None
    """How it was when the guard stopped it in a guarded run."""
    slots: list[Slot | None] = field(default_factory=list)
    """What each worker notes of its progress; a single one, of the kernel's own, without workers."""
    sent: dict[int, Any] = field(default_factory=dict)
    """The keys of each batch that is under way."""
    carry: Callable[[Any], Any] | None = None
    """Makes keys fit to travel to workers that are not forked."""
    oom_kills: int = 0
    """`machine.oom_kills` when it began."""
    unsent: dict[int, str] = field(default_factory=dict)
    """Batches whose keys could not be sent to their worker, and why."""
    is_stalled: bool = False
    """Whether the present wait has been found to be a stall."""
    late_workers: frozenset[int] = frozenset()
    """Those that the stall is about."""
    verdict: LoaderStalled | None = None
    """What the waiting thread is to raise."""
    last_verdict: LoaderStalled | None = None
    observe: Callable[[int, Any], Any] | None = None
    """Notes the keys of a batch that the kernel itself loads."""
    watch: Any = None
    """A select.poll over the workers' pipe (`inbox`) and their ends, but for those `unwatched`."""
    inbox: Any = None
    unwatched: set[int] = field(default_factory=set)
    accounts: tuple[Account, ...] = ()
    """Of the guarded runs that it is used in."""
    mends: bool = False
    """Whether workers may be replaced or samples left out at present."""
    allowance: Allowance | None = None
    """Of a loader that is used outside of cells and runs, once it is needed."""
    is_hung: bool = False
    """Whether the verdict says that a worker is to be replaced."""
    replacement: tuple[int, threading.Event] | None = None
    """The thread that replaces its workers, and what is set when it has."""
    generation: int = 0
    """How often its workers have been replaced."""
    resumed: int | None = None
    """How many workers have answered to the beginning of an epoch; None in its midst."""
    identity: str | None = None
    """What another run knows its dataset by, once that was asked for."""
    left_out: LeftOut | None = None
    """Samples that are not to be touched."""
    again: Any = None
    """Keys that a loader without workers loads next, in the place of the sampler's."""
    arrived: deque[tuple[int, Any]] = field(default_factory=deque)
    """Tasks that are done without a worker: all their samples are left out."""
    probes: dict[int, Any] = field(default_factory=dict)
    """Tasks of which one sample is to be found."""
    searched: set[int] = field(default_factory=set)
    """Those in which none was found to be at fault alone."""
    keeps_state: bool = False
    """Whether its dataset is a stream that can be resumed, and is to be."""
    states: dict[int, bytes | None] = field(default_factory=dict)
    """Of a stream that can be resumed: its state after each task that has arrived."""
    last_tasks: dict[int, int] = field(default_factory=dict)
    """Of such a stream: the last task of each worker that torch has got."""
    ended_tasks: set[int] = field(default_factory=set)
    """Tasks of which it is known that a stream had no more samples after them."""
    resume: dict[int, bytes | None] = field(default_factory=dict)
    """The states that workers begin with which take over from others."""
    has_own: bool = False
    """Whether messages of the workers may be for us, even when nothing may be mended any more."""
    has_suspects: bool = False
    """Whether a worker died or hung on a sample that has not come since."""

    def alive(self) -> list[Handle]:
        """Return the workers that still run."""
        return [worker for worker in self.workers if worker.is_alive()]

    def is_over(self) -> bool:
        """Tell whether it is no longer known, and has no worker left."""
        return self.loader_id not in registry.records and not self.alive()

    def begin_wait(self) -> float:
        """Note that the loop asks for a batch, and who asks."""
        if self.mark != registry.mark or get_ident() != self.thread:
            self.note_who_waits()
        self.is_in_epoch = True
        self.waiting_since = now = time.perf_counter()
        if not registry.is_watched:
            registry.on_wait()
        return now

    def note_who_waits(self) -> None:
        """Note which thread iterates it, and in which cell."""
        thread = get_ident()
        if thread != self.thread:
            self.thread, self.work = thread, work_of(sys._getframe(2))
        self.mark = registry.mark
        self.last_cell = registry.cells.get(thread)
        self.mends = registry.allowance_of(self).is_open

    def end_wait(self, since: float, outcome: str, is_counted: bool = False) -> None:
        """Note that the wait is over, and how it ended."""
        began, self.waiting_since = self.waiting_since or since, None  # later, if workers were replaced meanwhile
        self.end_stall(began, outcome)
        if not is_counted:
            self.wait_seconds += time.perf_counter() - since
            self.batches += outcome == BATCH
        if self.accounts and outcome in (END, ERROR):
            self._end_epoch(outcome == END)

    def end_stall(self, since: float, outcome: str) -> None:
        """Note that what was late has come, or has been dealt with."""
        while self.is_stalled:
            try:
                registry.on_stall_end(self, since, outcome)
            except interrupts.WaitBroken:  # meant for this wait, and too late for it
                continue

    def _end_epoch(self, is_regular: bool) -> None:
        """Tell the runs that an epoch has ended: regularly, or with the iterator."""
        is_over = self.loader_id not in registry.records
        for account in self.accounts if is_regular or is_over else ():
            with contextlib.suppress(Exception):  # no error of ours enters the user's loop
                account.end_epoch(self, time.perf_counter())
        if is_over:
            self.close_accounts()

    def begin_epoch(self) -> None:
        """Tell the runs that an epoch begins, with workers that are there already."""
        for account in self.accounts:
            with contextlib.suppress(Exception):  # as above
                account.begin_epoch(self, time.perf_counter())

    def close_accounts(self) -> None:
        """Tell the runs that it ends, before its workers do."""
        for account in self.accounts:
            with contextlib.suppress(Exception):  # a look must not keep it from ending
                account.accounts.close(self)

    def sample_of(self, progress: Progress) -> tuple[Any, str]:
        """Return the sample that a worker is on, and words for it."""
        if progress.phase == STARTING:
            return None, "in its start (imports, worker_init_fn)"
        if progress.phase == RESUMING:
            return None, "at the beginning of its next epoch (__iter__ of the dataset)"
        if progress.phase != LOADING:
            return None, "without a task"
        if progress.task not in self.sent and not self.manner.is_iterable:
            return None, f"on a sample of batch {progress.task}"  # which has just been delivered
        keys = self.sent.get(progress.task)
        return locate(progress.position, progress.in_epoch, progress.keys, keys, self.manner)

    def activity(self) -> str:
        """Say in a word what the loader does."""
        if self.is_broken:
            return "broken"
        if self.waiting_since is not None:
            return "waiting"
        return "busy" if self.is_in_epoch else "idle"


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
        grace_seconds: float,
        keep: bool,
        refresh_seconds: float,
        stall_seconds: float,
        on_stall: str,
        allowance: Allowance,
    ) -> None:
        self.allowance = allowance
        self.grace_seconds = grace_seconds
        self.keep = keep
        self.stall_seconds = stall_seconds
        self.on_stall = on_stall
        self.stalls: list[Stall] = []
        self._since = time.perf_counter()
        self.territory = Territory()
        self._before = {record: (record.batches, record.wait_seconds) for record in registry.all()}
        self._sums: dict[int, Sums] = {}  # epochs of one loader: their weak references are one object
        self._gone, self._gone_loaders = Sums(), 0
        """Of loaders that are gone, and how many these are."""
        self._next_clearing = 2 * MOST_LOADERS
        from .accounts import Accounts  # only now: it is not needed to load the extension

        self.accounts = Accounts(refresh_seconds)
        for record in self._before:
            self.accounts.join(record)
        self.report: RunReport | None = None
        registry.runs.append(self)
        registry.mark += 1  # other rules hold now for loaders that are in use
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
        self.accounts.end()
        if self in registry.runs:
            registry.runs.remove(self)
            registry.mark += 1
        self._seconds = time.perf_counter() - self._since

    def summary(self) -> Snapshot:
        """Return what its loaders did, for what stays in a saved notebook.

        Workers that the guard had to stop are there as they were before that.
        """
        now, seconds = registry.snapshot(), time.perf_counter() - self._since
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
        last = final or registry.state_of(latest)
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
            times=self.accounts.sum_up(self._since + self._seconds, registry.name),
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


class Registry:
    """The state of this process. There is one, `registry`."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.records: dict[int, Record] = {}
        self.cells: dict[int, Cell] = {}
        self.runs: list[Run] = []
        self.reaper = Reaper()
        self.ledger = Ledger(self._entries, self.reaper.identity)
        self.is_guarding = False
        self.mark = 0
        """Changes with every cell that begins or ends."""
        self.grace_seconds = 0.5
        self.stall_seconds = 30.0
        self.on_stall = "warn"
        self.retry = 0
        self.skip = 0
        self.refresh_seconds = 1.0
        self.pickle_by_value = True
        self.worker_threads = 1
        self.is_watched = False
        """Whether the watchdog's thread runs; it does while there are waits."""
        self.on_wait: Callable[[], None] = lambda: None
        self.on_birth: Callable[[], None] = lambda: None
        self.after_cell: list[Callable[[Cell], None]] = []
        """Told of each cell that has ended and was in no other one."""
        self.events: deque[Event] = deque(maxlen=50)
        self.take_verdict: Callable[[Record], LoaderStalled | None] = take_verdict
        self.await_verdict: Callable[[Record], None] = lambda record: None
        self.on_stall_end: Callable[[Record, float, str], None] = forget_stall
        self.interrupt_wait: Callable[[], None] | None = None
        """Raises in a wait for data that begins in the main thread: an interrupt came just before it."""
        self.tell: Callable[[str], None] = lambda line: None
        self.name_of: Callable[[Any], str | None] = lambda loader: None
        self.open_progress: Callable[[], Callable[[TuneProgress | None], None]] | None = None
        """Makes a display of how far `tune` is; called with None, it goes away."""
        self._ids = itertools.count(1)

    # -- births ---------------------------------------------------------------------------------

    def add(self, iterator: Any, loader: Any, control: Control, is_adopted: bool = False) -> Record:
        """Record an iterator at its birth, before it has workers; or adopt one that was alive before us."""
        self.settle_in_fork()
        thread = threading.current_thread()
        record = Record(
            loader_id=next(self._ids),
            control=control,
            iterator=weakref.ref(iterator),
            loader=weakref.ref(loader) if loader is not None else lambda: None,
            loader_type=type(loader).__name__ if loader is not None else "DataLoader",
            dataset=type(control.dataset(iterator, loader)).__name__,
            is_persistent=bool(getattr(loader, "persistent_workers", False)),
            cell=None if is_adopted else self._cell_of(thread),
            thread=threading.get_ident(),
            work=work_of(sys._getframe(1)),
            started=time.time(),
            oom_kills=machine.oom_kills(),
        )
        self.records[record.loader_id] = record
        runs = self._runs_of(thread)
        for run in runs[-1:] if LENT in getattr(loader, "__dict__", ()) else runs:
            run.take_in(record)
        self.on_birth()
        return record

    def _cell_of(self, thread: threading.Thread) -> Cell | None:
        """Return the cell that a thread works for."""
        own = self.cells.get(thread.ident or 0)
        owners = [cell for cell in list(self.cells.values()) if cell.territory.includes(thread)]
        return own or next(iter(owners), None)

    def _runs_of(self, thread: threading.Thread) -> list[Run]:
        """Return the runs that a thread works for; one with a run or cell of its own works for no other."""
        own = [run for run in self.runs if run.territory.own is thread]
        if own or thread.ident in self.cells:
            return own
        return [run for run in self.runs if run.territory.includes(thread)]

    def grace_of(self, record: Record) -> float:
        """Return the time that the workers of a loader have to leave."""
        return next((run.grace_seconds for run in reversed(self.runs) if run.has(record)), self.grace_seconds)

    def stall_rule(self, record: Record) -> tuple[float, str]:
        """Return how long this loader's loop may wait for a batch, and what is done about a longer wait."""
        run = self._run_that_waits(record)
        return (run.stall_seconds, run.on_stall) if run else (self.stall_seconds, self.on_stall)

    def _run_that_waits(self, record: Record) -> Run | None:
        """Return the run in which this loader is iterated: it need not have been made there."""
        cell = record.last_cell
        for run in reversed(self.runs):
            if run.has(record) or run.territory.own.ident == record.thread or (cell and cell.run is run):
                return run
        return None

    def allowance_of(self, record: Record) -> Allowance:
        """Return what may be mended for this loader: by its run, its cell, or for itself."""
        run = self._run_that_waits(record)
        if run is not None:
            return run.allowance
        owner: Cell | Record = record.last_cell or record
        if owner.allowance is None or (owner.allowance.retry, owner.allowance.skip) != (self.retry, self.skip):
            owner.allowance = Allowance(self.retry, self.skip)
        return owner.allowance

    def note_stall(self, record: Record, stall: Stall, earlier: Stall | None = None) -> None:
        """Put a stall into the report of the run; in the place of what was known of it earlier."""
        record.late_workers = frozenset(late.worker_id for late in stall.workers if late.worker_id is not None)
        if stall.came_after_seconds is not None:
            self.note_event(f"{stall.name} came after {stall.came_after_seconds:.1f} s")
        elif stall.ended is None:
            self.note_event(stall.sentence(), is_warning=True)
        run = self._run_that_waits(record)
        if run is not None:
            run.stalls[:] = [one for one in run.stalls if one is not earlier] + [stall]

    def note_event(self, text: str, is_warning: bool = False) -> None:
        """Keep something for the log of the live status."""
        self.events.append(Event(time.time(), text, is_warning))

    def tell_mended(self, record: Record, sentence: str) -> None:
        """Say what was mended in a cell that has no closing line."""
        if self._run_that_waits(record) is None:
            self.tell(f"loaderguard: {sentence}")

    def settle_in_fork(self) -> None:
        """Forget the kernel's state if we are a fork of it: its workers, cells and threads are not ours."""
        if self.owner == os.getpid():
            return
        self.owner = os.getpid()
        self.records.clear()
        self.cells.clear()
        self.runs.clear()
        self.events.clear()
        self.after_cell.clear()
        self.is_watched = False
        self.on_birth = lambda: None

    def prepare_birth(self) -> None:
        """Have the reaper ready before a worker starts."""
        with interrupts.held():  # or half of the reaper's start is left as a zombie
            line = self.reaper.ensure()
        if line:
            self.tell(line)

    def add_worker(self, record: Record, number: int, handle: Handle, born: float | None = None) -> None:
        """Record a worker, in the place of one that was dismissed if there is one; have it outlived by the reaper."""
        self.reaper.born(handle)
        record.workers[number : number + 1] = [handle]
        record.births[number : number + 1] = [born or time.time()]

    def note_started(self, record: Record) -> None:
        """Have others see the workers that a new loader has."""
        self.name(record)  # here, in the user's own thread
        self.ledger.touch()

    def _entries(self) -> list[LoaderEntry]:
        """Return the loaders with workers for the ledger; in its thread, which must not come to hold a loader."""
        return [_entry(record) for record in self.all() if record.workers]

    def forget_with_iterator(self, record: Record, iterator: Any) -> None:
        """Let the record of a loader without workers go when its iterator goes."""
        weakref.finalize(iterator, self._forget, record).atexit = False

    def _forget(self, record: Record) -> None:
        self.records.pop(record.loader_id, None)
        if self.owner == os.getpid():
            record.close_accounts()
            record.slots, record.sent, record.observe = [], {}, None  # a run may keep the record

    def remove(self, record: Record) -> bool:
        """Take a record out; True for the one caller who got it and now has to stop it."""
        return self.records.pop(record.loader_id, None) is not None

    def all(self) -> list[Record]:
        """Return the records of this process, oldest first."""
        return list(self.records.values()) if self.owner == os.getpid() else []

    # -- cells ----------------------------------------------------------------------------------

    def begin_cell(self, number: int | None) -> Cell:
        """Note that a cell starts in this thread; it may be nested in another one."""
        thread = threading.get_ident()
        cell = Cell(number, thread, outer=self.cells.get(thread))
        self.cells[thread] = cell
        self.mark += 1
        return cell

    def end_cell(self, cell: Cell) -> None:
        """Note that it ended; what it leaves alive belongs to the cell around it."""
        self.mark += 1
        if cell.outer is not None:
            self.cells[cell.thread] = cell.outer
            cell.outer.is_interrupted |= cell.is_interrupted
        else:
            self.cells.pop(cell.thread, None)
        for record in self.all():
            if record.cell is cell and cell.outer is not None:
                record.cell = cell.outer
        for act in list(self.after_cell) if cell.outer is None else []:
            try:
                act(cell)
            except Exception as error:  # noqa: BLE001 - the cell ends as it should
                self.tell(f"loaderguard: {type(error).__name__} at the end of a cell: {error}")

    # -- stopping -------------------------------------------------------------------------------

    def stop(
        self,
        records: Iterable[Record],
        why: str,
        grace_seconds: float | None = None,
        deliver: str = interrupts.NOW,
    ) -> StopReport:
        """Stop these loaders, all at once and within one deadline; an interrupt meanwhile hurries it."""
        with interrupts.held(deliver) as hurry:
            claimed = [(record, record.iterator()) for record in records if self.remove(record)]
            ended = threading.Event()
            for record, _ in claimed:
                record.stop_under_way = get_ident(), ended
                if self.runs and record.workers:
                    with contextlib.suppress(Exception):  # a look must not keep it from being stopped
                        record.final = self.state_of(record)
                record.stopped_by = why
                if record.workers:
                    self.note_event(f"{self.name(record)}: {len(record.workers)} workers stopped ({why})")
            for record, _ in claimed:
                await_other(record.replacement)
            grace = self.grace_seconds if grace_seconds is None else grace_seconds
            try:
                return self.stop_claimed(claimed, hurry, grace)
            finally:
                ended.set()

    def await_stop(self, record: Record) -> None:
        """Wait until another thread that stops this loader has done so: a click, in the middle of a cell."""
        await_other(record.stop_under_way)

    def stop_claimed(
        self, claimed: list[tuple[Record, Any]], hurry: Callable[[], bool], grace_seconds: float
    ) -> StopReport:
        """Stop loaders that the caller has taken out of `records`; if that fails they are put back."""
        since = time.perf_counter()
        numbered = [pair for record, _ in claimed for pair in enumerate(record.workers)]
        handles = [worker for _, worker in numbered]
        for record, _ in claimed:
            record.close_accounts()
        try:
            with processes.spare_descriptors():
                family = processes.descendants(handles)  # before any worker can leave them behind
                for record, iterator in claimed:
                    if iterator is not None and record.workers:
                        record.control.ask_to_leave(iterator)
                how, descendants = processes.stop(handles, grace_seconds, hurry, family)
                for record, iterator in claimed:
                    self._clear_away(record, iterator)
        except BaseException:
            self.records.update({record.loader_id: record for record, _ in claimed if record.alive()})
            raise
        endings = [Ending(worker.pid, number, how[worker.pid]) for number, worker in numbered]
        return StopReport(tuple(endings), time.perf_counter() - since, len(claimed), descendants)

    def _clear_away(self, record: Record, iterator: Any) -> None:
        """Reap the workers that have ended, and give back what they held."""
        for process in record.processes:
            process.join(REAP_SECONDS)  # not 0: that may come a moment too early, and leave a zombie
        record.processes = [process for process in record.processes if process.is_alive()]
        if iterator is not None and record.workers:
            record.control.release(iterator, record)
        ended = [handle for handle in record.workers if not handle.is_alive()]
        self.reaper.gone(ended)
        for handle in ended:
            handle.close()
        if record.workers:
            self.ledger.touch()

    def dismiss_workers(
        self, record: Record, hung: Iterable[int], grace_seconds: float, hurry: Callable[[], bool]
    ) -> None:
        """End the workers of a loader that is to go on with others; those that are `hung` have no time to leave.

        They keep their places until others take them, so that a stop by another thread finds the loader.
        """
        for account in record.accounts:
            with contextlib.suppress(Exception):  # a look must not keep the epoch from going on
                account.leave_workers(record)
        family = processes.descendants(record.workers)
        for number in hung:
            record.workers[number].send(processes.KILL)
        processes.stop(record.workers, grace_seconds, hurry, family)
        for process in record.processes:
            process.join(REAP_SECONDS)  # not 0: that may come a moment too early, and leave a zombie
        ended = [handle for handle in record.workers if not handle.is_alive()]
        self.reaper.gone(ended)
        for handle in ended:
            handle.close()
        record.processes = [process for process in record.processes if process.is_alive()]
        record.fates = {}

    def stop_worker(self, record: Record, handle: Handle) -> StopReport:
        """Stop one worker alone; its loader says so at its next use."""
        since = time.perf_counter()
        with interrupts.held() as hurry:
            how, descendants = processes.stop([handle], 0.0, hurry)
        number = record.workers.index(handle)
        record.fates[number] = "was stopped by loaderguard (clean)"
        ending = Ending(handle.pid, number, how[handle.pid])
        self.ledger.touch()
        return StopReport((ending,), time.perf_counter() - since, 0, descendants)

    # -- looking --------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Look at everything at once."""
        return Snapshot(
            taken=time.time(),
            pid=os.getpid(),
            guarding=self.is_guarding,
            loaders=tuple(self.state_of(record) for record in self.all()),
            machine=machine.look(),
            events=tuple(self.events),
        )

    def name(self, record: Record) -> str:
        """Return the loader's name in the notebook, or its type and number."""
        loader = record.loader()
        known = self.name_of(loader) if loader is not None else None
        record.last_name = known or record.last_name
        return record.last_name or f"{record.loader_type} #{record.loader_id}"

    def state_of(self, record: Record) -> LoaderState:
        """Look at one loader, also if it is gone."""
        iterator = record.iterator()
        lengths, since = record.lengths, record.waiting_since
        delivered = record.control.count_delivered(iterator) if iterator is not None else record.batches
        ready = record.control.count_ready(iterator) if iterator is not None and record.workers else 0
        waited = record.wait_seconds + (time.perf_counter() - since if since is not None else 0.0)
        return LoaderState(
            loader_id=record.loader_id,
            name=self.name(record),
            dataset=record.dataset,
            dataset_length=lengths[0],
            batches_total=lengths[1],
            cell=record.cell.number if record.cell else None,
            start_method=record.start_method,
            persistent=record.is_persistent,
            activity=record.activity(),
            in_use=self._is_in_use(record),
            stalled=record.is_stalled,
            started=record.started,
            batches=record.batches,
            wait_seconds=waited,
            batches_before=max(0, record.batches - delivered),
            ready=ready,
            capped=_capped(record),
            capacity=record.prefetch * len(record.workers),
            workers=tuple(
                self._worker_state(record, number, worker, born, ready)
                for number, (worker, born) in enumerate(zip(record.workers, record.births, strict=False))
            ),
        )

    def _is_in_use(self, record: Record) -> bool:
        """Tell whether the cell that took the last batch is still running; outside of cells that is not known."""
        cells = list(self.cells.values())
        while cells and record.last_cell not in cells:
            cells = [cell.outer for cell in cells if cell.outer is not None]
        return record.last_cell is None or bool(cells)

    def _worker_state(self, record: Record, number: int, worker: Handle, born: float, ready: int) -> WorkerState:
        slot = record.slots[number] if number < len(record.slots) else None
        progress = slot.read() if slot is not None else None
        state = WorkerState(number, worker.pid, born, worker.state(), processes.resident_bytes(worker.pid))
        if state.state == "dead" and record.control.has_finished(record.iterator(), number) and not record.is_broken:
            return replace(state, word="done")
        if progress is None or state.state == "dead":
            return replace(state, word=state.state)
        index, words = record.sample_of(progress)
        is_loading = progress.phase == LOADING
        return replace(
            state,
            phase=PHASES[progress.phase],
            word=_word(record, number, state, progress, ready),
            sample=_sample(index, words) if is_loading else None,
            sample_seconds=max(0.0, time.monotonic() - progress.since),
            samples=progress.samples + max(0, progress.position if is_loading else 0),
        )


def _entry(record: Record) -> LoaderEntry:
    """Say what the ledger keeps of a loader."""
    born = list(zip(record.workers, record.births, strict=False))
    return LoaderEntry(
        name=(record.last_name or f"{record.loader_type} #{record.loader_id}")[:LONGEST_TEXT],
        dataset=record.dataset[:LONGEST_TEXT],
        start_method=record.start_method,
        cell=record.cell.number if record.cell else None,
        workers=tuple(
            WorkerEntry(number, worker.pid, worker.mark, started)
            for number, (worker, started) in enumerate(born)
            if worker.mark is not None
        ),
    )


def _capped(record: Record) -> tuple[str, ...]:
    """Return the native thread pools that were made smaller in the workers."""
    found = [slot.read_text(CAPS) for slot in record.slots if slot is not None]
    caps = {name: sizes for one in found if one for name, sizes in one.items()}
    return tuple(f"{name} {before} → {now}" for name, (before, now) in caps.items())


def _sample(index: Any, words: str) -> str | None:
    """Say in a few words which sample a worker loads; None if that changes at this moment."""
    if index is not None:
        return key_text(index)
    return "in collate_fn" if words.startswith("in collate_fn") else None


def _word(record: Record, number: int, state: WorkerState, progress: Progress, ready: int) -> str:
    """Say in a word how a worker is."""
    if state.state == "stopped":
        return "stopped"
    if record.is_stalled and number in record.late_workers:
        return "stalled"
    if progress.phase == IDLE and record.is_in_epoch and (ready or record.waiting_since is None):
        return "full"
    return "loading" if progress.phase == RESUMING else PHASES[progress.phase]


def await_other(work: tuple[int, threading.Event] | None) -> None:
    """Wait until another thread has done what it is at; what this thread itself is at would never end."""
    if work is not None and work[0] != get_ident():
        work[1].wait(STOP_SECONDS)


def take_verdict(record: Record) -> LoaderStalled | None:
    """Return what the waiting thread was to raise: it does something about it instead."""
    found, record.verdict = record.verdict or record.last_verdict, None
    return found


def forget_stall(record: Record, since: float, outcome: str) -> None:
    """End a stall when nobody watches."""
    record.is_stalled = record.is_hung = False
    record.verdict = None


registry = Registry()
