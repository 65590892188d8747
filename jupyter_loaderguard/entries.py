"""What a file of the ledger says: entries of kernels, their loaders and workers; trusting nothing that is read.

Named tuples, and not dataclasses, because these are made six times slower, while the extension loads.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from .processes import is_alive, is_gone

VERSION = 1
LONGEST_TEXT = 300


class Unfit(Exception):
    """Tell why a file is not used."""


class WorkerEntry(NamedTuple):
    """A worker, as its kernel wrote it down."""

    worker_id: int
    pid: int
    mark: str
    """Its start time, as exactly as the system has it."""
    started: float


class LoaderEntry(NamedTuple):
    """A loader with workers."""

    name: str
    dataset: str
    start_method: str | None
    cell: int | None
    workers: tuple[WorkerEntry, ...]


class KernelEntry(NamedTuple):
    """A process under guard: a kernel, or a script with a `guard()` block."""

    pid: int
    mark: str
    started: float
    notebook: str
    """The notebook's path where Jupyter tells it, else the kernel's id or the script."""
    reaper: tuple[int, str] | None
    """Its reaper, by pid and start time, if it is known."""
    loaders: tuple[LoaderEntry, ...]

    def is_alive(self) -> bool:
        """Tell whether it still runs, or may do so."""
        return not is_gone(self.pid, self.mark)

    def is_spent(self) -> bool:
        """Tell whether it and all its workers have certainly ended."""
        workers = [worker for loader in self.loaders for worker in loader.workers]
        return not self.is_alive() and all(is_gone(worker.pid, worker.mark) for worker in workers)

    def workers(self) -> list[tuple[LoaderEntry, WorkerEntry]]:
        """Return those of its workers that still run, each with its loader."""
        found = [(loader, worker) for loader in self.loaders for worker in loader.workers]
        return [(loader, worker) for loader, worker in found if is_alive(worker.pid, worker.mark)]

    def to_json(self) -> bytes:
        """Write it down; `parse` reads it back."""
        loaders = [
            {**loader._asdict(), "workers": [worker._asdict() for worker in loader.workers]} for loader in self.loaders
        ]
        return json.dumps({"version": VERSION, **self._asdict(), "loaders": loaders}).encode("ascii")


def parse(text: bytes, pid: int, mark: str) -> KernelEntry:
    """Return what a file says, if it says what the file of this process would."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise Unfit("it is not JSON") from None
    if not isinstance(data, dict):
        raise Unfit("it is not a JSON object")
    if data.get("version") != VERSION:
        raise Unfit(f"its version is not {VERSION}")
    if (data.get("pid"), data.get("mark")) != (pid, mark):
        raise Unfit("it does not say what its name says")
    return KernelEntry(
        pid=as_pid(pid),
        mark=as_mark(mark),
        started=_seconds(data.get("started")),
        notebook=_text(data.get("notebook")),
        reaper=_reaper(data.get("reaper")),
        loaders=tuple(_loader(loader) for loader in _list(data.get("loaders"))),
    )


def _loader(data: Any) -> LoaderEntry:
    if not isinstance(data, dict):
        raise Unfit("a loader in it is not an object")
    method, cell = data.get("start_method"), data.get("cell")
    return LoaderEntry(
        name=_text(data.get("name")),
        dataset=_text(data.get("dataset")),
        start_method=None if method is None else _text(method),
        cell=None if cell is None else _number(cell),
        workers=tuple(_worker(worker) for worker in _list(data.get("workers"))),
    )


def _worker(data: Any) -> WorkerEntry:
    if not isinstance(data, dict):
        raise Unfit("a worker in it is not an object")
    pid = as_pid(data.get("pid"))
    if pid == os.getpid():
        raise Unfit("a worker in it is this very process")
    return WorkerEntry(
        worker_id=_number(data.get("worker_id")),
        pid=pid,
        mark=as_mark(data.get("mark")),
        started=_seconds(data.get("started")),
    )


def _reaper(data: Any) -> tuple[int, str] | None:
    if data is None:
        return None
    pid, mark = data if isinstance(data, list) and len(data) == 2 else (None, None)
    return as_pid(pid), as_mark(mark)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Unfit("a list in it is missing")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise Unfit("a number in it is none")
    return value


def as_pid(value: Any) -> int:
    """Return a pid, if it can be one."""
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise Unfit("a pid in it is none")
    return value


def as_mark(value: Any) -> str:
    """Return the start time of a process, if it can be one."""
    if not isinstance(value, str) or not 1 <= len(value) <= 40 or value.strip("0123456789."):
        raise Unfit("a start time in it is none")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e12 < value < 1e12:
        raise Unfit("a time in it is none")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit("a name in it is none")
    return value[:LONGEST_TEXT]
