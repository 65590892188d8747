"""Datasets whose sample 5 never comes, each for another reason. The functions' names are asserted by the tests."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, IterableDataset

BAD = 5


class Late(Dataset):
    """Well-behaved, but for sample 5."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> object:
        if index == BAD:
            return self.get_stuck(index)
        return torch.full((2,), index)

    def get_stuck(self, index: int) -> object:
        raise NotImplementedError


class Loops(Late):
    """B1, B2: an endless loop."""

    def get_stuck(self, index: int) -> object:
        while True:
            index += 1


class Sleeps(Late):
    """B2: no CPU, no end."""

    def get_stuck(self, index: int) -> object:
        time.sleep(3600)
        return None


class Dawdles(Late):
    """Comes, but late."""

    def __init__(self, seconds: float, length: int = 64) -> None:
        super().__init__(length)
        self.seconds = seconds

    def get_stuck(self, index: int) -> object:
        time.sleep(self.seconds)
        return torch.full((2,), index)


class SwallowsAll(Late):
    """B2: a loop that catches whatever is thrown into it, three times."""

    def get_stuck(self, index: int) -> object:
        for _ in range(3):
            try:
                while True:
                    time.sleep(0.05)
            except BaseException:
                continue
        while True:
            time.sleep(0.05)


class OppositeLocks(Late):
    """B3: samples 4 and 5 take two locks in opposite order."""

    def __init__(self, method: str) -> None:
        super().__init__()
        context = multiprocessing.get_context(method)
        self.locks = {"first": context.Lock(), "second": context.RLock()}
        self.has_first, self.has_second = context.Event(), context.Event()

    def __getitem__(self, index: int) -> object:
        if index == BAD - 1:
            return self.take_first_then_second()
        return super().__getitem__(index)

    def take_first_then_second(self) -> object:
        with self.locks["first"]:
            self.has_first.set()
            self.has_second.wait(30)
            with self.locks["second"]:
                return torch.zeros(2)

    def get_stuck(self, index: int) -> object:
        with self.locks["second"]:
            self.has_second.set()
            self.has_first.wait(30)
            with self.locks["first"]:
                return torch.zeros(2)


class InheritedLock(Late):
    """B3: a lock that a thread of the kernel holds at the moment of the fork."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        locked = threading.Event()
        threading.Thread(target=self._hold, args=(locked,), name="holds-the-lock", daemon=True).start()
        locked.wait()

    def _hold(self, locked: threading.Event) -> None:
        with self.lock:
            locked.set()
            while getattr(self, "is_needed", True):
                time.sleep(0.05)

    def get_stuck(self, index: int) -> object:
        with self.lock:
            return torch.zeros(2)


class HeldByKernel(Late):
    """B3: a lock that the notebook itself has taken."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.lock = multiprocessing.get_context(method).Lock()

    def get_stuck(self, index: int) -> object:
        self.lock.acquire()
        return torch.zeros(2)


class FileLock(Late):
    """B3: a lock on a file, held by another process."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def get_stuck(self, index: int) -> object:
        import fcntl

        with open(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        return torch.zeros(2)


class ReadsFifo(Late):
    """B4: a file that says nothing."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def get_stuck(self, index: int) -> object:
        with open(self.path, "rb") as file:
            return file.read()


class ReadsSocket(Late):
    """B4: a server that does not answer; with a time limit Python polls, without it reads."""

    def __init__(self, port: int, timeout: float | None = None) -> None:
        super().__init__()
        self.port, self.timeout = port, timeout

    def get_stuck(self, index: int) -> object:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.settimeout(self.timeout)
            return connection.recv(1)


class WaitsForChild(Late):
    """B4: a program that does not end; its output is read, or only its end is awaited."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def get_stuck(self, index: int) -> object:
        return subprocess.run(["sleep", "3600"], capture_output=self.reads, check=False)


class HoldsGil(Late):
    """B5: C code that holds the GIL (PyDLL does not release it). Any signal ends a sleep of C, hence the loop."""

    def get_stuck(self, index: int) -> object:
        while True:
            ctypes.PyDLL(None).sleep(3600)


class StopsItself(Late):
    """B6: as by SIGSTOP from somewhere, or a debugger."""

    def get_stuck(self, index: int) -> object:
        os.kill(os.getpid(), signal.SIGSTOP)
        return torch.zeros(2)


class Unpicklable(Late):
    """B10: something in the sample cannot travel."""

    def __getitem__(self, index: int) -> object:
        if index == BAD:
            return {"index": index, "handle": threading.Lock()}
        return {"index": index, "handle": None}


class UnpicklableError(Late):
    """B10: the error itself cannot travel."""

    def get_stuck(self, index: int) -> object:
        class LocalError(Exception):
            pass

        raise LocalError("of sample 5")


class Large(Late):
    """B11: batches that do not fit into a small /dev/shm."""

    def __getitem__(self, index: int) -> object:
        return torch.zeros(1_000_000)


def as_list(samples: list[object]) -> list[object]:
    """A collate_fn that leaves samples as they are, unshared."""
    return samples


class Whole(Late):
    """Asked for whole batches by `__getitems__`; one by one inside."""

    def __getitems__(self, indices: list[int]) -> list[object]:
        assert isinstance(indices, list)
        return [self[index] for index in indices]

    def get_stuck(self, index: int) -> object:
        while True:
            index += 1


class AtOnce(Late):
    """Asked for whole batches by `__getitems__`, which does not go through them one by one."""

    def __getitems__(self, indices: list[int]) -> list[object]:
        if sorted(indices)[0] <= BAD <= sorted(indices)[-1]:
            time.sleep(3600)
        return [torch.zeros(2)] * len(indices)


class StuckStream(IterableDataset):
    """Each worker's stream ends in sample 5 of its own."""

    def __iter__(self) -> Iterator[object]:
        for number in range(64):
            if number == BAD:
                time.sleep(3600)
            yield torch.full((2,), number)


class ByName(Late):
    """Keys that are no numbers."""

    def __getitem__(self, key: object) -> object:
        if key == ("cat", BAD):
            time.sleep(3600)
        return torch.zeros(2)


class Keys:
    """A batch sampler that gives such keys."""

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        for start in range(0, 64, 2):
            yield [("cat", start), ("cat", start + 1)]

    def __len__(self) -> int:
        return 32


class UnpicklableKeys:
    """A batch sampler whose third batch cannot be sent to a worker."""

    def __iter__(self) -> Iterator[list[object]]:
        yield [0, 1]
        yield [2, 3]
        yield [threading.Lock(), 5]

    def __len__(self) -> int:
        return 3


def stuck_collate(samples: list[object]) -> object:
    """A collate_fn that gets stuck on the batch of sample 5."""
    if any(int(sample[0]) == BAD for sample in samples):
        time.sleep(3600)
    return torch.stack(samples)


def stuck_init(worker_id: int) -> None:
    """A worker_init_fn that gets stuck in worker 1."""
    if worker_id == 1:
        time.sleep(3600)
