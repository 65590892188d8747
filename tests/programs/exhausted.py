"""A script that has no descriptor left when its loader ends: `python -m tests.programs.exhausted HARD_LIMIT WHERE FOLDER`.

Prints what it caught, which children and children's children are left, and whether its limit is as it was.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from tests.programs.datasets import Quick, StartsProcesses

LIMIT = 200


def _take_all() -> list[int]:
    taken = []
    while True:
        try:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return taken


def _is_running(pid: int) -> bool:
    """Tell it from one that only waits for init."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(hard: int, where: str, folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    dataset = StartsProcesses(folder) if where == "children" else Quick(1000)
    taken: list[int] = []
    caught = "nothing"
    try:
        with lg.guard(stall_seconds=20, on_stall="raise"):
            for _ in DataLoader(dataset, num_workers=2):
                taken += _take_all()
                if where != "wait":
                    raise ValueError("mine")
    except Exception as error:
        caught = f"{type(error).__name__}: {error}"
    finally:
        for fd in taken:
            os.close(fd)
    left = [child.name() for child in psutil.Process().children(recursive=True)]
    started = [int(pid) for file in Path(folder).iterdir() for pid in file.read_text().split()]
    running = [pid for pid in started if _is_running(pid)]
    print(caught)
    print(left, running, resource.getrlimit(resource.RLIMIT_NOFILE) == (LIMIT, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
