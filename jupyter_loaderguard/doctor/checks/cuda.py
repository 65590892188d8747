"""LG102: CUDA was initialised before workers are forked.

A forked process cannot use CUDA once its parent has: any CUDA call in the dataset, collate_fn or worker_init_fn then
raises. Loading on the CPU alone is not affected, hence a note, unless it did raise in the run. Measured:
torch.cuda.is_initialized(), the start method, and what the run raised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ...lending.failure import Failure
from ...model import Finding
from ..check import Check
from ..trial import Trial


class CudaCheck(Check):
    """See the docstring of this file."""

    code = "LG102"
    looks_for = "CUDA before fork"

    def explains(self, failure: Failure) -> bool:
        """Tell whether it is torch's own words for it."""
        return self._is_so() and "re-initialize CUDA" in failure.message

    def _is_so(self) -> bool:
        return self.subject.is_forked and bool(sys.modules["torch"].cuda.is_initialized())

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return the finding, as an error if it was one."""
        if not self._is_so():
            return []
        fix = 'Keep CUDA out of the dataset, and move batches in the loop; or pass multiprocessing_context="spawn".'
        evidence = f"torch.cuda.is_initialized() is True here, and the {self.subject.workers} workers start by fork."
        if trial.failure is not None and self.explains(trial.failure):
            raised = f"{evidence} {trial.failure.kind}: {trial.failure.message}"
            return self.finding("error", "workers are forked after CUDA was initialised, and use it", raised, fix)
        title = "workers are forked after CUDA was initialised: they cannot use it"
        return self.finding("note", title, f"{evidence} In the run they did not use it.", fix)
