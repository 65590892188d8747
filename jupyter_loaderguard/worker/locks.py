"""The locks that a dataset holds, and who has taken them.

Runs in a worker at its start, to note where its locks are, and in the kernel, to find a holder.

NOTE [ Who holds a lock ]
A worker that waits for a lock sleeps in the system call futex, on an address that the system tells. It
is the address of the semaphore in a multiprocessing lock, or of the one to which a threading lock
points. Python counts in each process how often this process has taken a multiprocessing lock; that
counter lies at a fixed place behind the lock object, and the kernel may read the memory of its workers.
Where any of this is not as known, `can_read` says so, and no holder is named.
"""

from __future__ import annotations

import _thread
import ctypes
import multiprocessing
import os
import sys
from dataclasses import dataclass
from typing import Any

from ..reach import visit

COUNT_OFFSET = 32
"""Of the counter in CPython's SemLockObject: head, handle, last_tid, count."""
POINTER_OFFSET = 16
"""Of the pointer to the semaphore in a threading lock, before Python 3.13."""
_THREADING = (_thread.LockType, _thread.RLock)


@dataclass(frozen=True)
class LockPlace:
    """Where one lock lies in a process."""

    path: str
    """How user code reaches it, e.g. dataset.lock."""
    kind: str
    """multiprocessing or threading."""
    address: int
    """What a futex call waits on."""
    counter: int
    """Where the process counts its takings; 0 if it does not."""
    was_locked: bool
    """Whether it was locked when this was noted."""


def find_locks(**roots: Any) -> list[LockPlace]:
    """Return the locks that can be reached from these objects, without running code of theirs."""
    if not can_read():
        return []
    found: list[LockPlace] = []

    def note(path: str, thing: Any) -> bool:
        place = _place(path, thing)
        if place is not None:
            found.append(place)
        return place is not None

    visit(roots, note)
    return found


def _place(path: str, thing: Any) -> LockPlace | None:
    if issubclass(type(thing), _THREADING):
        address = ctypes.c_size_t.from_address(id(thing) + POINTER_OFFSET).value
        if sys.version_info >= (3, 13):
            address = 0
        return LockPlace(path, "threading", address, 0, repr(thing).startswith("<locked"))
    synchronize = sys.modules.get("multiprocessing.synchronize")
    if synchronize is not None and issubclass(type(thing), (synchronize.Lock, synchronize.RLock)):
        inner = thing._semlock
        return LockPlace(path, "multiprocessing", inner.handle, id(inner) + COUNT_OFFSET, inner._is_zero())
    return None


_can_read: list[bool] = []


def can_read() -> bool:
    """Tell whether locks look here as this file knows them."""
    if not _can_read:
        _can_read.append(sys.implementation.name == "cpython" and sys.platform.startswith("linux") and _try_out())
    return _can_read[0]


def _try_out() -> bool:
    lock = multiprocessing.get_context("fork").Lock()
    place = id(lock._semlock) + COUNT_OFFSET  # type: ignore[attr-defined]
    free = ctypes.c_int.from_address(place).value
    with lock:
        return (free, ctypes.c_int.from_address(place).value) == (0, 1)


def has_taken(pid: int, place: LockPlace) -> bool:
    """Tell whether a process has taken the lock at this place of its memory."""
    if not place.counter:
        return False
    count = read_memory(pid, place.counter, 4)
    return len(count) == 4 and int.from_bytes(count, sys.byteorder, signed=True) > 0


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Return bytes of another process's memory; none if the system does not let us."""
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.pread(fd, size, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(fd)
