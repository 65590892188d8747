"""What every check of a loader has in common, and what it is shown while the loader runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..lending.subject import Subject
from ..model import Finding
from ..processes import Handle
from ..worker.slot import LOADING, Slot
from .load import ThreadLoad

if TYPE_CHECKING:
    from ..lending.failure import Failure
    from .trial import Trial


@dataclass(frozen=True)
class Worker:
    """One worker of the run."""

    number: int
    handle: Handle
    slot: Slot

    @property
    def pid(self) -> int:
        """Its process."""
        return self.handle.pid

    def samples(self) -> int:
        """Return how many samples it has loaded."""
        progress = self.slot.read()
        return progress.samples + (max(0, progress.position) if progress.phase == LOADING else 0)


@dataclass(frozen=True)
class Moment:
    """The run at one moment, once every worker has loaded a batch."""

    seconds: float
    """Since then."""
    workers: tuple[Worker, ...]
    load: dict[int, dict[int, ThreadLoad]] = field(default_factory=dict)
    """How busy the threads of each worker have been since then."""


class Check:
    """One thing that can be wrong. Each check is a subclass, in a file of its own."""

    code: ClassVar[str]
    looks_for: ClassVar[str]
    """What it looks for, in a few words."""
    ends_run = False
    """Whether it has seen something that makes it unwise to go on."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def refuses_run(self) -> str | None:
        """Say why the loader must not be run at all, if that is so."""
        return None

    def before(self) -> None:
        """Note what has to be known before the workers start."""

    def look_early(self, pids: list[int]) -> None:
        """Look at the workers also while they start; called as often as `look`."""

    def look(self, moment: Moment) -> None:
        """Look at the workers; called many times a second, by a thread of the doctor's."""

    def see(self, batch: Any) -> None:
        """Look at one of the first batches."""

    def after(self) -> None:
        """Put back what the run has moved; called however it ended."""

    def explains(self, failure: Failure) -> bool:
        """Tell whether what the loader raised is what this check is about."""
        return False

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return what is wrong, by all that was seen."""
        raise NotImplementedError

    def finding(self, severity: str, title: str, evidence: str, fix: str) -> list[Finding]:
        """Return one finding with this check's code."""
        return [Finding(self.code, severity, title, evidence, fix)]
