"""Interrupts of the user's, noted, or held back while the guard stops workers; and one of our own, that ends a wait.

NOTE [ Lost interrupts ]
Python raises KeyboardInterrupt wherever the main thread is at that moment. If that is a function which the collector
or the end of some object has called (`__del__`, the callback of a weakref, the `finally` of a generator), there is
nobody to raise it to: Python says "Exception ignored in", and the loop goes on. In a notebook that is no rare bad luck.
Measured with 8 workers alive, one run of the collector takes 0.17 s, and 0.5 to 0.7 s on a crowded machine. What it
finds are the iterators of earlier cells that were interrupted, and with each process and thread of theirs comes a
callback of a WeakSet: a press in all that time is raised in the first of these.
So what Python hands to sys.unraisablehook is raised again. And an interrupt that comes in the midst of a wait for
workers and does not end it is sent again, as some C code drops errors without a word: the user's loop cannot have
caught it there.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

NOW, LATER, NEVER = "now", "later", "never"
SOON_SECONDS = 0.02
LOST_SECONDS = 0.5
"""How long an interrupt may take to end a wait: twice as long as a wait takes to look up, and more."""


class Held:
    """Counts the interrupts that were held back."""

    def __init__(self, previous: Any = None) -> None:
        self.count = 0
        self.previous = previous
        """The handler in whose place it is."""

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
    previous = signal.getsignal(signal.SIGINT)
    note = Held(previous)
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


@contextlib.contextmanager
def let_through() -> Iterator[None]:
    """Let interrupts through for a while, inside of `held` and `blocked_for_child`: code of the user's runs."""
    present: Any = signal.getsignal(signal.SIGINT)
    note = getattr(present, "__self__", None)
    is_main = threading.get_ident() == threading.main_thread().ident
    if not is_main or not isinstance(note, Held) or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, ())
    signal.signal(signal.SIGINT, note.previous)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, present)


def is_raising() -> bool:
    """Tell whether an interrupt raises KeyboardInterrupt by itself; ipykernel's handler of an async cell does not."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _deliver_soon(main_thread: int | None) -> None:
    time.sleep(SOON_SECONDS)
    interrupt(main_thread)


def interrupt(main_thread: int | None) -> None:
    """Send SIGINT to the main thread of this process, which may be in a call of the system."""
    if main_thread is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main_thread, signal.SIGINT)
    else:
        _thread.interrupt_main()


def is_repeatable(handler: Any) -> bool:
    """Tell whether a handler of SIGINT may be called again for the same press: Python's own, or one that says so."""
    return handler is signal.default_int_handler or _knows_repeats(handler)


def _knows_repeats(handler: Any) -> bool:
    return bool(getattr(getattr(handler, "__self__", None), "is_repeatable", False))


def _is_in_place(handler: Any) -> bool:
    """Tell whether a handler is still in place, or held back; else the user has other plans, or the cell has ended."""
    present: Any = signal.getsignal(signal.SIGINT)
    return present is handler or isinstance(getattr(present, "__self__", None), Held)


def _raise_again() -> None:
    """Raise an interrupt once more in the main thread, which is this one; in a moment: here it would be lost again."""
    handler = signal.getsignal(signal.SIGINT)
    if _knows_repeats(handler):
        _thread.start_new_thread(_call_soon, (threading.get_ident(), handler))
    else:
        _Once(handler).install()


def _call_soon(main_thread: int, handler: Any) -> None:
    time.sleep(SOON_SECONDS)
    if _is_in_place(handler):
        interrupt(main_thread)


class _Once:
    """Raises a lost interrupt, once, in the place of the handler that has been called for it.

    At the end of the collector's run, if it was lost inside of one: a program that collects all the time would lose it
    at any other moment. And by a signal a moment later, which also ends a sleep.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous
        self._owner = os.getpid()
        self._main_thread = threading.get_ident()
        self._is_raised = False

    def install(self) -> None:
        """Raise it soon."""
        signal.signal(signal.SIGINT, self)
        gc.callbacks.append(self._note_collected)
        _thread.start_new_thread(self._raise_soon, ())

    def leave(self) -> None:
        """Give SIGINT back, unless the user has done something else with it."""
        present: Any = signal.getsignal(signal.SIGINT)
        if present is self:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self, signum: int, frame: Any) -> None:
        self._is_raised = True
        self.leave()
        raise KeyboardInterrupt

    def _note_collected(self, phase: str, info: Any) -> None:
        is_ours = os.getpid() == self._owner and threading.get_ident() == self._main_thread
        if phase == "stop" and is_ours and not self._is_raised and _is_in_place(self):
            # not a call of Python's: it would raise here, after it, and not in the code that the collector returns to
            _ = [*map(_thread.interrupt_main, (signal.SIGINT,))]

    def _raise_soon(self) -> None:
        time.sleep(SOON_SECONDS)
        if not self._is_raised and _is_in_place(self):
            interrupt(self._main_thread)
        with contextlib.suppress(ValueError):  # the user has emptied the list
            gc.callbacks.remove(self._note_collected)


class LostInterrupts:
    """Raises what Python could not raise, as long as it is on. See NOTE [ Lost interrupts ]."""

    def __init__(self, has_come: Callable[[], bool]) -> None:
        self._has_come = has_come
        self._hook: Any = None
        self._previous: Any = None

    def begin(self) -> None:
        """Take the place of sys.unraisablehook; a new function each time: a hook of the user's may call the last."""
        self._previous = previous = sys.unraisablehook

        def hook(lost: Any, /) -> None:
            if self._hook is not hook or not self._is_interrupt(lost):
                previous(lost)
                return
            try:
                _raise_again()
            except KeyboardInterrupt:  # one more, and in our way
                _raise_again()

        self._hook = sys.unraisablehook = hook

    def end(self) -> None:
        """Give it back, unless somebody else has it by now."""
        hook, self._hook = self._hook, None
        if hook is not None and sys.unraisablehook is hook:
            sys.unraisablehook = self._previous
        self._previous = None
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Once):  # what it was for has ended by itself
            handler.leave()

    def _is_interrupt(self, lost: Any) -> bool:
        """Tell it from a KeyboardInterrupt that user code has raised by itself."""
        is_main = threading.get_ident() == threading.main_thread().ident
        is_heard = callable(signal.getsignal(signal.SIGINT))  # else it is no longer wanted
        return is_main and is_heard and lost.exc_type is KeyboardInterrupt and self._has_come()


class UnheardInterrupts:
    """Sends an interrupt again that did not end a wait. See NOTE [ Lost interrupts ]."""

    def __init__(self) -> None:
        self._wait: object = None
        self._count = 0
        self._came: float | None = None

    def look(self, wait: object) -> None:
        """Look, now and then and from any thread, what the main thread waits for: the same is the same wait."""
        count = sum(watch.count() for watch in list(_watches)) if wait is not None else 0
        if wait is None or wait != self._wait:
            self._wait, self._count, self._came = wait, count, None
        elif count <= self._count:
            return
        elif self._came is None:
            self._came = time.monotonic()
        elif time.monotonic() - self._came >= LOST_SECONDS and is_repeatable(signal.getsignal(signal.SIGINT)):
            self._came = None
            interrupt(threading.main_thread().ident)
            self._count = count + 1  # with our own


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
    a handler of its own or swallows KeyboardInterrupt. Nothing of the user's is replaced for it. One that Python
    loses is raised again.
    """

    def __init__(self) -> None:
        self._is_on = self._was_taken = False
        self._taken = 0
        self._lost = LostInterrupts(lambda: self.has_come() or not self._is_on)
        self._read: socket.socket | None = None
        self._write: socket.socket | None = None
        with contextlib.suppress(OSError):  # too many open files: then KeyboardInterrupt alone tells of an interrupt
            self._read, self._write = socket.socketpair()  # not a pipe: Windows wants a socket here
            self._read.setblocking(False)
            self._write.setblocking(False)
            _watches.add(self)

    def begin(self) -> None:
        """Watch from now on, unless somebody else uses the descriptor."""
        if self._is_on or self._write is None or threading.current_thread() is not threading.main_thread():
            return
        self._was_taken = False
        previous = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._is_on = previous == -1
        if not self._is_on:
            signal.set_wakeup_fd(previous)
        self._lost.begin()

    def end(self) -> None:
        """Give the descriptor back, if it is still ours."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._lost.end()
        if not self._is_on or self._write is None:
            return
        self._is_on = False
        current = signal.set_wakeup_fd(-1)
        if current != self._write.fileno():
            signal.set_wakeup_fd(current)

    def take(self) -> bool:
        """Tell whether a SIGINT came since the last call; it is for the main thread alone."""
        noted = False
        if self._read is not None and threading.current_thread() is threading.main_thread():
            self._was_taken = self.has_come()
            with contextlib.suppress(BlockingIOError):  # that is all
                while True:
                    came = self._read.recv(65536).count(signal.SIGINT)
                    self._taken += came
                    noted |= came > 0
        return noted

    def count(self) -> int:
        """Return, from any thread, how many have come so far."""
        if self._read is None:
            return self._taken
        try:
            return self._taken + self._read.recv(65536, socket.MSG_PEEK).count(signal.SIGINT)
        except OSError:  # nothing came, or it is closed
            return self._taken

    def has_come(self) -> bool:
        """Tell, from any thread, whether one came since `begin`; an inner cell may have taken it."""
        try:
            return self._was_taken or (
                self._read is not None and signal.SIGINT in self._read.recv(65536, socket.MSG_PEEK)
            )
        except OSError:  # nothing came, or it is closed
            return False

    def close(self) -> None:
        """Undo everything; from another thread the descriptor cannot be given back, and so stays open."""
        self.end()
        for one in (self._read, self._write) if not self._is_on else ():
            if one is not None:
                one.close()


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
        self._thrown_at: set[int] = set()
        """Threads in which WaitBroken was to be raised without a signal, and which have not asked since."""

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
            self._thrown_at.add(thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(WaitBroken))

    def call_off(self) -> None:
        """Take back what has not been raised yet in this thread, by letting it be raised here.

        Python can be told to forget it, but 3.11 then believes for ever that there is something to raise: loops
        are slower by half, and under a trace function (a debugger, coverage) the next call never ends.
        """
        thread = threading.get_ident()
        if thread in self._thrown_at:
            self._thrown_at.discard(thread)
            with contextlib.suppress(WaitBroken):
                for _ in range(10):  # Python looks for it when it jumps back
                    pass

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._should_break(frame):
            raise WaitBroken


breaker = Breaker()
