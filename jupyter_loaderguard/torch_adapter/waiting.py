"""An iterator is asked for a batch: the wait is measured, and looks after the workers. See NOTE [ Dead workers ]."""

from __future__ import annotations

import functools
import queue
import select
import threading
import time
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

from .. import queues
from ..errors import LoaderGuardError, LoaderStalled
from ..interrupts import WaitBroken
from ..registry import BATCH, BEGAN, END, ERROR, Record, registry
from .deaths import WorkersFailed, raise_if_failed
from .ending import RECORD, detach
from .mending import begin_epoch, get_mended
from .progress import EMPTY, note_delivered, note_sample
from .skipping import leave_out_here

SLICE_SECONDS = 0.2
DEATH_SECONDS = 1.0


def timing_next(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Count what torch does around a wait as waiting too: its profiler takes 6 µs, and 200 µs after a pause."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        __tracebackhide__ = True
        record: Record | None = self.__dict__.get(RECORD)
        if record is None:
            return original(self)
        waited, since = record.wait_seconds, perf_counter()
        try:
            batch = original(self)
        except BaseException:
            record.wait_seconds = waited + perf_counter() - since
            raise
        now = perf_counter()
        record.wait_seconds = waited + now - since
        if record.accounts:
            for account in record.accounts:
                account.note(record, since, now, batch)
            record.wait_seconds = waited + perf_counter() - since  # what the accounts take is waiting too
        return batch

    return __next__


def measuring_next_data(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def _next_data(self: Any) -> Any:
        __tracebackhide__ = True  # the user's traceback is about the user's code
        record: Record | None = self.__dict__.get(RECORD)
        if record is None:
            return original(self)
        # begin_wait and end_wait, written out: this runs for every batch, and each call is felt
        if record.mark != registry.mark or get_ident() != record.thread:
            record.note_who_waits()
        record.is_in_epoch = True
        record.waiting_since = since = perf_counter()
        if not registry.is_watched:
            registry.on_wait()
        try:
            if record.stopped_by:
                raise _stopped(record)
            batch = _next_mended(self, record, original) if record.mends or record.has_own else original(self)
            if record.is_stalled or not record.workers:
                _look_at_batch(self, record)
            record.waiting_since = None
            record.batches += 1  # and `timing_next` counts the wait
            if record.is_stalled:  # found in this very moment
                record.end_wait(since, BATCH, is_counted=True)
            return batch
        except StopIteration:
            record.is_in_epoch = False
            record.end_wait(since, END)
            raise
        except WaitBroken:
            record.end_wait(since, ERROR)
            raise _stalled(self, record) from None
        except BaseException as error:
            try:
                explain(self, record, error)
            finally:
                record.end_wait(since, ERROR)
            raise

    return _next_data


def _next_mended(iterator: Any, record: Record, original: Callable[[Any], Any]) -> Any:
    """Return the next batch that is not empty because all its samples were left out."""
    __tracebackhide__ = True
    while True:
        try:
            batch = original(iterator)
        except StopIteration:
            raise
        except (Exception, WaitBroken) as error:
            if record.workers or not leave_out_here(iterator, record, error):
                raise
            continue
        if batch is not EMPTY:
            return batch


def _look_at_batch(iterator: Any, record: Record) -> None:
    """A batch has come: to a stalled wait, or from the kernel itself."""
    __tracebackhide__ = True
    if record.is_stalled:  # it came while the watchdog looks why it does not
        registry.await_verdict(record)
        if not record.is_hung:
            raise_if_stalled(iterator, record)
    if not record.workers:
        note_delivered(record)


def explain(iterator: Any, record: Record, error: BaseException) -> None:
    """Raise something better than this error of a wait, if there is; else add a note to it."""
    __tracebackhide__ = True
    if not isinstance(error, Exception):
        return
    if record.stopped_by:  # by another thread, while this one waited
        raise _stopped(record) from None
    raise_if_stalled(iterator, record)  # the user's code may have caught WaitBroken, and raised something else
    if not record.workers:
        try:
            note_sample(iterator, record, error)
        except WaitBroken:
            raise _stalled(iterator, record) from None


def _stalled(iterator: Any, record: Record) -> LoaderStalled:
    """Return what the watchdog found; the loader starts afresh at its next use."""
    record.is_broken = True
    detach(iterator, record)
    found, record.verdict = record.verdict or record.last_verdict, None
    return found or LoaderStalled(f"{registry.name(record)} was stalled")


def raise_if_stalled(iterator: Any, record: Record) -> None:
    """Raise what the watchdog found, if it is to be raised."""
    __tracebackhide__ = True
    if record.verdict is not None:
        raise _stalled(iterator, record) from None


def raise_if_late(iterator: Any, record: Record) -> None:
    """Raise what the watchdog found: for the loop, or inside of the guard for what replaces workers."""
    __tracebackhide__ = True
    if record.verdict is not None and record.is_hung and record.mends:
        raise WorkersFailed(sorted(record.late_workers), is_hung=True)
    raise_if_stalled(iterator, record)


def measuring_reset(original: Callable[..., None]) -> Callable[..., None]:
    """A persistent loader begins its next epoch: it waits for an answer of every worker."""

    @functools.wraps(original)
    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        record: Record | None = self.__dict__.get(RECORD)
        if record is None:
            return original(self, *args, **kwargs)
        try:
            return _begin_epoch(self, record, original, args, kwargs)
        except WaitBroken:
            raise _stalled(self, record) from None

    return _reset


def _begin_epoch(
    iterator: Any, record: Record, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    __tracebackhide__ = True
    record.begin_epoch()
    since = record.begin_wait()
    outcome = ERROR
    record.resumed = 0
    try:
        begin_epoch(iterator, record)
        original(iterator, *args, **kwargs)
        outcome = BEGAN
    except Exception as error:
        explain(iterator, record, error)
        raise
    finally:
        record.resumed = None
        record.end_wait(since, outcome)


def _stopped(record: Record) -> LoaderGuardError:
    """Return what to raise for a loader that was stopped; when its workers are gone."""
    registry.await_stop(record)
    return LoaderGuardError(
        f"this iterator over {registry.name(record)} was stopped by loaderguard ({record.stopped_by}); "
        "iter() of the loader starts fresh workers"
    )


def watching_try_get_data(original: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
    from torch.utils.data import _utils

    status_seconds: float = _utils.MP_STATUS_CHECK_INTERVAL
    main_thread = threading.main_thread().ident

    def attempt(iterator: Any, record: Record, timeout: float) -> tuple[bool, Any]:
        __tracebackhide__ = True
        if iterator._data_queue is not iterator._worker_result_queue or not queues.CAN_POLL:
            return _get_in_slices(iterator, record, original, timeout)
        if registry.interrupt_wait is not None and threading.get_ident() == main_thread:
            registry.interrupt_wait()
        watch = record.watch or _make_watch(iterator, record)
        ready = watch.poll(min(timeout, SLICE_SECONDS) * 1000)
        if not ready and timeout > SLICE_SECONDS:
            ready = _poll_on(iterator, record, timeout - SLICE_SECONDS)
        is_plain = len(ready) == 1 and ready[0][0] == record.inbox.fd
        if not is_plain and not _look_after_workers(iterator, record, timeout if ready else 0.0):
            return False, None
        try:
            return True, record.inbox.read(functools.partial(_await_rest, iterator, record))
        except Exception as error:
            if record.is_broken:
                raise
            return _explained_by_torch(iterator, record, original, error)

    @functools.wraps(original)
    def _try_get_data(self: Any, timeout: float = status_seconds) -> tuple[bool, Any]:
        __tracebackhide__ = True
        record: Record | None = self.__dict__.get(RECORD)
        if record is None:
            return original(self, timeout)
        if record.mends or record.has_own:
            return get_mended(self, record, attempt, timeout)
        return attempt(self, record, timeout)

    return _try_get_data


def _poll_on(iterator: Any, record: Record, timeout: float) -> list[tuple[int, int]]:
    """Wait on, and look in between whether the watchdog ends the wait."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    while True:
        raise_if_late(iterator, record)
        remaining = max(0.0, deadline - time.monotonic())
        ready: list[tuple[int, int]] = record.watch.poll(min(remaining, SLICE_SECONDS) * 1000)
        if ready or remaining <= SLICE_SECONDS:
            return ready


def _make_watch(iterator: Any, record: Record) -> Any:
    """Prepare to wait for a batch and for the death of a worker at once."""
    watch = select.poll()
    record.inbox = queues.Inbox(iterator._data_queue)
    watch.register(record.inbox.fd, select.POLLIN)
    for number, process in enumerate(iterator._workers):
        watch.register(_death_fd(record, number, process), select.POLLIN)
    record.watch = watch
    return watch


def _look_after_workers(iterator: Any, record: Record, timeout: float) -> bool:
    """Raise if a worker failed; stop watching those that ended as they should; tell whether a batch comes in time."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    while True:
        raise_if_failed(iterator, record)
        for number in _ended_duly(iterator, record) - record.unwatched:
            record.unwatched.add(number)
            record.watch.unregister(_death_fd(record, number, iterator._workers[number]))
        remaining = deadline - time.monotonic()
        ready = [fd for fd, _ in _poll_on(iterator, record, max(0.0, remaining))]
        if record.inbox.fd in ready:
            return True
        if not ready or remaining <= 0:
            return False


def _await_rest(iterator: Any, record: Record) -> None:
    """Wait for the rest of a batch, unless the worker that was sending it is dead."""
    __tracebackhide__ = True
    while record.inbox.fd not in [fd for fd, _ in _poll_on(iterator, record, 1.0)]:
        raise_if_failed(iterator, record)


def _ended_duly(iterator: Any, record: Record) -> set[int]:
    """Return the workers that ended after they were told to, as those of an iterable dataset do."""
    ended = {number for number, worker in enumerate(record.workers) if not worker.is_alive()}
    return {number for number in ended if not iterator._workers_status[number]}


def _explained_by_torch(
    iterator: Any, record: Record, original: Callable[..., tuple[bool, Any]], error: Exception
) -> tuple[bool, Any]:
    """Let torch say what an error of the read means; it knows about too many open files."""
    if isinstance(error, (ConnectionError, EOFError)):
        _await_death(iterator, record)
    raise_if_failed(iterator, record, error)
    real = iterator._data_queue
    iterator._data_queue = _FailedQueue(error)
    try:
        return original(iterator, 0.0)
    finally:
        iterator._data_queue = real


def _await_death(iterator: Any, record: Record) -> None:
    """Wait for the end of a worker whose sockets are closed already: it was killed while it handed over a batch."""
    deadline = time.monotonic() + DEATH_SECONDS
    while time.monotonic() < deadline:
        alive = [worker.is_alive() for worker in record.workers]
        if not all(is_there or not status for is_there, status in zip(alive, iterator._workers_status, strict=False)):
            return
        time.sleep(0.005)


class _FailedQueue:
    """Fails as the real queue has just failed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, timeout: float | None = None) -> Any:
        raise self._error


def _death_fd(record: Record, number: int, process: Any) -> int:
    """Return what becomes readable at the end of a worker."""
    fd = record.workers[number].fileno()
    return process.sentinel if fd is None else fd


def _get_in_slices(iterator: Any, record: Record, original: Callable[..., Any], timeout: float) -> tuple[bool, Any]:
    """Wait where no descriptor tells (pin-memory thread, Windows), and look after the workers in between."""
    deadline = time.monotonic() + timeout
    while True:
        raise_if_failed(iterator, record)
        raise_if_late(iterator, record)
        thread = getattr(iterator, "_pin_memory_thread", None)
        if thread is not None and not thread.is_alive():  # of what a worker that died had half handed over
            _await_death(iterator, record)
            raise_if_failed(iterator, record, EOFError("the thread that pins memory has ended"))
        remaining = deadline - time.monotonic()
        try:
            return True, iterator._data_queue.get(timeout=max(0.0, min(SLICE_SECONDS, remaining)))
        except queue.Empty:
            if remaining <= SLICE_SECONDS:
                return False, None
        except Exception as error:  # noqa: BLE001 - torch's own explanation of it is raised
            return _explained_by_torch(iterator, record, original, error)
