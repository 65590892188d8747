"""LG004: torch uses many more threads in the kernel than it may use CPUs.

It counts the CPUs of the machine, not those of a container with a limit on CPU time, and the threads then wait for
each other. Measured: torch.get_num_threads(), the CPUs by affinity and control group, and those of the machine.
torch is not imported for it.
"""

from __future__ import annotations

import os
import sys

from ... import machine
from ...model import Finding

CODE = "LG004"
LOOKS_FOR = "torch's threads against usable CPUs"


def check() -> list[Finding]:
    """Return the finding, if there are clearly too many."""
    torch, cpus, all_cpus = sys.modules.get("torch"), machine.usable_cpus(), os.cpu_count() or 1
    threads = torch.get_num_threads() if torch is not None else 0
    if cpus >= all_cpus or threads < 2 * cpus:
        return []
    evidence = f"torch.get_num_threads() is {threads}; this process may use {cpus} of {all_cpus} CPUs."
    title = "torch computes with more threads than there are usable CPUs"
    return [Finding(CODE, "warning", title, evidence, f"Here: `import torch; torch.set_num_threads({cpus})`")]
