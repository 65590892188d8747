"""Frozen data about time: where that of a run went, and what `tune` measured. It travels as JSON and as a trace."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class EpochTime:
    """One epoch of a loader, or as much of it as there was in the run."""

    began_seconds: float
    """Since the run began."""
    seconds: float
    batches: int
    wait_seconds: float
    """The loop waited for a batch."""
    loop_seconds: float
    """The loop's body had one."""
    first_batch_seconds: float | None
    """From `iter()` to the first batch, the start of the workers included; None if the epoch is older than the run."""


@dataclass(frozen=True)
class WorkerTime:
    """What the workers with one number did, through all epochs. The three shares are of `seconds`, 0 to 1."""

    worker_id: int
    seconds: float
    """From the end of its start to its own."""
    busy: float
    """It had a task, and computed or waited for a CPU."""
    blocked: float
    """It had a task, and waited for something else: a disk, a network, a lock, a sleep."""
    idle: float
    """It had no task: as much was loaded ahead as may be, or the loop had not begun."""
    samples: int
    load: tuple[float, ...] = ()
    """In each bin of the timeline, the share of the time in which it had a task."""


@dataclass(frozen=True)
class SlowSample:
    """One of the slowest samples."""

    index: str
    """The sample's index as text; for an iterable dataset its number in the worker's stream."""
    seconds: float
    worker_id: int | None
    """None if the kernel loaded it (`num_workers=0`)."""
    began_seconds: float
    """Since the run began."""


@dataclass(frozen=True)
class Wait:
    """One wait for a batch."""

    began_seconds: float
    """Since the run began."""
    seconds: float


@dataclass(frozen=True)
class LoaderTime:
    """Where the time of one loader went, in a run."""

    name: str
    dataset: str
    workers: int
    batches: int
    wait_seconds: float
    loop_seconds: float
    first_batch_seconds: float | None
    """Of the first epoch that began in the run."""
    wait_p50: float | None
    """Half of the waits for a batch were shorter, within 2 %."""
    wait_p95: float | None
    wait_p99: float | None
    batch_bytes: int | None
    """Tensors and arrays of a batch, the mean of those looked at; None if there are none, or too many parts."""
    epochs: tuple[EpochTime, ...]
    """The latest ones."""
    epochs_before: int
    """How many there were before those."""
    lanes: tuple[WorkerTime, ...]
    slowest: tuple[SlowSample, ...]
    waiting: tuple[float, ...]
    """In each bin of the timeline, the share of the time in which the loop waited."""
    looping: tuple[float, ...]
    """The same for the loop's body."""
    longest_waits: tuple[Wait, ...] = ()
    """In the order in which they were; all of them, if they were few."""


@dataclass(frozen=True)
class TuneRow:
    """What was measured with one setting.

    >>> from torch.utils.data import DataLoader
    >>> from jupyter_loaderguard import tune
    >>> row = tune(DataLoader(range(4096), batch_size=64), max_workers=1, seconds=4).rows[0]
    >>> row.num_workers, row.prefetch_factor
    (0, None)
    """

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    batches_per_second: float
    """Without the fastest and the slowest eighth of `blocks`; with a `step`, steps per second."""
    low: float
    """The middle half of the blocks is between this and `high`."""
    high: float
    blocks: tuple[float, ...]
    """Batches per second, in parts of the time that was measured."""
    batches: int
    seconds: float
    first_batch_seconds: float
    """From `iter()` to the first batch."""
    wait_share: float
    """Share of the time in which the loop waited for a batch, 0 to 1."""
    idle_share: float | None
    """Share of the time in which workers had nothing to do; None without workers."""
    worker_bytes: int | None = None
    """Memory that one worker held for itself."""
    remark: str = ""

    @property
    def setting(self) -> tuple[int, int, bool]:
        """What was tried, in the order in which less is preferred."""
        return self.num_workers, self.prefetch_factor or 0, self.persistent_workers

    @property
    def noise(self) -> float:
        """How far off the figure may be, as a share of it: by the spread of the blocks, and how many there are."""
        if len(self.blocks) < 2 or not self.batches_per_second:
            return 1.0
        deviation = (self.high - self.low) / 1.349  # of a normal distribution with these quartiles
        return 1.25 * deviation / math.sqrt(len(self.blocks)) / self.batches_per_second


@dataclass(frozen=True)
class Drawing:
    """Something that is drawn: a notebook shows it as HTML, print() as text."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TuneProgress:
    """How far `tune` is."""

    doing: str
    share: float
    """Of the time that it may take, 0 to 1."""
    seconds_left: float
    """At most."""


@dataclass(frozen=True)
class TuneResult:
    """How fast a loader was with several settings, and which one is recommended.

    >>> from torch.utils.data import DataLoader
    >>> from jupyter_loaderguard import tune
    >>> result = tune(DataLoader(range(4096), batch_size=64), max_workers=1, seconds=4)
    >>> result.settings["num_workers"] == result.best, result.best_row in result.rows, result.limit
    (True, True, 1)
    """

    loader: str
    """What was measured, in a few words."""
    rows: tuple[TuneRow, ...]
    """By the number of workers."""
    best: int
    """The recommended `num_workers`: the fewest of those between which no difference could be measured."""
    prefetch_factor: int | None
    """Recommended; None without workers."""
    persistent_workers: bool
    reason: str
    """The recommendation and its reason, in a sentence."""
    code: str
    """The line to paste."""
    limit: int
    """The most workers that could be tried."""
    limited_by: str
    """What sets that limit."""
    margin: float
    """Differences of this share are not taken for one: by the noise of this machine at that time."""
    seconds: float
    """How long it took."""
    lock: str | None = None
    """What the workers waited for, if it was one lock."""
    has_step: bool = False
    is_complete: bool = True
    """False after an interrupt, or if time was up or the loader failed before all had been measured."""
    remarks: tuple[str, ...] = ()

    @property
    def best_row(self) -> TuneRow:
        """What was measured with the recommended setting."""
        same = [row for row in self.rows if row.num_workers == self.best]
        alike = [row for row in same if row.prefetch_factor == self.prefetch_factor] or same
        return next((row for row in alike if row.persistent_workers == self.persistent_workers), alike[0])

    @property
    def settings(self) -> dict[str, Any]:
        """The recommendation, as arguments of a DataLoader."""
        if not self.best:
            return {"num_workers": 0}
        settings: dict[str, Any] = {"num_workers": self.best, "prefetch_factor": self.prefetch_factor}
        return {**settings, "persistent_workers": self.persistent_workers}

    def plot(self) -> Drawing:
        """Return the curve, with its spread: as the last line of a cell it is shown, and print() writes it as text."""
        return typing.cast(Drawing, drawn("curve", "draw", self))

    def __str__(self) -> str:
        return str(drawn("curve", "result", self))

    def _repr_html_(self) -> str:
        return str(drawn("curve", "result_html", self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def to_json(self) -> str:
        """Write it as JSON; `from_json` reads it back."""
        return write_json(self)

    @classmethod
    def from_json(cls, text: str) -> TuneResult:
        """Read what `to_json` wrote."""
        return read_json(cls, text)


def drawn(view: str, function: str, thing: Any) -> Any:
    """Have a view draw something. It is loaded only now: the model needs none, but for showing itself."""
    return getattr(importlib.import_module(f".views.{view}", __package__), function)(thing)


def write_json(thing: Any) -> str:
    """Write frozen data as JSON; what has no JSON of its own, as text."""
    return json.dumps(dataclasses.asdict(thing), default=str)


def read_json(kind: type[T], text: str) -> T:
    """Read frozen data of a kind back."""
    return typing.cast(T, _build(kind, json.loads(text)))


def _build(kind: Any, data: Any) -> Any:
    """Make data of the kind that an annotation says."""
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = typing.get_type_hints(kind, localns=globals())  # the model names our kinds for type checkers alone
        known = [field.name for field in dataclasses.fields(kind) if field.name in data]
        return typing.cast(Any, kind)(**{name: _build(hints[name], data[name]) for name in known})
    if isinstance(kind, types.UnionType) and data is not None:
        return _build(next(part for part in typing.get_args(kind) if part is not type(None)), data)
    if typing.get_origin(kind) is tuple and isinstance(data, list):
        return tuple(_build(typing.get_args(kind)[0], part) for part in data)
    return data


def write_trace(seconds: float, loaders: tuple[LoaderTime, ...], bin_seconds: float) -> str:
    """Write the accounts of a run in the trace format of Chrome, which Perfetto reads too."""
    events: list[dict[str, Any]] = [_slice("run", 0, 0, 0.0, seconds)]
    for number, loader in enumerate(loaders, 1):
        events += [
            {"ph": "M", "pid": number, "name": "process_name", "args": {"name": f"{loader.name} ({loader.dataset})"}},
            {"ph": "M", "pid": number, "tid": 0, "name": "thread_name", "args": {"name": "loop"}},
            *_loop_events(number, loader),
            *(event for lane in loader.lanes for event in _lane_events(number, lane, bin_seconds)),
            *(_sample_event(number, sample) for sample in loader.slowest),
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _slice(name: str, pid: int, tid: int, began: float, seconds: float, **args: Any) -> dict[str, Any]:
    times = {"ts": round(began * 1e6, 1), "dur": round(seconds * 1e6, 1)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": args}


def _loop_events(pid: int, loader: LoaderTime) -> list[dict[str, Any]]:
    epochs = [
        _slice(f"epoch {number}", pid, 0, one.began_seconds, one.seconds, batches=one.batches)
        for number, one in enumerate(loader.epochs, loader.epochs_before)
    ]
    return epochs + [
        _slice("wait for a batch", pid, 0, wait.began_seconds, wait.seconds) for wait in loader.longest_waits
    ]


def _lane_events(pid: int, lane: WorkerTime, bin_seconds: float) -> list[dict[str, Any]]:
    name = f"worker {lane.worker_id}"
    label = {"ph": "M", "pid": pid, "tid": lane.worker_id + 1, "name": "thread_name", "args": {"name": name}}
    counters = [
        {
            "ph": "C",
            "pid": pid,
            "name": f"{name} loading",
            "ts": number * bin_seconds * 1e6,
            "args": {"%": round(100 * load)},
        }
        for number, load in enumerate(lane.load)
    ]
    return [label, *counters]


def _sample_event(pid: int, sample: SlowSample) -> dict[str, Any]:
    thread = 0 if sample.worker_id is None else sample.worker_id + 1
    return _slice(f"sample {sample.index}", pid, thread, sample.began_seconds, sample.seconds)
