"""LG108: the limit of open files is too low for what the workers load ahead.

With torch's sharing strategy file_descriptor each tensor of a batch takes a descriptor until the batch is gone.
Measured: tensors per batch in the run, workers × prefetch_factor, the descriptors that are open now, and RLIMIT_NOFILE.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from ...lending.failure import Failure
from ...model import Finding
from ...usage import descriptor_count, descriptor_limits
from ..check import Check
from ..trial import Trial


class DescriptorsCheck(Check):
    """See the docstring of this file."""

    code = "LG108"
    looks_for = "too few descriptors"

    def explains(self, failure: Failure) -> bool:
        """Tell whether descriptors ran out."""
        return "Too many open files" in failure.message or "ancdata" in failure.message

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return the figures, if there may be too few."""
        limit, hard = descriptor_limits()
        did_fail = trial.failure is not None and self.explains(trial.failure)
        workers, prefetch, open_now = self.subject.workers, self.subject.prefetch, descriptor_count(os.getpid()) or 0
        need = open_now + trial.tensors * workers * prefetch
        if not limit or not workers or not (did_fail or (_takes_descriptors() and need > limit)):
            return []
        evidence = (
            f"{trial.tensors} tensors per batch × {workers} workers × prefetch_factor {prefetch}, and {open_now} open "
            f"now: up to {need:,} descriptors; the limit is {limit:,}."
        )
        if did_fail and trial.failure is not None:
            evidence = f"{trial.failure.kind}: {trial.failure.message}. {evidence}"
        raise_it = f"`import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))`"
        fix = (
            f"Here: {raise_it}. Or fewer tensors per batch, or a smaller prefetch_factor. Batches that you keep count."
        )
        return self.finding("error" if did_fail else "warning", "too few descriptors for the batches", evidence, fix)


def _takes_descriptors() -> bool:
    return bool(sys.modules["torch"].multiprocessing.get_sharing_strategy() == "file_descriptor")
