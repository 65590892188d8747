"""How the workers of an iterator were started, so that others can be started in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RECIPE = "_loaderguard_recipe"
"""The attribute of an iterator that holds it."""


@dataclass(eq=False)
class Recipe:
    """What torch started its workers with."""

    context: Any
    """The multiprocessing context, through which each worker is seen."""
    loop: Callable[..., None]
    arguments: dict[str, Any]
    """Of the first worker's loop, by name."""
    pinning: tuple[Any, tuple[Any, ...]] | None = None
    """Target and arguments of the thread that pins memory."""


def derive_seed(base_seed: int, generation: int) -> int:
    """Return a base seed for replaced workers: none of theirs is one that an earlier worker had."""
    import hashlib  # seldom needed, and not in the first cell

    digest = hashlib.blake2b(f"{base_seed}/{generation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class CannotTravel(BaseException):
    """Carries an error of pickling past torch, which would print a general warning beside what the guard says of it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
