"""LG105: the workers need more memory than there is.

Measured: under spawn and forkserver each worker gets its own copy of the arrays and tensors that the dataset holds
(memory maps become copies too), so their bytes × workers are compared with the memory that is available, and the loader
is not run if they exceed it. In a run, the memory that each worker holds for itself alone; the run ends
when little is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ... import machine, usage
from ...lending.batch import is_tensor, tensors_reached
from ...model import Finding
from ...views import text
from ..check import Check
from ..trial import Trial

LITTLE_SHARE = 0.15
"""Of what was available before the run: less than this is little, and the run ends."""
MUCH_SHARE = 0.6
"""Of the same: what the workers must hold of it, to be the cause."""
LOOK_SECONDS = 0.25


class MemoryCheck(Check):
    """See the docstring of this file."""

    code = "LG105"
    looks_for = "too little memory"

    def __init__(self, subject: Any) -> None:
        super().__init__(subject)
        self.available = machine.look().memory_available_bytes
        self._own = _copied_bytes(subject) if subject.workers and not subject.is_forked else {}
        self._held: list[int] = []
        self._next = 0.0

    def refuses_run(self) -> str | None:
        """Refuse if the copies alone would not fit."""
        need = sum(self._own.values()) * self.subject.workers
        return "its workers would need more memory than there is" if need > self.available else None

    def look_early(self, pids: list[int]) -> None:
        """Look whether little memory is left, and if so, who has it."""
        now = time.monotonic()
        if now < self._next or self._held:
            return
        self._next = now + LOOK_SECONDS
        if machine.look().memory_available_bytes < LITTLE_SHARE * self.available:
            self._held = [usage.private_bytes(pid) for pid in pids]
            self.ends_run = True

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return the figures, if it is too much."""
        workers, held = self.subject.workers, sum(self._held)
        fix = "Fewer workers, or keep the data in a file that each worker maps (numpy.load with mmap_mode='r')."
        if self.refuses_run():
            path, size = max(self._own.items(), key=lambda item: item[1])
            each = sum(self._own.values())
            evidence = (
                f"Under {self.subject.method} each worker gets a copy of {path} ({text.size(size)}): {workers} workers "
                f"× {text.size(each)} = {text.size(each * workers)}; {text.size(self.available)} are available."
            )
            return self.finding("error", "the workers need more memory than there is", evidence, fix)
        if held < MUCH_SHARE * self.available or not held:
            return []
        evidence = (
            f"{workers} workers held {text.size(held / len(self._held))} each for themselves, {text.size(held)} in "
            f"all; {text.size(self.available)} were available before."
        )
        return self.finding("error", "the workers use up the memory", evidence, fix)


def _copied_bytes(subject: Any) -> dict[str, int]:
    """Return the bytes of what is copied into a worker that is not forked, by paths."""
    found = {}
    for path, thing in tensors_reached(subject.roots):
        if not (is_tensor(thing) and (thing.is_shared() or thing.device.type != "cpu")):
            found[path] = int(thing.nbytes)
    return found
