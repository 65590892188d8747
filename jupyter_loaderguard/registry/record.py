"""One iterator over a DataLoader, from its birth to its end; and what is asked of it."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

from .. import frames, interrupts
from ..allowance import Allowance
from ..errors import LoaderStalled
from ..model import LoaderState
from ..processes import Handle
from ..quarantine import LeftOut
from ..reach import attributes_of, leads_to
from ..samples import Manner, locate
from ..seam import INCOMPLETE, shield
from ..worker.slot import LOADING, RESUMING, STARTING, OwnNotes, Progress, Slot
from .cell import Cell, work_of

if TYPE_CHECKING:
    from ..accounts.account import Account
    from . import Registry

BATCH, END, BEGAN, ERROR = "batch", "end of the epoch", "beginning of an epoch", "error"
RETRIED = "replaced"
"""How a wait for data ends."""


class Control(Protocol):
    """What the registry asks of an iterator; torch_adapter knows how."""

    def ask_to_leave(self, iterator: Any) -> bool:
        """Tell the workers that they are no longer needed, without waiting for them; tell whether all were told."""

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

    def is_asking_sampler(self, stack: Iterable[FrameType]) -> bool:
        """Tell whether a thread, by its frames, asks a sampler for the next keys."""

    def lengths(self, iterator: Any) -> tuple[int | None, int | None]:
        """Return the lengths of the dataset and of an epoch in batches, where they are known by now."""

    def hand_back(self, record: Record) -> None:
        """Make torch responsible for an iterator, for good."""

    def shut_down(self, iterator: Any) -> None:
        """End the workers of an iterator that was handed back in torch's own way."""


_COLLECTIONS: dict[str, Callable[[], Any]] = {
    "fates": dict,
    "unsent": dict,
    "unwatched": set,
    "arrived": deque,
    "probes": dict,
    "searched": set,
    "states": dict,
    "last_tasks": dict,
    "ended_tasks": set,
    "resume": dict,
    "births": list,
    "processes": list,
    "workers": list,
    "sent": dict,
    "slots": list,
}


OF_TORCH = {"_iterator", "dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "generator"}
"""Attributes of every DataLoader."""


def keeps(loader: Any, iterator: Any) -> bool:
    """Tell whether a loader keeps an iterator for ever, in whatever attribute of its own."""
    own = {name: value for name, value in attributes_of(loader).items() if name not in OF_TORCH}
    return iterator is not None and leads_to(own, iterator)


class Record:
    """One iterator over a DataLoader, from its birth to its end."""

    registry: Registry
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
    is_in_making: bool = True
    """Whether its workers are being started; see seam.let_go."""
    mistake: Exception | None = None
    """What went wrong in our own code meanwhile."""
    start_method: str | None = None
    workers: list[Handle]
    births: list[float]
    processes: list[Any]
    """The Process objects of the workers, also of one whose start was interrupted before torch knew of it."""
    batches: int = 0
    wait_seconds: float = 0.0
    waiting_since: float | None = None
    is_in_epoch: bool = False
    is_broken: bool = False
    judged_at: int | None = 0
    """How many cells had failed when it was last asked who still holds it; None if it had a name since."""
    fates: dict[int, str]
    """What became of workers that were stopped one by one."""
    making: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """What torch makes it of, beside its loader."""
    stopped_by: str | None = None
    """Why the guard stopped it; None if it lives, or ended by itself."""
    last_cell: Cell | None = None
    mark: int = -1
    """`registry.mark` when this was noted."""
    manner: Manner = Manner()
    prefetch: int = 2
    known_lengths: tuple[int | None, int | None] = (None, None)
    last_name: str | None = None
    """Its name in the notebook, when it had one."""
    stop_under_way: tuple[int, threading.Event] | None = None
    """The thread that stops it, and what is set when it has."""
    final: LoaderState | None = None
    """How it was when the guard stopped it in a guarded run."""
    slots: list[Slot | None]
    """What each worker notes of its progress; a single one, of the kernel's own, without workers."""
    sent: dict[int, Any]
    """The keys of each batch that is under way."""
    oldest_sent: int = 0
    """Batches before this one are delivered, and their keys forgotten."""
    carry: Callable[[Any], Any] | None = None
    """Makes keys fit to travel to workers that are not forked."""
    oom_kills: int = 0
    """`machine.oom_kills` when it began."""
    unsent: dict[int, str]
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
    unwatched: set[int]
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
    arrived: deque[tuple[int, Any]]
    """Tasks that are done without a worker: all their samples are left out."""
    probes: dict[int, Any]
    """Tasks of which one sample is to be found."""
    searched: set[int]
    """Those in which none was found to be at fault alone."""
    keeps_state: bool = False
    """Whether its dataset is a stream that can be resumed, and is to be."""
    states: dict[int, bytes | None]
    """Of a stream that can be resumed: its state after each task that has arrived."""
    last_tasks: dict[int, int]
    """Of such a stream: the last task of each worker that torch has got."""
    ended_tasks: set[int]
    """Tasks of which it is known that a stream had no more samples after them."""
    resume: dict[int, bytes | None]
    """The states that workers begin with which take over from others."""
    has_own: bool = False
    """Whether messages of the workers may be for us, even when nothing may be mended any more."""
    has_suspects: bool = False
    """Whether a worker died or hung on a sample that has not come since."""

    def __init__(self, **given: Any) -> None:
        """Take what is known at its birth; a loader may be asked for a single batch, so that each field is felt."""
        self.__dict__ = given

    def __getattr__(self, name: str) -> Any:
        """Make a collection when it is first needed."""
        make = _COLLECTIONS.get(name)
        if make is None:
            raise AttributeError(name)
        made = vars(self)[name] = make()
        return made

    def hand_back(self) -> None:
        """Make torch responsible for the iterator, for good."""
        self.control.hand_back(self)
        if self.workers:
            self.registry.keep_in_mind(self)

    def words(self) -> str:
        """Say which loader it is."""
        return f"{self.last_name or self.loader_type} ({self.dataset})"

    def is_kept(self) -> bool:
        """Tell whether its loader keeps it for later epochs: by persistent workers, or as those of timm do."""
        return self.is_persistent or keeps(self.loader(), self.iterator())

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The lengths of the dataset and of an epoch in batches, where they are known by now."""
        iterator = self.iterator()
        if self.known_lengths == (None, None) and iterator is not None:
            self.known_lengths = self.control.lengths(iterator)
        return self.known_lengths

    def take_slot(self) -> None:
        """Note in the kernel itself what a loader without workers is on."""
        self.slots = [OwnNotes()]

    def alive(self) -> list[Handle]:
        """Return the workers that still run."""
        return [worker for worker in self.workers if worker.is_alive()]

    def is_over(self) -> bool:
        """Tell whether it is no longer known, and has no worker left."""
        return self.loader_id not in self.registry.records and not self.alive()

    def begin_wait(self) -> float:
        """Note that the loop asks for a batch, and who asks."""
        if self.mark != self.registry.mark or get_ident() != self.thread:
            self.note_who_waits()
        self.is_in_epoch = True
        self.waiting_since = now = time.perf_counter()
        if not self.registry.is_watched:
            self.registry.on_wait()
        return now

    def note_who_waits(self) -> None:
        """Note which thread iterates it, and in which cell."""
        thread = get_ident()
        if thread != self.thread:
            self.thread, self.work = thread, work_of(frames.below(sys._getframe(2)))
        self.mark = self.registry.mark
        self.last_cell = self.registry.cells.get(thread)
        self.mends = self.registry.may_mend(self)

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
                self.registry.on_stall_end(self, since, outcome)
            except interrupts.WaitBroken:  # meant for this wait, and too late for it
                continue

    def _end_epoch(self, is_regular: bool) -> None:
        """Tell the runs that an epoch has ended: regularly, or with the iterator."""
        is_over = self.loader_id not in self.registry.records
        for account in self.accounts if is_regular or is_over else ():
            with shield(INCOMPLETE):
                account.end_epoch(self, time.perf_counter())
        if is_over:
            self.close_accounts()

    def begin_epoch(self) -> None:
        """Tell the runs that an epoch begins, with workers that are there already."""
        for account in self.accounts:
            with shield(INCOMPLETE):
                account.begin_epoch(self, time.perf_counter())

    def close_accounts(self) -> None:
        """Tell the runs that it ends, before its workers do."""
        for account in self.accounts:
            with shield(INCOMPLETE):
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
