"""LG104: more workers than usable CPUs, and they compute.

More workers than CPUs are right for a loader that waits for disks or networks. So it is measured: a worker is
CPU-bound if its main thread wanted a CPU for most of the run (it ran, or stood in the queue for one); there
is a finding if more workers than there are CPUs were CPU-bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from ... import machine
from ...model import Finding
from ..check import Check
from ..trial import Trial

BOUND_SHARE = 0.5
"""Measured with and without three busy processes beside it, on 2 CPUs: 0.70 to 1.00 for workers that compute, 0.19 at
most for those that wait or whose samples are tiny."""
SHORTEST_SECONDS = 0.5


class CrowdingCheck(Check):
    """See the docstring of this file."""

    code = "LG104"
    looks_for = "too many workers"

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return the figures, if the workers crowd each other."""
        cpus, workers = machine.usable_cpus(), self.subject.workers
        mains = [threads[pid] for pid, threads in trial.load.items() if pid in threads]
        bound = [main for main in mains if main.wanted >= BOUND_SHARE]
        if workers <= cpus or len(bound) <= cpus or trial.window_seconds < SHORTEST_SECONDS:
            return []
        wanted, got = sum(main.wanted for main in mains), sum(main.cpu for main in mains)
        evidence = (
            f"{workers} workers wanted {wanted:.1f} CPUs and got {got:.1f}, over {trial.window_seconds:.1f} s; "
            f"this process may use {cpus}. {len(bound)} of them computed or waited for a CPU most of the time."
        )
        title = f"{workers} workers compute on {cpus} CPU{'s' if cpus > 1 else ''}"
        return self.finding(
            "warning", title, evidence, f"Pass num_workers={cpus}: more only take turns, and cost memory."
        )
