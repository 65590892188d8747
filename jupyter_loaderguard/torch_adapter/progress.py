"""Which samples are under way: the keys that the sampler gives, and how the dataset is asked for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from ..errors import add_note, notes_of, traceback_of
from ..registry import Record
from ..seam import Call, entry, shield
from ..worker.observed import key_observer
from .failures import manner_of

EMPTY = object()
"""Stands for a batch all of whose samples were left out."""
building = threading.local()
"""`record`: of the iterator that this thread is making."""


def _remember_index(call: Call, iterator: Any, record: Record) -> Any:
    """Remember the keys of each batch that is sent to a worker: torch does not."""
    __tracebackhide__ = True
    task = iterator._send_idx
    try:  # `_ask_sampler`, written out: this runs for every batch
        keys = call.answer = call.original(iterator)
    except BaseException as error:
        _note_failed(call, error, task)
        raise
    if record.left_out is not None:
        keys = _pass_over(call, iterator, record, keys, task)
    while record.oldest_sent < iterator._rcvd_idx:  # these have been delivered
        record.sent.pop(record.oldest_sent, None)
        record.oldest_sent += 1
    record.sent[task] = keys
    return keys if record.carry is None else record.carry(keys)


def _ask_sampler(call: Call, iterator: Any, batch: int) -> Any:
    """Return the sampler's next keys; an error gets a note of when it came."""
    __tracebackhide__ = True
    try:
        keys = call.answer = call.original(iterator)
    except BaseException as error:
        _note_failed(call, error, batch)
        raise
    return keys


def _note_failed(call: Call, error: BaseException, batch: int) -> None:
    """Note what the sampler has raised."""
    call.error = error
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        note_sampler(error, batch)


def _pass_over(call: Call, iterator: Any, record: Record, keys: Any, batch: int) -> Any:
    """Return keys without the samples that are left out; those of the next batch if that is all of them."""
    __tracebackhide__ = True
    assert record.left_out is not None
    while (rest := record.left_out.without(keys, iterator._auto_collation)) is None:
        keys = _ask_sampler(call, iterator, batch)
    return rest


def _observe_index(call: Call, iterator: Any, record: Record) -> Any:
    """Note the samples that the kernel itself loads."""
    __tracebackhide__ = True
    task = iterator._num_yielded
    if record.again is None:
        try:  # as above
            keys = call.answer = call.original(iterator)
        except BaseException as error:
            _note_failed(call, error, task)
            raise
    else:
        keys, record.again = record.again, None
        call.settle(keys)
    if record.left_out is not None:
        keys = _pass_over(call, iterator, record, keys, task)
    if not record.slots or record.slots[0] is None:
        return keys
    record.sent = {task: keys}
    if record.observe is None:
        record.observe = key_observer(record.slots[0], record.manner.is_batched, record.manner.shows_keys)
    return record.observe(task, keys)


remembering_next_index, observing_next_index = entry(_remember_index), entry(_observe_index)
_ASKING = (_remember_index.__code__, _observe_index.__code__)


def is_asking_sampler(stack: Iterable[FrameType]) -> bool:
    """Tell whether a thread with these frames is inside of a loader's question for the next keys."""
    return any(frame.f_code in _ASKING for frame in stack)


def note_sampler(error: Exception, batch: int) -> None:
    """Add to an error of the sampler's when it was raised."""
    add_note(error, f"loaderguard: raised by the sampler, when it was asked for the samples of batch {batch}.")


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
    is_iterable = iterator._dataset_kind == _DatasetKind.Iterable
    has_workers = "_workers" in vars(iterator)
    record.manner = manner_of(iterator._dataset, iterator._auto_collation, is_iterable, has_workers)


def note_sample(iterator: Any, record: Record, error: Exception) -> None:
    """Add to an error of a loader without workers which sample it was."""
    from .failures import Site, describe

    slot = record.slots[0] if record.slots else None
    with shield("an error is not explained"):
        if slot is not None and not any("raised by the sampler" in note for note in notes_of(error)):
            site = Site(slot, None, os.getpid(), iterator._dataset, record.manner)
            add_note(error, describe(site, traceback_of(error)))
