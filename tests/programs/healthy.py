"""Loaders with which nothing is wrong: the doctor must find nothing."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sqlite3
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import h5py
import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)


class Images(Dataset):
    """Decodes and resizes; OpenCV's pool is off in its workers."""

    def __init__(self, length: int = 600) -> None:
        pixels = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)
        self.jpeg = cv2.imencode(".jpg", pixels)[1]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = cv2.resize(cv2.imdecode(self.jpeg, cv2.IMREAD_COLOR), (96, 96))
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, index % 10


def without_pool(worker_id: int) -> None:
    cv2.setNumThreads(0)


class Texts(Dataset):
    """A few thousand records, as dicts of strings and numbers."""

    def __init__(self, length: int = 3000) -> None:
        self.records = [{"text": f"this is sentence {n} " * 8, "label": n % 3} for n in range(length)]
        self.log = logging.getLogger("texts")
        self.log.addHandler(logging.StreamHandler())

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict:
        record = self.records[index]
        words = record["text"].split()
        return {"ids": torch.tensor([len(word) for word in words]), "label": record["label"], "text": record["text"]}


class Ragged(Dataset):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(1 + index % 17)


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    return {"values": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), "lengths": lengths}


class Stream(IterableDataset):
    """Each worker has its share of the numbers."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, 4000, step):
            yield torch.full((16,), number)


class Mapped(Dataset):
    """A memory-mapped array, read only."""

    def __init__(self, path: str, is_copied: bool = True) -> None:
        self.array = np.load(path, mmap_mode="r")
        self.is_copied = is_copied

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int):
        row = self.array[index]
        return torch.from_numpy(row.copy()) if self.is_copied else row


class LazyHdf5(Dataset):
    """Opens its file in the worker, at the first use."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = None

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["rows"][index])


class ReopensHdf5(LazyHdf5):
    """Opens its file at once, and anew in each process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        self.file, self.pid = h5py.File(self.path), os.getpid()

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pid != os.getpid():
            self._open()
        return super().__getitem__(index)


class ReopensDatabase(Dataset):
    """The same with SQLite, told by get_worker_info."""

    def __init__(self, path: str) -> None:
        self.path, self.worker = path, -1
        self.connection = sqlite3.connect(path, check_same_thread=False)
        self.connection.execute("CREATE TABLE IF NOT EXISTS rows (value REAL)")

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        if info is not None and info.id != self.worker:
            self.worker, self.kept = info.id, self.connection
            self.connection = sqlite3.connect(self.path)
        return torch.tensor(self.connection.execute("SELECT COUNT(*) FROM rows").fetchone())


class ReadsAt(Dataset):
    """One descriptor for all, but reads at positions of its own: nobody moves anybody's."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb")  # noqa: SIM115

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(os.pread(self.file.fileno(), 32, 128 + 32 * index)), dtype=torch.float64)


class Nested(Dataset):
    """Dicts in dicts, and tuples."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict:
        return {"image": {"left": torch.ones(3, 8, 8), "right": torch.zeros(3, 8, 8)}, "box": (index, torch.rand(4))}


class Fresh(Dataset):
    """Makes a whole batch itself."""

    def __init__(self) -> None:
        self.table = torch.rand(4000, 8)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[10 * index : 10 * index + 10] * 2


class Waits(Dataset):
    """Waits for a slow disk or network: many workers are right."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((4,), index)


class Counts(Dataset):
    """Has a lock, and holds it for a moment only."""

    def __init__(self) -> None:
        self.seen = multiprocessing.get_context("fork").Value("q", 0)

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        with self.seen.get_lock():
            self.seen.value += 1
        return torch.full((4,), index)


class Caches(Dataset):
    """Grows by what it keeps, which is its purpose."""

    def __init__(self) -> None:
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = torch.full((2000,), float(index))
        return self.cache[index].clone()


class Threads(Dataset):
    """Loads with threads of its own, which Python started."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(2)
        packed = self.pool.map(zlib.compress, [bytes(200_000)] * 2)
        return torch.tensor([len(one) for one in packed])


def _rows(folder: Path) -> str:
    path = folder / "rows.npy"
    np.save(path, np.random.default_rng(0).random((4000, 64)))
    return str(path)


def _hdf5(folder: Path) -> str:
    path = folder / "rows.h5"
    with h5py.File(path, "w") as file:
        file["rows"] = np.random.default_rng(0).random((2000, 32))
    return str(path)


def _weighted() -> DataLoader:
    data = TensorDataset(torch.rand(50_000, 32), torch.arange(50_000))
    generator = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler([1.0] * 50_000, 20_000, generator=generator)
    return DataLoader(data, batch_size=32, sampler=sampler, num_workers=2, generator=generator)


HEALTHY: dict[str, Callable[[Path], DataLoader]] = {
    "images": lambda _: DataLoader(Images(), batch_size=8, num_workers=2, shuffle=True, worker_init_fn=without_pool),
    "texts of dicts": lambda _: DataLoader(Texts(), batch_size=16, num_workers=2, shuffle=True),
    "ragged": lambda _: DataLoader(Ragged(), batch_size=8, num_workers=2, collate_fn=pad),
    "iterable": lambda _: DataLoader(Stream(), batch_size=4, num_workers=2),
    "batch sampler": lambda _: DataLoader(
        Ragged(),
        batch_sampler=BatchSampler(RandomSampler(range(2000)), 8, drop_last=True),
        num_workers=2,
        collate_fn=pad,
    ),
    "memory map": lambda folder: DataLoader(Mapped(_rows(folder)), batch_size=16, num_workers=2, shuffle=True),
    "memory map in the kernel": lambda folder: DataLoader(Mapped(_rows(folder), False), batch_size=None),
    "lazy HDF5": lambda folder: DataLoader(LazyHdf5(_hdf5(folder)), batch_size=8, num_workers=2),
    "reopened HDF5": lambda folder: DataLoader(ReopensHdf5(_hdf5(folder)), batch_size=8, num_workers=2),
    "reopened database": lambda folder: DataLoader(
        ReopensDatabase(str(folder / "rows.sqlite")), batch_size=8, num_workers=2
    ),
    "reads at positions": lambda folder: DataLoader(ReadsAt(_rows(folder)), batch_size=8, num_workers=2),
    "persistent": lambda _: DataLoader(Nested(), batch_size=8, num_workers=2, persistent_workers=True),
    "pinned": lambda _: DataLoader(Nested(), batch_size=8, num_workers=2, pin_memory=True),
    "spawn": lambda _: DataLoader(Nested(), batch_size=8, num_workers=1, multiprocessing_context="spawn"),
    "batch_size=None": lambda _: DataLoader(Fresh(), batch_size=None, num_workers=2),
    "batch_size=None in the kernel": lambda _: DataLoader(Fresh(), batch_size=None),
    "no workers": lambda _: DataLoader(Nested(), batch_size=8, shuffle=True),
    "stream without workers": lambda _: DataLoader(Stream(), batch_size=4),
    "many workers that wait": lambda _: DataLoader(Waits(), batch_size=4, num_workers=6),
    "a lock, held briefly": lambda _: DataLoader(Counts(), batch_size=4, num_workers=3),
    "threads of its own": lambda _: DataLoader(Threads(), batch_size=4, num_workers=2),
    "a cache": lambda _: DataLoader(Caches(), batch_size=8, num_workers=2),
    "weighted tensors": lambda _: _weighted(),
}
