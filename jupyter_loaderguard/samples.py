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
    if isinstance(keys, list) and 0 <= position < len(keys):
        return keys[position], f"on sample {key_text(keys[position])}"
    several = f"samples {span(keys)}" if isinstance(keys, list) else f"the samples {key_text(keys)}"
    if position >= size and not manner.asks_whole_batches:
        return None, f"in collate_fn of {several}"
    if isinstance(keys, list):
        return (keys[0] if len(keys) == 1 else list.copy(keys)), f"on {several}"
    return keys, f"on {several}"


def _locate_in_stream(position: int, done: int, size: int, is_batched: bool) -> tuple[Any, str]:
    if is_batched and position >= size:
        return None, f"in collate_fn of samples {done:,} to {done + size - 1:,} of its stream"
    number = done + max(position, 0)
    return number, f"on sample {number:,} of its stream"


def key_text(key: Any) -> str:
    """Return a key of the user's as a short text."""
    try:
        text = repr(key)
    except Exception as error:  # noqa: BLE001 - the user's class
        text = f"<{type(key).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def span(keys: list[Any]) -> str:
    """Return keys as a short text."""
    keys = list.copy(keys)
    if len(keys) <= _MANY:
        return ", ".join(key_text(key) for key in keys)
    return f"{', '.join(key_text(key) for key in keys[: _MANY - 1])}, … {key_text(keys[-1])}"
