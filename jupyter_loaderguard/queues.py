"""Python's multiprocessing queues and events, from the inside: reading without hanging, closing without waiting.

The only room that touches private names of multiprocessing.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from typing import Any

CAN_POLL = hasattr(select, "poll")
"""Not on Windows."""
PIPE_BUF: int = getattr(select, "PIPE_BUF", 512)
SHORT = PIPE_BUF - 4
"""So long is a message that is written at once, with its length before it."""
CLOSED = "the workers' pipe is closed"
read_file = os.read
"""Looked up once."""
LOCK_SECONDS = 0.1
"""How long to wait for a lock that a dead process may hold for ever, or for a thread on its way out."""


def is_plain(queue: Any) -> bool:
    """Tell whether it is a queue of multiprocessing's own, whose inside is known; libraries have others."""
    return type(queue) is Queue and hasattr(queue, "_reader")


class Inbox:
    """The reading end of a queue's pipe: reads whole messages, and never blocks on half of one.

    A process that is killed in the midst of its write leaves half a message; `Queue.get` would wait
    for the other half for ever. What was read stays here if the wait for the rest raises.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._bytes = bytearray()
        self.fd: int = queue._reader.fileno()
        self._poll: Any = None

    def read(self, await_more: Callable[..., None], *args: Any) -> Any:
        """Return the next object; to be called when the pipe is readable, as it is after each `await_more(*args)`."""
        return self.open(self.read_message(await_more, *args))

    open = staticmethod(ForkingPickler.loads)
    """Makes the object of a message; user code may raise in it."""

    def read_message(self, await_more: Callable[..., None], *args: Any) -> memoryview | bytes:
        """Return the next object as it was sent: a piece of memory."""
        if not self._bytes:  # nearly always; and then a short message is there as a whole, as it was written at once
            self._bytes += read_file(self.fd, 4)
            size = int.from_bytes(self._bytes, "big", signed=True)
            if len(self._bytes) == 4 and 0 < size <= SHORT:
                body = read_file(self.fd, size)
                if len(body) == size:
                    self._bytes.clear()
                    self._queue._sem.release()
                    return body
                self._bytes += body
            elif not self._bytes:
                raise EOFError(CLOSED)
        return self._read_long(await_more, *args)

    def _read_long(self, await_more: Callable[..., None], *args: Any) -> memoryview:
        """Return a message that may not be there as a whole."""
        self._fill(4, await_more, *args)
        start, size = 4, struct.unpack_from("!i", self._bytes)[0]
        if size == -1:  # the length does not fit into 31 bits
            self._fill(12, await_more, *args)
            start, size = 12, struct.unpack_from("!Q", self._bytes, 4)[0]
        self._fill(start + size, await_more, *args)
        message, self._bytes = memoryview(self._bytes)[start:], bytearray()
        self._queue._sem.release()
        return message

    def await_message(self, timeout: float) -> memoryview | bytes:
        """Return the next object as it was sent, or raise Empty; for a queue that nobody else reads."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.fd, select.POLLIN)
        if not self._poll.poll(timeout * 1000):
            raise Empty
        return self.read_message(self.await_more)

    @property
    def has_begun(self) -> bool:
        """Whether part of a message was read, and the rest was not."""
        return bool(self._bytes)

    def await_more(self) -> None:
        """Wait for the rest of a message for as long as it takes."""
        is_ready(self.fd, select.POLLIN, None)

    def _fill(self, size: int, await_more: Callable[..., None], *args: Any) -> None:
        while len(self._bytes) < size:
            if self._bytes and size > PIPE_BUF:  # a shorter message was written at once: the rest is there
                await_more(*args)
            data = read_file(self.fd, size - len(self._bytes))
            if not data:
                raise EOFError(CLOSED)
            self._bytes += data


class _Rest:
    """Stands in for a queue of which half a message was read: its next object is that one."""

    def __init__(self, queue: Any, inbox: Inbox, restore: Callable[[], None]) -> None:
        self._queue, self._inbox, self._restore = queue, inbox, restore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._restore()
        return self._inbox.read(self._inbox.await_more)


def give_back(holder: Any, name: str, inbox: Inbox) -> None:
    """Let others read the queue that `holder` has under a name, also if half a message was read from it."""
    queue = getattr(holder, name, None)
    if inbox.has_begun and queue is not None:
        setattr(holder, name, _Rest(queue, inbox, lambda: setattr(holder, name, queue)))


def set_event(event: Any) -> bool:
    """Set an event, unless a dead process holds its lock for ever."""
    condition = getattr(event, "_cond", None)
    if condition is not None:
        if not condition.acquire(True, LOCK_SECONDS):
            return False
        condition.release()
    event.set()
    return True


def can_put(queue: Any) -> bool:
    """Tell whether something put into a queue will be sent: a dead process may hold its lock for ever."""
    if not is_plain(queue) or queue._wlock is None:
        return True
    if not queue._wlock.acquire(True, LOCK_SECONDS):
        return False
    queue._wlock.release()
    return True


def unlock(condition: Any) -> None:
    """Release a lock that an interrupt has left locked.

    Python raises KeyboardInterrupt also between the taking of a lock and the `with` block that gives it back, as
    in `Queue.put`; the next put, the close and the queue's own thread would then wait for ever. Whoever works with
    the queue holds the lock for moments only.
    """
    condition.acquire(True, LOCK_SECONDS)
    condition.release()


def put_last(queue: Any, item: Any) -> bool:
    """Put something small into a queue, also if the collector has ended the queue's thread; tell whether it is in."""
    if not is_plain(queue):
        return _put_in_time(queue, item)
    unlock(queue._notempty)
    feeder = getattr(queue, "_close", None)
    if feeder is None or feeder.still_active():
        queue.put(item)
        return True
    if queue._wlock is not None and not queue._wlock.acquire(True, LOCK_SECONDS):
        return False
    try:
        return _send_now(queue, item)
    except OSError:  # the collector has closed the pipe as well
        return False
    finally:
        if queue._wlock is not None:
            queue._wlock.release()


def _put_in_time(queue: Any, item: Any) -> bool:
    """Put something into a queue of another kind, as torch does; but whether its `put` waits is not known."""
    done = threading.Event()

    def put() -> None:
        with contextlib.suppress(Exception):  # whatever it raises: it is not in
            queue.put(item)
            done.set()

    threading.Thread(target=put, name="loaderguard-farewell", daemon=True).start()
    return done.wait(LOCK_SECONDS)


def _send_now(queue: Any, item: Any) -> bool:
    """Write into a queue's pipe, as its thread would, if there is room.

    `put` takes the queue's semaphore for each item, and whoever reads the item gives it back: what is sent without
    taking it makes the reader fail, with a traceback, as the semaphore is bounded.
    """
    if not queue._sem.acquire(False):
        return False
    is_sent = False
    try:
        if is_ready(queue._writer.fileno(), select.POLLOUT):
            queue._writer.send_bytes(ForkingPickler.dumps(item))
            is_sent = True
    finally:
        if not is_sent:
            queue._sem.release()
    return is_sent


def close(queue: Any) -> None:
    """Close a queue and see its feeder thread end, which may sit on a full pipe that nobody reads."""
    if not is_plain(queue):
        getattr(queue, "close", lambda: None)()
        return
    unlock(queue._notempty)
    queue.cancel_join_thread()
    thread = getattr(queue, "_thread", None)
    if thread is None or not thread.is_alive() or thread.ident == threading.get_ident():
        queue.close()
        return
    try:
        reader = os.dup(queue._reader.fileno())  # the feeder closes its own, and the number may be used again at once
    except OSError:  # no more files can be opened: then the feeder ends when the pipe does
        _dismiss_feeder(queue)
        return
    try:
        _dismiss_feeder(queue)
        deadline = time.monotonic() + LOCK_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.002)
            while is_ready(reader, select.POLLIN) and os.read(reader, 65536):
                continue
    finally:
        os.close(reader)


def _dismiss_feeder(queue: Any) -> None:
    """Tell the feeder thread to end, also if an interrupt hit between its start and the making of its end."""
    is_complete = queue._close is not None
    queue.close()
    if not is_complete:
        queue._finalize_close(queue._buffer, queue._notempty)


def is_ready(fd: int, events: int, milliseconds: int | None = 0) -> bool:
    """Tell whether a descriptor can be read or written by now (poll: select stops at descriptor 1023)."""
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(milliseconds))


def on_unsent(queue: Any, note: Callable[[Exception, Any], None]) -> None:
    """Have it noted when the queue's thread cannot send an item: Python prints a traceback and drops the item."""
    print_error = getattr(queue, "_on_queue_feeder_error", None)
    if print_error is None:
        return

    def handle(error: Exception, item: Any) -> None:
        print_error(error, item)
        try:
            note(error, item)
        except Exception as failure:  # noqa: BLE001 - the queue's thread must go on
            print_error(failure, item)

    queue._on_queue_feeder_error = handle


def semaphore_names(holder: Any) -> set[str]:
    """Return the names of the semaphores in a queue, or in an event and its condition."""
    holders = [holder, getattr(holder, "_cond", None)]
    parts = [part for one in holders if one is not None for part in vars(one).values()]
    locks = [getattr(part, "_semlock", None) for part in parts]
    return {lock.name for lock in locks if lock is not None and lock.name}


def passed_descriptors() -> list[int]:
    """Return the descriptors that the process which is being started gets, as they are noted while it is pickled."""
    from multiprocessing.context import get_spawning_popen

    popen = get_spawning_popen()
    return getattr(popen, "_fds", [])


def start_method(process: Any) -> str | None:
    """Return how a process, or those of a class, are started: fork, spawn or forkserver."""
    import multiprocessing

    kind = process if isinstance(process, type) else type(process)
    method: str | None = getattr(kind, "_start_method", None)
    return method or multiprocessing.get_start_method(allow_none=True)
