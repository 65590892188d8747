"""LG103: an open file, socket or database that the workers share because it was opened before they were forked.

A forked worker inherits the descriptor, and with it the position in the file: the others, and the kernel, move it
between its seek and its read. Measured: what can be reached from dataset, collate_fn and worker_init_fn, without
running code of theirs. For a file also its position before and after the run: one that workers read by os.pread, or
not at all, or under a lock that they share (not the one inside a shared value), is
healthy. Files that are opened by each worker, memory maps,
and databases in memory are healthy too. The positions are put back after the run, also after one without workers,
which is a fork too. A loader that reads from a queue, a pipe or a connected socket is not run: what is taken from
these cannot be put back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from ...lending.handles import OpenHandle, find_open, link_target, put_back
from ...model import Finding
from ...reach import visit
from ..check import Check, Moment
from ..trial import Trial


class HandlesCheck(Check):
    """See the docstring of this file."""

    code = "LG103"
    looks_for = "shared files and connections"

    def __init__(self, subject: Any) -> None:
        super().__init__(subject)
        self._handles: list[OpenHandle] = []
        self._samplers: list[OpenHandle] = []
        """Of the sampler, which runs in the kernel: put back, but nobody shares them."""
        self._moved: dict[int, int] = {}
        self._reopened: set[str] = set()
        """Files that a worker has opened itself, too."""

    def refuses_run(self) -> str | None:
        """Find what is open; refuse if a run would take from it what cannot be put back."""
        self._handles, emptied = find_open(self.subject.roots)
        loader = self.subject.loader
        self._samplers, more = find_open({"batch_sampler": loader.batch_sampler, "sampler": loader.sampler})
        for path, what in (emptied + more)[:1]:
            return f"{path} is {what}, and what a run takes from it would be lost"
        return None

    def look(self, moment: Moment) -> None:
        """See which files the workers have opened themselves."""
        for file in {handle.file for handle in self._handles if handle.file} - self._reopened:
            ours = _descriptors_of(file, "self")
            if ours and all(_descriptors_of(file, worker.pid) - ours for worker in moment.workers):
                self._reopened.add(file)

    def after(self) -> None:
        """See which positions have moved, and put them back."""
        self._moved = put_back(self._handles + self._samplers)

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return one finding with all handles that are shared."""
        if not self.subject.is_forked:
            return []
        shared = [handle for handle in self._handles if handle.fd is None or handle.fd in self._moved]
        shared = [one for one in shared if not (one.file and (one.is_reopened or one.file in self._reopened))]
        locks, inner = _locks(self.subject.roots)
        if locks:
            shared = [handle for handle in shared if handle.fd is None]
        shared = list({handle.what: handle for handle in reversed(shared)}.values())[::-1]  # a file has several faces
        if not shared:
            return []
        workers = self.subject.workers
        evidence = " ".join(self._words(handle) for handle in shared)
        if inner and any(handle.fd is not None for handle in shared):
            evidence += f" The lock in {inner[0]} belongs to its own value, and was not taken for a lock of the file."
        title = f"{shared[0].path} was opened in the kernel and is shared by {workers} forked workers"
        if workers == 1:
            title = f"{shared[0].path} was opened in the kernel and is shared with a forked worker"
        return self.finding("warning", title, evidence, shared[0].fix)

    def _words(self, handle: OpenHandle) -> str:
        words = f"{handle.path} is {handle.what}."
        if handle.fd in self._moved:
            moved = f"{handle.position:,} to {self._moved[handle.fd]:,}"
            words += f" All processes have one position in it: the workers moved the kernel's from {moved}."
        return words


def _descriptors_of(file: str, pid: int | str) -> set[int]:
    """Return the descriptors that a process has of a file; none if it has ended or the system hides them."""
    folder = f"/proc/{pid}/fd"
    try:
        fds = os.listdir(folder)
    except OSError:
        return set()
    return {int(fd) for fd in fds if link_target(f"{folder}/{fd}") == file}


def _locks(roots: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the paths of the locks that workers share, and of shared values that have one of their own."""
    locks: list[str] = []
    values: list[str] = []

    def note(path: str, thing: Any) -> bool:
        synchronize, shared = (sys.modules.get(f"multiprocessing.{name}") for name in ("synchronize", "sharedctypes"))
        if shared is not None and issubclass(type(thing), shared.SynchronizedBase):
            values.append(path)
            return True
        if synchronize is not None and issubclass(type(thing), (synchronize.Lock, synchronize.RLock)):
            locks.append(path)
        return False

    visit(roots, note)
    return locks, values
