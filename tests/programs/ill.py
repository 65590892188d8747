"""Loaders with one thing wrong each, by the code that the doctor must find, and nothing else."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import h5py
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from jupyter_loaderguard.machine import usable_cpus
from jupyter_loaderguard.worker.threads import find_pools

from .datasets import Quick
from .healthy import _hdf5, _rows


class Raises(Quick):
    """One sample cannot be loaded."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ValueError("sample 5 is broken")
        return super().__getitem__(index)


class Dies(Quick):
    """One sample kills the process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Unsendable(Quick):
    """A sample that cannot be pickled: without the guard the loop would wait for ever."""

    def __getitem__(self, index: int) -> object:
        return lambda: index


def ask_for_threads(worker_id: int) -> None:
    """Undo the guard's cap of OpenCV's pool."""
    cv2.setNumThreads(cv2.getNumberOfCPUs())


class Blurs(Dataset):
    """Uses OpenCV, with its pool of threads where that is not capped."""

    def __init__(self) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 255, (1000, 1400, 3), np.uint8)

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(cv2.resize(cv2.GaussianBlur(self.pixels, (21, 21), 3), (64, 64)))


class Multiplies(Blurs):
    """Uses numpy's linear algebra, with its pool of threads."""

    def __init__(self) -> None:
        self.matrix = np.random.default_rng(0).random((400, 400))

    def __getitem__(self, index: int) -> torch.Tensor:
        for pool in find_pools():
            pool.resize(os.cpu_count() or 1)  # undo the guard's cap
        return torch.from_numpy((self.matrix @ self.matrix)[:8, :8].copy())


class Reader:
    """A file, opened at once."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb")  # noqa: SIM115


class SharesFile(Dataset):
    """Reads from a file that was opened before the fork."""

    def __init__(self, path: str) -> None:
        self.reader = Reader(path)

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reader.file.seek(128 + 512 * index)
        return torch.frombuffer(bytearray(self.reader.file.read(512)), dtype=torch.float64)


class SharesFileAndCounts(SharesFile):
    """Has a lock too, but one that guards something else."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.seen = multiprocessing.get_context("fork").Value("q", 0)


class SharesHdf5(SharesFile):
    """The same with HDF5."""

    def __init__(self, path: str) -> None:
        self.file = h5py.File(path)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.file["rows"][index])


class SharesDatabase(SharesFile):
    """The same with SQLite."""

    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path, check_same_thread=False)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.connection.execute("SELECT value FROM rows WHERE number = ?", (index,)).fetchone()
        return torch.tensor(row)


class SharesSocket(SharesFile):
    """The same with a socket."""

    def __init__(self, path: str) -> None:
        self.near, self.far = socket.socketpair()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.near.sendall(b"?")
        return torch.tensor(len(self.far.recv(1)))


class Computes(Quick):
    """Keeps a CPU busy."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(sum(range(300_000)))


class HoldsMuch(Quick):
    """Holds an array that does not fit into memory once per worker; its pages are never touched here."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.images = np.empty(size, np.uint8)


class HoldsObjects(Dataset):
    """Holds its data as Python objects."""

    def __init__(self, kind: str, length: int = 300_000) -> None:
        if kind == "list":
            self.items = [f"a line of text with the number {number}, somewhere" for number in range(length)]
        else:
            self.items = {number: (number, f"the text of {number}") for number in range(length)}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(len(self.items[index]))


class ManyTensors(Quick):
    """A sample of many tensors."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {f"feature{number}": torch.ones(4) for number in range(40)}


class TakesTurns(Quick):
    """Does its work under a lock that all workers share."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.lock = multiprocessing.get_context("fork").Lock()
        self.work = work

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            self.work()
        return super().__getitem__(index)


class LocksFile(Quick):
    """Does its work under a lock on a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            sleep()
        return super().__getitem__(index)


class Large(Quick):
    """Batches that are large."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(BATCH_BYTES, dtype=torch.uint8)


BATCH_BYTES = 32 << 20


def sleep() -> None:
    time.sleep(0.01)


def compute() -> None:
    sum(range(1_500_000))


@dataclass(frozen=True)
class Ill:
    """One of them."""

    name: str
    code: str
    make: Callable[[Path], DataLoader]
    words: tuple[str, ...]
    """What title and evidence must say."""


def _database(folder: Path) -> str:
    path = folder / "rows.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, value REAL)")
        connection.executemany("INSERT INTO rows VALUES (?, ?)", [(number, 0.5) for number in range(2000)])
    connection.close()
    return str(path)


def _too_much_memory(_: Path) -> DataLoader:
    size = int(psutil.virtual_memory().available * 0.7)
    return DataLoader(HoldsMuch(size), num_workers=2, multiprocessing_context="spawn")


def _too_many_descriptors(_: Path) -> DataLoader:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return DataLoader(ManyTensors(), num_workers=2, prefetch_factor=limit // 80 + 1)


def _too_much_shm(_: Path) -> DataLoader:
    shm = os.statvfs("/dev/shm")
    ahead = shm.f_blocks * shm.f_frsize // BATCH_BYTES // 2 + 2
    return DataLoader(Large(), batch_size=None, num_workers=2, prefetch_factor=ahead)


def _shared_table(_: Path) -> DataLoader:
    return DataLoader(TensorDataset(torch.rand(2000, 8).share_memory_()), batch_size=None, num_workers=2)


def _persistent_views(_: Path) -> DataLoader:
    return DataLoader(TensorDataset(torch.rand(2000, 8)), batch_size=None, num_workers=1, persistent_workers=True)


CPUS = usable_cpus()
SEVERAL = max(2, CPUS)
ILL = [
    Ill("a broken sample", "LG100", lambda _: DataLoader(Raises(), num_workers=2), ("ValueError", "sample 5")),
    Ill("the same in the kernel", "LG100", lambda _: DataLoader(Raises()), ("ValueError", "sample 5 is broken")),
    Ill("a deadly sample", "LG100", lambda _: DataLoader(Dies(), num_workers=2), ("SIGKILL",)),
    Ill(
        "an unsendable batch",
        "LG100",
        lambda _: DataLoader(Unsendable(), batch_size=None, num_workers=2),
        ("pickle", "could not send batch"),
    ),
    Ill(
        "OpenCV's pool",
        "LG101",
        lambda _: DataLoader(Blurs(), num_workers=SEVERAL, worker_init_fn=ask_for_threads),
        ("OpenCV", "busy threads"),
    ),
    Ill("OpenBLAS's pool", "LG101", lambda _: DataLoader(Multiplies(), num_workers=SEVERAL), ("OpenBLAS", "CPUs")),
    Ill(
        "a shared file",
        "LG103",
        lambda folder: DataLoader(SharesFile(_rows(folder)), num_workers=2),
        ("dataset.reader.file", "rows.npy", "2 forked workers", "from 0 to"),
    ),
    Ill(
        "a shared file and a counter",
        "LG103",
        lambda folder: DataLoader(SharesFileAndCounts(_rows(folder)), num_workers=2),
        ("dataset.reader.file", "from 0 to", "The lock in dataset.seen"),
    ),
    Ill(
        "shared HDF5",
        "LG103",
        lambda folder: DataLoader(SharesHdf5(_hdf5(folder)), num_workers=2),
        ("dataset.file", "rows.h5", "descriptor"),
    ),
    Ill(
        "a shared database",
        "LG103",
        lambda folder: DataLoader(SharesDatabase(_database(folder)), num_workers=2),
        ("dataset.connection", "rows.sqlite"),
    ),
    Ill("a shared socket", "LG103", lambda _: DataLoader(SharesSocket(""), num_workers=2), ("dataset.near", "socket")),
    Ill(
        "too many workers",
        "LG104",
        lambda _: DataLoader(Computes(100_000), num_workers=2 * CPUS + 1),
        (f"{2 * CPUS + 1} workers", f"may use {CPUS}"),
    ),
    Ill("too much memory", "LG105", _too_much_memory, ("dataset.images", "2 workers ×", "available")),
    Ill(
        "a list of strings",
        "LG106",
        lambda _: DataLoader(HoldsObjects("list"), batch_size=16, num_workers=2, shuffle=True),
        ("dataset.items", "list of 300,000", "per 1,000"),
    ),
    Ill(
        "a dict of tuples",
        "LG106",
        lambda _: DataLoader(HoldsObjects("dict"), batch_size=16, num_workers=2, shuffle=True),
        ("dataset.items", "dict of 300,000", "per 1,000"),
    ),
    Ill(
        "views",
        "LG107",
        lambda _: DataLoader(TensorDataset(torch.rand(2000, 8)), batch_size=None),
        ("batch[0]", "dataset.tensors[0]", "the same memory"),
    ),
    Ill("views of shared memory", "LG107", _shared_table, ("batch[0]", "dataset.tensors[0]", "shared memory")),
    Ill("views, persistent", "LG107", _persistent_views, ("batch[0]", "dataset.tensors[0]", "next epoch")),
    Ill("too many descriptors", "LG108", _too_many_descriptors, ("40 tensors", "2 workers", "limit")),
    Ill(
        "a lock around a wait",
        "LG109",
        lambda _: DataLoader(TakesTurns(sleep), num_workers=4),
        ("4 workers do the work of 1", "dataset.lock"),
    ),
    Ill(
        "a lock around work",
        "LG109",
        lambda _: DataLoader(TakesTurns(compute), num_workers=2),
        ("2 workers do the work of 1", "dataset.lock"),
    ),
    Ill(
        "a lock on a file",
        "LG109",
        lambda folder: DataLoader(LocksFile(_rows(folder)), num_workers=3),
        ("3 workers do the work of 1", "rows.npy"),
    ),
    Ill("too little shared memory", "LG110", _too_much_shm, ("2 workers", "34 MB per batch", "/dev/shm")),
]
