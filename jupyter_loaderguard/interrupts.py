"""Interrupts of the user's, noted, or held back while the guard stops workers; and one of our own, that ends a wait."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

NOW, LATER, NEVER = "now", "later", "never"


class Held:
    """Counts the interrupts that were held back."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, signum: int, frame: Any) -> None:
        """Serve as the SIGINT handler for the time being."""
        self.count += 1

    def __call__(self) -> bool:
        """Tell whether the user is in a hurry."""
        return self.count > 0


@contextlib.contextmanager
def held(deliver: str = NOW) -> Iterator[Held]:
    """Hold SIGINT back in the main thread, so that a stop is never left half done.

    Afterwards it is delivered to the handler that was there: now, or LATER from `__del__`, where
    an exception would be printed and lost, or NEVER, when the cell it was meant for has ended.
    """
    note = Held()
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.get_ident() == threading.main_thread().ident  # current_thread() leaves a trace of a foreign one
    if not is_main or previous in (None, signal.SIG_IGN):
        yield note  # no interrupt can arrive here, or none that we could give back
        return
    signal.signal(signal.SIGINT, note.note)
    try:
        yield note
    finally:
        signal.signal(signal.SIGINT, previous)
        if note.count and deliver == NOW:
            signal.raise_signal(signal.SIGINT)
        elif note.count and deliver == LATER:
            # not threading.Thread: the collector may have called us inside of that module's lock
            _thread.start_new_thread(_deliver_soon, (threading.main_thread().ident,))


def is_raising() -> bool:
    """Tell whether an interrupt raises KeyboardInterrupt by itself; ipykernel's handler of an async cell does not."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _deliver_soon(main_thread: int | None) -> None:
    time.sleep(0.02)
    interrupt(main_thread)


def interrupt(main_thread: int | None) -> None:
    """Send SIGINT to the main thread of this process, which may be in a call of the system."""
    if main_thread is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main_thread, signal.SIGINT)
    else:
        _thread.interrupt_main()


@contextlib.contextmanager
def blocked_for_child(start_method: str | None) -> Iterator[None]:
    """Block SIGINT in this thread while a worker starts: it inherits the mask, and so is born deaf.

    Not under forkserver: there the mask would reach the forkserver, if this starts it, and stay with
    all that it forks, the user's own processes included. Under spawn the resource tracker comes
    first: its start unblocks SIGINT at its end.
    """
    if start_method not in ("fork", "spawn") or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if start_method == "spawn":
        from multiprocessing import resource_tracker  # not in the first cell

        resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class InterruptWatch:
    """Notes every SIGINT that reaches the main thread while it is on, whatever user code makes of it.

    By the wakeup descriptor: its byte is written by Python's C handler, also when user code installed
    a handler of its own or swallows KeyboardInterrupt. Nothing of the user's is replaced for it.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()  # not a pipe: Windows wants a socket here
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._is_on = self._was_taken = False
        _watches.add(self)

    def begin(self) -> None:
        """Watch from now on, unless somebody else uses the descriptor."""
        if self._is_on or threading.current_thread() is not threading.main_thread():
            return
        self._was_taken = False
        previous = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._is_on = previous == -1
        if not self._is_on:
            signal.set_wakeup_fd(previous)

    def end(self) -> None:
        """Give the descriptor back, if it is still ours."""
        if not self._is_on or threading.current_thread() is not threading.main_thread():
            return
        self._is_on = False
        current = signal.set_wakeup_fd(-1)
        if current != self._write.fileno():
            signal.set_wakeup_fd(current)

    def take(self) -> bool:
        """Tell whether a SIGINT came since the last call; it is for the main thread alone."""
        noted = False
        if threading.current_thread() is threading.main_thread():
            self._was_taken = self.has_come()
            with contextlib.suppress(BlockingIOError):  # that is all
                while True:
                    noted |= signal.SIGINT in self._read.recv(65536)
        return noted

    def has_come(self) -> bool:
        """Tell, from any thread, whether one came since `begin`; an inner cell may have taken it."""
        try:
            return self._was_taken or signal.SIGINT in self._read.recv(65536, socket.MSG_PEEK)
        except OSError:  # nothing came, or it is closed
            return False

    def close(self) -> None:
        """Undo everything; from another thread the descriptor cannot be given back, and so stays open."""
        self.end()
        if not self._is_on:
            self._read.close()
            self._write.close()


_watches: weakref.WeakSet[InterruptWatch] = weakref.WeakSet()


def _stop_watching_in_child() -> None:
    """Let no process that is forked from the kernel write into the kernel's socket."""
    for watch in list(_watches):
        watch.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_watching_in_child)


def free_signal() -> int | None:
    """Return a signal that user code has no handler for, a real-time one where there are some."""
    if hasattr(signal, "SIGRTMAX"):
        candidates = list(range(signal.SIGRTMAX - 4, signal.SIGRTMIN + 2, -1))
    else:
        candidates = [getattr(signal, name, 0) for name in ("SIGUSR2", "SIGUSR1")]
    return next((number for number in candidates if number and signal.getsignal(number) is signal.SIG_DFL), None)


class WaitBroken(BaseException):
    """Ends a wait for data in the kernel's own thread; never seen outside of the guard.

    Not an Exception, so that an `except Exception` of the user's dataset lets it pass.
    """


class Breaker:
    """Breaks off what a thread of this process does. There is one, `breaker`.

    The main thread by a signal of our own, which also ends a sleep or a read; other threads, where Python
    runs no signal handlers, when they next execute Python code.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._should_break: Callable[[FrameType | None], bool] = lambda frame: False
        self._handler = self._handle  # one object, to be known again

    def install(self, should_break: Callable[[FrameType | None], bool]) -> None:
        """Prepare; `should_break` is asked again in the main thread, at the moment itself."""
        self._should_break = should_break
        if threading.current_thread() is threading.main_thread() and self._signum is None:
            self._signum = free_signal()
            if self._signum is not None:
                signal.signal(self._signum, self._handler)

    def remove(self) -> None:
        """Undo it; from another thread the handler stays, and does nothing."""
        self._should_break = lambda frame: False
        if self._signum is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(self._signum) is self._handler:
                signal.signal(self._signum, signal.SIG_DFL)
            self._signum = None

    def break_off(self, thread: int) -> None:
        """Raise WaitBroken in a thread."""
        is_main = thread == threading.main_thread().ident
        if is_main and self._signum is not None and signal.getsignal(self._signum) is self._handler:
            signal.pthread_kill(thread, self._signum)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(WaitBroken))

    def call_off(self, thread: int) -> None:
        """Take back what has not been raised yet."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._should_break(frame):
            raise WaitBroken


breaker = Breaker()
