"""The watchdog: compares the time that loops wait for data with the limit, and looks at what is late.

NOTE [ What counts as waiting ]
Only the time between a loop's question for a batch and the answer counts. Taken off it is time in which
a debugger holds the waiting thread, in which this whole process did not run (it was stopped, or the
machine slept: the watchdog's own sleep took too long), and the start of a worker process until its
agent is there, up to START_SECONDS: under spawn that is the import of torch, and not the user's code.

C code that holds the GIL also makes the watchdog's sleep too long, and that time counts: then the process used a
CPU or, on a crowded machine, was taken off one again and again. A process that did not run was neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import FrameType

from . import frames, interrupts, usage
from .errors import LoaderStalled, warn_limited
from .model import Stall
from .registry import BATCH, BEGAN, END, RETRIED, Record, forget_stall, registry, take_verdict
from .torch_adapter import WAITING
from .traces import short_place
from .worker.slot import LOADING

TICK_SECONDS = 0.25
IDLE_SECONDS = 1.0
JOINED_SECONDS = 1.0
PAUSE_SECONDS = 1.0
"""A sleep of the watchdog that took so much longer than asked for means that the process did not run."""
PREEMPTIONS_PER_SECOND = 10.0
"""Of a process that computes beside others; measured: some 70 beside 6 others on 2 CPUs, at most 1 if it is stopped."""
LEAST_CPU = 0.05
"""Of a CPU, for a process that computes on a crowded machine; one that was stopped had a moment before and after."""
START_SECONDS = 60.0
VERDICT_SECONDS = 2.0
AGAIN = 4
"""The card is shown again when the stall has lasted so many times the limit."""
LINGER_SECONDS = 1.0
"""How long the thread stays when no loop waits any more: the next wait may come at once."""
_DEBUGGERS = ("bdb", "pdb", "ipdb", "IPython.core.debugger", "IPython.terminal.debugger", "pydevd", "debugpy", "pudb")


@dataclass(eq=False)
class _Wait:
    """One wait for a batch."""

    since: float
    seen: float
    """When it was last looked at."""
    discount: float = 0.0
    """Seconds that do not count. See NOTE [ What counts as waiting ]."""
    start_discount: float = 0.0
    shown: int = 0
    stall: Stall | None = None
    is_examined: threading.Event = field(default_factory=threading.Event)
    joined_since: float | None = None
    """Since when the main thread waits for the thread that waits, after an interrupt."""
    is_raised: bool = False
    """Whether it is to end by LoaderStalled, which says it all."""


class Watchdog:
    """The thread that watches the waits of this process. There is one, `watchdog`."""

    def __init__(self) -> None:
        self.show: Callable[[Stall, Record, str], None] = lambda stall, record, key: None
        """Draws a stall; the same key means the same card, with news."""
        self.place_of: Callable[[str], str] = short_place
        self._waits: dict[Record, _Wait] = {}
        self._looked = _Moment()
        self._break_lock = threading.Lock()
        self._failure: Exception | None = None
        self._unheard = interrupts.UnheardInterrupts()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_on = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Watch from now on; the thread itself lives only while loops wait, and a little longer."""
        self._is_on = True
        registry.on_wait = self._ensure_thread
        registry.await_verdict = self._await_verdict
        registry.take_verdict = self._take_verdict
        registry.on_stall_end = self._end
        interrupts.breaker.install(self._should_break)

    def stop(self) -> None:
        """Watch no longer."""
        self._is_on = False
        registry.on_wait = lambda: None
        registry.await_verdict = lambda record: None
        registry.take_verdict = take_verdict
        registry.on_stall_end = forget_stall
        interrupts.breaker.remove()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        registry.is_watched = False
        self._waits.clear()
        self._failure = None

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._is_on and not registry.is_watched:
                registry.is_watched = True
                self._wake.clear()
                self._looked = _Moment()  # not in the thread: the process may be stopped before that runs
                self._thread = threading.Thread(target=self._run, name="loaderguard-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException:
            registry.is_watched = False  # the next wait starts another thread
            raise

    def _watch(self) -> None:
        waited, pause = self._looked.wall, 0.0
        while self._is_on and not self._wake.wait(pause):
            records = registry.all()
            self._drop_gone(records)
            if any(record.waiting_since is not None for record in records):
                waited = time.perf_counter()
            elif time.perf_counter() - waited > LINGER_SECONDS and self._may_leave():
                return
            try:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                self._unheard.look(_main_waits(records))
                pause = self._look(records, pause)
            except Exception as error:  # noqa: BLE001 - the watchdog goes on
                warn_limited(f"a stall could not be looked at or shown ({type(error).__name__}: {error})")
                pause = IDLE_SECONDS

    def _may_leave(self) -> bool:
        """Announce that the thread leaves, unless a wait has begun meanwhile: the next one starts it again."""
        with self._lock:
            self._waits.clear()
            registry.is_watched = any(record.waiting_since is not None for record in registry.all())
            return not registry.is_watched

    def _drop_gone(self, records: list[Record]) -> None:
        """Forget waits for loaders that were stopped; if one was stalled, say that it is over."""
        for gone in set(self._waits) - set(records):
            self._forget(gone, "")

    def _forget(self, record: Record, outcome: str) -> None:
        wait = self._waits.pop(record, None)
        if wait is not None and wait.stall is not None:
            self._say_it_is_over(record, wait, wait.stall, outcome)

    def _look(self, records: list[Record], slept: float) -> float:
        """Look at every wait, and return how long to sleep."""
        now = _Moment()
        pauses = [IDLE_SECONDS]
        for record in records:
            limit, on_stall = registry.stall_rule(record)
            pauses.append(max(0.05, limit / 2))
            since = record.waiting_since
            if since is not None:
                left = self._look_at(record, since, slept, limit, on_stall)
                pauses.append(min(TICK_SECONDS, max(0.01, left)))
        self._looked = now
        return min(pauses)

    def _look_at(self, record: Record, since: float, slept: float, limit: float, on_stall: str) -> float:
        """Look at one wait, act if it has lasted too long, and return how long it has until it does."""
        now = time.perf_counter()
        wait = self._waits.get(record)
        if wait is None or wait.since != since:
            wait = self._waits[record] = _Wait(since, seen=since)
        self._discount(wait, record, now, slept)
        seconds = now - since - wait.discount
        if record.verdict is None and _is_joined_after_interrupt(record):
            if wait.joined_since is None:
                wait.joined_since = now
            if now - wait.joined_since >= JOINED_SECONDS:
                words = "was broken off: the cell was interrupted, and waits for the thread of this loop"
                record.verdict = record.last_verdict = LoaderStalled(f"a loop over {registry.name(record)} {words}")
        if record.verdict is not None:
            self._break(record, wait)
            return TICK_SECONDS
        if on_stall == "retry" and seconds >= limit and (left := _seconds_to_go(record, limit)) > 0:
            return left
        if wait.shown < 2 and seconds >= limit * (AGAIN if wait.shown else 1):
            self._act(record, wait, seconds, limit, on_stall)
        return limit * (AGAIN if wait.shown else 1) - (time.perf_counter() - since - wait.discount)

    def _discount(self, wait: _Wait, record: Record, now: float, slept: float) -> None:
        """Take off what is not waiting. See NOTE [ What counts as waiting ]."""
        gap, wait.seen = now - wait.seen, now
        if gap > slept + PAUSE_SECONDS and not _Moment().has_run_since(self._looked, gap - slept):
            wait.discount += gap - slept
        elif _is_debugging(frames.stack_of(record.thread)):
            wait.discount += gap
        elif wait.start_discount < START_SECONDS and _is_starting(record):
            wait.discount += gap
            wait.start_discount += gap

    def _act(self, record: Record, wait: _Wait, seconds: float, limit: float, on_stall: str) -> None:
        """Look at what is late, and show or raise it.

        From here on it is a stall, also if the batch comes while we look: our look itself may be what brings
        it, as the signal that asks for a stack ends a sleep in C. The thread that waits sees `is_stalled` at
        the end of its wait, and waits for us; or we see that its wait is over.
        """
        wait.is_examined.clear()
        record.is_stalled = True
        try:
            if record.waiting_since != wait.since:
                record.is_stalled = False
                return
            from .examine import Examiner  # seldom needed, and not in the first cell

            stall = Examiner(record, self.place_of).examine(seconds, limit)
            if stall is not None:
                registry.note_stall(record, stall, wait.stall)
                wait.stall, wait.shown = stall, wait.shown + 1
                self._tell(record, wait, stall, on_stall)
        finally:
            wait.is_examined.set()

    def _tell(self, record: Record, wait: _Wait, stall: Stall, on_stall: str) -> None:
        if on_stall == "warn":
            self.show(stall, record, _key(record, wait))
            return
        wait.is_raised = True
        record.is_hung = on_stall == "retry" and record.mends
        record.verdict = record.last_verdict = _error(stall)
        if not record.workers:
            self._break(record, wait)

    def _break(self, record: Record, wait: _Wait) -> None:
        """Break off what the waiting thread does, so that it raises `LoaderStalled`.

        A wait for workers looks for the verdict by itself. But the thread may also load the samples itself
        (`num_workers=0`), ask the sampler, or ask a stuck worker for the shared memory of a batch that it has
        sent. Under the lock: no break comes after `_end`.
        """
        with self._break_lock:
            if record.verdict is not None and record.waiting_since == wait.since:
                interrupts.breaker.break_off(record.thread)

    def _should_break(self, frame: FrameType | None) -> bool:
        """Tell whether the main thread is still in the wait that is to be broken off."""
        main = threading.main_thread().ident
        return any(
            record.verdict is not None and record.waiting_since is not None and record.thread == main
            for record in registry.all()
        )

    def _await_verdict(self, record: Record) -> None:
        wait = self._waits.get(record)
        if wait is not None:
            wait.is_examined.wait(VERDICT_SECONDS)

    def _take_verdict(self, record: Record) -> LoaderStalled | None:
        """Under the lock, as above: no break comes into what is done about it."""
        with self._break_lock:
            found = take_verdict(record)
        interrupts.breaker.call_off()
        return found

    def _end(self, record: Record, since: float, outcome: str) -> None:
        """Say that a wait that was stalled is over; called by the thread that waited."""
        wait = self._waits.get(record)
        if wait is not None and wait.since == since:
            wait.is_examined.wait(VERDICT_SECONDS)
        with self._break_lock:
            record.verdict = None
        interrupts.breaker.call_off()
        record.is_stalled = record.is_hung = False
        if wait is not None and wait.since == since:
            self._forget(record, outcome)

    def _say_it_is_over(self, record: Record, wait: _Wait, stall: Stall, outcome: str) -> None:
        has_come = outcome in (BATCH, BEGAN)
        ways = {END: "with the end of the epoch", RETRIED: "with the replacement of what was late"}
        ended = ways.get(outcome) or record.stopped_by or "by an error or an interrupt"
        over = replace(
            stall,
            came_after_seconds=time.perf_counter() - wait.since if has_come else None,
            ended=None if has_come else ended,
        )
        registry.note_stall(record, over, stall)
        if not wait.is_raised:
            try:
                self.show(over, record, _key(record, wait))
            except Exception as error:  # noqa: BLE001 - the loop goes on; the watchdog says it
                self._failure = error


@dataclass(frozen=True)
class _Moment:
    """When something was, on the wall and on this process's CPUs."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)
    preempted: int = field(default_factory=usage.count_preemptions)

    def has_run_since(self, earlier: _Moment, seconds: float) -> bool:
        """Tell whether this process ran, or wanted to, for most of so many seconds."""
        cpu, preempted = self.cpu - earlier.cpu, self.preempted - earlier.preempted
        return cpu >= seconds / 2 or (cpu >= seconds * LEAST_CPU and preempted >= seconds * PREEMPTIONS_PER_SECOND)


def _main_waits(records: list[Record]) -> object:
    """Return which workers the main thread waits for since when; None if for none, and it runs code of the user's."""
    main = threading.main_thread().ident
    waits = [(record.loader_id, record.waiting_since) for record in records if record.workers and record.thread == main]
    return [wait for wait in waits if wait[1] is not None] or None


def _is_joined_after_interrupt(record: Record) -> bool:
    """Tell whether the main thread is done with its interrupted cell but for a thread, which waits for workers.

    Libraries that load in a thread of their own end so. Plain torch's workers die of the front end's SIGINT, and the
    thread with them; ours are deaf to it, as the end of the cell is what stops them, and it would never come.
    """
    main = threading.main_thread().ident
    cell = registry.cells.get(main or 0)
    if cell is None or record.cell is not cell or record.thread == main or not cell.has_interrupt():
        return False
    innermost = frames.stack_of(main)[:3]
    return any(frame.f_code is threading.Thread.join.__code__ for frame in innermost)


def _key(record: Record, wait: _Wait) -> str:
    return f"loaderguard-{record.loader_id}-{wait.since:.6f}"


def _error(stall: Stall) -> LoaderStalled:
    late = stall.workers[0] if stall.workers else None
    if late is None:
        return LoaderStalled(stall.sentence(), seconds=stall.seconds)
    return LoaderStalled(stall.sentence(), late.worker_id, late.pid, late.index, stall.seconds, late.stack)


def _is_debugging(stack: Iterable[FrameType]) -> bool:
    """Tell whether a debugger holds the thread inside of its wait; one that runs the whole program does not count."""
    for frame in stack:
        name = frame.f_globals.get("__name__") or ""
        if name in _DEBUGGERS or name.partition(".")[0] in ("pydevd", "debugpy", "_pydevd_bundle"):
            return True
        if name == WAITING:
            return False
    return False


def _seconds_to_go(record: Record, limit: float) -> float:
    """Return how long until a sample that the loop waits for has taken longer than the limit.

    A worker that goes on to other samples is slow, not stuck: there is nothing that a replacement would mend.
    """
    iterator = record.iterator()
    if iterator is None:
        return 0.0
    _, awaited = record.control.awaited(iterator)
    slots = [record.slots[number] for number in awaited or [0] if number < len(record.slots)]
    notes = [slot.read() for slot in slots if slot is not None]
    return min((limit - (time.monotonic() - note.since) for note in notes if note.phase == LOADING), default=0.0)


def _is_starting(record: Record) -> bool:
    """Tell whether the loop waits for a worker whose process is not ready yet."""
    iterator = record.iterator()
    if iterator is None or not record.slots:
        return False
    _, awaited = record.control.awaited(iterator)
    slots = [record.slots[number] for number in awaited if number < len(record.slots)]
    return any(slot is not None and not slot.read().pid for slot in slots)


watchdog = Watchdog()
