"""Iterators end: by torch, by the collector, by the guard. See NOTE [ Stop order ]."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from .. import interrupts, queues
from ..errors import warn_limited
from ..registry import Record, registry
from .recipe import RECIPE

RECORD = "_loaderguard_record"
"""The attribute of an iterator that holds its record."""
PIN_SECONDS = 0.3


def quick_shutdown_workers(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def _shutdown_workers(self: Any) -> None:
        _shut_down(self, original, interrupts.NOW)

    return _shutdown_workers


def quick_del(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def __del__(self: Any) -> None:
        _shut_down(self, original, interrupts.LATER)

    return __del__


def _shut_down(iterator: Any, original: Callable[[Any], None], deliver: str) -> None:
    """Stop an iterator that torch or the collector ends."""
    record: Record | None = vars(iterator).get(RECORD)
    if record is None or _is_python_exiting():
        original(iterator)
        return
    if os.getpid() != registry.owner:
        return  # a copy that a forked worker inherited: its workers are the kernel's
    with interrupts.held(deliver) as hurry:
        try:
            if registry.remove(record):  # else it is stopped, or being stopped by another thread
                registry.stop_claimed([(record, iterator)], hurry, registry.grace_of(record))
        except Exception as error:  # noqa: BLE001 - no error of ours enters the user's loop
            warn_limited(f"a DataLoader's workers could not be stopped ({type(error).__name__}: {error})")


def _is_python_exiting() -> bool:
    """Tell it by torch's own flag; nothing can be imported any more at that time."""
    utils = sys.modules.get("torch.utils.data._utils") if sys.modules else None
    return utils is None or utils.python_exit_status is not False


class _TorchControl:
    """Takes iterators apart for the registry. See NOTE [ Stop order ]."""

    def ask_to_leave(self, iterator: Any) -> None:
        iterator._shutdown = True
        forget_pids(iterator)
        end_pinning(iterator)
        event = getattr(iterator, "_workers_done_event", None)
        if event is not None and queues.set_event(event):
            for queue in iterator._index_queues:
                queues.put_last(queue, None)

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


def measure(iterator: Any) -> tuple[int | None, int | None]:
    """Return the lengths of the dataset and of an epoch in batches, None where unknown.

    To be called when the iterator is made, in the user's own thread: their `__len__` may take long.
    """
    return length_of(iterator._dataset), length_of(iterator._index_sampler)


def length_of(sized: Any) -> int | None:
    """Return how long something is, by the user's own code."""
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 - the user's code; an unknown length is no error
        return None


def signal_handling() -> Any:
    from torch.utils.data._utils import signal_handling

    return signal_handling
