"""Which samples are under way: the keys that the sampler gives, and how the dataset is asked for them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..errors import add_note
from ..registry import Record
from ..worker.observed import key_observer
from .ending import RECORD

EMPTY = object()
"""Stands for a batch all of whose samples were left out."""
building = threading.local()
"""`record`: of the iterator that this thread is making."""
SPARE_KEYS = 64


def remembering_next_index(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember the keys of each batch that is sent to a worker: torch does not."""

    @functools.wraps(original)
    def _next_index(self: Any) -> Any:
        __tracebackhide__ = True
        record: Record | None = self.__dict__.get(RECORD) or getattr(building, "record", None)
        try:
            keys = original(self)
            if record is not None and record.left_out is not None:
                keys = _pass_over(self, record, keys, original)
        except StopIteration:
            raise
        except Exception as error:
            note_sampler(error, self._send_idx)
            raise
        if record is not None:
            if len(record.sent) > SPARE_KEYS and len(record.sent) > 2 * len(self._task_info):
                _forget_delivered(record, self._task_info)
            record.sent[self._send_idx] = keys
            if record.carry is not None:
                return record.carry(keys)
        return keys

    return _next_index


def _forget_delivered(record: Record, under_way: dict[int, Any]) -> None:
    """Keep the keys of batches that are under way; rarely enough that it does not count."""
    record.sent = {task: keys for task, keys in record.sent.items() if task in under_way}


def _pass_over(iterator: Any, record: Record, keys: Any, original: Callable[[Any], Any]) -> Any:
    """Return keys without the samples that are left out; those of the next batch if that is all of them."""
    __tracebackhide__ = True
    assert record.left_out is not None
    while (rest := record.left_out.without(keys, iterator._auto_collation)) is None:
        keys = original(iterator)
    return rest


def observing_next_index(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Note the samples that the kernel itself loads."""

    @functools.wraps(original)
    def _next_index(self: Any) -> Any:
        __tracebackhide__ = True
        record: Record | None = self.__dict__.get(RECORD)
        try:
            if record is not None and record.again is not None:
                keys, record.again = record.again, None
            else:
                keys = original(self)
            if record is not None and record.left_out is not None:
                keys = _pass_over(self, record, keys, original)
        except StopIteration:
            raise
        except Exception as error:
            note_sampler(error, self._num_yielded)
            raise
        if record is None or not record.slots or record.slots[0] is None:
            return keys
        task = self._num_yielded
        record.sent = {task: keys}
        if record.observe is None:
            record.observe = key_observer(record.slots[0], record.manner.is_batched)
        return record.observe(task, keys)

    return _next_index


def is_asking_sampler(stack: Iterable[FrameType]) -> bool:
    """Tell whether a thread with these frames is inside of a loader's question for the next keys."""
    return any(frame.f_code.co_name == "_next_index" and frame.f_globals is globals() for frame in stack)


def note_sampler(error: Exception, batch: int) -> None:
    """Add to an error of the sampler's when it was raised."""
    add_note(error, f"loaderguard: raised by the sampler, when it was asked for the samples of batch {batch}.")


def note_delivered(record: Record) -> None:
    """Note that a batch which the kernel itself loaded is with the loop."""
    slot = record.slots[0] if record.slots else None
    if slot is not None:
        slot.end()


def is_stream(dataset: Any) -> bool:
    """Tell whether torch takes what this dataset iterates over, rather than asking it for keys."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def identify(dataset: Any) -> str:
    """Return a name for a dataset that another run can know it by: its class; of a Subset, also what it is one of."""
    from torch.utils.data import Subset

    name = type(dataset).__name__
    if type(dataset) is not Subset:
        return name
    import hashlib  # seldom needed, and not in the first cell

    digest = hashlib.blake2b(repr(list(dataset.indices)).encode(), digest_size=4).hexdigest()
    return f"{name} {digest} of {identify(dataset.dataset)}"


def learn_manner(iterator: Any, record: Record) -> None:
    """Note how torch asks the dataset for samples."""
    from .failures import manner_of

    record.manner = manner_of(iterator._dataset, iterator._auto_collation)
    record.prefetch = getattr(iterator, "_prefetch_factor", None) or 2


def note_sample(iterator: Any, record: Record, error: Exception) -> None:
    """Add to an error of a loader without workers which sample it was."""
    from .failures import Site, describe

    slot = record.slots[0] if record.slots else None
    is_of_sampler = any("raised by the sampler" in note for note in getattr(error, "__notes__", ()))
    if slot is not None and not is_of_sampler:
        site = Site(slot, None, os.getpid(), iterator._dataset, record.manner)
        add_note(error, describe(site, error.__traceback__))
