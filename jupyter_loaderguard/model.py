"""Frozen data that the guard hands out: it is drawn by views/ and travels as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .quarantine import SkippedSample, decode, encode, save

if TYPE_CHECKING:
    from .timing import LoaderTime


@dataclass(frozen=True)
class WorkerState:
    """One worker process at the moment of the snapshot."""

    worker_id: int
    pid: int
    started: float
    """Seconds since the epoch."""
    state: str
    """running, sleeping, blocked (uninterruptible), stopped or dead."""
    memory_bytes: int
    """Resident memory; pages that workers share are counted in each of them."""
    phase: str = "unknown"
    """starting, idle or loading; unknown for a worker that is not observed: it may be older than the guard."""
    sample: str | None = None
    """What it loads: the sample's index as text, or its number in the stream of an iterable dataset."""
    sample_seconds: float = 0.0
    """How long it has been in this phase or on this sample."""
    samples: int = 0
    """Samples that it has loaded since its start."""
    word: str = "unknown"
    """starting, loading, idle, full (its batches wait to be taken), stalled, stopped, dead, or done (end of stream)."""
    samples_per_second: float | None = None
    """This and the next three only in the live status: they need two looks, or a long one."""
    cpu_percent: float | None = None
    private_bytes: int | None = None
    """Memory that ends with it: pages that it shares are not counted."""
    descriptors: int | None = None


@dataclass(frozen=True)
class LoaderState:
    """One live iterator over a DataLoader; without workers if `num_workers=0`."""

    loader_id: int
    name: str
    dataset: str
    dataset_length: int | None
    batches_total: int | None
    cell: int | None
    """Execution count of the cell that made it; None outside of cells."""
    start_method: str | None
    persistent: bool
    activity: str
    """waiting (for a batch), busy (the loop's body runs), idle, broken (a worker died); at the end done or stopped."""
    started: float
    batches: int
    wait_seconds: float
    workers: tuple[WorkerState, ...]
    batches_before: int = 0
    """Those of earlier epochs among `batches`: the workers of a persistent loader live on."""
    in_use: bool = True
    """Whether the cell that took the last batch still runs."""
    stalled: bool = False
    """Whether the loop waits for a batch for longer than the limit."""
    ready: int = 0
    """Batches that are loaded and wait to be taken."""
    capped: tuple[str, ...] = ()
    """Native thread pools that the guard made smaller in the workers, from and to how many threads."""
    capacity: int = 0
    """How many batches workers may load ahead; 0 without workers."""
    batches_per_second: float | None = None
    """This and the next two only in the live status: they need two looks."""
    wait_share: float | None = None
    """Share of the time since the last look that the loop waited for data, 0 to 1."""
    history: tuple[float, ...] = ()
    """Batches per second at the last looks, the latest last."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a loader."""

    at: float
    """Seconds since the epoch."""
    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class MachineState:
    """What the workers share."""

    cpus: int
    """CPUs that this process may use."""
    memory_bytes: int
    memory_available_bytes: int
    """Within the limit of the container, where there is one, as is the number above."""
    shm_bytes: int | None
    shm_used_bytes: int | None


@dataclass(frozen=True)
class Snapshot:
    """Everything under guard in this process, at one moment.

    >>> from jupyter_loaderguard import snapshot
    >>> now = snapshot()
    >>> now.loaders, now.workers, now.machine.cpus > 0
    ((), (), True)
    """

    taken: float
    pid: int
    guarding: bool
    loaders: tuple[LoaderState, ...]
    machine: MachineState
    events: tuple[Event, ...] = ()
    """The latest stalls and stops."""

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """All workers of all loaders."""
        return tuple(worker for loader in self.loaders for worker in loader.workers)

    def to_json(self) -> str:
        """Write it as JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Read what `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Snapshot:
        """Read the same, as part of something else."""
        data["machine"] = MachineState(**data["machine"])
        data["loaders"] = tuple(_loader_state(loader) for loader in data["loaders"])
        data["events"] = tuple(Event(**event) for event in data.get("events", ()))
        return cls(**data)


def _loader_state(data: dict[str, Any]) -> LoaderState:
    workers = tuple(WorkerState(**worker) for worker in data.pop("workers"))
    data["history"] = tuple(data.get("history", ()))
    data["capped"] = tuple(data.get("capped", ()))
    return LoaderState(workers=workers, **data)


@dataclass(frozen=True)
class Ending:
    """How one worker ended when the guard stopped it."""

    pid: int
    worker_id: int
    how: str
    """left (by itself), SIGTERM, SIGKILL, dead (it was already) or unkillable."""


@dataclass(frozen=True)
class StopReport:
    """What a stop did: which workers, how each one ended, and how long all of it took.

    >>> report = StopReport((Ending(4711, 0, "left"), Ending(4712, 1, "SIGTERM")), seconds=0.5, loaders=1)
    >>> report.pids, report.how[4712], report.left
    ((4711, 4712), 'SIGTERM', 0)
    """

    endings: tuple[Ending, ...]
    seconds: float
    loaders: int = 0
    descendants: int = 0
    """Processes that the workers had started themselves and that were ended with them."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers that were asked to stop."""
        return tuple(ending.pid for ending in self.endings)

    @property
    def how(self) -> dict[int, str]:
        """How each worker ended, by pid."""
        return {ending.pid: ending.how for ending in self.endings}

    @property
    def left(self) -> int:
        """Workers that even SIGKILL did not end in time."""
        return Counter(self.how.values())["unkillable"]


@dataclass(frozen=True)
class Frame:
    """One call on a Python stack."""

    file: str
    line: int
    function: str
    place: str
    """The file as a person knows it: a cell by its number, else its path."""
    code: str
    """The text of the line, where it can be read."""
    is_user: bool
    """Whether it is the user's own code, rather than Python's or an installed package's."""


@dataclass(frozen=True)
class Holder:
    """Who has taken the lock that a worker waits for."""

    who: str
    pid: int | None
    frame: Frame | None


@dataclass(frozen=True)
class LateWorker:
    """A worker that does not deliver, as it was when the stall was looked at."""

    worker_id: int | None
    """None if the kernel itself loads the samples (`num_workers=0`)."""
    pid: int
    batch: int | None
    index: Any
    """The sample that it is on; its number in the worker's stream for an iterable dataset."""
    samples: str
    """Where that is, in words: on sample 5, in collate_fn of samples 4, 5, …"""
    seconds: float
    """How long it has been on that."""
    kind: str
    """What it is doing, in a few words: CPU-bound, waiting for a lock, …"""
    detail: str
    """What it waits for, as measured at that moment."""
    advice: str
    """What to do about it, where something can be done."""
    frames: tuple[Frame, ...]
    """Its main thread, most recent call first."""
    frame: Frame | None
    """The user's own innermost call among them."""
    stack: str
    """The same as text, other threads included."""
    holder: Holder | None = None
    is_awaited: bool = True
    """Whether the loop waits for this one's batch; others are shown because they are late too, or hold a lock."""

    @property
    def name(self) -> str:
        """Who it is."""
        if self.worker_id is None:
            return f"the kernel itself (pid {self.pid})"
        return f"worker {self.worker_id} (pid {self.pid})"

    def sentence(self) -> str:
        """Say in a sentence what it is on, and what it is doing."""
        doing = f"{self.kind} ({self.detail})" if self.detail else self.kind
        if self.kind.startswith(("done", "blocked because")):
            return f"{self.name}, {self.samples.removeprefix('on ')}: {self.kind}: {self.detail}"
        if self.kind.startswith(("idle", "starting")):
            return f"{self.name} is {doing}"
        if self.samples.startswith("on an unknown sample"):
            return f"{self.name} is {self.samples}, {doing}{self.where()}"
        return f"{self.name} has been {self.samples} for {self.seconds:.1f} s, {doing}{self.where()}"

    def where(self) -> str:
        """Say at which line of the user's it is."""
        frame = self.frame
        return f", in {frame.function}() at {frame.place}:{frame.line}" if frame is not None else ""


@dataclass(frozen=True)
class Stall:
    """A batch that does not come."""

    loader_id: int
    loader: str
    dataset: str
    cell: int | None
    batch: int | None
    """Its number in the epoch, from 0; None between two epochs of a persistent loader."""
    batches_total: int | None
    seconds: float
    """How long the loop had waited when this was looked at."""
    limit_seconds: float
    workers: tuple[LateWorker, ...]
    came_after_seconds: float | None = None
    """How long the loop had waited when the batch came at last; None if it has not."""
    ended: str | None = None
    """How the wait ended otherwise."""

    @property
    def name(self) -> str:
        """Which batch of which loader."""
        if self.batch is None:
            return f"the next epoch of {self.loader}"
        total = f" of {self.batches_total:,}" if self.batches_total is not None else ""
        return f"batch {self.batch:,}{total} of {self.loader}"

    def sentence(self) -> str:
        """Say in a sentence what did not come, and what the late worker is doing."""
        late = f": {self.workers[0].sentence()}" if self.workers else ""
        return f"{self.name} did not come within {self.limit_seconds:g} s{late}"


@dataclass(frozen=True)
class RankState:
    """One rank of a distributed job, as it was when it was last heard of."""

    rank: int
    """Its number in torch.distributed, or else its engine's, or the one that its launcher gave it."""
    host: str
    pid: int
    status: str
    """live, silent (not heard of for some time), lost (gone), or starting; otherwise why it is not guarded (yet)."""
    heard: float = 0.0
    """When it was last heard of; seconds since the epoch."""
    engine: int | None = None
    """Its number in ipyparallel; None for a process that the notebook itself launched."""
    job: str = ""
    """What the ranks of its torch.distributed have in common, and those of others have not."""
    is_busy: bool = False
    """Whether a cell, or a function of the job, runs there."""
    collective: str = ""
    """The call of torch.distributed that its main thread is in."""
    collective_seconds: float = 0.0
    waits_for: int | None = None
    """The rank whose late loader it waits for, in such a call."""
    is_slowest: bool = False
    stall_count: int = 0
    stalls: tuple[Stall, ...] = ()
    """Those that last."""
    snapshot: Snapshot | None = None

    @property
    def name(self) -> str:
        """Which rank it is, and where."""
        engine = f"engine {self.engine} on " if self.engine is not None and self.engine != self.rank else ""
        return f"rank {self.rank} ({engine}{self.host})"

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """Its workers; none if it is gone."""
        return self.snapshot.workers if self.snapshot is not None and self.status != "lost" else ()

    @property
    def wait_share(self) -> float | None:
        """Share of its time that it waits for data, for the loader that it waits most for; None if not known."""
        loaders = self.snapshot.loaders if self.snapshot is not None else ()
        shares = [one.wait_share for one in loaders if one.in_use and one.wait_share is not None]
        return max(shares, default=None)


@dataclass(frozen=True)
class ClusterState:
    """All ranks at one moment."""

    taken: float
    ranks: tuple[RankState, ...]
    note: str = ""
    """What is wrong with all of them."""


def stall_from(data: dict[str, Any]) -> Stall:
    """Read a stall that travelled as JSON."""
    return Stall(**{**data, "workers": tuple(_late_worker_from(one) for one in data["workers"])})


def _late_worker_from(data: dict[str, Any]) -> LateWorker:
    holder = data["holder"]
    if holder is not None:
        holder = Holder(**{**holder, "frame": _frame_from(holder["frame"])})
    frames = tuple(Frame(**frame) for frame in data["frames"])
    return LateWorker(**{**data, "frames": frames, "frame": _frame_from(data["frame"]), "holder": holder})


def _frame_from(data: dict[str, Any] | None) -> Frame | None:
    return Frame(**data) if data is not None else None


@dataclass(frozen=True)
class DeadWorker:
    """A worker that ended before it should."""

    worker_id: int
    pid: int
    exit_code: int | None
    """Negative for a signal; None if other code of this process took it."""
    fate: str
    """The same in words."""
    sample: str
    """What it was on, in words; empty if that is not known."""

    @property
    def name(self) -> str:
        """Who it was."""
        return f"worker {self.worker_id} (pid {self.pid})"


@dataclass(frozen=True)
class Failure:
    """What was measured when workers were found dead."""

    loader: str
    workers: tuple[DeadWorker, ...]
    oom_kills: int = 0
    """Processes of this container that the system ended for memory since the loader began."""
    why: str | None = None
    """The traceback of a worker that could not start."""


@dataclass(frozen=True)
class Card:
    """An error explained."""

    title: str
    """What happened."""
    facts: tuple[str, ...]
    """What was measured."""
    fix: str
    """What to do."""


@dataclass(frozen=True)
class Retry:
    """Workers that were replaced, with their batches produced again."""

    loader: str
    why: str
    """Which worker died or hung, on what, and how."""
    batches: int
    """How many had been sent to workers and not come back."""
    seconds: float
    """How long the replacement took."""

    def sentence(self) -> str:
        """Say in a sentence what was done."""
        again = "1 batch was" if self.batches == 1 else f"{self.batches:,} batches were"
        took = f"{self.seconds:.2f} s"
        return f"the workers of {self.loader} were replaced in {took} and {again} produced again: {self.why}"


@dataclass(frozen=True)
class RunReport:
    """What happened in a guarded cell or `with guard()` block.

    >>> from torch.utils.data import DataLoader
    >>> from jupyter_loaderguard import guard
    >>> class Images(list):
    ...     def __getitem__(self, index):
    ...         return 1 // (index - 5)
    >>> with guard(skip=1) as run:
    ...     count = sum(len(batch) for batch in DataLoader(Images(range(8)), batch_size=4))
    >>> report = run.report
    >>> count, report.batches, [sample.index for sample in report.skipped], report.retries, report.left
    (7, 2, [5], 0, 0)
    >>> RunReport.from_json(report.to_json()) == report
    True
    """

    loaders: int
    workers: int
    batches: int
    seconds: float
    wait_seconds: float
    peak_bytes: int
    """Most memory that its workers held at once for themselves alone (shared pages not counted)."""
    left: int
    """Workers that the run started and that are still alive."""
    stalls: tuple[Stall, ...] = ()
    retries: int = 0
    """How often workers were replaced because one died or hung."""
    skipped: tuple[SkippedSample, ...] = ()
    """The quarantine: samples that were left out."""
    retried: tuple[Retry, ...] = ()
    """The replacements one by one; also those that found a sample to be left out, which `retries` does not count."""
    remarks: tuple[str, ...] = ()
    """What retry and skip guarantee here, and what not."""
    times: tuple[LoaderTime, ...] = ()
    """Where the time of each loader went; of the latest ones, if there were many."""
    bin_seconds: float = 0.0
    """How wide the bins of their timelines are."""
    peak_shm_bytes: int = 0
    """Most that was in use of /dev/shm, by whomever."""

    @property
    def wait_fraction(self) -> float:
        """Share of the run's time that its loop waited for data, 0 to 1."""
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds else 0.0

    def save_quarantine(self, path: Any) -> None:
        """Write the samples that were left out as JSON, for `guard(quarantine=path)` of a later run."""
        save(self.skipped, path)

    def to_json(self) -> str:
        """Write it as JSON; `from_json` reads it back."""
        from .timing import write_json  # seldom needed, and not in the first cell

        return write_json(_with_keys(self, encode))

    @classmethod
    def from_json(cls, text: str) -> RunReport:
        """Read what `to_json` wrote."""
        from .timing import read_json

        return _with_keys(read_json(cls, text), decode)

    def to_trace(self) -> str:
        """Write its timeline as JSON for chrome://tracing and ui.perfetto.dev."""
        from .timing import write_trace

        return write_trace(self.seconds, self.times, self.bin_seconds)

    def __str__(self) -> str:
        from .timing import drawn

        return str(drawn("timeline", "report", self))

    def _repr_html_(self) -> str:
        from .timing import drawn

        return str(drawn("timeline", "report_html", self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _with_keys(report: RunReport, change: Callable[[Any], Any]) -> RunReport:
    """Return a report with other keys of its samples: JSON has no tuples."""
    skipped = tuple(replace(sample, index=change(sample.index)) for sample in report.skipped)
    late = [tuple(replace(one, index=change(one.index)) for one in stall.workers) for stall in report.stalls]
    stalls = tuple(replace(stall, workers=workers) for stall, workers in zip(report.stalls, late, strict=True))
    return replace(report, skipped=skipped, stalls=stalls)


@dataclass(frozen=True)
class Finding:
    """Something that the doctor found to be wrong.

    >>> finding = Finding("LG109", "warning", "4 workers do the work of 1", "3 of them wait for dataset.lock", "…")
    >>> finding.code, finding.severity
    ('LG109', 'warning')
    """

    code: str
    """LG001 to LG099: of the machine; from LG100 on: of a loader. docs/doctor.md has them all."""
    severity: str
    """error (it fails), warning (it costs or corrupts something) or note (it may)."""
    title: str
    evidence: str
    """What was measured, with its figures."""
    fix: str


class Findings(list[Finding]):
    """What the doctor found, the worst first, and what it did to find it."""

    def __init__(self, found: Iterable[Finding] = (), subject: str = "", checked: str = "", ran: str = "") -> None:
        super().__init__(found)
        self.subject = subject
        """What was examined, in a few words."""
        self.checked = checked
        """What was looked for."""
        self.ran = ran
        """What was run for it: how many batches, with how many workers, in how many seconds."""
