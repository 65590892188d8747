"""What is late in a stall, and what it is doing: measured at that moment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from . import frames, traces, waits
from .model import Frame, Holder, LateWorker, Stall
from .processes import Handle
from .registry import Record, registry
from .samples import key_text, plain_list, span
from .waits import Doing
from .worker.locks import LockPlace, find_locks, has_taken
from .worker.slot import IDLE, LOADING, LOCKS, UNSENT, Progress, Slot

_KINDS = {
    waits.LOCK: "waiting for a lock",
    waits.FILE: "waiting for a file",
    waits.SOCKET: "waiting for a socket",
    waits.CHILD: "waiting for a child process",
    waits.PIPE: "waiting for a pipe",
    waits.SYSTEM: "waiting in a system call",
    waits.GONE: "gone",
    waits.UNKNOWN: "waiting",
}


class Examiner:
    """Looks at one loader whose batch is late."""

    def __init__(self, record: Record, place_of: Callable[[str], str]) -> None:
        self._record = record
        self._place_of = place_of
        self._progress: dict[int, Progress] = {}

    def examine(self, seconds: float, limit: float) -> Stall | None:
        """Return what is late; None if the loader is gone."""
        record = self._record
        iterator = record.iterator()
        if iterator is None:
            return None
        batch, awaited = record.control.awaited(iterator)
        is_in_sampler = record.control.is_asking_sampler(frames.stack_of(record.thread))
        if is_in_sampler or not record.workers:
            late = [self._kernel(batch, seconds, is_in_sampler)]
        else:
            late = self._late_workers(awaited, batch, limit)
        return Stall(
            loader_id=record.loader_id,
            loader=registry.name(record),
            dataset=record.dataset,
            cell=record.last_cell.number if record.last_cell else None,
            batch=batch,
            batches_total=record.lengths[1],
            seconds=seconds,
            limit_seconds=limit,
            workers=tuple(late),
        )

    # -- workers --------------------------------------------------------------------------------

    def _late_workers(self, awaited: list[int], batch: int | None, limit: float) -> list[LateWorker]:
        record = self._record
        now = time.monotonic()
        self._progress = {number: slot.read() for number, slot in enumerate(record.slots) if slot is not None}
        stuck = [
            number
            for number, progress in self._progress.items()
            if progress.phase == LOADING and now - progress.since >= limit
        ]
        if batch is None:  # between two epochs every worker has to answer
            awaited = [number for number in awaited if number in stuck] or awaited
        doing, holders = self._look_at(self._suspects(awaited, stuck))
        chosen, pids = list(doing), {number: handle.pid for number, handle in enumerate(record.workers)}
        texts = traces.ask([(record.workers[number], self._slot(number)) for number in chosen])
        frames = {number: traces.parse(texts[pids[number]], self._place_of) or [[]] for number in chosen}
        return [self._late_worker(number, doing.get(number), holders.get(number), frames, awaited) for number in chosen]

    def _look_at(self, suspects: list[int]) -> tuple[dict[int, Doing], dict[int, int | None]]:
        """Return what workers do, and who holds the locks that they wait for; and the same of the holders."""
        doing: dict[int, Doing] = {}
        holders: dict[int, int | None] = {}
        while suspects:
            pids = {number: self._record.workers[number].pid for number in suspects}
            looked = waits.look((pid, pid) for pid in pids.values())
            doing |= {number: looked[pid, pid] for number, pid in pids.items()}
            holders |= {number: self._holder_number(number, doing[number]) for number in suspects}
            suspects = list({holder for holder in holders.values() if holder is not None and holder not in doing})
        return doing, holders

    def _suspects(self, awaited: list[int], stuck: list[int]) -> list[int]:
        """Return the late workers, those that the loop waits for first.

        An idle one has done its part: its batch may wait for a stuck worker, of which the kernel asks the
        shared memory of an earlier batch. It is a suspect only if it could not send, or if nobody else is.
        """
        late = [number for number in dict.fromkeys([*awaited, *stuck]) if not self._is_done(number)]
        return late or awaited

    def _is_done(self, number: int) -> bool:
        slot, progress = self._slot(number), self._progress.get(number)
        is_idle = progress is not None and progress.pid != 0 and progress.phase == IDLE
        has_lost = any(self._is_given(task, number) for task in self._record.unsent)
        return is_idle and not has_lost and not (slot is not None and slot.read_text(UNSENT))

    def _late_worker(
        self,
        number: int,
        doing: Doing | None,
        holder: int | None,
        frames: dict[int, list[list[Frame]]],
        awaited: list[int],
    ) -> LateWorker:
        handle, progress = self._record.workers[number], self._progress.get(number)
        main, *others = frames[number]
        kind, detail, advice, index = self._state(number, handle, progress, doing)
        who = None
        if holder is not None:
            held_at = traces.users_own(frames[holder][0])
            who = Holder(f"worker {holder} (pid {self._record.workers[holder].pid})", None, held_at)
        elif doing is not None and doing.kind == waits.LOCK:
            who, more, advice_on_lock = self._other_holder(number, doing)
            detail, advice = detail or more, advice or advice_on_lock
        known_index, samples = self._sample(progress)
        if index is not None:  # it is done: its stack says nothing about the batch
            main, stack = [], detail
        else:
            stack = _stack_text(main, others) if main else _no_stack(kind, self._slot(number), self._record)
        return LateWorker(
            worker_id=number,
            pid=handle.pid,
            batch=progress.task if progress and progress.phase == LOADING else None,
            index=known_index if index is None else index[0],
            samples=samples if index is None else index[1],
            seconds=time.monotonic() - progress.since if progress else 0.0,
            kind=kind,
            detail=detail,
            advice=advice,
            frames=tuple(main),
            frame=traces.users_own(main),
            stack=stack,
            holder=who,
            is_awaited=number in awaited,
        )

    def _slot(self, number: int) -> Slot | None:
        return self._record.slots[number] if number < len(self._record.slots) else None

    def _state(
        self, number: int, handle: Handle, progress: Progress | None, doing: Doing | None
    ) -> tuple[str, str, str, tuple[Any, str] | None]:
        """Return kind, detail, advice, and the sample if the slot's own one is not it."""
        slot = self._slot(number)
        unsent = slot.read_text(UNSENT) if slot is not None else None
        if isinstance(unsent, dict) and progress is not None and progress.phase == IDLE:
            return self._unsent(unsent)
        lost = next((error for task, error in self._record.unsent.items() if self._is_given(task, number)), None)
        if lost is not None and progress is not None and progress.phase == IDLE:
            advice = "Let the sampler yield keys that pickle can send, such as numbers, strings and tuples."
            return "idle: its task could not be sent to it", lost, advice, None
        if doing is not None and doing.kind == waits.STOPPED:
            return "stopped", doing.detail, f"`kill -CONT {handle.pid}` lets it go on.", None
        if progress is not None and not progress.pid:
            return "starting", "its process is not ready yet", "", None
        if progress is not None and progress.phase == IDLE:
            return "idle", "it has no task left, and its batch has not arrived", "", None
        if doing is None:
            return "working", "", "", None
        detail = "" if doing.kind == waits.LOCK and not doing.holder else doing.detail
        return _KINDS.get(doing.kind, doing.kind), detail or self._lock_path(number, doing), "", None

    def _is_given(self, task: int, number: int) -> bool:
        iterator = self._record.iterator()
        return iterator is not None and self._record.control.worker_of(iterator, task) == number

    def _unsent(self, unsent: dict[str, Any]) -> tuple[str, str, str, tuple[Any, str] | None]:
        """Explain a batch that the worker has finished, but could not send."""
        keys, place, error = plain_list(self._record.sent.get(unsent["task"])), unsent["place"], unsent["error"]
        index, words = None, f"on batch {unsent['task']}"
        if isinstance(keys, list) and keys:
            levels = [step for step, size in zip(place or (), unsent["sizes"], strict=False) if size == len(keys)]
            sample = 0 if len(keys) == 1 else levels[0] if len(levels) == 1 else None
            index = keys[sample] if sample is not None else keys
            words = f"on sample {key_text(index)}" if sample is not None else f"on samples {span(keys)}"
        elif keys is not None:
            index, words = keys, f"on sample {key_text(keys)}"
        if unsent["is_full"]:
            return (
                "blocked because shared memory is full",
                self._shm_figures(unsent["bytes"], error),
                _SHM_ADVICE,
                (index, words),
            )
        where = f", at batch{''.join(f'[{step}]' for step in place)}" if place else ""
        advice = "Let __getitem__ and collate_fn return what pickle can send: tensors, arrays, numbers, strings."
        if unsent["is_short"]:
            advice = _FILES_ADVICE
        return "done, but its batch could not be sent", f"{error}{where}", advice, (index, words)

    def _shm_figures(self, batch_bytes: int, error: str) -> str:
        stats = os.statvfs("/dev/shm")
        size, free, batch = (
            amount / 1e6 for amount in (stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize, batch_bytes)
        )
        workers, prefetch = len(self._record.workers), self._record.prefetch
        return (
            f"its batch is done, but could not be sent: {error}; /dev/shm has {size:,.0f} MB, {free:,.0f} MB free; "
            f"needed are up to {workers} workers × {prefetch} batches × {batch:,.1f} MB = "
            f"{workers * prefetch * batch:,.0f} MB"
        )

    def _sample(self, progress: Progress | None) -> tuple[Any, str]:
        """Return the sample that a worker is on, and words for it."""
        if progress is None:
            return None, f"on an unknown sample ({_why_unseen(self._record)})"
        return self._record.sample_of(progress)

    # -- locks ----------------------------------------------------------------------------------

    def _places(self, number: int) -> list[LockPlace]:
        slot = self._slot(number)
        rows = slot.read_text(LOCKS) if slot is not None else None
        return [LockPlace(*row) for row in rows or ()]

    def _place_waited_for(self, number: int, doing: Doing) -> LockPlace | None:
        return next((place for place in self._places(number) if place.address == doing.address), None)

    def _lock_path(self, number: int, doing: Doing) -> str:
        if doing.kind != waits.LOCK or not doing.address:
            return ""
        place = self._place_waited_for(number, doing)
        return f"{place.path}, a {place.kind} lock" if place is not None else ""

    def _holder_number(self, number: int, doing: Doing) -> int | None:
        """Return the worker that holds what this one waits for. See NOTE [ Who holds a lock ]."""
        if doing.kind != waits.LOCK:
            return None
        pids = {worker.pid: other for other, worker in enumerate(self._record.workers)}
        if doing.holder:
            return pids.get(doing.holder)
        wanted = self._place_waited_for(number, doing)
        if wanted is None or wanted.kind != "multiprocessing":
            return None
        for other, worker in enumerate(self._record.workers):
            for place in self._places(other) if other != number and worker.is_alive() else ():
                if place.path == wanted.path and has_taken(worker.pid, place):
                    return other
        return None

    def _other_holder(self, number: int, doing: Doing) -> tuple[Holder | None, str, str]:
        """Return who else may hold a lock: the kernel, another process, or nobody that could release it."""
        if doing.holder:
            return Holder(f"pid {doing.holder}", doing.holder, None), "", ""
        place = self._place_waited_for(number, doing)
        if place is None:
            return None, "", ""
        if place.kind == "multiprocessing":
            mine = [one for one in self._kernels_locks() if one.path == place.path]
            held = any(has_taken(os.getpid(), one) for one in mine)
            return (Holder(f"the kernel (pid {os.getpid()})", os.getpid(), None) if held else None), "", ""
        if place.was_locked:
            words = "nobody in this worker: a thread of the kernel had locked it when the worker was forked"
            advice = "Make the lock in worker_init_fn, or start the loader while no thread holds it."
            return Holder(words, None, None), "", advice
        return Holder("this worker itself, by another of its threads or further up in its stack", None, None), "", ""

    def _kernels_locks(self) -> list[LockPlace]:
        iterator = self._record.iterator()
        dataset = self._record.control.dataset(iterator, self._record.loader()) if iterator is not None else None
        loader = self._record.loader()
        collate, init = getattr(loader, "collate_fn", None), getattr(loader, "worker_init_fn", None)
        return find_locks(dataset=dataset, collate_fn=collate, worker_init_fn=init)

    # -- without workers ------------------------------------------------------------------------

    def _kernel(self, batch: int | None, seconds: float, is_in_sampler: bool) -> LateWorker:
        """Look at the kernel's own thread, which loads the samples itself."""
        record = self._record
        thread = next((one for one in threading.enumerate() if one.ident == record.thread), None)
        native = (thread.native_id if thread else None) or os.getpid()
        doing = waits.look([(os.getpid(), native)])[os.getpid(), native]
        slot = self._slot(0) if not record.workers else None
        progress = slot.read() if slot is not None and not is_in_sampler else None
        stack = traces.of_thread(frames.stack_of(record.thread), self._place_of)
        index, samples = self._sample(progress) if progress else (None, "in the sampler, asked for the next samples")
        return LateWorker(
            worker_id=None,
            pid=os.getpid(),
            batch=batch,
            index=index,
            samples=samples,
            seconds=time.monotonic() - progress.since if progress else seconds,
            kind=_KINDS.get(doing.kind, doing.kind),
            detail=doing.detail,
            advice="",
            frames=tuple(stack),
            frame=traces.users_own(stack),
            stack=_stack_text(stack, []),
        )


_SHM_ADVICE = (
    "Give the container more shared memory (docker run --shm-size=…), or use fewer workers, a smaller prefetch_factor "
    "or smaller batches."
)
_FILES_ADVICE = (
    "Fewer tensors per batch, a smaller prefetch_factor, torch.multiprocessing.set_sharing_strategy('file_system') "
    "before the loader starts; or a higher limit, ulimit -n."
)


def _why_unseen(record: Record) -> str:
    """Say why a loader's workers do not note what they do."""
    if record.slots:
        return "it cannot be observed: there was no shared memory or no descriptor for it"
    return "it was started before the guard, or not by torch's own way"


def _no_stack(state: str, slot: Slot | None, record: Record) -> str:
    """Say why a worker does not say where it is."""
    if state == "stopped":
        return "  It is stopped, and cannot say where it is until it goes on."
    if slot is None:
        return f"  It cannot say where it is: {_why_unseen(record)}."
    if not slot.read().pid:
        return "  It is still starting."
    if slot.fd is None:
        return "  It cannot say where it is: there were too few descriptors left (ulimit -n) when it was started."
    return "  It did not answer: it is blocked in the system, or has just ended."


def _stack_text(main: list[Frame], others: list[list[Frame]]) -> str:
    """Write stacks as text, most recent call first."""
    parts = [traces.frames_text(main)] + [f"another thread:\n{traces.frames_text(frames)}" for frames in others]
    return "\n".join(parts)


def describe_stacks(workers: list[tuple[Record, int]], place_of: Callable[[str], str]) -> dict[int, str]:
    """Return the stacks of workers, given as loader and number, as text by pid; all are asked at once."""
    asked = [(record, number, *_handle_and_slot(record, number)) for record, number in workers]
    texts = traces.ask([(handle, slot) for _, _, handle, slot in asked])
    found = {}
    for record, number, handle, slot in asked:
        main, *others = traces.parse(texts[handle.pid], place_of) or [[]]
        progress = slot.read() if slot is not None else None
        doing = f" · {record.sample_of(progress)[1]}" if progress is not None and progress.phase == LOADING else ""
        head = f"worker {number} (pid {handle.pid}) of {registry.name(record)}{doing}"
        found[handle.pid] = f"{head}\n{_stack_text(main, others) if main else _no_stack(handle.state(), slot, record)}"
    return found


def _handle_and_slot(record: Record, number: int) -> tuple[Handle, Slot | None]:
    return record.workers[number], record.slots[number] if number < len(record.slots) else None
