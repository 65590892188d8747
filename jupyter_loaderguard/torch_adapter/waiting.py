"""An iterator is asked for a batch: the wait is measured, and looks after the workers. See NOTE [ Dead workers ]."""

from __future__ import annotations

import queue
import select
import threading
import time
from threading import get_ident
from time import perf_counter
from typing import Any

from .. import queues
from ..errors import LoaderStalled
from ..interrupts import WaitBroken
from ..registry import BATCH, BEGAN, END, ERROR, Record, registry
from ..seam import Call, entry, for_user
from .deaths import WorkersFailed, raise_if_failed
from .ending import STATUS_SECONDS, detach, forget_pids, stopped
from .mending import begin_epoch, get_mended
from .progress import EMPTY, note_sample
from .skipping import leave_out_here

SLICE_SECONDS = 0.2
DEATH_SECONDS = 1.0
MAIN_THREAD = threading.main_thread().ident


def _next(call: Call, iterator: Any, record: Record) -> Any:
    """Account for a batch. What torch does around the wait counts too: its profiler takes 6 µs, 200 after a pause."""
    __tracebackhide__ = True
    waited, since = record.wait_seconds, perf_counter()
    try:
        batch = call.answer = call.original(iterator)
    except BaseException as error:
        call.error = error
        record.wait_seconds = waited + perf_counter() - since
        raise
    _account_for(record, waited, since, batch)
    return batch


def _account_for(record: Record, waited: float, since: float, batch: Any) -> None:
    """Tell the guarded runs of a batch; the time that this takes is waiting too."""
    now = perf_counter()
    record.wait_seconds = waited + now - since
    for account in record.accounts:
        account.note(record, since, now, batch)
    record.wait_seconds = waited + perf_counter() - since


def _next_data(call: Call, iterator: Any, record: Record) -> Any:
    """Measure a wait; without workers all of torch's `next()` is one."""
    __tracebackhide__ = True
    # begin_wait and end_wait, written out: this runs for every batch, and each call is felt
    if record.mark != registry.mark or get_ident() != record.thread:
        record.note_who_waits()
    record.is_in_epoch = True
    record.waiting_since = since = perf_counter()
    if not registry.is_watched:
        registry.on_wait()
    try:
        if record.stopped_by:
            raise stopped(record)
        if record.mends or record.has_own:
            batch = _next_mended(call, iterator, record)
        else:
            try:  # `call(iterator)`, written out as well
                batch = call.answer = call.original(iterator)
            except BaseException as error:
                call.error = error
                raise
        if record.is_stalled:
            _look_at_batch(iterator, record)
        if not record.workers and record.slots and record.slots[0] is not None:
            record.slots[0].end()  # the kernel itself has loaded it
        record.waiting_since = None
        record.batches += 1
        if record.is_stalled:  # found in this very moment
            record.end_wait(since, BATCH, is_counted=True)
    except StopIteration:
        record.is_in_epoch = False
        record.end_wait(since, END)
        raise
    except WaitBroken:
        record.end_wait(since, ERROR)
        raise _stalled(iterator, record) from None
    except BaseException as error:
        try:
            explain(iterator, record, error)
        finally:
            record.end_wait(since, ERROR)
        raise
    waited = record.wait_seconds
    record.wait_seconds = waited + perf_counter() - since
    if record.accounts and not record.workers:
        _account_for(record, waited, since, batch)
    return batch


def _next_mended(call: Call, iterator: Any, record: Record) -> Any:
    """Return the next batch that is not empty because all its samples were left out."""
    __tracebackhide__ = True
    while True:
        try:
            batch = call(iterator)
        except StopIteration:
            raise
        except (Exception, WaitBroken) as error:
            if record.workers or not leave_out_here(iterator, record, error):
                raise
            call.reopen()
            continue
        if batch is not EMPTY:
            return batch
        call.reopen()


def _look_at_batch(iterator: Any, record: Record) -> None:
    """A batch has come to a stalled wait, while the watchdog looks why it does not."""
    __tracebackhide__ = True
    registry.await_verdict(record)
    if not record.is_hung:
        raise_if_stalled(iterator, record)


def explain(iterator: Any, record: Record, error: BaseException) -> None:
    """Raise something better than this error of a wait, if there is; else add a note to it."""
    __tracebackhide__ = True
    if not isinstance(error, Exception):
        return
    if record.stopped_by:  # by another thread, while this one waited
        raise stopped(record) from None
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
    return for_user(found or LoaderStalled(f"{registry.name(record)} was stalled"))


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


def _reset(call: Call, iterator: Any, record: Record, *args: Any, **kwargs: Any) -> None:
    """Measure how a persistent loader begins its next epoch: it waits for an answer of every worker."""
    __tracebackhide__ = True
    if record.is_in_making:
        if registry.may_mend(record):  # else a worker that dies of its first sample is torch's to tell
            forget_pids(iterator)
        call(iterator, *args, **kwargs)
        return
    record.begin_epoch()
    since = record.begin_wait()
    outcome = ERROR
    record.resumed = record.oldest_sent = 0
    try:
        begin_epoch(iterator, record)
        call(iterator, *args, **kwargs)
        outcome = BEGAN
    except WaitBroken:
        raise _stalled(iterator, record) from None
    except Exception as error:
        explain(iterator, record, error)
        raise
    finally:
        record.resumed = None
        record.end_wait(since, outcome)


def _try_get_data(call: Call, iterator: Any, record: Record, timeout: float = STATUS_SECONDS) -> tuple[bool, Any]:
    __tracebackhide__ = True
    if record.mends or record.has_own:
        return get_mended(call, iterator, record, _attempt, timeout)
    return _attempt(call, iterator, record, timeout)


def _attempt(call: Call, iterator: Any, record: Record, timeout: float) -> tuple[bool, Any]:
    """Wait for a message of the workers, and look after them."""
    __tracebackhide__ = True
    watch = record.watch or _make_watch(iterator, record)
    if watch is None:
        return _get_in_slices(call, iterator, record, timeout)
    if registry.interrupt_wait is not None and get_ident() == MAIN_THREAD:
        registry.interrupt_wait()
    ready = watch.poll(SLICE_SECONDS * 1000 if timeout > SLICE_SECONDS else timeout * 1000)
    if not ready and timeout > SLICE_SECONDS:
        ready = _poll_on(iterator, record, timeout - SLICE_SECONDS)
    is_plain = len(ready) == 1 and ready[0][0] == record.inbox.fd
    if not is_plain and not _look_after_workers(iterator, record, timeout if ready else 0.0):
        return False, None
    try:
        message = record.inbox.read_message(_await_rest, iterator, record)
    except (OSError, EOFError) as error:
        return _explained_by_torch(call, iterator, record, error)
    try:
        call.answer = answer = True, record.inbox.open(message)
    except Exception as error:  # noqa: BLE001 - what came cannot be unpickled: theirs
        return _explained_by_torch(call, iterator, record, error)
    return answer


timing_next, measuring_next_data, measuring_reset = entry(_next, "accounts"), entry(_next_data), entry(_reset)
watching_try_get_data = entry(_try_get_data)


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
    """Prepare to wait for a batch and for the death of a worker at once; None where no descriptor tells of a batch."""
    is_pinned = iterator._data_queue is not iterator._worker_result_queue
    if is_pinned or not queues.CAN_POLL or not queues.is_plain(iterator._data_queue):
        return None
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


def _explained_by_torch(call: Call, iterator: Any, record: Record, error: Exception) -> tuple[bool, Any]:
    """Let torch say what an error of the read means; it knows about too many open files."""
    __tracebackhide__ = True

    def by_torch(*args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Ask torch's own method; what was read is lost, and must not be waited for."""
        real, iterator._data_queue = iterator._data_queue, _FailedQueue(error)
        try:
            answer: tuple[bool, Any] = call(iterator, 0.0)
            return answer
        finally:
            iterator._data_queue = real

    call.fallback = by_torch
    if isinstance(error, (ConnectionError, EOFError)):
        _await_death(iterator, record)
    raise_if_failed(iterator, record, error)
    return by_torch()


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


def _get_in_slices(call: Call, iterator: Any, record: Record, timeout: float) -> tuple[bool, Any]:
    """Wait where no descriptor tells (pin-memory thread, Windows), and look after the workers in between."""
    __tracebackhide__ = True
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
            answer = True, iterator._data_queue.get(timeout=max(0.0, min(SLICE_SECONDS, remaining)))
        except queue.Empty:
            if remaining <= SLICE_SECONDS:
                return False, None
        except Exception as error:  # noqa: BLE001 - torch's own explanation of it is raised
            return _explained_by_torch(call, iterator, record, error)
        else:
            call.settle(answer)
            return answer
