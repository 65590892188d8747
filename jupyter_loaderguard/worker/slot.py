"""The slot: a worker's own piece of shared memory, in which it notes what it is on; the kernel only reads.

It is a file without a name, so nothing is left of it when its last holder ends. Under fork it is
inherited, under spawn and forkserver its descriptor travels. Numbers come first, then a text about a
batch that could not be sent, the table of the dataset's locks, why it could not start, which
thread pools were capped, the slowest samples, and then what faulthandler writes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

from .slowest import REGION_BYTES, SlowSamples, read_slowest

NAME = "loaderguard"
PID, SIGNUM, PHASE, TASK, POSITION, KEYS, SINCE, BEGAN, IN_EPOCH, SAMPLES, BATCHES, BUSY, READY = range(13)
STARTING, IDLE, LOADING, RESUMING = range(4)
PHASES = ("starting", "idle", "loading", "resuming")
NUMBERS_BYTES = 256
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
        self.fd = _anonymous_file()
        self._memory: Any = None

    @classmethod
    def local(cls) -> Slot:
        """Make one that nobody else sees, for a loader without workers."""
        slot = cls.__new__(cls)
        slot.fd = None
        slot._attach(bytearray(STACK_START))
        slot.numbers[PID] = os.getpid()
        return slot

    def open(self) -> None:
        """Map it, in the process that writes."""
        assert self.fd is not None
        self._attach(mmap.mmap(self.fd, STACK_START))

    def _attach(self, memory: Any) -> None:
        self._memory = memory
        self.numbers = memoryview(memory)[:NUMBERS_BYTES].cast("q")
        self.clocks = memoryview(memory)[:NUMBERS_BYTES].cast("d")
        self.slowest = SlowSamples(memoryview(memory)[SLOWEST])
        self.clocks[SINCE] = time.monotonic()

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.fd is not None
        return _arrive, (reduction.DupFd(self.fd),)

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

    def write_text(self, part: slice, data: Any) -> None:
        """Write something short as JSON, cut off where it does not fit."""
        text = json.dumps(data).encode()
        if len(text) >= part.stop - part.start:
            return
        if self._memory is not None:
            self._memory[part] = text.ljust(part.stop - part.start, b"\0")
        elif self.fd is not None:
            os.pwrite(self.fd, text, part.start)

    def read_text(self, part: slice) -> Any:
        """Return what was written there, or None."""
        text = self._bytes(part).rstrip(b"\0") if self.fd is not None else b""
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

    def __del__(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


class LentSlot(Slot):
    """The slot of another process's worker, opened through the system's files (Linux), to be read only.

    Its offset is not the worker's, who goes on writing where it was: a new stack comes after the earlier ones.
    """

    def __init__(self, fd: int) -> None:
        """Take over a descriptor of such a file."""
        self.fd = fd
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
    try:
        if not os.readlink(f"{process}/fd/{name}").startswith(f"/memfd:{NAME}"):
            return None
        with open(f"{process}/fdinfo/{name}") as file:
            offset = int(file.readline().split()[1])
        slot = LentSlot(os.open(f"{process}/fd/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except (OSError, ValueError, IndexError):  # closed meanwhile, or not to be seen
        return None
    assert slot.fd is not None
    is_whole = os.fstat(slot.fd).st_size >= STACK_START
    return slot if is_whole and offset >= STACK_START else None


def _anonymous_file() -> int:
    """Return a file without a name; its pages exist, so that a full disk is an error here and no SIGBUS later."""
    if sys.platform.startswith("linux"):
        fd = os.memfd_create(NAME)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.pwrite(fd, bytes(STACK_START), 0)
    os.lseek(fd, STACK_START, os.SEEK_SET)  # where a stack goes, whoever asks for the first one
    return fd


def _arrive(duplicate: Any) -> Slot:
    slot = Slot.__new__(Slot)
    slot.fd = duplicate.detach()
    slot._memory = None
    return slot
