"""Who still holds an object: only the frames of an old traceback, or something that a user can reach?"""

from __future__ import annotations

import gc
from types import AsyncGeneratorType, CellType, CoroutineType, FrameType, GeneratorType
from typing import Any

from ..frames import running

_SUSPENDED = (GeneratorType, CoroutineType, AsyncGeneratorType)


def is_held_by_frames(thing: Any, partner: Any) -> bool:
    """Tell whether finished frames hold it and nothing else does, but for its partner: the loader or the iterator."""
    holders, others = gc.get_referrers(thing), []
    allowed = (partner, None if partner is None else vars(partner))
    try:
        # lists, not generators: those would be holders themselves
        others += [holder for holder in holders if not _is_one_of(holder, allowed)]
        return holders != [] and False not in [_is_of_a_frame(holder, (holders, others), 3) for holder in others]
    finally:
        holders.clear()  # this very frame is one of them: they would hold each other, and the thing
        others.clear()


def _is_of_a_frame(holder: Any, own: tuple[Any, ...], depth: int) -> bool:
    """Tell whether this is a frame, or something of it alone: a cell, its *args, the locals that a traceback copied."""
    if _is_one_of(holder, own):
        return True
    if isinstance(holder, FrameType):
        return _is_finished(holder)
    if not depth or not isinstance(holder, (dict, tuple, CellType)):
        return False
    owners = gc.get_referrers(holder)
    try:
        return False not in [_is_of_a_frame(owner, (*own, owners), depth - 1) for owner in owners]
    finally:
        owners.clear()  # as above


def _is_finished(frame: FrameType) -> bool:
    """Tell it from one that runs, or that a generator or coroutine will go on with."""
    owners = [owner for owner in gc.get_referrers(frame) if isinstance(owner, _SUSPENDED)]
    return not owners and not _is_one_of(frame, tuple(running()))


def _is_one_of(thing: Any, things: tuple[Any, ...]) -> bool:
    return bool([True for one in things if thing is one])
