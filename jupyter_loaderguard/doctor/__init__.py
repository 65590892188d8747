"""The doctor: looks for what is wrong with a loader, or with the machine, and says how to mend it.

`doctor(loader)` runs a few batches of a copy of the loader, with workers of its own, for at most 5 s in all, and
returns findings, each with a code, a severity, the evidence and a fix; none if all is well. `doctor()` looks
at the machine alone. docs/doctor.md has all codes. This module can be called itself, because
`jupyter_loaderguard.doctor` is both the function and, once it has been imported, this module.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

from ..guarding import check_seconds
from ..lending.subject import describe
from ..model import Finding, Findings
from .checks import LOADER_CHECKS, MACHINE_CHECKS
from .checks.failure import FailureCheck
from .trial import run

SHORTEST_SECONDS = 0.5
_SEVERITIES = ("error", "warning", "note")


def examine(loader: Any = None, seconds: float = 5.0) -> Findings:
    """Return what is wrong with a loader, or without one, with the machine; the worst first."""
    until = time.monotonic() + check_seconds("seconds", seconds, SHORTEST_SECONDS)
    if loader is None:
        return _examine_machine()
    subject = describe(loader)
    checks = [check(subject) for check in LOADER_CHECKS]
    trial = run(subject, checks, until)
    found = [finding for check in checks for finding in check.findings(trial)]
    if trial.failure is not None and not any(check.explains(trial.failure) for check in checks):
        found += FailureCheck(subject).findings(trial)
    checked = ", ".join(check.looks_for for check in (FailureCheck, *LOADER_CHECKS))
    return Findings(_sort(found), subject.name, checked, trial.ran)


def _examine_machine() -> Findings:
    found = [finding for check in MACHINE_CHECKS for finding in check.check()]
    checked = ", ".join(check.LOOKS_FOR for check in MACHINE_CHECKS)
    return Findings(_sort(found), "this machine", checked)


def _sort(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: (_SEVERITIES.index(finding.severity), finding.code))


class _Doctor(ModuleType):
    """This module, as something that can be called."""

    def __call__(self, loader: Any = None, seconds: float = 5.0) -> Findings:
        """Return what is wrong with a loader, or without one, with the machine; the worst first."""
        return examine(loader, seconds)


sys.modules[__name__].__class__ = _Doctor
