"""Streams that can be resumed: their state travels with each batch, and is kept until the next one has come."""

from __future__ import annotations

from typing import Any

from ..registry import Record, registry
from ..seam import rim, shield


class Stated:
    """A batch of a stream on its way from a worker, with the state of the stream after it.

    It arrives as the batch itself, whoever receives it: its state is taken off when it is unpickled. After the last
    batch, if that is not a full one, the stream has ended: its state is then often that of a new beginning.
    """

    def __init__(self, data: Any, loader_id: int, task: int, state: bytes | None, is_last: bool) -> None:
        self._parts = data, loader_id, task, state, is_last

    def __reduce__(self) -> tuple[Any, ...]:
        return deliver, self._parts


@rim
def deliver(data: Any, loader_id: int, task: int, state: bytes | None, is_last: bool) -> Any:
    """Keep the state of a stream, and return the batch."""
    with shield("retry does not hold for a stream"):
        record = registry.records.get(loader_id)
        if record is not None:
            record.states[task] = state
            if is_last:
                record.ended_tasks.add(task)
    return data


def note_state(iterator: Any, record: Record, task: int) -> None:
    """Note that torch gets a batch of a stream: from now on its state counts, and the one before it does not."""
    worker = iterator._task_info[task][0]
    record.states.pop(record.last_tasks.get(worker, -1), None)
    record.last_tasks[worker] = task
    if task in record.states and record.states[task] is None:
        record.keeps_state = False
        why = f"state_dict() of {record.dataset} fails, or what it returns cannot be pickled"
        registry.allowance_of(record).remarks[f"retry does not hold for {registry.name(record)}: {why}"] = None
