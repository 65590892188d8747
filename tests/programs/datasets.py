"""Datasets that behave, and that misbehave as real ones do."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import torch
from torch.utils.data import Dataset, IterableDataset


class Quick(Dataset):
    """Tiny samples, at once."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index)


class Slow(Quick):
    """A sample takes a while, but comes."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().__getitem__(index)


class Stuck(Quick):
    """Never returns, and swallows every exception."""

    def __getitem__(self, index: int) -> torch.Tensor:
        while True:
            try:
                time.sleep(0.05)
            except BaseException:
                continue


class Stubborn(Stuck):
    """Ignores SIGTERM as well."""

    def __getitem__(self, index: int) -> torch.Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().__getitem__(index)


class HoldsGil(Quick):
    """Sits in C code that holds the GIL (PyDLL does not release it)."""

    def __getitem__(self, index: int) -> torch.Tensor:
        ctypes.PyDLL(None).sleep(600)
        raise AssertionError("not reached")


class StartsProcesses(Quick):
    """Starts a process that starts another one, in sessions of their own, and writes down their pids."""

    def __init__(self, folder: str, length: int = 1000, stuck: bool = False) -> None:
        super().__init__(length)
        self.folder = folder
        self.stuck = stuck

    def __getitem__(self, index: int) -> torch.Tensor:
        marker = os.path.join(self.folder, f"{os.getpid()}")
        if not os.path.exists(marker):
            code = (
                "import subprocess, time\n"
                "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
                "time.sleep(600)\n"
            )
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
            grandchild = int(child.stdout.readline())
            with open(marker + ".part", "w") as file:
                file.write(f"{child.pid} {grandchild}")
            os.rename(marker + ".part", marker)
        if self.stuck:
            time.sleep(600)
        return super().__getitem__(index)


class Stream(IterableDataset):
    """An iterable dataset; its workers end one after the other."""

    def __init__(self, length: int = 100) -> None:
        self.length = length

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.full((4,), index) for index in range(first, self.length * (first + 1), step))


class Rude(Quick):
    """Raises wherever a polite look would call it."""

    def __len__(self) -> int:
        raise OSError("no length today")

    def __repr__(self) -> str:
        raise ValueError("no repr today")


class Big(Quick):
    """Samples that fill queues and shared memory."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(256, 1024)


class StubbornProcesses(Stubborn):
    """Starts a process of its own first."""

    def __getitem__(self, index: int) -> torch.Tensor:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        return super().__getitem__(index)


class Holds(Dataset):
    """Holds something large, and gives its keys back."""

    def __init__(self, data: object) -> None:
        self.data = data

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index
