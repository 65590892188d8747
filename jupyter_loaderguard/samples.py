"""Which sample a worker is on, from its notes and the keys of its batch; and keys as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LONGEST = 80
_MANY = 8


@dataclass(frozen=True)
class Manner:
    """How a loader asks its dataset for samples."""

    is_batched: bool = True
    is_iterable: bool = False
    asks_whole_batches: bool = False
    """By `__getitems__`."""
    shows_keys: bool = False
    """Whether the list of a batch's keys comes into the hands of the user's code: then it is torch's own."""


def locate(position: int, done: int, size: int, keys: Any, manner: Manner) -> tuple[Any, str]:
    """Return the sample's index, and words for where that is.

    The worker is at `position` among the `size` keys of its batch, and has `done` samples behind it. The
    index is None in collate_fn; all keys of the batch in a `__getitems__` that does not go through them
    one by one; and the sample's number in the stream for an iterable dataset.
    """
    if manner.is_iterable:
        return _locate_in_stream(position, done, size, manner.is_batched)
    if not manner.is_batched:
        return keys, f"on sample {key_text(keys)}"
    keys = plain_list(keys)
    if isinstance(keys, list) and 0 <= position < len(keys):
        return keys[position], f"on sample {key_text(keys[position])}"
    several = f"samples {span(keys)}" if isinstance(keys, list) else f"the samples {key_text(keys)}"
    if position >= size and not manner.asks_whole_batches:
        return None, f"in collate_fn of {several}"
    if isinstance(keys, list):
        return (keys[0] if len(keys) == 1 else keys), f"on {several}"
    return keys, f"on {several}"


def _locate_in_stream(position: int, done: int, size: int, is_batched: bool) -> tuple[Any, str]:
    if is_batched and position >= size:
        return None, f"in collate_fn of samples {done:,} to {done + size - 1:,} of its stream"
    number = done + max(position, 0)
    return number, f"on sample {number:,} of its stream"


def plain_list(keys: Any) -> Any:
    """Return the keys of a batch; those in a list of a class of the user's in a list that runs no code of it."""
    return list.copy(keys) if list in type(keys).__mro__ else keys


def key_text(key: Any) -> str:
    """Return a key of the user's as a short text."""
    try:
        text = repr(key)
    except Exception as error:  # noqa: BLE001 - the user's class
        text = f"<{type(key).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


_PLAIN_KEYS = {int, str, bool, float, bytes, type(None)}


def quick_text(key: Any, number: int) -> str:
    """Return a key as a short text in the midst of the loop, where no code of its class is run: else its number."""
    parts = key if type(key) is tuple else (key,)
    is_plain = len(parts) <= _MANY and _PLAIN_KEYS.issuperset(map(type, parts))
    if is_plain or type(key).__module__ in ("numpy", "torch"):
        return key_text(key)
    return f"{type(key).__name__}, its number {number}"


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error of the user's, whose class may refuse to say it."""
    try:
        words = str(error)
    except (Exception, SystemExit, GeneratorExit) as failure:  # noqa: BLE001 - the user's class
        words = f"<its message cannot be shown: str() raises {type(failure).__name__}>"
    return f"{type(error).__name__}: {words}"


def span(keys: list[Any]) -> str:
    """Return keys as a short text."""
    keys = plain_list(keys)
    if len(keys) <= _MANY:
        return ", ".join(key_text(key) for key in keys)
    return f"{', '.join(key_text(key) for key in keys[: _MANY - 1])}, … {key_text(keys[-1])}"
