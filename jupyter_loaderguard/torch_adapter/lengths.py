"""How long an epoch is, as far as torch's own samplers have counted: no code of the user's is run to find out.

Their `__len__` may take seconds, or draw random numbers, and so change which samples come.
"""

from __future__ import annotations

from types import GeneratorType
from typing import Any

from torch import Tensor
from torch.utils.data.dataset import Subset, TensorDataset
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .. import frames

Lengths = tuple[int | None, int | None]


def lengths_of(iterator: Any) -> Lengths:
    """Return the lengths of the dataset and of an epoch in batches, None where unknown.

    From any thread, once the sampler has been asked for its first keys.
    """
    sampler, drawn = iterator._index_sampler, iterator._sampler_iter
    batch_size, drop_last = 1, False
    if type(sampler) is BatchSampler:
        batch_size, drop_last = sampler.batch_size, sampler.drop_last
        sampler, drawn = sampler.sampler, _local(drawn, "sampler_iter")
    counted = iterator._IterableDataset_len_called
    if counted is None:
        length, count = _count(sampler, drawn, iterator._dataset)
    else:
        length = count = counted
    if count is None:
        return length, None
    return length, count // batch_size if drop_last else -(-count // batch_size)


def _count(sampler: Any, drawn: Any, dataset: Any) -> Lengths:
    """Return the lengths of the dataset and of an epoch in samples."""
    length, count, kind = _plain_length(dataset), None, type(sampler)
    if kind is SequentialSampler and type(drawn) is type(iter(range(0))):
        count = len(drawn.__reduce__()[1][0])
    elif kind is RandomSampler:
        count = _local(drawn, "n")
    elif kind is SubsetRandomSampler:
        return length, _plain_length(sampler.indices)
    elif kind is WeightedRandomSampler:
        return length, sampler.num_samples
    if count is not None and sampler.data_source is dataset:
        length = count
    return length, getattr(sampler, "_num_samples", None) or count


def _local(generator: Any, name: str) -> Any:
    """Return a variable of torch's own sampler, which is a generator that waits to be asked for more."""
    frame = generator.gi_frame if isinstance(generator, GeneratorType) and not generator.gi_running else None
    return frames.locals_of(frame).get(name) if frame is not None else None


def _plain_length(thing: Any) -> int | None:
    """Return the length of something whose `__len__` is not the user's."""
    if type(thing) is Subset:
        return _plain_length(thing.indices)
    if type(thing) is TensorDataset:
        return _plain_length(thing.tensors[0])
    return len(thing) if type(thing) in (list, tuple, range, dict, str, bytes, Tensor) else None


def length_of(sized: Any) -> int | None:
    """Return how long something is, by the user's own code: where the user has asked for what needs it."""
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 - the user's code; an unknown length is no error
        return None
