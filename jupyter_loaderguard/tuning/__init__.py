"""tune: how many workers a loader should have, measured with the loader itself.

NOTE [ How it is measured ]
A copy of the loader runs without workers first, in a fork of the kernel, then with 1 worker and upward, each for a
slice of the time. Every visit takes other samples: the order of the loader's own sampler is followed on and on, so
that a file that an earlier visit has brought into memory is not read again before the epoch is over. It climbs until
more no longer pays or until CPUs, memory or /dev/shm set a limit. Settings that are close are visited again, in the
opposite order. The recommendation is the one with the fewest workers among those between which no difference was
measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import LoaderGuardError
from ..guarding import check_seconds
from ..lending.handles import find_open, put_back
from ..lending.keys import taken_again_and_again
from ..lending.loan import lend_order, untouched
from ..lending.subject import Subject, describe
from ..registry import registry
from ..timing import TuneProgress, TuneResult
from ..views import curve
from .bench import Bench
from .choice import choose, code_line, explain, margin_of
from .limits import Limit

DEFAULT_SECONDS = 25.0
SHORTEST_SECONDS = 1.0


def _print_progress() -> Callable[[TuneProgress | None], None]:
    """Write a bar to the terminal, if there is one."""

    def show(progress: TuneProgress | None) -> None:
        if sys.stderr.isatty():
            line = curve.progress(progress) if progress is not None else ""
            print(f"\r{line:<78}", end="" if line else "\r", file=sys.stderr, flush=True)  # noqa: T201

    return show


def tune(
    loader: Any, max_workers: int | None = None, seconds: float | None = None, step: Callable[[Any], Any] | None = None
) -> TuneResult:
    """Measure how fast a loader is with 0, 1, 2 … workers, and recommend a number."""
    began = time.monotonic()
    budget = check_seconds("seconds", DEFAULT_SECONDS if seconds is None else seconds, SHORTEST_SECONDS)
    if max_workers is not None and (
        isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 0
    ):
        raise LoaderGuardError(f"max_workers must be a whole number from 0 on, not {max_workers!r}")
    if step is not None and not callable(step):
        raise LoaderGuardError(f"step must be a function that takes a batch, not {step!r}")
    if step is not None and max_workers == 0:
        raise LoaderGuardError("step runs on batches that workers load; with it, max_workers must be at least 1")
    subject = describe(loader)
    show = (registry.open_progress or _print_progress)()
    bench = Bench(subject, max_workers, budget, began, step, show)
    try:
        _measure(subject, bench)
    except KeyboardInterrupt:
        if not bench.rows():
            raise
        bench.stop_early("interrupted")
    finally:
        show(None)
    return _conclude(subject, bench, began)


def _measure(subject: Subject, bench: Bench) -> None:
    """Run all visits, and leave the user's objects as they were."""
    loader = subject.loader
    handles, emptied = find_open({**subject.roots, "batch_sampler": loader.batch_sampler, "sampler": loader.sampler})
    for path, what in emptied[:1]:
        raise LoaderGuardError(f"{path} is {what}, and what a run takes from it would be lost")
    try:
        with untouched(), lend_order(subject, bench.until, taken_again_and_again) as order:
            bench.run(order)
    finally:
        put_back(handles)


def _conclude(subject: Subject, bench: Bench, began: float) -> TuneResult:
    rows, limit = bench.rows(), bench.limit
    if not rows:
        raise LoaderGuardError(bench.why_nothing())
    margin = margin_of(rows)
    best = choose(rows, margin)
    serial = bench.serial()
    if bench.stopped:
        limit = Limit(limit.workers, bench.stopped)
    name = registry.name_of(subject.loader)
    result = TuneResult(
        loader=f"{name or type(subject.loader).__name__} of {type(subject.dataset).__name__}",
        rows=rows,
        best=best.num_workers,
        prefetch_factor=best.prefetch_factor,
        persistent_workers=best.persistent_workers or (bool(best.num_workers) and bench.persistent),
        reason=explain(rows, best, limit, serial, bench.has_step, not bench.stopped) + bench.persistent_words(best),
        code="",
        limit=bench.limit.workers,
        limited_by=limit.why,
        margin=margin,
        seconds=time.monotonic() - began,
        lock=serial.lock if serial is not None else None,
        has_step=bench.has_step,
        is_complete=not bench.stopped,
        remarks=tuple(bench.remarks),
    )
    return replace(result, code=code_line(subject.loader, name, result.settings))
