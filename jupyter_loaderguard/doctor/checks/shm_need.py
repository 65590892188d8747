"""LG110: /dev/shm is too small for what the workers load ahead.

The tensors of a batch lie in /dev/shm from the moment when a worker has made them until the loop has dropped them.
Measured: the largest batch of the run, workers × prefetch_factor, and the free space of /dev/shm. Arrays that
are not tensors travel through a pipe, and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

from ... import machine
from ...lending.failure import Failure
from ...model import Finding
from ...views import text
from ..check import Check
from ..trial import Trial

_WORDS = ("No space left on device", "Bus error", "SIGBUS", "insufficient shared memory")


class ShmNeedCheck(Check):
    """See the docstring of this file."""

    code = "LG110"
    looks_for = "too little shared memory"
    _total = _free = 0

    def before(self) -> None:
        """Note how much there is, before the run takes some."""
        state = machine.look()
        self._total = state.shm_bytes or 0
        self._free = self._total - (state.shm_used_bytes or 0)

    def explains(self, failure: Failure) -> bool:
        """Tell whether /dev/shm is full."""
        return bool(self.subject.workers) and any(word in f"{failure.message} {failure.note}" for word in _WORDS)

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return the figures, if it is too small."""
        workers, prefetch, size = self.subject.workers, self.subject.prefetch, trial.tensor_bytes
        need = workers * prefetch * size
        did_fail = trial.failure is not None and self.explains(trial.failure)
        if not self._total or not workers or not (did_fail or need > self._free):
            return []
        evidence = (
            f"{workers} workers × prefetch_factor {prefetch} × {text.size(size)} per batch = {text.size(need)}; "
            f"/dev/shm has {text.size(self._total)}, of which {text.size(self._free)} were free."
        )
        if did_fail and trial.failure is not None:
            evidence = f"{trial.failure.kind}: {trial.failure.message.splitlines()[0]}. {evidence}"
        fix = "A container: --shm-size=8g (Docker). Else smaller batches, fewer workers, or a smaller prefetch_factor."
        return self.finding("error" if did_fail else "warning", "/dev/shm is too small for the batches", evidence, fix)
