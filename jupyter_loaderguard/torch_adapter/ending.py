"""Iterators end: by torch, by the collector, by the guard. See NOTE [ Stop order ]."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import _utils

from .. import interrupts, queues
from ..errors import LoaderGuardError
from ..registry import Record, registry
from ..seam import RECORD, Call, entry, for_user, is_entry
from .instrument import TORCH, TORCHDATA
from .lengths import Lengths, lengths_of
from .recipe import RECIPE

PIN_SECONDS = 0.3
STATUS_SECONDS = float(getattr(_utils, "MP_STATUS_CHECK_INTERVAL", 5.0))
"""How long torch waits before it looks after its workers, and how long it lets one leave."""


def _shutdown_workers(call: Call, iterator: Any, record: Record) -> None:
    """Stop an iterator that torch, a library or the user ends."""
    __tracebackhide__ = True
    _shut_down(call, iterator, record, interrupts.NOW)


def _del(call: Call, iterator: Any, record: Record) -> None:
    """Stop an iterator that nobody holds any more."""
    if is_entry(type(iterator)._shutdown_workers):
        _shut_down(call, iterator, record, interrupts.LATER)
    else:
        call(iterator)  # a class of its own has something to do then


quick_shutdown_workers, quick_del = entry(_shutdown_workers), entry(_del)


def _shut_down(call: Call, iterator: Any, record: Record, deliver: str) -> None:
    __tracebackhide__ = True
    if _is_python_exiting():
        call(iterator)
        return
    if os.getpid() != registry.owner:
        return  # a copy that a forked worker inherited: its workers are the kernel's
    with interrupts.held(deliver) as hurry:
        if registry.remove(record):  # else it is stopped, or being stopped by another thread
            registry.stop_claimed([(record, iterator)], hurry, registry.grace_of(record), _due_seconds(iterator))


def _due_seconds(iterator: Any) -> float:
    """Return how long workers have to leave that know that they are to.

    Those that have nothing to do any more, as at the end of an epoch, are at work for themselves if they do not
    leave at once: they save caches, or run the `finally` of a stream. torch gives them so much time.
    """
    if getattr(iterator, "_tasks_outstanding", 1) > 0:
        return 0.0
    return STATUS_SECONDS * len(iterator._workers)


def _is_python_exiting() -> bool:
    """Tell it by torch's own flag; nothing can be imported any more at that time."""
    utils = sys.modules.get("torch.utils.data._utils") if sys.modules else None
    return utils is None or utils.python_exit_status is not False


class _TorchControl:
    """Takes iterators apart for the registry. See NOTE [ Stop order ]."""

    def ask_to_leave(self, iterator: Any) -> bool:
        iterator._shutdown = True
        forget_pids(iterator)
        end_pinning(iterator)
        event = getattr(iterator, "_workers_done_event", None)
        if event is None or not queues.set_event(event):
            return False
        return False not in [queues.put_last(queue, None) for queue in iterator._index_queues]

    def lengths(self, iterator: Any) -> Lengths:
        return lengths_of(iterator)

    def hand_back(self, record: Record) -> None:
        """Make torch responsible for an iterator again."""
        iterator = record.iterator()
        if iterator is not None and (record.arrived or record.probes):
            return  # torch does not know of batches that were left out, and would wait for them
        registry.remove(record)
        if iterator is None:
            return
        vars(iterator).pop(RECORD, None)
        record.close_accounts()
        if record.inbox is not None:
            queues.give_back(iterator, "_data_queue", record.inbox)
        is_registered = getattr(iterator, "_worker_pids_set", True)
        if record.workers and not iterator._shutdown and not is_registered:
            signal_handling()._set_worker_pids(id(iterator), tuple(worker.pid for worker in iterator._workers))
            iterator._worker_pids_set = True

    def shut_down(self, iterator: Any) -> None:
        """Have torch end the workers in its own way, of an iterator that was handed back; those that are late first."""
        if getattr(iterator, "_workers_done_event", None) is None:
            return  # that is done, but for the rest
        for process in iterator._workers:
            process.terminate()
        iterator._shutdown = False
        with contextlib.suppress(ValueError):  # a queue is closed already; torch has ended the workers all the same
            iterator._shutdown_workers()

    def release(self, iterator: Any, record: Record) -> None:
        for queue in getattr(iterator, "_index_queues", ()):
            queues.close(queue)
        # a stored traceback may keep the iterator; descriptors and semaphores go now
        vars(iterator).pop(RECIPE, None)
        iterator._index_queues = []
        iterator._worker_result_queue = iterator._data_queue = iterator._workers_done_event = None
        record.watch = record.inbox = None
        record.slots = []
        record.sent.clear()
        record.states.clear()
        record.ended_tasks.clear()
        detach(iterator, record)
        if record.stopped_by and not record.is_persistent and record.is_kept():
            _let_revive(iterator, record)

    def dataset(self, iterator: Any, loader: Any) -> Any:
        return iterator._dataset if loader is None else loader.dataset

    def has_finished(self, iterator: Any, number: int) -> bool:
        status = getattr(iterator, "_workers_status", ())
        return number < len(status) and not status[number]

    def count_delivered(self, iterator: Any) -> int:
        return int(getattr(iterator, "_num_yielded", 0))

    def awaited(self, iterator: Any) -> tuple[int | None, list[int]]:
        tasks = getattr(iterator, "_task_info", None)
        if tasks is None:  # without workers; `_num_yielded` counts a batch when it is delivered
            return iterator._num_yielded, []
        batch = iterator._rcvd_idx
        if batch not in tasks:  # a persistent loader asks its workers for the next epoch
            return None, list(range(len(iterator._workers)))
        if getattr(iterator, "_in_order", True):
            return batch, [tasks[batch][0]]
        return batch, sorted({info[0] for info in tasks.values() if len(info) == 1})

    def count_ready(self, iterator: Any) -> int:
        tasks = list(getattr(iterator, "_task_info", {}).values())
        held = sum(len(info) == 2 for info in tasks)  # here already, out of order
        try:
            return held + int(iterator._worker_result_queue.qsize())
        except (NotImplementedError, AttributeError, OSError):  # macOS cannot count; or it has just been closed
            return held

    def is_asking_sampler(self, stack: Any) -> bool:
        from .progress import is_asking_sampler

        return is_asking_sampler(stack)

    def worker_of(self, iterator: Any, task: int) -> int | None:
        info = iterator._task_info.get(task)
        return info[0] if info else None


control = _TorchControl()


def forget_pids(iterator: Any) -> None:
    if getattr(iterator, "_worker_pids_set", False):
        with contextlib.suppress(ValueError):  # it was done, and an interrupt came before the next line
            signal_handling()._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def end_pinning(iterator: Any) -> None:
    """Let the thread that pins memory end, which comes before the workers do."""
    thread = getattr(iterator, "_pin_memory_thread", None)
    if thread is not None:
        iterator._pin_memory_thread_done_event.set()
        if queues.can_put(iterator._worker_result_queue):
            iterator._worker_result_queue.put((None, None))
            queues.unlock(iterator._data_queue.not_full)
            thread.join(PIN_SECONDS)
        iterator._worker_result_queue.cancel_join_thread()
        iterator._worker_result_queue.close()


def detach(iterator: Any, record: Record) -> None:
    """Let the next `iter()` of a persistent loader start fresh workers."""
    loader = record.loader()
    if record.is_persistent and getattr(loader, "_iterator", None) is iterator:
        loader._iterator = None


def stopped(record: Record) -> LoaderGuardError:
    """Return what to raise for a loader that was stopped; when its workers are gone."""
    registry.await_stop(record)
    record.stop_under_way = None
    words = f"this iterator over {registry.name(record)} was stopped by loaderguard ({record.stopped_by})"
    return for_user(LoaderGuardError(f"{words}; iter() of the loader starts fresh workers"))


def _let_revive(iterator: Any, record: Record) -> None:
    """Have an iterator that its loader keeps for ever begin anew when it is asked again: no `iter()` makes another one.

    By an attribute of its own, which also works when the guard is gone by then.
    """
    vars(iterator)["_next_data"] = functools.partial(_revive, weakref.ref(iterator), record, threading.Lock())


def _revive(reference: Callable[[], Any], record: Record, lock: threading.Lock) -> Any:
    """Make an iterator anew, and return its next batch; a loop that another thread has stopped is told so once."""
    __tracebackhide__ = True
    iterator, loader, stopper = reference(), record.loader(), record.stop_under_way
    if loader is None or (stopper is not None and stopper[0] != threading.get_ident()):
        raise stopped(record)
    known: list[Any] = [kind for kind in type(iterator).__mro__ if kind.__module__ in (TORCH, TORCHDATA)]
    args, kwargs = record.making
    with lock:
        if "_next_data" in vars(iterator):  # no other thread has done it meanwhile
            known[0].__init__(iterator, loader, *args, **kwargs)  # classes derived from it have done their part
            del vars(iterator)["_next_data"]
    return iterator._next_data()


def signal_handling() -> Any:
    from torch.utils.data._utils import signal_handling

    return signal_handling
