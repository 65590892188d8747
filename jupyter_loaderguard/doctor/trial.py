"""The run that all checks share: a few batches of a copy of the loader, under guard and bounded in time.

NOTE [ One run ]
The kernel's own thread takes the batches as fast as they come, as a loop without a model would. A thread of the
doctor's looks at the workers meanwhile, from the moment when each of them has loaded a batch: what happens
before that is their start. When it has seen enough the run ends; when time is up it stops the workers,
which ends a wait for a batch too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import LoaderGuardError
from ..guarding import guard
from ..lending.batch import count_storages
from ..lending.failure import Failure, describe_failure
from ..lending.loan import Order, lend, lend_order, untouched, unwarned
from ..lending.subject import Subject
from ..registry import Record, Run, registry
from ..views import text
from ..worker.slot import UNSENT
from .check import Check, Moment, Worker
from .load import LoadMeter, ThreadLoad

WINDOW_SECONDS = 1.3
"""How long the workers are looked at when they have begun: long enough for a noisy machine."""
TICK_SECONDS = 0.008
LOAD_SECONDS = 0.05
STOP_SECONDS = 0.7
"""What is kept for the end of the workers, of the time that the doctor has."""
GRACE_SECONDS = 0.2
SEEN_BATCHES = 8


@dataclass(frozen=True)
class Trial:
    """What the run showed."""

    ran: str = ""
    batches: int = 0
    seconds: float = 0.0
    window_seconds: float = 0.0
    """How long the workers were looked at."""
    tensors: int = 0
    """Most tensors in a batch, by their storages."""
    tensor_bytes: int = 0
    """Most bytes of tensors in a batch."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Parts of a batch that are parts of the dataset; of a loader without workers."""
    load: dict[int, dict[int, ThreadLoad]] = field(default_factory=dict)
    failure: Failure | None = None


def run(subject: Subject, checks: Sequence[Check], until: float) -> Trial:
    """Run a copy of the loader until enough has been seen, or until a moment of the monotonic clock."""
    reasons = [reason for check in checks if (reason := check.refuses_run())]
    if reasons:
        return Trial(f"not run: {reasons[0]}")
    try:
        for check in checks:
            check.before()
        if not subject.workers:
            from .aside import run_aside  # which needs this file

            return run_aside(subject, until - STOP_SECONDS)
        with untouched(), unwarned():
            return _run_workers(subject, checks, until - STOP_SECONDS)
    finally:
        for check in checks:
            check.after()


def _run_workers(subject: Subject, checks: Sequence[Check], until: float) -> Trial:
    since = time.monotonic()
    with (
        guard(stall_seconds=3600, on_stall="warn", grace_seconds=GRACE_SECONDS, refresh_seconds=60) as guarded,
        lend_order(subject, until) as order,
    ):
        observer = _Observer(subject, checks, guarded, until)
        try:
            trial = _iterate(subject, checks, observer, order)
        finally:
            observer.end()
    if observer.unsent is not None:
        failure, size = observer.unsent
        trial = replace(trial, failure=failure, tensor_bytes=max(trial.tensor_bytes, size))
    trial = replace(trial, seconds=time.monotonic() - since, window_seconds=observer.window_seconds, load=observer.load)
    if order.keys is not None and (trouble := order.keys.trouble):
        return replace(trial, failure=None, ran=f"not run: {trouble}")
    return replace(trial, ran=_ran(trial, text.count(subject.workers, "worker"), order.remark))


def _iterate(subject: Subject, checks: Sequence[Check], observer: _Observer, order: Order) -> Trial:
    """Take batches until the observer has seen enough, the epoch ends, time is up or the loader raises."""
    trial = Trial()
    try:
        iterator = iter(lend(subject, subject.workers, order))
        observer.may_stop = True
        while not observer.is_done:
            batch = next(iterator, observer)
            if batch is observer:
                break
            if trial.batches < SEEN_BATCHES:
                trial = see(trial, batch)
                for check in checks:
                    check.see(batch)
            trial = replace(trial, batches=trial.batches + 1)
            del batch
    except Exception as error:  # noqa: BLE001 - what the user's code raises is a finding
        if not (observer.is_time_up and isinstance(error, LoaderGuardError)):
            failure = describe_failure(error)
            return replace(trial, failure=replace(failure, note=failure.note or observer.name_dead(error)))
    return replace(trial, failure=order.keys.failure if order.keys is not None else None)


def see(trial: Trial, batch: Any) -> Trial:
    """Note how large a batch is."""
    tensors, size = count_storages(batch)
    return replace(trial, tensors=max(trial.tensors, tensors), tensor_bytes=max(trial.tensor_bytes, size))


def _ran(trial: Trial, workers: str, remark: str) -> str:
    if not trial.batches and trial.failure is None:
        return f"no batch came within {text.seconds(trial.seconds)} from {workers}, so little could be measured"
    batches = text.count(trial.batches, "batch", "batches")
    more = f" ({remark})" if remark else ""
    return f"ran {batches} with {workers} in {text.seconds(trial.seconds)}{more}"


def _read_unsent(record: Record) -> tuple[Failure, int] | None:
    """Return why a worker could not send a batch, for which the loop would wait for ever, and how large it was."""
    for number, slot in enumerate(list(record.slots)):
        told = slot.read_text(UNSENT) if slot is not None else None
        if told is not None:
            kind, _, message = told["error"].partition(": ")
            note = f"worker {number} could not send batch {told['task']}"
            return Failure(kind, message, "", note), told["bytes"]
    return None


class _Observer:
    """The thread that looks at the workers. See NOTE [ One run ]."""

    def __init__(self, subject: Subject, checks: Sequence[Check], run: Run, until: float) -> None:
        self._subject, self._checks, self._run, self._until = subject, checks, run, until
        self._meter, self._loaded = LoadMeter(), 0.0
        self._since = 0.0
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.window_seconds = 0.0
        self.unsent: tuple[Failure, int] | None = None
        """Why a batch never came: it could not be sent; and how large it was."""
        self.may_stop = self.is_done = self.is_time_up = False
        self._thread = threading.Thread(target=self._watch, name="loaderguard-doctor", daemon=True)
        self._thread.start()

    @property
    def load(self) -> dict[int, dict[int, ThreadLoad]]:
        """How busy the threads of each worker were."""
        return self._meter.loads()

    def end(self) -> None:
        """Look no longer."""
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def name_dead(self, error: Exception) -> str:
        """Say which workers have died, if that is what broke a connection to one."""
        if not isinstance(error, (ConnectionError, EOFError)):
            return ""
        ended = [process for record in self._run.born for process in record.processes if process.exitcode]
        codes = [(process.pid, process.exitcode) for process in ended]
        return ", ".join(f"pid {pid} was ended by {signal.Signals(-code).name}" for pid, code in codes if code < 0)

    def _watch(self) -> None:
        try:
            while not self._ended.wait(TICK_SECONDS):
                self._tick(time.monotonic())
        except Exception as error:  # noqa: BLE001 - of ours: raised by `end`, not lost with the thread
            self._error, self.is_done = error, True

    def _tick(self, now: float) -> None:
        record = next((record for record in list(self._run.born) if record.workers), None)
        if record is not None:
            for check in self._checks:
                check.look_early([worker.pid for worker in list(record.workers)])
            self.unsent = self.unsent or _read_unsent(record)
        is_over = now >= self._until or self.unsent is not None or any(check.ends_run for check in self._checks)
        if is_over and not self.is_time_up:
            self.is_done = True
            if record is not None and self.may_stop:
                self.is_time_up = True
                registry.stop([record], "the doctor's time is up", 0.0)
        elif record is not None and not self.is_done:
            self._look(now, self._workers(record))

    def _workers(self, record: Record) -> tuple[Worker, ...]:
        """Return the workers, if all of them have begun and are alive."""
        pairs = list(zip(record.workers, record.slots, strict=False))
        found = [Worker(n, handle, slot) for n, (handle, slot) in enumerate(pairs) if slot is not None]
        is_complete = len(found) == self._subject.workers and all(worker.handle.is_alive() for worker in found)
        return tuple(found) if is_complete and all(worker.slot.read().batches for worker in found) else ()

    def _look(self, now: float, workers: tuple[Worker, ...]) -> None:
        if not workers:
            return
        self._since = self._since or now
        self.window_seconds = now - self._since
        if now - self._loaded >= LOAD_SECONDS:
            self._loaded = now
            self._meter.look(worker.pid for worker in workers)
        moment = Moment(self.window_seconds, workers, self.load)
        for check in self._checks:
            check.look(moment)
        self.is_done = self.window_seconds >= WINDOW_SECONDS
