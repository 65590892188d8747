"""Other workers, queues and threads in the place of those that an iterator has; what did not come back is sent again.

NOTE [ Everything anew ]
All workers share one queue for results. One that was killed in the midst of its write leaves the queue's lock held, or
half a message in the pipe. So not only that worker is replaced but all of them, with all queues. Batches that had
come back and wait for their turn are kept. The others are asked to leave before they are ended: one that was
ended while it held a lock of the user's would hold it for ever.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

from .. import queues
from ..registry import Record, registry
from ..worker.slot import LOCKS
from .ending import end_pinning
from .progress import EMPTY
from .recipe import RECIPE, Recipe, derive_seed

LEAVE_SECONDS = 0.1
"""How long healthy workers have to leave if no lock of the user's is in their reach."""


def replace_workers(iterator: Any, record: Record, hung: list[int], hurry: Callable[[], bool]) -> int:
    """Replace all workers; return how many batches are produced again."""
    recipe: Recipe = vars(iterator)[RECIPE]
    at_end = _at_end(iterator, record)
    ended = _ended_streams(iterator) + at_end if not iterator._persistent_workers else []
    record.resume = _states_to_resume(iterator, record)
    kept = {number: iterator._workers[number] for number in ended}
    _dismiss(iterator, record, hung, hurry)
    record.generation += 1
    _start(iterator, record, recipe, kept)
    return _send_again(iterator, record, at_end)


def _ended_streams(iterator: Any) -> list[int]:
    """Return the workers that have come to the end of their stream, and leave."""
    return [number for number, status in enumerate(iterator._workers_status) if not status]


def _states_to_resume(iterator: Any, record: Record) -> dict[int, bytes | None]:
    """Return the states of streams after the last batch that torch has got; one at its end begins anew next time."""
    last = record.last_tasks
    return {
        number: record.states.get(last[number], record.resume.get(number))
        if number in last
        else record.resume.get(number)
        for number, status in enumerate(iterator._workers_status)
        if status
    }


def _dismiss(iterator: Any, record: Record, hung: list[int], hurry: Callable[[], bool]) -> None:
    grace = registry.grace_of(record) if _has_locks(record) else LEAVE_SECONDS
    end_pinning(iterator)
    if queues.set_event(iterator._workers_done_event):
        for one in iterator._index_queues:
            queues.put_last(one, None)
    registry.dismiss_workers(record, hung, grace, hurry)
    for one in iterator._index_queues:
        queues.close(one)
    iterator._worker_result_queue.close()
    record.watch = record.inbox = None
    record.unwatched = set()


def _has_locks(record: Record) -> bool:
    return any(slot is not None and slot.read_text(LOCKS) for slot in record.slots)


def _start(iterator: Any, record: Record, recipe: Recipe, kept: dict[int, Any]) -> None:
    """Start workers as torch does; those that are `kept` have come to their end."""
    context = recipe.context
    results, done = context.Queue(), context.Event()
    iterator._worker_result_queue, iterator._workers_done_event = results, done
    iterator._index_queues, iterator._workers = [], []
    seed = derive_seed(iterator._base_seed, record.generation)
    for number in range(iterator._num_workers):
        tasks = context.Queue()
        tasks.cancel_join_thread()
        process = kept.get(number)
        if process is None:
            own = {"index_queue": tasks, "data_queue": results, "done_event": done, "base_seed": seed}
            process = context.Process(target=recipe.loop, kwargs={**recipe.arguments, **own, "worker_id": number})
            process.daemon = True
            process.start()
        iterator._index_queues.append(tasks)
        iterator._workers.append(process)
    iterator._data_queue = results
    if recipe.pinning is not None:
        _start_pinning(iterator, recipe)


def _start_pinning(iterator: Any, recipe: Recipe) -> None:
    """Start the thread that pins memory, with other queues in the places of its old ones."""
    assert recipe.pinning is not None
    target, arguments = recipe.pinning
    iterator._data_queue, iterator._pin_memory_thread_done_event = queue.Queue(), threading.Event()
    fresh = (iterator._worker_result_queue, iterator._data_queue, iterator._pin_memory_thread_done_event)
    recipe.pinning = target, (*fresh[:2], arguments[2], fresh[2], *arguments[4:])
    thread = threading.Thread(target=target, args=recipe.pinning[1], daemon=True)
    thread.start()
    iterator._pin_memory_thread = thread


def _send_again(iterator: Any, record: Record, at_end: list[int]) -> int:
    """Send what had been sent and did not come back; a stream's tasks go to the worker that had them.

    A worker that had sent the last batch of its stream was about to say that there is no more; that is said for it.
    """
    if record.resumed is not None:
        _resume(iterator, record)
    open_tasks = sorted(iterator._task_info)
    if not record.manner.is_iterable:
        workers = range(iterator._num_workers)
        iterator._workers_status = [True for _ in workers]
        iterator._workers_num_tasks = [0 for _ in workers]
        iterator._worker_queue_idx_cycle = itertools.cycle(workers)
    from torch.utils.data._utils.worker import _IterableDatasetStopIteration

    count = 0
    for worker in at_end:
        record.arrived.append((-1, _IterableDatasetStopIteration(worker)))
    for task in open_tasks:
        worker, *data = iterator._task_info[task]
        if not record.manner.is_iterable:
            worker = next(iterator._worker_queue_idx_cycle)
            iterator._workers_num_tasks[worker] += 1
            iterator._task_info[task] = (worker, *data)
        if not data and iterator._workers_status[worker] and worker not in at_end:
            send(iterator, record, task)
            count += 1
    return count


def _at_end(iterator: Any, record: Record) -> list[int]:
    """Return the workers whose streams have ended, of which torch has not been told."""
    return [
        number
        for number, status in enumerate(iterator._workers_status)
        if status and record.last_tasks.get(number) in record.ended_tasks
    ]


def _resume(iterator: Any, record: Record) -> None:
    """Let workers answer that the epoch may begin, in the place of those that have not."""
    from torch.utils.data._utils.worker import _ResumeIteration

    for tasks in iterator._index_queues[record.resumed or 0 :]:
        tasks.put(_ResumeIteration(iterator._shared_seed))


def send(iterator: Any, record: Record, task: int) -> None:
    """Send a task to its worker once more; one without samples is done."""
    probe = record.probes.get(task)
    keys = probe.trial if probe is not None else record.sent[task]
    if record.left_out is not None and probe is None:
        keys = record.left_out.without(keys, iterator._auto_collation)
        if keys is None:
            record.arrived.append((task, EMPTY))
            record.has_own = True
            return
        record.sent[task] = keys
    worker = iterator._task_info[task][0]
    iterator._index_queues[worker].put((task, record.carry(keys) if record.carry is not None else keys))


def why_not(iterator: Any, record: Record) -> str | None:
    """Say why the workers of this loader cannot be replaced, nor its samples left out; None if they can."""
    if RECIPE not in vars(iterator):
        return "its workers were started before the guard"
    if type(iterator).__module__.startswith("torchdata."):
        return "torchdata's StatefulDataLoader keeps the state of its workers itself: resume from its state_dict()"
    if any(task not in record.sent for task, info in list(iterator._task_info.items()) if len(info) == 1):
        return "its batches were asked for before the guard"
    if record.manner.is_iterable and not record.keeps_state:
        has_state = all(hasattr(iterator._dataset, name) for name in ("state_dict", "load_state_dict"))
        what = (
            "was started without retry"
            if has_state
            else "is an iterable dataset without state_dict() and load_state_dict()"
        )
        return (
            f"{record.dataset} {what}: which samples of its stream had been delivered cannot be known by a new worker"
        )
    return None
