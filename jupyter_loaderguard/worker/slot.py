"""The slot: a worker's own piece of shared memory, in which it notes what it is on; the kernel only reads.

It is a file without a name, so nothing is left of it when its last holder ends. Under fork it is
inherited, under spawn and forkserver its descriptor travels. Where descriptors are scarce, a forked worker
inherits memory alone; there it cannot write its stack. Numbers come first, then a text about a
batch that could not be sent, the table of the dataset's locks, why it could not start, which
thread pools were capped, the slowest samples, and then what faulthandler writes.

NOTE [ Kinds of slots ]
memfd_create is missing in some builds of Python, conda's among them, and some sandboxes forbid it. A file that never
had a name (O_TMPFILE), or has lost it at once, does the same: in /dev/shm, which is memory, or where temporary files
go. Another process knows either by what is in it: MAGIC stands behind the numbers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

from .slowest import REGION_BYTES, SlowSamples, read_slowest

NAME = "loaderguard"
PID, SIGNUM, PHASE, TASK, POSITION, KEYS, SINCE, BEGAN, IN_EPOCH, SAMPLES, BATCHES, BUSY, READY = range(13)
STARTING, IDLE, LOADING, RESUMING = range(4)
LEAST_SECONDS = 0.0001
"""A sample that took the kernel less is not worth a note: it would be felt."""
PHASES = ("starting", "idle", "loading", "resuming")
NUMBERS_BYTES = 256
MAGIC = b"lguard\0\1"
MAGIC_AT = NUMBERS_BYTES - len(MAGIC)
UNSENT = slice(NUMBERS_BYTES, 4096)
LOCKS = slice(4096, 16384)
FAILURE = slice(16384, 23552)
CAPS = slice(23552, 24576)
SLOWEST = slice(24576, 24576 + REGION_BYTES)
STACK_START = SLOWEST.stop
CAN_SHARE = hasattr(os, "pwrite")
"""Not on Windows: there a descriptor cannot be handed to a worker, which then works unobserved."""
_NUMBERS = struct.Struct("qqqqqqddqqqdd")
"""In the order above, which is that of Progress."""
_TASK, _WORK = struct.Struct("qqqqdd"), struct.Struct("qqqqddqqqd")
"""From PHASE to BEGAN, and to BUSY."""


@dataclass(frozen=True)
class Progress:
    """What a slot says at one moment."""

    pid: int
    """0 until the worker is ready."""
    signum: int
    """What makes the worker write its stack; 0 if nothing does."""
    phase: int
    task: int
    position: int
    """Which of the task's keys it is on: -1 before the first one was taken, `keys` after the last one."""
    keys: int
    since: float
    """When that began, on the monotonic clock."""
    began: float
    """When the task did, on the same clock."""
    in_epoch: int
    """Samples of finished tasks, since the epoch began."""
    samples: int
    """The same since the worker began."""
    batches: int
    busy_seconds: float
    """What it has spent on finished tasks."""
    ready: float
    """When it asked for its first task, on the monotonic clock; 0 until then."""


class _Descriptor(int):
    """A descriptor that is closed with its last holder."""

    def __del__(self) -> None:
        os.close(self)


class Slot:
    """One worker's notes. The worker has them mapped and writes; the kernel reads the file."""

    fd: int | None = None
    numbers: memoryview[int]
    clocks: memoryview[float]
    slowest: SlowSamples
    single: tuple[Any] | None = None
    """The key of a task that is one sample, without a batch."""

    def __init__(self) -> None:
        """Make an empty slot, in shared memory."""
        self.fd = _Descriptor(_anonymous_file())
        self._memory: Any = None

    @classmethod
    def local(cls) -> Slot:
        """Make one that nobody else sees: for a loader without workers, or a worker that cannot be observed."""
        slot = cls._without_file(bytearray(STACK_START))
        slot.numbers[PID] = os.getpid()
        return slot

    @classmethod
    def inherited(cls) -> Slot:
        """Make one that takes no descriptor, for a worker that is forked; it has no room for a stack."""
        return cls._without_file(mmap.mmap(-1, STACK_START))

    @classmethod
    def _without_file(cls, memory: Any) -> Slot:
        slot = cls.__new__(cls)
        slot.fd = None
        slot._attach(memory)
        return slot

    def open(self) -> None:
        """Map it, in the process that writes."""
        if self.fd is not None:
            self._attach(mmap.mmap(self.fd, STACK_START))

    def _attach(self, memory: Any) -> None:
        self._memory = memory
        self.numbers = memoryview(memory)[:NUMBERS_BYTES].cast("q")
        self.clocks = memoryview(memory)[:NUMBERS_BYTES].cast("d")
        self.slowest = SlowSamples(memoryview(memory)[SLOWEST])
        self.clocks[SINCE] = time.monotonic()

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.fd is not None
        return _arrive, (reduction.DupFd(int(self.fd)),)  # a plain number: ours would close it there

    def begin(self, task: int, keys: int) -> None:
        """Note a new task."""
        now = time.monotonic()
        _TASK.pack_into(self._memory, 8 * PHASE, LOADING, task, -1, keys, now, now)

    def end(self, skips: bool = False) -> None:
        """Note that the task is done; with `skips`, one of which no key was taken was not done at all."""
        work = _WORK.unpack_from(self._memory, 8 * PHASE)
        _, task, position, keys, _, began, in_epoch, samples, batches, busy = work
        done = position if position >= 0 else 0 if skips else keys
        in_epoch, samples = in_epoch + done, samples + done
        now = time.monotonic()
        done_now = now, began, in_epoch, samples, batches + 1, busy + now - began
        _WORK.pack_into(self._memory, 8 * PHASE, IDLE, task, position, keys, *done_now)
        if self.single is not None and now - began > self.slowest.floor:
            self.slowest.note(self.single[0], began, now, in_epoch - 1)

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self.numbers[PHASE] = IDLE
        self.clocks[SINCE] = time.monotonic()

    def get_ready(self) -> None:
        """Note that the worker's start is over."""
        self.clocks[READY] = time.monotonic()

    def begin_epoch(self) -> None:
        """Note that a persistent worker begins afresh; what it had lost is no longer awaited."""
        self.slowest.clear()
        self.numbers[IN_EPOCH] = 0
        self.numbers[PHASE] = RESUMING
        self.clocks[SINCE] = time.monotonic()
        self.write_text(UNSENT, None)

    def read(self) -> Progress:
        """Return what the worker has noted; read until it is the same twice, as it may be writing."""
        before = self._bytes(slice(0, _NUMBERS.size))
        while (after := self._bytes(slice(0, _NUMBERS.size))) != before:
            before = after
        return Progress(*_NUMBERS.unpack(before))

    def _bytes(self, part: slice) -> bytes:
        if self.fd is None:
            return bytes(self._memory[part])
        return os.pread(self.fd, part.stop - part.start, part.start)

    def read_slowest(self) -> list[tuple[float, float, str]]:
        """Return the slowest samples of this epoch: seconds, when each began on the monotonic clock, and its key."""
        return read_slowest(self._bytes(SLOWEST))

    def write_text(self, part: slice, data: Any) -> bool:
        """Write something short as JSON; tell whether it fits, else nothing is written."""
        text = json.dumps(data).encode()
        if len(text) >= part.stop - part.start:
            return False
        if self._memory is not None:
            self._memory[part] = text.ljust(part.stop - part.start, b"\0")
        elif self.fd is not None:
            os.pwrite(self.fd, text, part.start)
        return True

    def read_text(self, part: slice) -> Any:
        """Return what was written there, or None."""
        text = self._bytes(part).rstrip(b"\0")
        with contextlib.suppress(ValueError):  # empty, or just being written
            return json.loads(text)
        return None

    def clear_stack(self) -> None:
        """Make room for the next stack: the worker's descriptor shares its offset with ours."""
        if self.fd is not None:
            os.lseek(self.fd, STACK_START, os.SEEK_SET)
            os.ftruncate(self.fd, STACK_START)

    def stack_bytes(self) -> int:
        """Return how much of a stack has been written."""
        return 0 if self.fd is None else os.fstat(self.fd).st_size - STACK_START

    def read_stack(self) -> str:
        """Return what faulthandler has written."""
        size = self.stack_bytes()
        return os.pread(self.fd, size, STACK_START).decode("utf-8", "replace") if self.fd is not None else ""


class OwnNotes(Slot):
    """What the kernel itself notes of a loader without workers: the same numbers in a list, which is quicker."""

    def __init__(self) -> None:
        self._memory = None
        now = time.monotonic()
        notes: Any = [os.getpid(), 0, STARTING, 0, 0, 0, now, 0.0, 0, 0, 0, 0.0, 0.0]
        self.numbers = self.clocks = self._notes = notes
        self.slowest = SlowSamples(least_seconds=LEAST_SECONDS)

    def begin(self, task: int, keys: int) -> None:
        """Note a new task."""
        now = time.monotonic()
        self._notes[PHASE:IN_EPOCH] = (LOADING, task, -1, keys, now, now)

    def end(self, skips: bool = False) -> None:
        """Note that the task is done."""
        notes, now = self._notes, time.monotonic()
        done = notes[POSITION] if notes[POSITION] >= 0 else notes[KEYS]
        notes[PHASE] = IDLE
        notes[SINCE] = now
        notes[IN_EPOCH] += done
        notes[SAMPLES] += done
        notes[BATCHES] += 1
        notes[BUSY] += now - notes[BEGAN]
        if self.single is not None and now - notes[BEGAN] > self.slowest.floor:
            self.slowest.note(self.single[0], notes[BEGAN], now, int(notes[IN_EPOCH]) - 1)

    def read(self) -> Progress:
        """Return what is noted."""
        return Progress(*self._notes)

    def read_slowest(self) -> list[tuple[float, float, str]]:
        """Return the slowest samples."""
        return read_slowest(self.slowest.region())

    def read_text(self, part: slice) -> Any:
        """Return None: no text is written here."""
        return None


class LentSlot(Slot):
    """The slot of another process's worker, opened through the system's files (Linux), to be read only.

    Its offset is not the worker's, who goes on writing where it was: a new stack comes after the earlier ones.
    """

    def __init__(self, fd: int) -> None:
        """Take over a descriptor of such a file."""
        self.fd = _Descriptor(fd)
        self._memory = None
        self._start = STACK_START

    def clear_stack(self) -> None:
        """Begin behind what is there."""
        assert self.fd is not None
        self._start = max(STACK_START, os.fstat(self.fd).st_size)

    def stack_bytes(self) -> int:
        """Return how much has been written since; if the kernel has cleared it meanwhile, since then."""
        assert self.fd is not None
        size = os.fstat(self.fd).st_size
        if size < self._start:
            self._start = STACK_START
        return size - self._start

    def read_stack(self) -> str:
        """Return what faulthandler has written since."""
        assert self.fd is not None
        size = self.stack_bytes()
        return os.pread(self.fd, size, self._start).decode("utf-8", "replace")


def borrow(pid: int) -> Slot | None:
    """Return the slot in which a worker notes its own pid; None if there is none, or if it is another user's.

    A forked worker has inherited those of others too.
    """
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for name in names:
        slot = _open_lent(f"/proc/{pid}", name)
        if slot is not None and slot.read().pid == pid:
            return slot
    return None


def _open_lent(process: str, name: str) -> LentSlot | None:
    """Open a descriptor of another process, if it is a slot that is ready for a stack."""
    path = f"{process}/fd/{name}"
    try:
        if not _may_be_slot(os.readlink(path), os.stat(path)):  # a look only: to open a device may act on it
            return None
        with open(f"{process}/fdinfo/{name}") as file:
            offset = int(file.readline().split()[1])
        slot = LentSlot(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except (OSError, ValueError, IndexError):  # closed meanwhile, or not to be seen
        return None
    assert slot.fd is not None
    is_whole = _may_be_slot(os.readlink(path), os.fstat(slot.fd))  # of what was opened: it may be another by now
    has_magic = is_whole and os.pread(slot.fd, len(MAGIC), MAGIC_AT) == MAGIC
    return slot if has_magic and offset >= STACK_START else None


def _may_be_slot(link: str, found: os.stat_result) -> bool:
    """Tell whether a file is this user's own, without a name, and as large as a slot. See NOTE [ Kinds of slots ]."""
    is_named_so = link.startswith(f"/memfd:{NAME}") or os.path.basename(link).startswith(("#", NAME))
    is_nameless = found.st_nlink == 0 and link.endswith(" (deleted)")
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_named_so and is_nameless and is_own and found.st_size >= STACK_START


def _anonymous_file() -> int:
    """Return a file without a name, by the first way that works here. See NOTE [ Kinds of slots ]."""
    problem: Exception | None = None
    for make in (_make_memfd, _make_in_memory, _make_temporary):
        try:
            return _filled(make())
        except (OSError, AttributeError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # no other way has a descriptor either
            problem = error
    raise OSError(errno.ENOTSUP, f"no shared memory: {problem}")


def _filled(fd: int) -> int:
    """Give a file its pages, so that a full disk is an error here and no SIGBUS later."""
    try:
        empty = bytes(MAGIC_AT) + MAGIC + bytes(STACK_START - NUMBERS_BYTES)
        if os.pwrite(fd, empty, 0) != STACK_START:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.lseek(fd, STACK_START, os.SEEK_SET)  # where a stack goes, whoever asks for the first one
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_memfd() -> int:
    make: Callable[[str], int] = os.memfd_create
    return make(NAME)


def _make_in_memory() -> int:
    return _make_nameless("/dev/shm")


def _make_temporary() -> int:
    return _make_nameless(tempfile.gettempdir())


def _make_nameless(folder: str) -> int:
    """Return a file of this user's alone, that has no name in its folder, or had one for a moment."""
    with contextlib.suppress(OSError, AttributeError):  # not every file system can, nor every system
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix=f"{NAME}-", dir=folder)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _arrive(duplicate: Any) -> Slot:
    slot = Slot.__new__(Slot)
    slot.fd = _Descriptor(duplicate.detach())
    slot._memory = None
    return slot
