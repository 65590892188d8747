"""LG001: /dev/shm is very small, as in a container that was given none.

Batches of workers travel through it. Measured: the size of the file system. A container has 64 MB unless it is told
otherwise, which two workers with batches of a few images fill.
"""

from __future__ import annotations

from ... import machine
from ...model import Finding
from ...views import text

CODE = "LG001"
LOOKS_FOR = "the size of /dev/shm"
SMALL_BYTES = 128 << 20


def check() -> list[Finding]:
    """Return the finding, if it is small."""
    state = machine.look()
    if state.shm_bytes is None or state.shm_used_bytes is None or state.shm_bytes >= SMALL_BYTES:
        return []
    evidence = f"/dev/shm has {text.size(state.shm_bytes)}, of which {text.size(state.shm_used_bytes)} are used."
    fix = "Start the container with --shm-size=8g (Docker), or mount a larger tmpfs at /dev/shm."
    return [Finding(CODE, "warning", "/dev/shm is very small for the batches of workers", evidence, fix)]
