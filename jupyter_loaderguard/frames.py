"""The stacks of other threads of this process.

NOTE [ Frames of a thread that runs ]
In Python 3.11, sys._current_frames() and `frame.f_back` make objects, and that may start the collector. A finalizer
that it calls may let the other thread run, and the frame that was being looked at is gone: the process crashes, or goes
on with something that is no frame. tests/programs/walked.py crashes so within seconds. Therefore the collector is off
for that time, and all of it is one call into C, so that no other thread sees that. From 3.12 on the
collector never runs in such a moment.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar

_CAN_COLLECT = sys.version_info[:2] == (3, 11)
_call = operator.methodcaller("__call__")
Found = TypeVar("Found")


def stack_of(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, the innermost one first; none if it has ended."""
    top = map(dict.get, map(_call, (sys._current_frames,)), (thread,))  # asked for when the list is made
    return _uncollected(partial(list[FrameType], _following(top)))


def below(frame: FrameType) -> list[FrameType]:
    """Return a frame of this very thread and what called it; here nobody else is in the way."""
    return list(_following((frame,)))


def innermost() -> dict[int, FrameType]:
    """Return the innermost frame of every other thread: whoever keeps that of his own keeps himself."""
    found = _uncollected(sys._current_frames)
    del found[get_ident()]
    return found


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame that waits, as that of a generator does."""
    return _uncollected(partial(getattr, frame, "f_locals"))


def running() -> list[FrameType]:
    """Return the frames that are on the stack of some thread."""
    return [frame for thread in (get_ident(), *innermost()) for frame in stack_of(thread)]


def _following(top: Any) -> Iterator[FrameType]:
    """Follow `f_back` to its end, without a step in Python."""
    steps: Any = chain(top, repeat("f_back"))
    link: Any = getattr
    return takewhile(operator.truth, accumulate(steps, link))


def _uncollected(take: Callable[[], Found]) -> Found:
    """Call something that is written in C with the collector off. See NOTE [ Frames of a thread that runs ]."""
    if not _CAN_COLLECT or not gc.isenabled():
        return take()
    try:
        # without a name here: this very frame may be in it, and what holds itself holds all the rest
        return list[Any](map(_call, (gc.disable, take, gc.enable)))[1]  # type: ignore[no-any-return]
    except BaseException:  # no memory
        gc.enable()
        raise
