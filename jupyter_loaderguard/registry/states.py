"""How loaders and workers are at this moment, as frozen data."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from .. import usage
from ..entries import LONGEST_TEXT, LoaderEntry, WorkerEntry
from ..model import LoaderState, WorkerState
from ..processes import Handle
from ..samples import key_text
from ..worker.slot import CAPS, IDLE, LOADING, PHASES, RESUMING, Progress
from .record import Record


def state_of(record: Record, name: str, in_use: bool) -> LoaderState:
    """Look at one loader, also if it is gone."""
    iterator = record.iterator()
    lengths, since = record.lengths, record.waiting_since
    delivered = record.control.count_delivered(iterator) if iterator is not None else record.batches
    ready = record.control.count_ready(iterator) if iterator is not None and record.workers else 0
    waited = record.wait_seconds + (time.perf_counter() - since if since is not None else 0.0)
    return LoaderState(
        loader_id=record.loader_id,
        name=name,
        dataset=record.dataset,
        dataset_length=lengths[0],
        batches_total=lengths[1],
        cell=record.cell.number if record.cell else None,
        start_method=record.start_method,
        persistent=record.is_persistent,
        activity=record.activity(),
        in_use=in_use,
        stalled=record.is_stalled,
        started=record.started,
        batches=record.batches,
        wait_seconds=waited,
        batches_before=max(0, record.batches - delivered),
        ready=ready,
        capped=_capped(record),
        capacity=record.prefetch * len(record.workers),
        workers=tuple(
            _worker_state(record, number, worker, born, ready)
            for number, (worker, born) in enumerate(zip(record.workers, record.births, strict=False))
        ),
    )


def _worker_state(record: Record, number: int, worker: Handle, born: float, ready: int) -> WorkerState:
    slot = record.slots[number] if number < len(record.slots) else None
    progress = slot.read() if slot is not None else None
    state = WorkerState(number, worker.pid, born, worker.state(), usage.resident_bytes(worker.pid))
    if state.state == "dead" and record.control.has_finished(record.iterator(), number) and not record.is_broken:
        return replace(state, word="done")
    if progress is None or state.state == "dead":
        return replace(state, word=state.state)
    index, words = record.sample_of(progress)
    is_loading = progress.phase == LOADING
    return replace(
        state,
        phase=PHASES[progress.phase],
        word=_word(record, number, state, progress, ready),
        sample=_sample(index, words) if is_loading else None,
        sample_seconds=max(0.0, time.monotonic() - progress.since),
        samples=progress.samples + max(0, progress.position if is_loading else 0),
    )


def entry_of(record: Record) -> LoaderEntry:
    """Say what the ledger keeps of a loader."""
    born = list(zip(record.workers, record.births, strict=False))
    return LoaderEntry(
        name=(record.last_name or f"{record.loader_type} #{record.loader_id}")[:LONGEST_TEXT],
        dataset=record.dataset[:LONGEST_TEXT],
        start_method=record.start_method,
        cell=record.cell.number if record.cell else None,
        workers=tuple(
            WorkerEntry(number, worker.pid, worker.mark, started)
            for number, (worker, started) in enumerate(born)
            if worker.mark is not None
        ),
    )


def _capped(record: Record) -> tuple[str, ...]:
    """Return the native thread pools that were made smaller in the workers."""
    found = [slot.read_text(CAPS) for slot in record.slots if slot is not None]
    caps = {name: sizes for one in found if one for name, sizes in one.items()}
    return tuple(f"{name} {before} → {now}" for name, (before, now) in caps.items())


def _sample(index: Any, words: str) -> str | None:
    """Say in a few words which sample a worker loads; None if that changes at this moment."""
    if index is not None:
        return key_text(index)
    return "in collate_fn" if words.startswith("in collate_fn") else None


def _word(record: Record, number: int, state: WorkerState, progress: Progress, ready: int) -> str:
    """Say in a word how a worker is."""
    if state.state == "stopped":
        return "stopped"
    if record.is_stalled and number in record.late_workers:
        return "stalled"
    if progress.phase == IDLE and record.is_in_epoch and (ready or record.waiting_since is None):
        return "full"
    return "loading" if progress.phase == RESUMING else PHASES[progress.phase]
