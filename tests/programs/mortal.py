"""Datasets whose workers die, or run out of something."""

from __future__ import annotations

import os
import signal

import torch
from torch.utils.data import Dataset

BAD = 9


class Mortal(Dataset):
    """Sixteen samples, of which the ninth is fatal."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD:
            self.die()
        return torch.full((4,), index)

    def die(self) -> None:
        """Do what ends the worker."""


class Dies(Mortal):
    """By a signal."""

    def __init__(self, name: str) -> None:
        self.name = name

    def die(self) -> None:
        os.kill(os.getpid(), getattr(signal, self.name))


class Leaves(Mortal):
    """By its own decision."""

    def die(self) -> None:
        os._exit(3)


class Heavy(Dataset):
    """Four megabytes each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1_048_576)


class Hungry(Mortal):
    """Asks for more memory than it may have."""

    def die(self) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
        bytearray(2**34)


class FullDisk(Mortal):
    """Writes to a disk without space."""

    def die(self) -> None:
        raise OSError(28, "No space left on device", "/data/cache/x.npy")


class OpensAll(Mortal):
    """Opens files until it may not."""

    def die(self) -> None:
        import resource

        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (len(os.listdir("/proc/self/fd")) + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        )
        kept = []
        try:
            while True:
                kept.append(os.open(os.devnull, os.O_RDONLY))
        finally:
            for fd in kept:
                os.close(fd)
