"""Datasets whose sample 5 fails, each in another way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, IterableDataset

BAD = 5


class Raises(Dataset):
    """Sample 5 raises."""

    def __init__(self, kind: type[Exception] = ValueError, at: int | None = BAD) -> None:
        self.kind, self.at = kind, at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> object:
        if index == self.at:
            raise self.kind(f"sample {index} is broken")
        return torch.full((2,), index)


class RaisesWhole(Raises):
    """The same, asked for whole batches."""

    def __getitems__(self, indices: list[int]) -> list[object]:
        return [self[index] for index in indices]


class RaisesInStream(IterableDataset):
    """Sample 5 of each worker's stream raises."""

    def __iter__(self) -> Iterator[object]:
        for number in range(64):
            if number == BAD:
                raise ValueError("the stream is broken")
            yield torch.full((2,), number)


class DecodeError(Exception):
    """An error that wants more than a message."""

    def __init__(self, path: str, code: int) -> None:
        super().__init__(f"{path}: {code}")
        self.path, self.code = path, code


class Decodes(Raises):
    """Raises such an error."""

    def __getitem__(self, index: int) -> object:
        if index == BAD:
            raise DecodeError(f"{index}.jpg", 42)
        return super().__getitem__(index)


class ReturnsNone(Raises):
    """Swallows its error."""

    def __getitem__(self, index: int) -> object:
        try:
            return super().__getitem__(index)
        except ValueError:
            pass


class BrokenSampler:
    """Fails when it is asked for the fourth batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(3):
            yield [number]
        raise OSError("no more keys")

    def __len__(self) -> int:
        return 64


def broken_collate(samples: list[torch.Tensor]) -> object:
    """Fails on the batch of sample 5."""
    if any(int(sample[0]) == BAD for sample in samples):
        raise ZeroDivisionError
    return torch.stack(samples)


def as_list(samples: list[object]) -> list[object]:
    """Leave samples as they are."""
    return samples


def broken_init(worker_id: int) -> None:
    """A worker_init_fn that fails."""
    raise LookupError(f"worker {worker_id} cannot start")
