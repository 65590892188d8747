"""Cells that run, and whose work it is: the threads that belong to a cell or a run."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from .. import frames
from ..allowance import Allowance

if TYPE_CHECKING:
    from .run import Run

IDLE_IN_A_POOL = {("concurrent.futures.thread", "_worker"), ("multiprocessing.pool", "worker")}
_RUNNERS = ("threading", "concurrent.futures.thread", "multiprocessing.pool")


class Territory:
    """The threads whose work belongs to a cell or a run: the one that began it, and those that got to work since.

    These are threads that were started since, and those that were idle in a pool at that time.
    """

    def __init__(self) -> None:
        self.own = threading.current_thread()
        innermost = frames.innermost()
        busy = [thread for thread in threading.enumerate() if not _is_idle(innermost.get(thread.ident or 0))]
        self._earlier = weakref.WeakSet(busy)

    def includes(self, thread: threading.Thread) -> bool:
        """Tell whether a thread is one of them."""
        return thread is self.own or thread not in self._earlier


def _is_idle(frame: FrameType | None) -> bool:
    return frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in IDLE_IN_A_POOL


def work_of(stack: Iterable[FrameType]) -> frozenset[CodeType]:
    """Return the functions that a thread is in, but for those that only run threads."""
    return frozenset(frame.f_code for frame in stack if frame.f_globals.get("__name__") not in _RUNNERS)


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
