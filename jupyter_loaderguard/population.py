"""Frozen data of a census: kernels, loaders, workers and orphans as they are seen from outside."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelWorker:
    """A live worker of a kernel under guard, seen from outside."""

    worker_id: int
    pid: int
    started: float
    """Seconds since the epoch."""
    state: str
    """running, sleeping, blocked (uninterruptible) or stopped."""
    memory_bytes: int
    """Resident memory; pages that workers share are counted in each of them."""


@dataclass(frozen=True)
class KernelLoader:
    """A loader with workers, of a kernel under guard."""

    name: str
    dataset: str
    start_method: str | None
    cell: int | None
    workers: tuple[KernelWorker, ...]


@dataclass(frozen=True)
class KernelState:
    """A kernel under guard, or a script with a `guard()` block, seen from outside."""

    pid: int
    started: float
    notebook: str
    """The notebook's path where Jupyter tells it, else the kernel's id or the program."""
    loaders: tuple[KernelLoader, ...]


@dataclass(frozen=True)
class Orphan:
    """A worker whose kernel is dead."""

    pid: int
    mark: str
    """Its start time as the system has it: with the pid it means one process for ever."""
    started: float
    state: str
    memory_bytes: int
    recognised: str
    """ledger (its kernel had written it down) or marks (what torch does to every worker, and its kernel is gone)."""
    kernel_pid: int | None = None
    """This and the next three where they are known."""
    notebook: str | None = None
    dataset: str | None = None
    worker_id: int | None = None


@dataclass(frozen=True)
class Census:
    """The loader workers of this user on this machine, whatever kernel they are of."""

    taken: float
    kernels: tuple[KernelState, ...]
    orphans: tuple[Orphan, ...]
    notes: tuple[str, ...] = ()
    """What was left aside, and why; a line each."""

    def to_json(self) -> str:
        """Write it as JSON; docs/command_line.md says what is in it."""
        return json.dumps({"version": 1, **dataclasses.asdict(self)})


@dataclass(frozen=True)
class SweptProcess:
    """What became of one process in a sweep."""

    pid: int
    what: str
    """Who it was."""
    how: str
    """ended, gone (it had ended before), spared (it was not what it had been) or unkillable."""
