"""The agent: runs inside a worker, before torch's own worker loop, and is never in its way."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ..interrupts import free_signal
from ..processes import Handle
from ..seam import rim, shield
from .locks import find_locks
from .slot import FAILURE, PID, SIGNUM, Slot
from .threads import limit_environment

WorkerLoop = Callable[..., None]
Kernel = tuple[int, str | None]
Prepare = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


class WorkerEntry:
    """Stand in for the target of a worker's Process: settle in, then run torch's loop.

    Under spawn and forkserver it arrives by pickle. It is unpickled in two steps, so that the
    worker is deaf to SIGINT before the import of torch, which takes seconds, and not only after.

    NOTE [ A kernel that dies while a worker starts ]
    The kernel tells the reaper of a worker after it was born, and may be killed in between. So a forked
    worker tells the reaper itself, and then looks whether the kernel lives: if it dies later, the
    reaper reads the worker's line. Under spawn and forkserver the worker has no pipe to the reaper; it
    looks twice, the second time after the import of torch, long after the kernel has told.
    """

    def __init__(
        self,
        loop: WorkerLoop,
        kernel: Kernel,
        announce: Callable[[], None],
        slot: Slot | None,
        prepare: Prepare,
        parcel: Any = None,
        threads: int = 0,
    ) -> None:
        """Run `loop`, with what `prepare` makes of its arguments; `announce` is for a forked worker, `parcel` not.

        `threads` is the cap of native thread pools, 0 for none.
        """
        self._loop = loop
        self.__name__ = str(getattr(loop, "__name__", type(loop).__name__))  # as a function has it
        self._kernel = kernel
        self._announce: Callable[[], None] | None = announce
        self._slot = slot
        self._prepare = prepare
        self._parcel = parcel
        self._threads = threads
        self._waits_for_import = False
        """Whether the collector is off until torch is imported: see `_arrive`."""

    @rim
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._waits_for_import:
            gc.enable()
        with shield("a worker hears interrupts that are meant for the notebook"):
            settle_in()
        with shield("a worker may outlive its kernel"):
            if self._announce is not None:
                self._announce()
            leave_if_orphaned(self._kernel)
        if self._parcel is not None:
            kwargs = {**kwargs, **self._open_parcel()}
        with shield("what a worker does is not seen"):  # nor is it by the kernel: its slot has no pid
            slot = self._open_slot()
            register_stack_dump(slot)
            args, kwargs = self._prepare(self._loop, slot, args, kwargs)
            slot.numbers[PID] = os.getpid()
        self._loop(*args, **kwargs)

    def _open_slot(self) -> Slot:
        """Return the slot; if the kernel cannot see one, one of the worker's own: errors name their samples by it."""
        if self._slot is not None:
            with contextlib.suppress(OSError, ValueError):  # no descriptor, no memory
                self._slot.open()
                return self._slot
        return Slot.local()

    def _open_parcel(self) -> dict[str, Any]:
        """Return the user's objects; if they cannot be made here, tell the kernel why, or say it as Python does."""
        parcel, self._parcel = self._parcel, None
        try:
            parts: dict[str, Any] = parcel.open()
        except Exception as error:
            from .by_value import describe_failure

            if self._slot is None or not self._slot.write_text(FAILURE, describe_failure(error)):
                raise
            sys.exit(1)  # the kernel shows it: once is enough
        return parts

    def __reduce__(self) -> tuple[Any, ...]:
        state = {**vars(self), "_announce": None}
        del state["_waits_for_import"]  # is known where it arrives
        return _arrive, (self._kernel, self._threads), state


def _arrive(kernel: Kernel, threads: int) -> WorkerEntry:
    settle_in()
    if threads:
        limit_environment(threads)  # before torch and numpy are loaded
    leave_if_orphaned(kernel)
    entry = WorkerEntry.__new__(WorkerEntry)
    # nothing that torch's import makes is garbage: to look for some takes a tenth of the worker's start
    entry._waits_for_import = gc.isenabled()
    gc.disable()
    return entry


def leave_if_orphaned(kernel: Kernel) -> None:
    """End this worker, before anything of the user's has run, if nobody waits for it any more."""
    pid, mark = kernel
    if os.getppid() != pid and not Handle(pid, mark).is_alive():
        os._exit(1)


def settle_in() -> None:
    """Leave it to the guard who stops: an interrupt of the notebook is not for the workers.

    The wakeup descriptor is the kernel's, inherited by fork: our signals are not the kernel's.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def register_stack_dump(slot: Slot) -> None:
    """Write the stack into the slot at a signal that nobody else uses here; in C, so also if the GIL is held.

    Of the main thread alone, which the signal stops: the frames of threads that go on running meanwhile cannot be
    read safely, and a look must never end a worker.
    """
    signum = free_signal()
    if signum is None or slot.fd is None or not hasattr(faulthandler, "register"):
        return
    faulthandler.register(signum, file=slot.fd, all_threads=False, chain=False)
    slot.numbers[SIGNUM] = signum


def lock_table(**roots: Any) -> list[tuple[Any, ...]]:
    """Return where the locks are that a worker may come to wait for, to be noted in its slot."""
    return [dataclasses.astuple(place) for place in find_locks(**roots)[:64]]


def rename_process(worker_id: int) -> None:
    """Show in `ps` and `top` which worker it is; a name has 15 bytes there."""
    if sys.platform.startswith("linux"):
        name = f"pt_data_worker{worker_id}" if worker_id < 10 else f"pt_data_work{worker_id}"
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
            file.write(name)
