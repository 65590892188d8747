"""What a loader or its sampler raised, as plain words."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from ..traces import is_user_file
from ..watch import watchdog

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')


@dataclass(frozen=True)
class Failure:
    """What the loader raised."""

    kind: str
    message: str
    place: str = ""
    """Where in the user's code."""
    note: str = ""
    """Which worker and sample, as the guard noted it."""


def describe_failure(error: BaseException) -> Failure:
    """Return what was raised, also if torch has wrapped it together with its traceback."""
    kind, message = type(error).__name__, str(error)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    if "Original Traceback" in message:
        frames += [(one["file"], int(one["line"]), one["function"]) for one in _FRAME.finditer(message)]
        lines = message.strip().splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith(f"{kind}:")]
        message = "\n".join(lines[starts[-1] :]).removeprefix(f"{kind}:").strip() if starts else lines[-1]
    users = [frame for frame in frames if is_user_file(frame[0])]
    place = f"{watchdog.place_of(users[-1][0])}:{users[-1][1]}, in {users[-1][2]}()" if users else ""
    notes = [note.removeprefix("loaderguard: ").rstrip(".") for note in getattr(error, "__notes__", ())]
    return Failure(kind, message, place, "; ".join(notes))
