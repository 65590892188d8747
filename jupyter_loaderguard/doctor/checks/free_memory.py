"""LG003: hardly any memory is left.

Measured: the memory that is available, within the limit of the container where there is one. The system ends a
process when it is used up, and workers are the first to go.
"""

from __future__ import annotations

from ... import machine
from ...model import Finding
from ...views import text

CODE = "LG003"
LOOKS_FOR = "free memory"
LITTLE_SHARE = 0.04


def check() -> list[Finding]:
    """Return the finding, if little is left."""
    state = machine.look()
    if state.memory_available_bytes >= LITTLE_SHARE * state.memory_bytes:
        return []
    evidence = f"{text.size(state.memory_available_bytes)} of {text.size(state.memory_bytes)} are available."
    fix = "Free memory before workers start: %loaderguard clean ends workers that are not needed, %reset variables."
    return [Finding(CODE, "warning", "memory is nearly used up", evidence, fix)]
