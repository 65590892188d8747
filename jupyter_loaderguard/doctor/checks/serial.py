"""LG109: workers wait for one lock, so that several do little more than the work of one.

Measured: in some hundred looks at the run, how many workers waited for the same lock at that moment, by the system call
that each one was in. What remains is how many worked at a time. The lock is named by its path from the dataset,
or by its file if it is a lock on one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...lending.serial import LockCensus
from ...model import Finding
from ..check import Check, Moment
from ..trial import Trial


class SerialCheck(Check):
    """See the docstring of this file."""

    code = "LG109"
    looks_for = "workers that wait for one lock"

    def __init__(self, subject: Any) -> None:
        super().__init__(subject)
        self._census = LockCensus(subject.workers)

    def look(self, moment: Moment) -> None:
        """Count who waits for which lock."""
        self._census.look((worker.pid, worker.slot) for worker in moment.workers)

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return how many workers worked at a time, if most of them waited."""
        found = self._census.verdict()
        if found is None:
            return []
        evidence = (
            f"In {found.looks} looks at {found.workers} workers within {trial.window_seconds:.1f} s, "
            f"{found.waiting:.1f} of them were waiting for {found.lock} on average."
        )
        fix = f"Hold {found.lock} for less, or not at all: files that each worker opens for itself need no lock."
        title = f"{found.workers} workers do the work of {found.workers - found.waiting:.1f}"
        return self.finding("warning", title, evidence, fix)
