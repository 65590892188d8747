"""`c.LoaderGuard…` in ipython_config.py and `%config LoaderGuard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traitlets import Bool, Float, Int, TraitError, Unicode, observe
from traitlets.config import Configurable

from ..errors import LoaderGuardError
from ..guarding import MOST_TIMES, check_on_stall, check_seconds
from ..registry import registry

if TYPE_CHECKING:
    from typing import TypeAlias

    _Float: TypeAlias = Float[float, float]
    _Int: TypeAlias = Int[int, int]
    _Unicode: TypeAlias = Unicode[str, str]
else:  # before traitlets 5.10 they take no types
    _Float, _Int, _Unicode = Float, Int, Unicode

_OF_THE_REGISTRY = (
    "grace_seconds",
    "stall_seconds",
    "on_stall",
    "retry",
    "skip",
    "pickle_by_value",
    "worker_threads",
    "refresh_seconds",
)


class Seconds(_Float):
    """A number of seconds; a bad value is refused with its name, the value and the range."""

    def __init__(self, default: float, least: float = 0.0, **metadata: Any) -> None:
        super().__init__(default, **metadata)
        self.least = least

    def validate(self, obj: Any, value: Any) -> float:
        try:
            return check_seconds(f"LoaderGuard.{self.name}", value, self.least)
        except LoaderGuardError as error:
            raise TraitError(str(error)) from None


class Count(_Int):
    """A small number; a bad value is refused with its name, the value and the range."""

    def __init__(self, default: int, most: int = 1024, **metadata: Any) -> None:
        super().__init__(default, **metadata)
        self.most = most

    def validate(self, obj: Any, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= self.most:
            raise TraitError(f"LoaderGuard.{self.name} must be a number from 0 to {self.most}, not {value!r}")
        return value


class OnStall(_Unicode):
    """A word that says what to do about a stall."""

    def validate(self, obj: Any, value: Any) -> str:
        try:
            return check_on_stall(f"LoaderGuard.{self.name}", value)
        except LoaderGuardError as error:
            raise TraitError(str(error)) from None


class LoaderGuard(Configurable):
    """Settings of jupyter_loaderguard; the options of a cell override them."""

    grace_seconds = Seconds(0.5, help="Time for workers to leave by themselves before SIGTERM.", config=True)
    stall_seconds = Seconds(
        30.0, least=0.1, help="A wait for one batch that is longer than this is a stall.", config=True
    )
    on_stall = OnStall(
        "warn",
        help="What to do about a stall: warn (show what is late, and go on waiting), raise (LoaderStalled) or retry "
        "(treat the late worker as dead).",
        config=True,
    )
    retry = Count(
        0,
        MOST_TIMES,
        help="How often in a cell workers may be replaced when one dies, with their batches delivered all the same.",
        config=True,
    )
    skip = Count(
        0, MOST_TIMES, help="How many samples that raise, kill or hang a worker may be left out in a cell.", config=True
    )
    explain = Bool(True, help="Explain errors of loaders in a card below the traceback.", config=True)
    pickle_by_value = Bool(
        True,
        help="Send classes and functions of the notebook to workers by value, under spawn and forkserver.",
        config=True,
    )
    worker_threads = Count(
        1,
        help="Cap of the native thread pools (OpenCV, OpenMP, MKL, OpenBLAS) in each worker; 0 leaves them alone.",
        config=True,
    )
    widget = Bool(True, help="Show the live status widget above the output of guarded cells.", config=True)
    refresh_seconds = Seconds(
        1.0,
        least=0.1,
        help="How often the widget is drawn, and the memory of a guarded cell's workers measured.",
        config=True,
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in _OF_THE_REGISTRY:
            setattr(registry, name, getattr(self, name))

    @observe(*_OF_THE_REGISTRY)
    def _apply(self, change: Any) -> None:
        setattr(registry, change["name"], change["new"])
