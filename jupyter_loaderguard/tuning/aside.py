"""A visit without workers, in a fork of the kernel: so the dataset in the kernel stays as it is.

The fork loads for some seconds, and tells after each block how many batches it took. The `step` does not run there.

NOTE [ Threads after a fork ]
The kernel's pool of threads is not in the fork, and torch would wait for it for ever. But it belongs to the thread that
used it: another thread of the fork makes a pool of its own. So the fork loads in a thread, as fast as the kernel does.
What wants the thread that it was made in, such as a connection to SQLite, is loaded there, with one thread of torch's.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from .. import processes
from ..guarding import guard
from ..lending.batch import count_storages
from ..lending.failure import Failure, describe_failure
from ..lending.fork import forked
from ..lending.loan import Order, lend, own_order, untouched, unwarned
from ..lending.subject import Subject
from ..registry import registry
from ..worker.agent import settle_in
from .visit import BLOCKS, GRACE_SECONDS, SHOW_SECONDS, Visit

_END = object()


@dataclass(frozen=True)
class _Task:
    subject: Subject
    seconds: float
    skip: int
    """Batches that others have taken: their files may be in memory already."""


def why_not_aside() -> str:
    """Say why nothing can be loaded in a fork of this process; empty if it can."""
    if not processes.LINUX:
        return "on this system a copy of the kernel could not load it"
    return "CUDA is in use, and a copy of the kernel could not load it" if _uses_cuda() else ""


def _uses_cuda() -> bool:
    return bool(sys.modules["torch"].cuda.is_initialized())


def visit_aside(
    found: Visit, subject: Subject, seconds: float, until: float, skip: int, show: Callable[[], None]
) -> None:
    """Load in a fork for some seconds, and note it in `found`; a batch that takes longer is awaited until `until`."""
    with (
        guard(stall_seconds=3600, grace_seconds=GRACE_SECONDS, refresh_seconds=60),
        forked(_load, _Task(subject, seconds, skip)) as (process, pipe),
    ):
        if not _receive(found, pipe, until, show) and time.monotonic() < until:
            process.join(GRACE_SECONDS)
            found.failure = found.failure or _death(process.exitcode)


def _receive(found: Visit, pipe: Any, until: float, show: Callable[[], None]) -> bool:
    """Note what the fork tells; tell whether it has told all."""
    while (remaining := until - time.monotonic()) > 0:
        show()
        if not pipe.poll(min(SHOW_SECONDS, remaining)):
            continue
        try:
            told: dict[str, Any] = json.loads(pipe.recv_bytes())
        except EOFError:
            return False
        if told["kind"] == "failure":
            found.failure = Failure(**told["failure"])
            return True
        if told["kind"] == "empty":
            found.is_empty = True
            continue
        if told["kind"] == "end":
            return True
        found.first_batch_seconds, found.tensor_bytes = told["first"], told["bytes"]
        if told["batches"]:
            found.blocks.append((told["batches"], told["seconds"]))
        found.steps, found.threads = told["taken"], told["threads"]
    return False


def _death(code: int | None) -> Failure:
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return Failure("the process that loaded it ended", how)


def _load(task: _Task, pipe: Any) -> None:
    """Load batches, in the fork, and tell after each block."""
    settle_in()
    registry.is_guarding = False  # of the kernel's guard, nothing runs here
    last: dict[str, Any] = {"kind": "end"}
    try:
        with untouched(), unwarned():
            _measure_with_threads(task, pipe)
    except Exception as error:  # noqa: BLE001 - what the user's code raises is told
        last = {"kind": "failure", "failure": asdict(describe_failure(error))}
    _tell(pipe, last)


def _measure_with_threads(task: _Task, pipe: Any) -> None:
    """Measure with as many of torch's threads as the kernel has. See NOTE [ Threads after a fork ]."""
    torch, has_begun = sys.modules["torch"], threading.Event()
    if torch.get_num_threads() > 1:
        failure = _run_in_thread(_measure, task, pipe, has_begun)
        if failure is None:
            return
        if has_begun.is_set():
            raise failure
    torch.set_num_threads(1)
    _measure(task, pipe, has_begun)


def _run_in_thread(target: Callable[..., None], *arguments: Any) -> Exception | None:
    """Run something in another thread, and return what it raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            target(*arguments)
        except Exception as error:  # noqa: BLE001 - the caller decides
            raised.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="loaderguard-loading")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def _measure(task: _Task, pipe: Any, has_begun: threading.Event) -> None:
    kernel, started = os.getppid(), perf_counter()
    batches = _batches(task)
    batch = next(batches, _END)
    has_begun.set()
    if batch is _END:
        _tell(pipe, {"kind": "empty"})
        return
    first, size = perf_counter() - started, count_storages(batch)[1]
    del batch
    since, until, count, taken = perf_counter(), perf_counter() + task.seconds, 0, 1
    told = {"kind": "block", "first": first, "bytes": size, "threads": sys.modules["torch"].get_num_threads()}
    _tell(pipe, {**told, "batches": 0, "seconds": 0.0, "taken": taken})
    for _ in batches:
        count, taken, now = count + 1, taken + 1, perf_counter()
        if now - since >= task.seconds / BLOCKS:
            _tell(pipe, {**told, "batches": count, "seconds": now - since, "taken": taken})
            if now >= until or os.getppid() != kernel:
                break
            since, count = perf_counter(), 0


def _batches(task: _Task) -> Iterator[Any]:
    """Go through the loader's batches on and on, from where others have stopped."""
    order = own_order(task.subject)
    skip = task.skip
    while True:
        is_empty = True
        for batch in lend(task.subject, 0, _without_first(order, skip)):
            is_empty = False
            yield batch
        if is_empty and not skip:
            return
        skip = 0


def _without_first(order: Order, number: int) -> Order:
    name = next((name for name in ("batch_sampler", "sampler") if name in order.options), None)
    if name is None or not number:
        return order
    return Order({**order.options, name: _Rest(order.options[name], number)})


class _Rest:
    """A sampler without its first keys."""

    def __init__(self, sampler: Any, number: int) -> None:
        self._sampler, self._number = sampler, number

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._number, None)


def _tell(pipe: Any, told: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(told).encode())
