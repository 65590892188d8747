"""Cells: when one starts and ends, how it ended, and which loaders end with it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from IPython import version_info
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

from .. import frames, interrupts
from ..guarding import finish_run
from ..model import StopReport
from ..registry import Cell, Record, registry, work_of
from ..seam import rim, say, shield
from .holders import is_held_by_frames
from .outlet import Outlet
from .sigint import InterruptibleWaits

OK, ERROR, INTERRUPT = "ok", "error", "interrupt"


def doomed(records: Iterable[Record], cell: Cell, outcome: str, is_bound: Callable[[Record], bool]) -> list[Record]:
    """Return the loaders that end with a plain cell, as the README's table "At the end of a cell" has it."""
    records = [record for record in records if record.workers]
    if outcome == INTERRUPT:
        return [record for record in records if record.cell is cell or _is_iterated_in(record, cell)]
    if outcome == ERROR:
        return [
            record
            for record in records
            if (record.cell is cell or (record.is_broken and record.last_cell is cell))
            and not is_bound(record)
            and (record.is_broken or not record.is_kept())
            and not _is_in_other_thread(record, cell)
        ]
    return []


def _is_in_other_thread(record: Record, cell: Cell) -> bool:
    """Tell whether another thread iterates it: that one is still in the functions in which it began to."""
    if record.thread == cell.thread:
        return False
    return bool(record.work & work_of(frames.stack_of(record.thread)))


def _is_iterated_in(record: Record, cell: Cell) -> bool:
    return record.last_cell is cell and record.is_in_epoch


class Cells:
    """Follows the cells of a shell and applies what is promised at their end."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._watch = interrupts.InterruptWatch()
        self._infos: dict[Cell, Any] = {}
        self._places: dict[Cell, tuple[Any, FrameType | None]] = {}
        self._waits: dict[Cell, InterruptibleWaits] = {}
        self._failures = 0
        self.unfollowed: set[int] = set()
        """Threads that run a cell which the guard has failed to follow."""
        self._ahead = 1 if version_info >= (9,) else 0
        """By how much the shell's execution count is ahead of the running cell's; learnt from each cell."""
        self.after_run: Callable[[Cell, str], None] = lambda cell, outcome: None
        self.after_error: Callable[[Cell, BaseException], None] = lambda cell, error: None
        self.after_stop: Callable[[StopReport], None] = lambda report: None

    def start(self) -> None:
        """Follow from now on, the running cell included."""
        self._shell.events.register("pre_run_cell", self._pre_run_cell)
        self._shell.events.register("post_run_cell", self._post_run_cell)
        if _cell_frame() is not None:
            self._begin(None, self._shell.execution_count - self._ahead)

    def stop(self) -> None:
        """Follow no longer."""
        self._shell.events.unregister("pre_run_cell", self._pre_run_cell)
        self._shell.events.unregister("post_run_cell", self._post_run_cell)
        for cell in reversed(list(self._infos)):
            self._forget(cell)
            if cell.run is not None:
                cell.run.end()
            registry.end_cell(cell)
        self._watch.close()

    def current(self) -> Cell | None:
        """Return the cell that runs in this thread."""
        return registry.cells.get(threading.get_ident())

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[[str], None]]:
        """Treat what runs in this block as a plain cell; it is told how that ended."""
        self.end_abandoned()
        self._begin(None, None)
        cell, outcomes = self.current(), [ERROR]
        try:
            yield outcomes.append
        finally:
            if cell is not None and cell is self.current():
                cell.is_interrupted |= self._watch.take()
                self._end(cell, INTERRUPT if cell.is_interrupted else outcomes[-1])

    # -- begin ----------------------------------------------------------------------------------

    @rim
    def _pre_run_cell(self, info: ExecutionInfo) -> None:
        running = registry.cells.get(threading.get_ident())
        self.unfollowed.discard(threading.get_ident())
        try:
            self._follow_held(info)
        except Exception as error:  # noqa: BLE001 - see NOTE [ Fail open ] in seam.py
            self.unfollowed.add(threading.get_ident())
            say("what this cell leaves behind is not cleared away", error)
            with shield("this cell is followed no longer"):
                cell = self.current()
                if cell is not None and cell is not running:
                    self._drop(cell)

    def _follow_held(self, info: ExecutionInfo) -> None:
        try:
            # IPython prints and forgets what is raised here; an async cell has a handler that raises nothing
            with interrupts.held(interrupts.LATER) if interrupts.is_raising() else contextlib.nullcontext():
                self._follow(info)
        except KeyboardInterrupt:  # a moment before it was held back, or after
            with interrupts.held(interrupts.LATER) as interrupt:
                interrupt.count += 1
                if info not in self._infos.values():
                    self._follow(info)

    def _follow(self, info: ExecutionInfo) -> None:
        self.end_abandoned()
        self._begin(info, self._shell.execution_count - self._ahead if info.store_history else None)

    def end_abandoned(self) -> None:
        """End the cells of this thread that have ended without post_run_cell: an interrupt can make IPython skip it."""
        while True:
            try:
                while self._is_stale(self.current()):
                    self._end(self._stack()[0], INTERRUPT)
                return
            except KeyboardInterrupt:  # just before the stop holds it back
                continue

    def _is_stale(self, cell: Cell | None) -> bool:
        """Tell whether a cell has ended without a word: it is neither on the stack nor a task that waits."""
        if cell is None:
            return False
        task, frame = self._places.get(cell, (None, None))
        return task.done() if task is not None else frame is not None and frame not in frames.running()

    def _begin(self, info: Any, number: int | None) -> None:
        outer = self.current()
        if number is None and outer is not None:
            number = outer.number
        if outer is None:
            self._watch.take()  # what came between cells was not for this one
            self._watch.begin()
        cell = registry.begin_cell(number)
        cell.outlet, cell.has_interrupt = Outlet(self._shell), self._watch.has_come
        self._infos[cell] = info
        task = _cell_task()
        self._places[cell] = (task, _cell_frame())
        if task is not None:
            self._waits[cell] = InterruptibleWaits(task)
        if registry.is_guarding and registry.records:
            registry.prepare_birth()

    def _stack(self) -> list[Cell]:
        """Return the cells that run in this thread, innermost first."""
        cells, cell = [], self.current()
        while cell is not None:
            cells.append(cell)
            cell = cell.outer
        return cells

    # -- end ------------------------------------------------------------------------------------

    @rim
    def _post_run_cell(self, result: ExecutionResult | None) -> None:
        cell = registry.cells.get(threading.get_ident())
        try:
            self._conclude_held(cell, result)
        except Exception as error:  # noqa: BLE001 - see NOTE [ Fail open ] in seam.py
            say("the end of this cell is not as it should be", error)
            with shield("workers of this cell are not stopped"):
                self._end_plainly(cell, result)

    def _end_plainly(self, cell: Cell | None, result: ExecutionResult | None) -> None:
        """Do the least that a cell's end has to do: its loaders end if it failed."""
        if cell is None:
            return
        if cell is self.current():
            self._drop(cell)
        if cell.run is not None and cell.run in registry.runs:
            finish_run(cell.run, keep=False, deliver=interrupts.NEVER)
        if result is None or not result.success:
            outcome = INTERRUPT if cell.is_interrupted else ERROR
            self._stop(doomed(registry.all(), cell, outcome, self._is_bound), "its cell failed", None)

    def _drop(self, cell: Cell) -> None:
        """Follow a cell no longer, whatever is known of it."""
        self._forget(cell)
        registry.end_cell(cell)
        if cell.outer is None:
            self._watch.end()

    def _conclude_held(self, cell: Cell | None, result: ExecutionResult | None) -> None:
        try:
            with interrupts.held(interrupts.NEVER):
                self._conclude(cell, result)
        except KeyboardInterrupt:  # a moment before it was held back, or after; IPython would print and forget it
            with interrupts.held(interrupts.NEVER):
                if cell in self._infos:
                    self._conclude(cell, result)

    def _conclude(self, cell: Cell | None, result: ExecutionResult | None) -> None:
        if cell is None or _is_blank(result):
            return
        info = self._infos.get(cell)
        if result is not None and info is not None and result.info is not info and result.success:
            return  # of a cell that IPython ended before it began
        self._learn_number(cell, result)
        outcome = self._outcome(cell, result)
        error = result.error_in_exec if result is not None else None
        try:
            if outcome == ERROR and error is not None:
                self.after_error(cell, error)
        finally:
            self._end(cell, outcome)

    def _learn_number(self, cell: Cell, result: ExecutionResult | None) -> None:
        """Take the number that IPython gave the cell: when it counts on depends on its version."""
        number = getattr(result, "execution_count", None)
        if number is not None and cell.number is not None and cell.outer is None:
            self._ahead += cell.number - number
            cell.number = number

    def _outcome(self, cell: Cell, result: ExecutionResult | None) -> str:
        error = None if result is None else result.error_before_exec or result.error_in_exec
        cell.is_interrupted |= self._watch.take()
        if cell.is_interrupted or isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
            return INTERRUPT
        return ERROR if error is not None or result is None else OK

    def _end(self, cell: Cell, outcome: str) -> None:
        with interrupts.held(interrupts.NEVER):
            cell.is_interrupted |= outcome == INTERRUPT
            self._forget(cell)
            try:
                self._stop_loaders(cell, outcome)
            finally:
                registry.end_cell(cell)
                if cell.outer is None:
                    self._watch.take()  # these have hurried the stop, and are done with
                    self._watch.end()

    def _forget(self, cell: Cell) -> None:
        self._infos.pop(cell, None)
        self._places.pop(cell, None)
        if cell in self._waits:
            self._waits.pop(cell).restore()

    def _stop_loaders(self, cell: Cell, outcome: str) -> None:
        """Keep the promises of the README's table "At the end of a cell"."""
        ended = "its guarded cell ended" if cell.run else "only an old traceback still held it"
        why = {INTERRUPT: "its cell was interrupted", ERROR: "its cell failed"}.get(outcome, ended)
        grace = cell.run.grace_seconds if cell.run else None
        if registry.is_guarding:
            self._stop(doomed(registry.all(), cell, outcome, self._is_bound), why, grace)
            registry.shut_down(doomed(registry.handed_back, cell, outcome, self._is_bound))
            self._failures += outcome != OK
            if cell.outer is None:
                self._stop([record for record in registry.all() if self._is_forgotten(record, cell)], why, grace)
        if cell.run is not None:
            is_kept = not registry.is_guarding or (cell.run.keep and outcome == OK)
            finish_run(cell.run, is_kept, why, interrupts.NEVER)
            self.after_run(cell, outcome)
        elif outcome == OK and any(self._may_be_garbage(record, cell) for record in registry.all()):
            gc.collect()
        registry.await_stops(cell)

    def _stop(self, records: list[Record], why: str, grace: float | None) -> None:
        if records:
            self.after_stop(registry.stop(records, why, grace, interrupts.NEVER))

    def _is_bound(self, record: Record) -> bool:
        """Tell whether the iterator has a name in the notebook."""
        return self._has_name(record.iterator())

    def _has_name(self, *things: Any) -> bool:
        values = list(self._shell.user_ns.values())
        return any(value is thing for value in values for thing in things if thing is not None)

    def _is_forgotten(self, record: Record, cell: Cell) -> bool:
        """Tell whether only the traceback of a failed cell still holds it: its name has gone to another, or is gone.

        To ask who holds it takes some 50 ms, so it is asked once after a failure and once after the loss
        of the name.
        """
        iterator, loader, is_kept = record.iterator(), record.loader(), record.is_kept()
        if self._has_name(iterator, loader if is_kept else None):
            record.judged_at = None
            return False
        if iterator is None or not record.workers or record.judged_at == self._failures:
            return False
        if _is_in_other_thread(record, cell):
            return False
        record.judged_at = self._failures
        return is_held_by_frames(iterator, loader) and (
            not is_kept or loader is None or is_held_by_frames(loader, iterator)
        )

    def _may_be_garbage(self, record: Record, cell: Cell) -> bool:
        """Tell whether a live loader of this cell may be unreachable: what is not referenced ends at once."""
        return record.cell is cell and bool(record.workers) and not self._has_name(record.iterator(), record.loader())


def _cell_frame() -> FrameType | None:
    """Return the frame of IPython's own that runs the innermost cell of this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not InteractiveShell.run_cell_async.__code__:
        frame = frame.f_back
    return frame


def _cell_task() -> Any:
    """Return the task that runs this cell, if it is an async one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
    code = getattr(task.get_coro() if task else None, "cr_code", None)
    return task if code is InteractiveShell.run_cell_async.__code__ else None


def _is_blank(result: ExecutionResult | None) -> bool:
    raw = getattr(getattr(result, "info", None), "raw_cell", None)
    return isinstance(raw, str) and not raw.strip()
