"""What is alive: loaders, workers, cells and guarded runs. The only place where live state changes.

A Record is made when an iterator is born and leaves when its workers are stopped. It holds the
iterator weakly, so that the guard never keeps one alive. There is no lock: the collector may run
`__del__`, and so a stop, in the middle of any of our lines, also in the same thread. Single dict
operations are atomic, and whoever pops a record from `records` is the one who stops it.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from .. import frames, interrupts, machine, processes, usage
from ..allowance import Allowance
from ..entries import LoaderEntry
from ..errors import LoaderStalled
from ..ledger import Ledger
from ..model import Ending, Event, LoaderState, Snapshot, Stall, StopReport
from ..processes import Handle
from ..reaper import Reaper
from ..seam import INCOMPLETE, hand_back, is_for_user, rim, shield
from . import states
from .cell import Cell, work_of
from .record import BATCH, BEGAN, END, ERROR, RETRIED, Control, Record, keeps
from .run import Run

if TYPE_CHECKING:
    from ..timing import TuneProgress

__all__ = [
    "BATCH",
    "BEGAN",
    "END",
    "ERROR",
    "LENT",
    "RETRIED",
    "Cell",
    "Control",
    "Record",
    "Registry",
    "Run",
    "forget_stall",
    "keeps",
    "registry",
    "take_verdict",
    "work_of",
]

LENT = "_loaderguard_lent"
"""An attribute of loaders that are copies of the user's: they count in the run that they are made for, and no other."""
REAP_SECONDS = 0.1
STOP_SECONDS = 10
"""More than a stop by another thread takes, its grace included."""


class Registry:
    """The state of this process. There is one, `registry`."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.records: dict[int, Record] = {}
        self.cells: dict[int, Cell] = {}
        self.runs: list[Run] = []
        self.handed_back: list[Record] = []
        """Iterators that torch is responsible for: the guard failed at them."""
        self._stops: list[tuple[list[Record], tuple[int, threading.Event]]] = []
        """The stops that are under way: what is stopped, by which thread, and what is set when it is done."""
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
        self.place_of: Callable[[str], str] = lambda file: file
        """Names a cell for its file."""
        self.open_progress: Callable[[], Callable[[TuneProgress | None], None]] | None = None
        """Makes a display of how far `tune` is; called with None, it goes away."""
        self._ids = itertools.count(1)

    # -- births ---------------------------------------------------------------------------------

    def add(
        self, iterator: Any, loader: Any, control: Control, is_adopted: bool = False, has_workers: bool = True
    ) -> Record:
        """Record an iterator at its birth, before it has workers; or adopt one that was alive before us."""
        self.settle_in_fork()
        number = next(self._ids)
        record = Record(
            registry=self,
            loader_id=number,
            control=control,
            # one with workers says itself when it goes, in its __del__
            iterator=weakref.ref(iterator, None if has_workers else functools.partial(self._forget, number)),
            loader=_weak(loader),
            loader_type=type(loader).__name__ if loader is not None else "DataLoader",
            dataset=type(control.dataset(iterator, loader)).__name__,
            is_persistent=bool(getattr(loader, "persistent_workers", False)),
            cell=None if is_adopted else self._cell_here(),
            thread=get_ident(),
            work=work_of(frames.below(sys._getframe(1))) if has_workers else frozenset(),
            started=time.time(),
            workers=[],
            oom_kills=machine.oom_kills() if has_workers else 0,
        )
        if self.runs:
            runs = self._runs_of(threading.current_thread())
            for run in runs[-1:] if LENT in getattr(loader, "__dict__", ()) else runs:
                run.take_in(record)
        self.on_birth()
        self.records[number] = record
        return record

    def _cell_here(self) -> Cell | None:
        """Return the cell that this thread works for."""
        own = self.cells.get(get_ident())
        if own is not None or not self.cells:
            return own
        thread = threading.current_thread()
        owners = [cell for cell in list(self.cells.values()) if cell.territory.includes(thread)]
        return next(iter(owners), None)

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

    def may_mend(self, record: Record) -> bool:
        """Tell whether anything may be mended for this loader; asked for each one, so the usual answer is quick."""
        if not (self.runs or self.retry or self.skip):
            return False
        return self.allowance_of(record).is_open

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
        self._stops.clear()
        self.handed_back.clear()
        self.events.clear()
        self.after_cell.clear()
        self.is_watched = False
        self.on_birth = lambda: None

    def prepare_birth(self, free_descriptors: float = usage.SPARE_DESCRIPTORS) -> None:
        """Have the reaper ready before a worker starts."""
        with interrupts.held():  # or half of the reaper's start is left as a zombie
            line = self.reaper.ensure(is_scarce=free_descriptors < usage.FEW_DESCRIPTORS)
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
        return [states.entry_of(record) for record in self.all() if record.workers]

    @rim
    def _forget(self, number: int, iterator: Any) -> None:
        """Let the record of a loader without workers go: its iterator has gone."""
        record = self.records.pop(number, None)
        if record is not None and record.accounts and self.owner == os.getpid():
            with shield(INCOMPLETE):
                record.close_accounts()
                record.slots, record.sent, record.observe = [], {}, None  # a run keeps the record

    def remove(self, record: Record) -> bool:
        """Take a record out; True for the one caller who got it and now has to stop it."""
        return self.records.pop(record.loader_id, None) is not None

    def keep_in_mind(self, record: Record) -> None:
        """Know an iterator that was handed back to torch for as long as it lives: torch may have to end it."""
        known = [one for one in self.handed_back if one.iterator() is not None]
        self.handed_back = [*known, record]

    def shut_down(self, records: Iterable[Record]) -> None:
        """Have torch end the workers of iterators that were handed back to it, in its own way."""
        for record in records:
            iterator = record.iterator()
            if iterator is not None and record.alive():
                with shield(f"workers of {record.words()} are not stopped"):
                    record.control.shut_down(iterator)

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
            with shield("something is left undone at the end of a cell"):
                act(cell)

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
                    with shield(f"{record.words()} is missing in the summary"):
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

    def await_stops(self, cell: Cell) -> None:
        """Wait until other threads have stopped what they stop of a cell: the collector runs in any of them."""
        for records, work in list(self._stops):
            if any(record.cell is cell for record in records):
                await_other(work)

    def stop_claimed(
        self,
        claimed: list[tuple[Record, Any]],
        hurry: Callable[[], bool],
        grace_seconds: float,
        due_seconds: float = 0.0,
    ) -> StopReport:
        """Stop loaders that the caller has taken out of `records`.

        If an interrupt breaks it off they are put back; if we fail at it, torch ends them in its own way. Workers
        that could all be told to leave have `due_seconds` for it, if that is more.
        """
        stop = [record for record, _ in claimed], (get_ident(), threading.Event())
        self._stops.append(stop)
        try:
            return self._stop_claimed(claimed, hurry, grace_seconds, due_seconds)
        finally:
            self._stops.remove(stop)
            stop[1][1].set()

    def _stop_claimed(
        self, claimed: list[tuple[Record, Any]], hurry: Callable[[], bool], grace_seconds: float, due_seconds: float
    ) -> StopReport:
        since = time.perf_counter()
        numbered = [pair for record, _ in claimed for pair in enumerate(record.workers)]
        handles = [worker for _, worker in numbered]
        for record, _ in claimed:
            record.close_accounts()
        try:
            with usage.spare_descriptors():
                family = processes.descendants(handles)  # before any worker can leave them behind
                asked = [pair for pair in claimed if pair[1] is not None and pair[0].workers]
                told = [record.control.ask_to_leave(iterator) for record, iterator in asked]
                grace = max(grace_seconds, due_seconds) if all(told) else grace_seconds
                how, descendants = processes.stop(handles, grace, hurry, family)
                for record, iterator in claimed:
                    self._clear_away(record, iterator)
        except BaseException as error:
            if not isinstance(error, Exception) or is_for_user(error):
                self.records.update({record.loader_id: record for record, _ in claimed if record.alive()})
                raise
            how, descendants = self._leave_to_torch(claimed, error), 0
        endings = [Ending(worker.pid, number, how[worker.pid]) for number, worker in numbered]
        return StopReport(tuple(endings), time.perf_counter() - since, len(claimed), descendants)

    def _leave_to_torch(self, claimed: list[tuple[Record, Any]], error: Exception) -> dict[int, str]:
        """Have torch end workers that we have failed to end; return how each one ended."""
        hand_back([record for record, _ in claimed], error)
        self.shut_down([record for record, _ in claimed])
        handles = [worker for record, _ in claimed for worker in record.workers]
        return {worker.pid: "unkillable" if worker.is_alive() else "SIGTERM" for worker in handles}

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
            with shield(INCOMPLETE):
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
        return states.state_of(record, self.name(record), self._is_in_use(record))

    def _is_in_use(self, record: Record) -> bool:
        """Tell whether the cell that took the last batch is still running; outside of cells that is not known."""
        cells = list(self.cells.values())
        while cells and record.last_cell not in cells:
            cells = [cell.outer for cell in cells if cell.outer is not None]
        return record.last_cell is None or bool(cells)


def _weak(loader: Any) -> Callable[[], Any]:
    """Return what finds a loader as long as it lives; nothing for one that cannot be referred to weakly."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: None


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
