"""The census: who is alive on this machine of this user's, by the ledger and by the workers' own marks."""

from __future__ import annotations

import time

from . import ledger
from .entries import KernelEntry, LoaderEntry, WorkerEntry
from .orphans import STRANGE_PROC, Look
from .population import Census, KernelLoader, KernelState, KernelWorker, Orphan
from .processes import has_own_proc, is_alive, state_of
from .usage import resident_bytes


def take() -> Census:
    """Look at all kernels under guard, their loaders and workers, and at the workers of dead kernels."""
    entries, notes = ledger.read()
    living = [entry for entry in entries if entry.is_alive()]
    look = Look()
    orphans = find_written(entries, look)
    known = {worker.pid for entry in living for _, worker in entry.workers()} | {orphan.pid for orphan in orphans}
    found, doubts = look.find(known)
    if not has_own_proc():
        doubts.append(f"loaderguard: {STRANGE_PROC}.")
    return Census(
        taken=time.time(),
        kernels=tuple(_kernel_state(entry) for entry in living),
        orphans=tuple(orphans + found),
        notes=tuple(notes + doubts),
    )


def find_written(entries: list[KernelEntry], look: Look) -> list[Orphan]:
    """Return the live workers that dead kernels had written down."""
    living = [entry for entry in entries if entry.is_alive()]
    claimed = {(entry.pid, entry.mark) for entry in living}
    claimed |= {(worker.pid, worker.mark) for entry in living for _, worker in entry.workers()}
    found = {
        worker.pid: _orphan(entry, loader, worker)
        for entry in entries
        if entry not in living
        for loader, worker in entry.workers()
        if (worker.pid, worker.mark) not in claimed and look.is_left(worker.pid)
    }
    return [orphan for orphan in found.values() if is_alive(orphan.pid, orphan.mark)]


def _orphan(entry: KernelEntry, loader: LoaderEntry, worker: WorkerEntry) -> Orphan:
    return Orphan(
        pid=worker.pid,
        mark=worker.mark,
        started=worker.started,
        state=state_of(worker.pid),
        memory_bytes=resident_bytes(worker.pid),
        recognised="ledger",
        kernel_pid=entry.pid,
        notebook=entry.notebook,
        dataset=loader.dataset,
        worker_id=worker.worker_id,
    )


def _kernel_state(entry: KernelEntry) -> KernelState:
    workers: dict[LoaderEntry, list[WorkerEntry]] = {}
    for loader, worker in entry.workers():
        workers.setdefault(loader, []).append(worker)
    loaders = tuple(_loader_state(loader, living) for loader, living in workers.items())
    return KernelState(entry.pid, entry.started, entry.notebook, loaders)


def _loader_state(loader: LoaderEntry, workers: list[WorkerEntry]) -> KernelLoader:
    seen = tuple(
        KernelWorker(one.worker_id, one.pid, one.started, state_of(one.pid), resident_bytes(one.pid)) for one in workers
    )
    return KernelLoader(loader.name, loader.dataset, loader.start_method, loader.cell, seen)
