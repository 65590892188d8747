"""The guard as a whole: turned on and off, asked to clean, and as a `with` block."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from . import interrupts
from .allowance import Allowance
from .errors import LoaderGuardError
from .model import Stall, StopReport
from .quarantine import load
from .registry import Record, Run, registry
from .seam import forget_said, shield
from .torch_adapter import adapter
from .views import text
from .watch import watchdog

HELPER_SECONDS = 0.3
ON_STALL = ("warn", "raise", "retry")
MOST_TIMES = 1_000_000

_holders: set[object] = set()


def activate(holder: object) -> None:
    """Guard from now on, until every holder has deactivated it."""
    with interrupts.held():
        registry.settle_in_fork()
        _holders.add(holder)
        if not registry.is_guarding:
            registry.is_guarding = True
            forget_said()
            atexit.register(_stop_at_exit)
            registry.ledger.open()
            adapter.instrument()
            watchdog.start()


def deactivate(holder: object) -> None:
    """Undo `activate`; live loaders go on working."""
    with interrupts.held():
        _holders.discard(holder)
        if registry.is_guarding and not _holders:
            registry.is_guarding = False
            watchdog.stop()
            adapter.uninstrument()
            registry.ledger.close()
            atexit.unregister(_stop_at_exit)


def _stop_at_exit() -> None:
    """End the workers before multiprocessing does: it would join one that ignores SIGTERM for ever."""
    stop_everything("the kernel ends")
    registry.ledger.close()


def stop_everything(why: str) -> StopReport:
    """Stop all loaders at once and without grace: the process ends."""
    return registry.stop(registry.all(), why, grace_seconds=0.0, deliver=interrupts.NEVER)


def dismiss_multiprocessing_helpers() -> None:
    """Let Python's resource tracker and forkserver leave before ipykernel waits for its children.

    The first ignores the SIGTERM that ipykernel sends to them, the second becomes a zombie that it goes
    on waiting for: 2.5 s, until the front end kills the kernel. They leave once nobody holds their
    pipe; processes of the user's that do are not waited for.
    """
    for name in ("forkserver", "resource_tracker"):
        module = sys.modules.get(f"multiprocessing.{name}")
        helper = getattr(module, f"_{name}", None)
        stop = getattr(helper, "_stop", None)
        if stop is not None:
            thread = threading.Thread(target=stop, name=f"loaderguard-{name}", daemon=True)
            thread.start()
            thread.join(HELPER_SECONDS)


def guard(
    *,
    stall_seconds: float | None = None,
    on_stall: str | None = None,
    retry: int | None = None,
    skip: int | None = None,
    quarantine: Any = None,
    grace_seconds: float | None = None,
    keep: bool = False,
    refresh_seconds: float | None = None,
) -> contextlib.AbstractContextManager[Run]:
    """Run a block under the strict guard: none of its workers outlives it.

    `run.report` holds the figures afterwards. With `keep` the workers stay at a normal end.
    """

    def prepare() -> Callable[[], Run]:
        allowance = make_allowance(retry, skip, quarantine)
        grace = check_seconds("grace_seconds", registry.grace_seconds if grace_seconds is None else grace_seconds)
        often = registry.refresh_seconds if refresh_seconds is None else refresh_seconds
        refresh = check_seconds("refresh_seconds", often, least=0.05)
        stall = check_seconds("stall_seconds", registry.stall_seconds if stall_seconds is None else stall_seconds, 0.1)
        reaction = check_on_stall("on_stall", registry.on_stall if on_stall is None else on_stall)
        return functools.partial(Run, registry, grace, keep, refresh, stall, reaction, allowance)

    return _Block(prepare, keep)


class _Block(contextlib.ContextDecorator, contextlib.AbstractContextManager[Run]):
    """A block under the strict guard.

    A class and not a generator: an interrupt that comes when the generator has yielded and the block has not begun
    leaves it to whoever holds the traceback; and one that was never left is closed when Python's modules are gone.
    """

    def __init__(self, prepare: Callable[[], Callable[[], Run]], keep: bool) -> None:
        self._prepare = prepare
        self._keep = keep
        self._run: Run | None = None

    def _recreate_cm(self) -> _Block:
        return _Block(self._prepare, self._keep)

    def __enter__(self) -> Run:
        if self in _holders:
            raise LoaderGuardError("this guard is on; each block needs one of its own")
        make_run = self._prepare()
        try:
            with interrupts.held():
                activate(self)
                self._run = run = make_run()
        except BaseException:
            self._end(is_kept=False)
            raise
        return run  # nothing is called any more: no interrupt comes between this and the block

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._end(self._keep and kind is None)
        except KeyboardInterrupt:  # a moment before it was held back, or after
            self._end(self._keep and kind is None)
            raise

    def _end(self, is_kept: bool) -> None:
        """Do what is not done yet."""
        with interrupts.held():
            run, self._run = self._run, None
            try:
                if run is not None:
                    finish_run(run, is_kept)
            finally:
                deactivate(self)


def finish_run(run: Run, keep: bool, why: str = "its guarded block ended", deliver: str = interrupts.NOW) -> None:
    """End a run: stop its loaders unless they are to be kept, and write its report."""
    with interrupts.held(deliver):
        with shield("a guarded run is not ended properly"):
            run.end()
        if not keep:
            registry.stop([record for record in run.born if record.workers], why, run.grace_seconds)
            registry.shut_down([record for record in registry.handed_back if record in run.born])
        for record in run.born:
            registry.await_stop(record)
        with shield("the report of a guarded run has no figures"):
            run.make_report()


def check_seconds(name: str, value: Any, least: float = 0.0) -> float:
    """Return the value if it is a sensible number of seconds; else say which and why not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 3600:
        raise LoaderGuardError(f"{name} must be a number of seconds from {least:g} to 3600, not {value!r}")
    return float(value)


def check_on_stall(name: str, value: Any) -> str:
    """Return the value if it says what to do about a stall; else say which and why not."""
    if value not in ON_STALL:
        words = ", ".join(map(repr, ON_STALL[:-1]))
        raise LoaderGuardError(f"{name} must be {words} or {ON_STALL[-1]!r}, not {value!r}")
    return str(value)


def check_times(name: str, value: Any) -> int:
    """Return the value if it says how often something may be done; else say which and why not."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TIMES:
        raise LoaderGuardError(f"{name} must be a whole number from 0 to {MOST_TIMES}, not {value!r}")
    return value


def make_allowance(retry: int | None, skip: int | None, quarantine: Any) -> Allowance:
    """Return what a run may mend; what is not said is as configured."""
    return Allowance(
        check_times("retry", registry.retry if retry is None else retry),
        check_times("skip", registry.skip if skip is None else skip),
        load(quarantine) if quarantine is not None else (),
    )


def stacks(pid: int | None = None) -> dict[int, str]:
    """Return the Python stacks of all workers, or of one, as text by pid."""
    from .examine import describe_stacks

    records = [record for record in registry.all() if record.workers]
    chosen = [(record, number) for record in records for number in range(len(record.workers))]
    live = [(record, number) for record, number in chosen if record.workers[number].is_alive()]
    if pid is not None:
        _find_worker(records, pid)  # or say that there is none
        live = [(record, number) for record, number in live if record.workers[number].pid == pid]
    return describe_stacks(live, watchdog.place_of)


def _print_stall(stall: Stall, record: Record, key: str) -> None:
    print(text.stall(stall), file=sys.stderr, flush=True)  # noqa: T201 - something is wrong


watchdog.show = _print_stall


def clean(target: Any = None, why: str = "clean") -> StopReport:
    """Stop all loaders, or the given one: a loader, its iterator, its name, a worker's pid, or a list of these.

    A pid stops that worker alone.
    """
    if target is None:
        return registry.stop([record for record in registry.all() if record.workers], why)
    targets = list(target) if isinstance(target, (list, tuple, set)) else [target]
    found = [each for one in targets for each in _find(one)]  # all of them are known before any is stopped
    whole = [record for record, pid in found if pid is None]
    reports = [registry.stop(whole, why)] if whole else []
    for record, pid in found:
        if pid is not None and record not in whole:
            worker = next(worker for worker in record.workers if worker.pid == pid)
            reports.append(registry.stop_worker(record, worker))
    return _sum(reports)


def _sum(reports: Iterable[StopReport]) -> StopReport:
    reports = list(reports)
    return StopReport(
        endings=tuple(ending for report in reports for ending in report.endings),
        seconds=sum(report.seconds for report in reports),
        loaders=sum(report.loaders for report in reports),
        descendants=sum(report.descendants for report in reports),
    )


def _find(target: Any) -> list[tuple[Record, int | None]]:
    """Return the records that a target means, with the pid if it means one worker."""
    records = [record for record in registry.all() if record.workers]
    if isinstance(target, int) and not isinstance(target, bool):
        return [_find_worker(records, target)]
    base = getattr(target, "base_dataloader", None)  # of accelerate's wrappers
    found = [(record, None) for record in records if _is_meant(record, target) or (base and _is_meant(record, base))]
    if not found:
        what = repr(target) if isinstance(target, str) else f"this {type(target).__name__}"
        raise LoaderGuardError(f"{what} is not a loader with live workers; {_live(records)}")
    return list(found)


def _is_meant(record: Record, target: Any) -> bool:
    if isinstance(target, str):
        return target in (registry.name(record), f"#{record.loader_id}")
    return target is not None and (target is record.iterator() or target is record.loader())


def _find_worker(records: list[Record], pid: int) -> tuple[Record, int | None]:
    for record in records:
        for worker in record.workers:
            if worker.pid == pid:
                if not worker.is_alive():
                    raise LoaderGuardError(f"worker {pid} of {registry.name(record)} has already ended")
                return record, pid
    raise LoaderGuardError(f"pid {pid} is not a live worker of a loader in this kernel, and is left alone")


def _live(records: list[Record]) -> str:
    if not registry.is_guarding:
        return "the guard is off here, and knows of none"
    names = ", ".join(registry.name(record) for record in records)
    return f"live: {names}" if names else "none is live"
