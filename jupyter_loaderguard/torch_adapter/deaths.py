"""Workers that end before they should: who, how, on which sample; and the error that says so."""

from __future__ import annotations

import signal
import threading
from typing import Any

from .. import machine
from ..errors import add_note
from ..model import DeadWorker, Failure
from ..registry import Record, registry
from ..seam import for_user
from ..traces import name_cells
from ..worker.slot import FAILURE, LOADING
from .ending import detach

EXIT_CODE_SECONDS = 0.3


class WorkersFailed(BaseException):
    """Tell, inside of the guard, that workers died or hung and may be replaced; see mending.py.

    Not an Exception, so that what explains errors of a read lets it pass.
    """

    def __init__(self, numbers: list[int], is_hung: bool, cause: Exception | None = None) -> None:
        super().__init__()
        self.numbers = numbers
        self.is_hung = is_hung
        self.cause = cause


def raise_if_failed(iterator: Any, record: Record, cause: Exception | None = None) -> None:
    """Raise if a worker died; `cause` is how the read of a batch failed."""
    __tracebackhide__ = True
    has_data = record.watch is not None and record.inbox.fd in [fd for fd, _ in record.watch.poll(0)]
    failed = [
        number
        for number, process in enumerate(iterator._workers)
        if iterator._workers_status[number]
        and not record.workers[number].is_alive()
        and (cause is not None or _exit_code(process) != 0 or not has_data)
    ]
    if failed and record.mends and not record.stopped_by:
        raise WorkersFailed(failed, is_hung=False, cause=cause)
    if failed:
        raise give_up(iterator, record, describe(iterator, record, failed)) from cause


def give_up(iterator: Any, record: Record, failure: Failure) -> RuntimeError:
    """Return what torch would raise, with what became of the workers; the loader starts afresh at its next use."""
    record.is_broken = True
    record.last_cell = registry.cells.get(threading.get_ident())
    for worker in failure.workers:
        iterator._workers_status[worker.worker_id] = False
    detach(iterator, record)
    pids = ", ".join(str(worker.pid) for worker in failure.workers)
    fates = "; ".join(f"{worker.name} {worker.fate}" for worker in failure.workers)
    error = RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {fates}")
    vars(error)["loaderguard_failure"] = failure
    if failure.why is not None:
        add_note(error, f"loaderguard: it could not start:\n{name_cells(failure.why, registry.place_of)}")
    return for_user(error)


def describe(iterator: Any, record: Record, failed: list[int], late: str | None = None) -> Failure:
    """Measure what is known about workers that died, or are `late`, now: their slots are soon gone."""
    workers = []
    for number in failed:
        process = iterator._workers[number]
        code = None if late else _exit_code(process)
        fate = late or record.fates.get(number) or _fate(code)
        workers.append(DeadWorker(number, process.pid, code, fate, _last_words(record, number)))
    slots = [record.slots[number] for number in failed if number < len(record.slots)]
    told = [slot.read_text(FAILURE) for slot in slots if slot is not None]
    why = next((str(one) for one in told if one), None)
    return Failure(registry.name(record), tuple(workers), max(0, machine.oom_kills() - record.oom_kills), why)


def _last_words(record: Record, number: int) -> str:
    """Say what a worker was on when it ended."""
    slot = record.slots[number] if number < len(record.slots) else None
    progress = slot.read() if slot is not None else None
    if progress is None or not progress.pid:
        return ""
    words = record.sample_of(progress)[1]
    return f"{words} of batch {progress.task}" if progress.phase == LOADING else words


def _exit_code(process: Any) -> int | None:
    """Return it; None if it was taken by someone else, who waits for all children of this process."""
    process.join(EXIT_CODE_SECONDS)  # under forkserver it arrives a moment after the death
    code: int | None = process.exitcode
    return code


def _fate(code: int | None) -> str:
    if code is None:
        return "is gone, and other code of this process took its exit code"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"
