"""Datasets with samples that raise, that end their worker or that never come; streams that can be resumed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Frail(Dataset):
    """Samples with faults; each is an ordinary one otherwise, and depends on its index alone."""

    def __init__(
        self,
        length: int = 100,
        raises: tuple[int, ...] = (),
        kills: tuple[int, ...] = (),
        hangs: tuple[int, ...] = (),
        seconds: float = 0.0,
        once: str = "",
    ) -> None:
        """With `once`, a folder, a sample kills or hangs a single time."""
        self.length, self.seconds, self.once = length, seconds, once
        self.raises, self.kills, self.hangs = raises, kills, hangs

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        if index in (*self.raises, *self.kills, *self.hangs) and self._is_due(index):
            self._fail(index)
        return torch.tensor([index, index * index % 97])

    def _is_due(self, index: int) -> bool:
        if not self.once or index in self.raises:
            return True
        try:
            os.close(os.open(os.path.join(self.once, str(index)), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _fail(self, index: int) -> None:
        if index in self.raises:
            raise ValueError(f"sample {index} is corrupt")
        if index in self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        while index in self.hangs:
            time.sleep(0.01)


class Exits(Frail):
    """Ends its worker by os._exit."""

    def _fail(self, index: int) -> None:
        os._exit(3)


class AsksForAll(Frail):
    """Takes a whole batch at once, so that nobody sees at which sample it is."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        places = list(indices)
        bad = [index for index in places if index in (*self.raises, *self.kills, *self.hangs)]
        for index in bad:
            self._fail(index)
        return [torch.tensor([index, index * index % 97]) for index in places]


def fragile_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """End the worker if sample 13 is there."""
    if any(int(sample[0]) == 13 for sample in samples):
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.stack(samples)


class Augmented(Frail):
    """Adds noise that is drawn in the worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        super().__getitem__(index)
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


class Resumable(IterableDataset):
    """Each worker has every n-th number; knows where it is, and can begin there."""

    def __init__(self, length: int = 60, kills: tuple[int, ...] = (), once: str = "") -> None:
        self.length, self._frail = length, Frail(length, kills=kills, once=once)
        self._next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while self._next * step + first < self.length:
            number = self._next * step + first
            self._next += 1
            yield self._frail[number]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class StopsAtItsEnd(Resumable):
    """Worker 1 has a single sample, and stops itself when it has sent it; the others have all the others."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        if get_worker_info().id != 1:
            yield from super().__iter__()
        elif self._next == 0:
            self._next = 1
            yield self._frail[1]
            self._next = 0

    def state_dict(self) -> dict[str, int]:
        if get_worker_info().id == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return super().state_dict()


class Counts(Frail):
    """Writes down which samples were asked for."""

    def __init__(self, folder: str, length: int = 40, raises: tuple[int, ...] = ()) -> None:
        super().__init__(length, raises)
        self.folder = folder

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(os.path.join(self.folder, "asked"), "a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


class NamedKeys(Dataset):
    """Samples are known by pairs of a word and a number."""

    def __getitem__(self, key: tuple[str, int]) -> torch.Tensor:
        if key == ("left", 3):
            raise KeyError(key)
        return torch.tensor([len(key[0]), key[1]])


class KeySampler:
    """Asks for them in batches."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        for number in range(6):
            yield [("left", number), ("right", number)]


class LiveState(IterableDataset):
    """Hands out its state itself, not a copy; or none that can be used."""

    def __init__(self, length: int, kind: str = "live") -> None:
        self.length, self.kind = length, kind
        self.state = {"padding": list(range(2000)), "next": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["next"] < self.length:
            number = self.state["next"]
            self.state["next"] += 1
            yield torch.full((2,), number)

    def state_dict(self) -> object:
        if self.kind == "raises":
            raise NotImplementedError
        return (lambda: None) if self.kind == "unpicklable" else self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


class Uneven(Resumable):
    """The first worker's stream is short."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info().id
        while self._next < (6 if worker == 0 else 30):
            number = self._next + 100 * worker
            self._next += 1
            time.sleep(0.02 * worker)
            yield torch.tensor([number, 0])
        self._next = 0


class ReadsAhead(AsksForAll):
    """Takes a key more than it loads, so that the slot is one ahead."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        keys = iter(indices)
        key, found = next(keys, None), []
        while key is not None:
            following = next(keys, None)
            found.append(self[key])
            key = following
        return found
