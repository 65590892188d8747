"""Keys in all shapes: what a dataset gets under guard is what plain torch gives it, the very types."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import jupyter_loaderguard as lg
from jupyter_loaderguard.worker.observed import count_keys


class Mute(list):
    """Says nothing of its length."""

    def __len__(self) -> int:
        raise RuntimeError("asked for the length")


class Odd(list):
    """Gives one more when gone through, and refuses to be looked into."""

    def __iter__(self) -> Iterator[Any]:
        yield from list.__iter__(self)
        yield 7

    def __getitem__(self, place: Any) -> Any:
        raise RuntimeError("looked into")

    def __reduce__(self) -> tuple[Any, ...]:
        return Odd, (list.copy(self),)


class Bare:
    """No list at all."""

    def __init__(self, keys: Iterable[int]) -> None:
        self.keys = list(keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys)

    def __len__(self) -> int:
        raise RuntimeError("asked for the length")


class Batches:
    def __init__(self, shape: Callable[[Any], Any]) -> None:
        self.shape = shape

    def __iter__(self) -> Iterator[Any]:
        return (self.shape(range(start, start + 4)) for start in (0, 4))

    def __len__(self) -> int:
        return 2


class One(Dataset):
    def __getitem__(self, key: Any) -> Any:
        return type(key).__name__, str(key)

    def __len__(self) -> int:
        return 8


class Whole(One):
    def __getitems__(self, keys: Any) -> Any:
        return [(type(keys).__name__, type(pickle.loads(pickle.dumps(keys))).__name__, *map(str, keys))]


class Rude(One):
    def __getattr__(self, name: str) -> Any:
        raise (RuntimeError if name == "__getitems__" else AttributeError)(name)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def _same(samples: Any) -> Any:
    return samples


def outcome(dataset: Any, workers: int, **options: Any) -> Any:
    iterator = iter(DataLoader(dataset, num_workers=workers, collate_fn=_same, **options))
    try:
        return [str(batch) for batch in iterator]
    except Exception as error:
        return type(error), str(error).splitlines()[-1]
    finally:
        getattr(iterator, "_shutdown_workers", lambda: None)()  # plain torch leaves them to the collector


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shape", [list, tuple, Mute, Odd, Bare, numpy.array], ids=lambda shape: shape.__name__)
@pytest.mark.parametrize(
    "dataset",
    [One(), Whole(), Subset(One(), range(8)), Subset(Whole(), range(8)), Rude()],
    ids=lambda one: type(one).__name__,
)
def test_a_dataset_gets_what_plain_torch_gives_it(dataset: Any, shape: Any, workers: int) -> None:
    plain = outcome(dataset, workers, batch_sampler=Batches(shape))
    with lg.guard():
        assert outcome(dataset, workers, batch_sampler=Batches(shape)) == plain


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_is_one_key_is_the_samplers_own(workers: int) -> None:
    for shape in (list, Mute, Odd, Bare):
        plain = outcome(One(), workers, sampler=Batches(shape), batch_size=None)
        with lg.guard():
            under_guard = outcome(One(), workers, sampler=Batches(shape), batch_size=None)
        assert [word.partition(" object")[0] for word in under_guard] == [w.partition(" object")[0] for w in plain]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_last_dropped", [False, True])
def test_streams_come_as_ever(workers: int, is_last_dropped: bool) -> None:
    options = {"batch_size": 3, "drop_last": is_last_dropped}
    plain = outcome(Stream(), workers, **options)
    with lg.guard():
        assert outcome(Stream(), workers, **options) == plain


def test_keys_are_counted_without_code_of_the_users() -> None:
    counted = [[1, 2], (1, 2, 3), range(4), torch.arange(5), {6: 7}, Odd([1, 2]), Mute([1]), Bare([1, 2]), iter([1])]
    assert [count_keys(keys) for keys in counted] == [2, 3, 4, 5, 1, 2, 1, 1, 1]
    assert count_keys(torch.tensor(3)) == 1
