"""LG100: the loader raises.

Measured: a copy of it was run, and an error came instead of a batch. Errors that another check explains (descriptors,
/dev/shm, CUDA) are reported there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from ...model import Finding
from ..check import Check
from ..trial import Trial

_SAMPLE = re.compile(r"\bsample ")
_KEY_END = re.compile(r"$|[;,\s]|\.(?=$|\s)")


class FailureCheck(Check):
    """See the docstring of this file."""

    code = "LG100"
    looks_for = "errors"

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return what was raised, and where."""
        failure = trial.failure
        if failure is None:
            return []
        where = f", at {failure.place}" if failure.place else ""
        note = f" ({failure.note})" if failure.note else ""
        said = f": {failure.message}" if failure.message else ""
        evidence = f"After {trial.batches} batches: {failure.kind}{said}{where}{note}"
        return self.finding("error", f"the loader raises {failure.kind}", evidence, self._fix(failure.note))

    def _fix(self, note: str) -> str:
        key = _read_key(note) if not self.subject.is_iterable else None
        if key is not None:
            return f"See it alone: `loader.dataset[{key}]`"
        return "Make it with num_workers=0 and go through it, `for _ in loader: pass`, to see the whole traceback."


def _read_key(note: str) -> str | None:
    """Return the sample's key as code that can be typed; None if it was cut, or is no plain value."""
    found = _SAMPLE.search(note)
    rest = note[found.end() :] if found else ""
    return next((rest[: end.start()] for end in _KEY_END.finditer(rest) if _is_literal(rest[: end.start()])), None)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True
