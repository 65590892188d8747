"""A loader without workers, run in a process of its own: a fork of the kernel that loads a few batches and ends.

So the dataset in the kernel stays as it is, caches and streams included, and one that never returns can be
ended. What it saw comes back as JSON through a pipe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from .. import processes
from ..guarding import guard
from ..lending.failure import Failure, describe_failure
from ..lending.fork import forked
from ..lending.loan import lend, own_order, untouched, unwarned
from ..lending.subject import Subject
from ..registry import registry
from ..views import text
from ..worker.agent import settle_in
from .checks.aliases import find_aliases
from .trial import GRACE_SECONDS, SEEN_BATCHES, Trial, see

ENOUGH_SECONDS = 0.6


def run_aside(subject: Subject, until: float) -> Trial:
    """Load a few batches in a fork of this process, until a moment of the monotonic clock at most."""
    torch = sys.modules["torch"]
    if not processes.LINUX or torch.cuda.is_initialized():
        why = "CUDA is in use, and a copy of" if processes.LINUX else "on this system a copy of"
        return Trial(f"not run: {why} the kernel could not load it")
    with guard(stall_seconds=3600, grace_seconds=GRACE_SECONDS):
        return _run(subject, until)


def _run(subject: Subject, until: float) -> Trial:
    since = time.monotonic()
    with forked(_load, subject) as (process, pipe):
        trial, is_complete = _receive(pipe, until)
    if not is_complete and time.monotonic() < until:
        trial = replace(trial, failure=_death(process.exitcode))
    return replace(trial, seconds=time.monotonic() - since, ran=_ran(trial, time.monotonic() - since))


def _receive(pipe: Any, until: float) -> tuple[Trial, bool]:
    """Return what the process has told last, and whether that was all."""
    trial = Trial()
    while pipe.poll(max(0.0, until - time.monotonic())):
        try:
            told: dict[str, Any] = json.loads(pipe.recv_bytes())
        except EOFError:
            return trial, False
        if told.pop("is_last"):
            return _trial(told), True
        trial = _trial(told)
    return trial, False


def _trial(told: dict[str, Any]) -> Trial:
    failure = Failure(**told.pop("failure")) if told["failure"] else told.pop("failure")
    aliases = tuple((part, own) for part, own in told.pop("aliases"))
    return Trial(**told, aliases=aliases, failure=failure)


def _ran(trial: Trial, seconds: float) -> str:
    if not trial.batches and trial.failure is None:
        return f"no batch came within {text.seconds(seconds)}, so little could be measured"
    batches = text.count(trial.batches, "batch", "batches")
    return f"ran {batches} in a copy of this process in {text.seconds(seconds)}"


def _death(code: int | None) -> Failure:
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return Failure("the process that loaded it ended", how)


def _load(subject: Subject, pipe: Any) -> None:
    """Load batches, in the fork, and tell after each one what was seen."""
    settle_in()
    registry.is_guarding = False  # of the kernel's guard, nothing runs here
    sys.modules["torch"].set_num_threads(1)  # the kernel's pool of threads is not here; torch's own workers do the same
    kernel, until, trial = os.getppid(), time.monotonic() + ENOUGH_SECONDS, Trial()
    try:
        with untouched(), unwarned():
            for batch in lend(subject, 0, own_order(subject)):
                trial = see(replace(trial, batches=trial.batches + 1), batch)
                trial = replace(trial, aliases=trial.aliases or tuple(find_aliases(batch, subject.roots)))
                _tell(pipe, trial)
                if trial.batches >= SEEN_BATCHES or time.monotonic() > until or os.getppid() != kernel:
                    break
    except Exception as error:  # noqa: BLE001 - what the user's code raises is a finding
        trial = replace(trial, failure=describe_failure(error))
    _tell(pipe, trial, is_last=True)


def _tell(pipe: Any, trial: Trial, is_last: bool = False) -> None:
    told = {name: value for name, value in asdict(trial).items() if name not in ("ran", "seconds", "load")}
    pipe.send_bytes(json.dumps({**told, "is_last": is_last}).encode())
