"""What the guard raises or warns with."""

from __future__ import annotations

import contextlib
import sys
import warnings
from types import TracebackType
from typing import Any


class LoaderGuardError(RuntimeError):
    """Tell that a request to the guard cannot be met; the message says why.

    >>> from jupyter_loaderguard import guard
    >>> with guard(grace_seconds=-1):
    ...     pass
    Traceback (most recent call last):
    jupyter_loaderguard.errors.LoaderGuardError: grace_seconds must be a number of seconds from 0 to 3600, not -1
    """


class LoaderStalled(LoaderGuardError):
    """Tell that a batch did not come within `stall_seconds`.

    >>> import time
    >>> from torch.utils.data import DataLoader
    >>> from jupyter_loaderguard import guard
    >>> class Slow(list):
    ...     def __getitem__(self, index):
    ...         time.sleep(60 if index == 3 else 0)
    ...         return index
    >>> try:
    ...     with guard(stall_seconds=0.5, on_stall="raise"):
    ...         batches = list(DataLoader(Slow(range(8)), num_workers=2))
    ... except LoaderStalled as stalled:
    ...     print(stalled.worker_id, stalled.index, "in __getitem__" in stalled.stack)
    1 3 True
    """

    def __init__(
        self,
        message: str,
        worker_id: int | None = None,
        pid: int | None = None,
        index: Any = None,
        seconds: float = 0.0,
        stack: str = "",
    ) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        """The worker that is late; None if the kernel itself loads the samples."""
        self.pid = pid
        self.index = index
        """The sample that it is on; its number in the worker's stream for an iterable dataset."""
        self.seconds = seconds
        """How long the loop had waited."""
        self.stack = stack
        """The Python stack of the late worker, most recent call first."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.worker_id, self.pid, self.index, self.seconds, self.stack)
        return type(self), (self.args[0], *fields)


class LoaderGuardWarning(UserWarning):
    """Tell that the guard itself is limited, e.g. by an unknown torch.

    >>> issubclass(LoaderGuardWarning, UserWarning)
    True
    """


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error of the user's; before Python 3.11 it becomes part of the message."""
    with contextlib.suppress(Exception):  # the user's class, which has its own idea of notes and attributes
        if hasattr(error, "add_note"):
            error.add_note(text)
        elif error.args and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error of the user's."""
    try:
        return [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    except Exception:  # noqa: BLE001 - the user's class, as above
        return []


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error, whatever its class makes of its attributes."""
    trace: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    return trace


def warn_limited(text: str) -> None:
    """Say in a line that the guard itself is limited; loaders go on working.

    As a warning, but past the filters: `simplefilter("error")` would raise it in the user's loop, and torch ignores
    warnings for a time while it is imported. Only one that names this very warning is heeded.
    """
    line = f"loaderguard: {text}."
    if any(entry[0] == "ignore" and entry[2] is LoaderGuardWarning for entry in warnings.filters):
        return
    try:
        warnings.showwarning(LoaderGuardWarning(line), LoaderGuardWarning, "jupyter_loaderguard", 1)
    except Exception:  # noqa: BLE001 - the user's own way to show warnings
        print(line, file=sys.stderr)  # noqa: T201 - something is wrong
