"""Loaders that keep one iterator for ever over a sampler that never ends, so that no epoch has to start workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.utils.data import DataLoader


class Repeat:
    """A sampler that begins anew whenever it ends."""

    def __init__(self, sampler: Iterable) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator:
        while True:
            yield from self.sampler


class MultiEpochsLoader(DataLoader):
    """In the manner of timm."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._DataLoader__initialized = False  # or torch forbids another sampler
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator:
        for _ in range(len(self)):
            yield next(self.iterator)


class InfiniteLoader(DataLoader):
    """In the manner of ultralytics: it can be told to begin anew, and ends its workers itself."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator:
        for _ in range(len(self)):
            yield next(self.iterator)

    def __del__(self) -> None:
        workers = getattr(getattr(self, "iterator", None), "_workers", ())
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        if workers:
            self.iterator._shutdown_workers()

    def reset(self) -> None:
        self.iterator = self._get_iterator()


class Holder:
    """Something of a loader's."""


class HeldElsewhere(InfiniteLoader):
    """Keeps its iterator not in an attribute, but in something that is in one."""

    def __init__(self, *arguments, how: str, **options) -> None:
        super().__init__(*arguments, **options)
        iterator = vars(self).pop("iterator")
        self.holder = Holder()
        if how == "object":
            self.holder.iterator = iterator
        elif how == "list":
            self.holder = [iterator]
        elif how == "closure":
            self.holder = lambda: iterator
        else:
            self.holder = (batch for batch in iterator)
        self.how = how

    def __iter__(self) -> Iterator:
        for _ in range(len(self)):
            yield next(self.find())

    def find(self) -> Iterator:
        ways = {
            "object": lambda: self.holder.iterator,
            "list": lambda: self.holder[0],
            "closure": lambda: self.holder(),
        }
        return ways.get(self.how, lambda: self.holder)()
