"""torch.compile: what a compiled function calls is compiled too, but for torch's own loaders. Ours is left out as well.

Else each of our functions in a compiled loop is looked at anew for every batch, and a small step takes twice the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RULES = "torch._dynamo.trace_rules"


def leave_out(rules: Any) -> Callable[[], None]:
    """Have torch.compile leave this package alone, and return the undo."""
    before = list(rules.SKIP_DIRS)
    rules.add(__name__.partition(".")[0])
    added = [folder for folder in rules.SKIP_DIRS if folder not in before]

    def undo() -> None:
        rules.SKIP_DIRS[:] = [folder for folder in rules.SKIP_DIRS if folder not in added]
        rules._recompile_re()

    return undo
