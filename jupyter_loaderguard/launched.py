"""Ranks that the notebook itself launches, by accelerate's notebook_launcher or torch.multiprocessing.spawn.

NOTE [ The cell that launched them ]
A launcher that is interrupted leaves its processes behind, if the front end signals the kernel alone. So each
process watches a number that the kernel counts up at the end of each cell: when it changes, the cell that launched
the process is over, and the process interrupts itself, unless the interrupt has reached it too; if its main thread
does not react, its workers are stopped all the same. The number is in a file without a name, which travels as a
descriptor; reports come back through a socket pair, that nobody else can open.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.context import assert_spawning
from typing import Any

from .errors import LoaderGuardError
from .guarding import guard, stop_everything
from .interrupts import InterruptWatch, interrupt
from .model import RankState
from .processes import Handle
from .registry import Cell, registry
from .reporter import Reporter, state_from

REACTION_SECONDS = 1.0
"""How long a process may take to end its loop when its cell has ended."""
LONGEST_REPORT = 200_000


def _can_launch() -> bool:
    """Tell whether this system has what a link is made of; macOS knows such sockets by name only."""
    try:
        for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            one.close()
    except (AttributeError, OSError):
        return False
    return hasattr(os, "pread")


class Ranked:
    """A function for a launcher: each process that runs it guards itself, and is a rank in the table of the notebook.

    Its workers end with it, and with the cell that launched it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise LoaderGuardError(f"ranked() wants the function that each process runs, not {function!r}")
        functools.update_wrapper(self, function)  # launchers ask for its name
        self._function = function
        self._link = _Link() if _can_launch() else None

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a process that is spawned; only while it is."""
        assert_spawning(self)
        return {"function": self._function, "link": self._link.travel() if self._link else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        functools.update_wrapper(self, state["function"])
        self._function, link = state["function"], state["link"]
        self._link = _Link(link) if link else None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the function in this process, under the strict guard."""
        link = self._link
        if link is None or link.is_here:  # no process was launched, as with num_processes=1
            with guard():
                return self._function(*arguments, **options)
        with guard(), link.joined(_rank_of(arguments, link.kernel_rank)):
            return self._function(*arguments, **options)


def _rank_of(arguments: tuple[Any, ...], kernel_rank: str) -> int:
    """Return the number that the launcher gave: in the environment, if it is not the kernel's, or as an argument."""
    told = os.environ.get("RANK", "")
    if told != kernel_rank and told.isascii() and told.isdigit():
        return int(told)
    return arguments[0] if arguments and isinstance(arguments[0], int) else 0


class _Link:
    """What a launched process and the kernel share."""

    def __init__(self, travelled: tuple[Any, Any, int, str] | None = None) -> None:
        self._ended_cells: int | None = None  # in a fork it is read from the file
        self._owner = os.getpid()
        self.kernel_rank = os.environ.get("RANK", "")
        if travelled is not None:
            file_end, socket_end, self._ended_cells, self.kernel_rank = travelled
            self._file, self._out = file_end.detach(), socket.socket(fileno=socket_end.detach())
            self._owner = 0
            return
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())
        os.pwrite(self._file, bytes(8), 0)
        into, self._out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, _close, self._file, self._out)
        launched.listen(into, self)

    @property
    def is_here(self) -> bool:
        """Whether this is still the process that made it."""
        return self._owner == os.getpid()

    def travel(self) -> tuple[Any, Any, int, str]:
        """Return what a spawned process needs."""
        return reduction.DupFd(self._file), reduction.DupFd(self._out.fileno()), self.count(), self.kernel_rank

    def count(self) -> int:
        """Return how many cells have ended."""
        return int.from_bytes(os.pread(self._file, 8, 0), "little")

    def note_end(self) -> None:
        """Tell all processes that a cell has ended."""
        os.pwrite(self._file, (self.count() + 1).to_bytes(8, "little"), 0)

    @contextlib.contextmanager
    def joined(self, rank: int) -> Any:
        """Report from this process, and watch for the end of the cell that launched it."""
        self._out.setblocking(False)
        reporter = Reporter(self._send, lambda: rank, is_busy=True)
        interrupts = InterruptWatch()
        interrupts.begin()
        ended_cells = self.count() if self._ended_cells is None else self._ended_cells
        reporter.on_tick = _CellWatch(self, ended_cells, interrupts).look
        reporter.start()
        try:
            yield
        finally:
            reporter.stop()
            interrupts.close()
            self._send("")

    def _send(self, report: str) -> None:
        """Send a report, or that there will be no more; if the kernel is too busy to hear, the next one comes soon."""
        with contextlib.suppress(OSError):
            self._out.send(f"{os.getpid()} {report}".encode()[:LONGEST_REPORT])


class _CellWatch:
    """Ends the work of this process when the cell that launched it has ended."""

    def __init__(self, link: _Link, ended_cells: int, interrupts: InterruptWatch) -> None:
        self._link, self._ended_cells, self._interrupts = link, ended_cells, interrupts
        self._parent = os.getppid()
        self._told: float | None = None

    def look(self) -> None:
        """Interrupt this process if its cell, or the kernel, is over; later, stop what it did not stop itself.

        Not a second time: the user's interrupt may have reached it already, and it may be saving its work.
        """
        if self._told is None and (self._link.count() != self._ended_cells or os.getppid() != self._parent):
            self._told = time.monotonic()
            if not self._interrupts.has_come():
                interrupt(threading.main_thread().ident)
        elif self._told is not None and time.monotonic() - self._told > REACTION_SECONDS:
            stop_everything("the cell that launched this process ended")


def _close(file: int, out: socket.socket) -> None:
    os.close(file)
    out.close()


class Launched:
    """The ranks that this notebook launched, as they were when they were last heard of. There is one, `launched`."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankState] = {}
        self.on_report: Callable[[], None] = lambda: None

    def states(self) -> list[RankState]:
        """Return the ranks of the latest launch; those that have ended without a word are lost."""
        return sorted(self._ranks.values(), key=lambda one: one.rank)

    def listen(self, into: socket.socket, link: _Link) -> None:
        """Hear reports, from a thread, as long as the link is in use."""
        seen = weakref.ref(link)

        def note_end(cell: Cell) -> None:
            one = seen()
            if one is not None and one.is_here and cell.thread == threading.main_thread().ident:
                one.note_end()

        registry.after_cell.append(note_end)
        target, arguments = self._run, (into, seen, note_end)
        threading.Thread(target=target, args=arguments, name="loaderguard-launched", daemon=True).start()

    def _run(self, into: socket.socket, seen: Callable[[], Any], note_end: Callable[[Cell], None]) -> None:
        own: dict[int, Handle] = {}
        try:
            while seen() is not None:
                message = into.recv(LONGEST_REPORT) if select.select([into], [], [], 0.25)[0] else None
                if message == b"":  # nobody holds the other end any more
                    return
                if message is not None:
                    self._hear(message, own)
                else:
                    self._look_for_lost(own)
        finally:
            into.close()
            with contextlib.suppress(ValueError):
                registry.after_cell.remove(note_end)
            self._look_for_lost(own)

    def _hear(self, message: bytes, own: dict[int, Handle]) -> None:
        word, _, report = message.decode(errors="replace").partition(" ")
        pid = int(word)
        if not own:
            self._ranks.clear()  # of an earlier launch
        if pid not in own:
            own[pid] = Handle(pid)
        if not report:
            self._ranks.pop(pid, None)
        else:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # cut, because it was too long
                self._ranks[pid] = state_from(report, time.time())
        self.on_report()

    def _look_for_lost(self, own: dict[int, Handle]) -> None:
        """Forget the processes that have ended, and mark the ranks of those that did not say so."""
        for pid in [pid for pid, handle in own.items() if not handle.is_alive()]:
            del own[pid]
            if pid in self._ranks:
                self._ranks[pid] = replace(self._ranks[pid], status="lost", is_busy=False)
                self.on_report()


launched = Launched()
