"""LG106: workers copy the dataset's Python objects, page by page, as they read them.

A forked worker shares the kernel's memory until one of them writes to it, and Python writes to an object's reference
count whenever it looks at the object. So a long list or dict of objects is copied into each worker in the course
of an epoch; a numpy array or a tensor, which is one object, is not. Measured, for a container of many
objects that can be reached from the dataset: how many of the pages that its objects lie on have become the
worker's own since it had begun, and how its private memory grew with its samples. Growth that does not come
with copied pages of such a container is not claimed.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ... import usage
from ...model import Finding
from ...reach import visit
from ...views import text
from ..check import Check, Moment, Worker
from ..pages import PAGE_BYTES, own_pages
from ..trial import Trial

MANY = 20_000
"""Objects: fewer do not matter."""
SAMPLED = 4096
LARGE_BYTES = 24 << 20
"""Of all workers' copies at the end of an epoch: less does not matter."""
FEWEST_PAGES = 24
FEWEST_SHARE = 0.02
LEAST_GROWTH = 200_000
LOOK_SECONDS = 0.4


@dataclass(frozen=True)
class Container:
    """Many Python objects, and some of the pages that they lie on."""

    path: str
    kind: str
    length: int
    pages: tuple[int, ...]
    total_bytes: int
    """What all of its objects lie on, by those that were looked at."""


@dataclass(frozen=True)
class Look:
    """One worker at one moment."""

    worker: int
    samples: int
    private_bytes: int
    copied: int


class CopiesCheck(Check):
    """See the docstring of this file."""

    code = "LG106"
    looks_for = "memory that grows by copies"

    def __init__(self, subject: Any) -> None:
        super().__init__(subject)
        self._container: Container | None = None
        self._first: dict[int, Look] = {}
        self._last: dict[int, Look] = {}
        self._next = 0.0

    def before(self) -> None:
        """Find the largest container of Python objects, while nobody shares its pages yet."""
        if self.subject.is_forked:
            found = _find_containers(self.subject.roots)
            self._container = max(found, key=lambda one: one.total_bytes, default=None)

    def look(self, moment: Moment) -> None:
        """Note what each worker has copied, a few times."""
        if self._container is None or moment.seconds < self._next:
            return
        self._next = moment.seconds + LOOK_SECONDS
        looks = [self._look_at(worker, self._container) for worker in moment.workers]
        now = {look.worker: look for look in looks if look is not None}
        self._first = self._first or now
        self._last = now or self._last

    def _look_at(self, worker: Worker, container: Container) -> Look | None:
        copied, private = own_pages(worker.pid, container.pages), usage.private_bytes(worker.pid)
        return Look(worker.number, worker.samples(), private, copied) if copied is not None and private else None

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return the growth of the worker that grew most, if it comes with copies."""
        container = self._container
        pairs = [(self._first[number], last) for number, last in self._last.items() if number in self._first]
        if container is None or container.total_bytes * self.subject.workers < LARGE_BYTES:
            return []
        grown = [pair for pair in pairs if _has_grown(*pair, container)]
        if not grown:
            return []
        first, last = max(grown, key=lambda pair: pair[1].copied - pair[0].copied)
        growth, samples = last.private_bytes - first.private_bytes, last.samples - first.samples
        evidence = (
            f"{container.path} is a {container.kind} of {container.length:,} objects on about "
            f"{text.size(container.total_bytes)}. Worker {last.worker} grew by {text.size(growth)} in {samples:,} "
            f"samples, {text.size(growth / samples * 1000)} per 1,000: of {len(container.pages):,} pages of it that "
            f"were looked at, it had its own copy of {first.copied:,} at first and of {last.copied:,} at the end."
        )
        title = f"each worker copies {container.path} as it reads it: its memory grows"
        fix = "Keep it in one numpy array or tensor (strings: one bytes array and offsets, or a file that is mapped)."
        return self.finding("warning", title, evidence, fix)


def _has_grown(first: Look, last: Look, container: Container) -> bool:
    copied = last.copied - first.copied
    is_much = copied >= max(FEWEST_PAGES, FEWEST_SHARE * len(container.pages))
    return is_much and last.private_bytes - first.private_bytes >= LEAST_GROWTH and last.samples > first.samples


def _find_containers(roots: dict[str, Any]) -> list[Container]:
    found: list[Container] = []

    def note(path: str, thing: Any) -> bool:
        if not _is_container(thing) or len(thing) < MANY:
            return False
        container = _describe(path, thing)
        if container is not None:
            found.append(container)
        return True

    visit(roots, note)
    return found


def _is_container(thing: Any) -> bool:
    if type(thing) in (list, tuple, dict, set, frozenset, deque):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(thing) is numpy.ndarray and thing.dtype == object and thing.ndim == 1


def _describe(path: str, thing: Any) -> Container | None:
    """Look at some of its objects: the first ones, and of what has numbers, some throughout."""
    length = len(thing)
    begin = [id(part) for part in itertools.islice(thing.values() if type(thing) is dict else thing, SAMPLED)]
    spread = []
    if type(thing) not in (dict, set, frozenset, deque):
        spread = [id(thing[number]) for number in range(0, length, max(1, length // SAMPLED))]
    looked_at = set(begin)
    if len(looked_at) < len(begin) // 2:  # the same few objects again and again
        return None
    dense = len({address // PAGE_BYTES for address in looked_at})
    pages = tuple(sorted({address // PAGE_BYTES for address in (*begin, *spread)}))
    total = length * dense * PAGE_BYTES // len(begin)
    return Container(path, _kind(thing), length, pages, total)


def _kind(thing: Any) -> str:
    return "numpy array" if type(thing).__name__ == "ndarray" else type(thing).__name__
