"""How often workers may be replaced and samples left out, in a guarded run or in a cell; and what was.

NOTE [ Whose fault ]
A worker that dies or hangs on a sample is replaced, and the sample tried again: the system may have ended it for
memory, or a disk was slow. If the same sample does it a second time, before it has ever come, it is the sample's:
it is left out. What leads to a sample that is left out does not count as a retry. Where no retry remains, a sample gets
its second look all the same, as often as samples may be left out.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .model import Retry
from .quarantine import LeftOut, SkippedSample, identity

TWICE = 2


@dataclass(frozen=True)
class Suspect:
    """What a worker was on when it died or hung."""

    loader_id: int
    worker_id: int
    task: int
    key: Any
    """The sample's; all keys of the task if that is not known."""
    is_exact: bool
    """Whether the sample is known; else it is one of the task's."""
    guess: int | None = None
    """The place among the task's keys at which it seemed to be."""

    @property
    def mark(self) -> tuple[Any, ...]:
        """What makes two of them the same."""
        return (self.loader_id, identity(self.key)) if self.is_exact else (self.loader_id, "task", self.task)


@dataclass(eq=False)
class Allowance:
    """What is left of `retry` and `skip`. See NOTE [ Whose fault ]."""

    retry: int = 0
    skip: int = 0
    known: tuple[SkippedSample, ...] = ()
    """Of an earlier run: these samples are not touched at all."""
    retries: int = 0
    retried: list[Retry] = field(default_factory=list)
    skipped: list[SkippedSample] = field(default_factory=list)
    remarks: dict[str, None] = field(default_factory=dict)
    """Sentences for the report, each once."""
    _second_looks: int = 0
    _left_out: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    """Datasets, held weakly where they can be, and keys."""
    _failures: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    @property
    def is_open(self) -> bool:
        """Tell whether anything may be mended or is to be left out."""
        return bool(self.retry or self.skip or self.known)

    def may_retry(self) -> bool:
        """Tell whether workers may be replaced once more."""
        return self.retries < self.retry

    def may_skip(self) -> bool:
        """Tell whether one more sample may be left out."""
        return len(self.skipped) < self.skip

    def take_second_look(self) -> bool:
        """Tell whether samples may be tried once more without a retry, and count it."""
        is_allowed = self.may_skip() and self._second_looks < self.skip
        self._second_looks += is_allowed
        return is_allowed

    def note_failures(self, suspects: Iterable[Suspect]) -> list[Suspect]:
        """Count what died or hung on what; return those that are to blame. See NOTE [ Whose fault ]."""
        blamed = []
        for suspect in suspects:
            self._failures[suspect.mark] += 1
            if self._failures[suspect.mark] >= TWICE:
                blamed.append(suspect)
        return blamed if self.may_skip() else []

    def forgive(self, loader_id: int, task: int, keys: Any) -> bool:
        """Forget what was counted against the samples of a batch that has come; return whether others are suspected."""
        self._failures.pop((loader_id, "task", task), None)
        for key in keys if type(keys) in (list, tuple) else [keys]:
            self._failures.pop((loader_id, identity(key)), None)
        self._failures.pop((loader_id, identity(keys)), None)  # a tuple may be the key of a single sample
        return any(mark[0] == loader_id for mark in self._failures)

    def leave_out(self, dataset: Any, sample: SkippedSample) -> None:
        """Note that a sample of this dataset is left out from now on."""
        try:
            owner: Callable[[], Any] = weakref.ref(dataset)
        except TypeError:
            owner = lambda: dataset  # noqa: E731 - not by its id, which another one may get later
        self.skipped.append(sample)
        self._left_out.append((owner, sample.index))

    def left_out_of(self, dataset: Any, name: str, length: int | None) -> tuple[LeftOut | None, int]:
        """Return the samples of a dataset that nobody is to touch, and how many of them an earlier run had found.

        Those are meant by the name of the dataset and its length.
        """
        found = LeftOut()
        for owner, key in self._left_out:
            if owner() is dataset:
                found.add(key)
        earlier = [one for one in self.known if one.dataset == name and one.dataset_length in (None, length)]
        for sample in earlier:
            found.add(sample.index)
        return found if len(found) else None, len(earlier)

    def history(self) -> str:
        """Say what was done before it was no longer enough; empty if nothing was."""
        done = []
        if self.retries:
            times = "once" if self.retries == 1 else f"{self.retries} times"
            done.append(f"workers had been replaced {times} (retry={self.retry})")
        if self.skipped:
            names = ", ".join(sample.sample for sample in self.skipped)
            done.append(f"{len(self.skipped)} left out (skip={self.skip}): samples {names}")
        return f"loaderguard: before this, {'; '.join(done)}." if done else ""
