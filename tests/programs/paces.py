"""Loaders whose best number of workers is known by construction."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from .datasets import Quick


class Computes(Quick):
    """Bound by the CPU: as fast as there are CPUs."""

    def __getitem__(self, index: int) -> torch.Tensor:
        data = bytes(64)
        for _ in range(8_000):
            data = hashlib.sha256(data).digest()
        return super().__getitem__(index)


class Sleeps(Quick):
    """Waits for a network: as fast as there are workers."""

    def __init__(self, length: int = 1000, seconds: float = 0.005) -> None:
        super().__init__(length)
        self.seconds = seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Locked(Sleeps):
    """One lock for all workers: they take turns."""

    def __init__(self, length: int = 1000) -> None:
        super().__init__(length, 0.01)
        self.lock = multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return super().__getitem__(index)


class OneDisk(Sleeps):
    """A disk that serves one at a time, by a lock on a file."""

    def __init__(self, folder: Path, length: int = 1000) -> None:
        super().__init__(length, 0.01)
        self.path = str(folder / "disk")

    def __getitem__(self, index: int) -> torch.Tensor:
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            return super().__getitem__(index)
        finally:
            os.close(fd)


class Moves(Quick):
    """Bound by memory: copies a lot of it for each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        block = torch.ones(8_000_000)
        for _ in range(2):
            block = block.clone()
        return super().__getitem__(index)


class Holds(Sleeps):
    """Each worker keeps much memory for itself."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.kept = bytearray(os.urandom(1 << 20) * 120)
        return super().__getitem__(index)


def loader(dataset: Quick, **options: object) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **options})  # type: ignore[arg-type]
