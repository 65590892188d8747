"""The order of the samples: taken from the sampler in a fork of the kernel, and handed over key by key.

NOTE [ Why a fork ]
Samplers shuffle in place, count epochs and draw from generators. In a fork they change a copy of everything,
however deep it lies, and one that takes its time, or never gives a key, can be ended. The fork waits when
the pipe is full, so it is only a little ahead of the workers.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from ..registry import registry
from ..worker.agent import settle_in
from .failure import Failure, describe_failure
from .fork import forked

END = object()


class Keys:
    """What takes the place of the sampler in the kernel: it can be gone through once."""

    def __init__(self, pipe: Any, until: float) -> None:
        self._pipe, self._until = pipe, until
        self.given = 0
        self.is_late = False
        """Whether time was up before the next key came."""
        self.failure: Failure | None = None
        """What the sampler raised."""

    @property
    def trouble(self) -> str:
        """Why no key could come, if that is not the sampler's fault."""
        if self.failure is not None and "re-initialize CUDA" in self.failure.message:
            return "the sampler uses CUDA, which a copy of the kernel cannot"
        return "the sampler gave no key in time" if self.is_late and not self.given else ""

    def __iter__(self) -> Iterator[Any]:
        """Go through the keys until there are no more, or until time is up."""
        while (told := self._receive()) is not None:
            self.given += 1
            yield pickle.loads(told)

    def _receive(self) -> bytes | None:
        if not self._pipe.poll(max(0.0, self._until - time.monotonic())):
            self.is_late = True
            return None
        try:
            mark, *told = self._pipe.recv_bytes().partition(b":")
        except EOFError:
            self.failure = Failure("the process that ran the sampler ended", "before it had given all keys")
            return None
        if mark == b"raised":
            self.failure = Failure(**pickle.loads(told[1]))
        return told[1] if mark == b"key" else None


class EndlessKeys:
    """The same without an end: when the sampler has given all, another fork begins again."""

    def __init__(self, sampler: Any, until: float) -> None:
        self._sampler, self._until = sampler, until
        self._stack = ExitStack()
        self._keys: Keys | None = None
        self._source: Iterator[Any] = iter(())
        self.taken = 0

    @property
    def failure(self) -> Failure | None:
        """What the sampler raised."""
        return self._keys.failure if self._keys is not None else None

    @property
    def trouble(self) -> str:
        """Why no key could come, if that is not the sampler's fault."""
        return self._keys.trouble if self._keys is not None else ""

    def __iter__(self) -> Iterator[Any]:
        """Go on where the last one stopped."""
        while (key := self._next()) is not END:
            yield key

    def skip(self, number: int) -> None:
        """Leave some out: another process has taken them."""
        for _ in range(number):
            if self._next() is END:
                return

    def _next(self) -> Any:
        key = next(self._source, END)
        has_more = self._keys is None or (self._keys.given and self._keys.failure is None and not self._keys.is_late)
        if key is END and has_more:
            self._begin()
            key = next(self._source, END)
        self.taken += key is not END
        return key

    def _begin(self) -> None:
        self.close()
        self._keys = self._stack.enter_context(taken_aside(self._sampler, self._until))
        self._source = iter(self._keys)

    def close(self) -> None:
        """End the fork."""
        self._stack.close()


@contextmanager
def taken_again_and_again(sampler: Any, until: float) -> Iterator[EndlessKeys]:
    """Run a sampler in forks, one after the other, and end the last one at the end."""
    keys = EndlessKeys(sampler, until)
    try:
        yield keys
    finally:
        keys.close()


@contextmanager
def taken_aside(sampler: Any, until: float) -> Iterator[Keys]:
    """Run a sampler in a fork, and end it at the end."""
    with forked(_give, sampler) as (_, pipe):
        yield Keys(pipe, until)


def _give(sampler: Any, pipe: Any) -> None:
    """Send the keys, in the fork, as fast as they are wanted."""
    settle_in()
    registry.is_guarding = False  # of the kernel's guard, nothing runs here
    sys.modules["torch"].set_num_threads(1)  # the kernel's pool of threads is not here
    kernel, last = os.getppid(), b"end:"
    try:
        for keys in sampler:
            pipe.send_bytes(b"key:" + pickle.dumps(keys))
            if os.getppid() != kernel:
                break
    except Exception as error:  # noqa: BLE001 - what the user's code raises is a finding
        last = b"raised:" + pickle.dumps(asdict(describe_failure(error)))
    pipe.send_bytes(last)
