"""LG002: this process may open very few files.

Each tensor of a batch that a worker sends, and that is kept, takes a descriptor in the kernel, as do pipes and files.
Measured: the soft limit (RLIMIT_NOFILE) and the descriptors that are open now.
"""

from __future__ import annotations

import os

from ...model import Finding
from ...usage import descriptor_count, descriptor_limits

CODE = "LG002"
LOOKS_FOR = "the limit of open files"
FEW = 512


def check() -> list[Finding]:
    """Return the finding, if the limit is very low."""
    soft, hard = descriptor_limits()
    if not 0 < soft < FEW:
        return []
    open_now = descriptor_count(os.getpid())
    now = f" {open_now} are open now." if open_now is not None else ""
    raise_it = f"`import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))`"
    fix = f"Here: {raise_it}. Or ulimit -n before Jupyter starts."
    return [Finding(CODE, "warning", "very few files may be open at once", f"The limit is {soft}.{now}", fix)]
