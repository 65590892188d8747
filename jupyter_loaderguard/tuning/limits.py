"""How many workers may be tried: by CPUs, by memory and by /dev/shm; and what says so."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .. import machine
from ..lending.batch import is_tensor, tensors_reached
from ..lending.subject import Subject
from ..views import text

USABLE_SHARE = 0.8
"""Of memory and of /dev/shm: the rest is left to others."""


@dataclass(frozen=True)
class Limit:
    """The most workers, and why not more."""

    workers: int
    why: str


@dataclass
class Needs:
    """What a worker needs, as far as it has been measured."""

    worker_bytes: int = 0
    batch_bytes: int = 0
    """Tensors of a batch: they lie in /dev/shm until the loop has dropped them."""


def usable_cpus() -> Limit:
    """Return the CPUs that are this process's own share, if several ranks run on this machine."""
    cpus, ranks = machine.usable_cpus(), local_ranks()
    if ranks > 1:
        return Limit(max(1, cpus // ranks), f"{text.count(cpus, 'usable CPU')} are shared by {ranks} local ranks")
    return Limit(cpus, f"this process may use {text.count(cpus, 'CPU')}")


def local_ranks() -> int:
    """Return how many processes of one training run on this machine, as launchers say it."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() and int(value) > 0 else 1


def copied_bytes(subject: Subject, method: str) -> int:
    """Return the bytes of tensors and arrays of which each worker gets a copy, because it is not forked."""
    if method == "fork":
        return 0
    things = [thing for _, thing in tensors_reached(subject.roots)]
    return sum(
        int(one.nbytes) for one in things if not (is_tensor(one) and (one.is_shared() or one.device.type != "cpu"))
    )


def most_workers(asked: int | None, prefetch: int, needs: Needs) -> Limit:
    """Return the most workers that may be tried, by what is known so far."""
    limits = [usable_cpus()]
    if asked is not None:
        limits.append(Limit(asked, f"max_workers={asked}"))
    state = machine.look()
    if needs.worker_bytes:
        room = USABLE_SHARE * state.memory_available_bytes
        free = text.size(state.memory_available_bytes)
        why = f"a worker holds {text.size(needs.worker_bytes)} of memory, and {free} are available"
        limits.append(Limit(int(room // needs.worker_bytes), why))
    if needs.batch_bytes and state.shm_bytes is not None and state.shm_used_bytes is not None:
        room = state.shm_bytes - state.shm_used_bytes
        why = (
            f"each worker puts {prefetch} batches of {text.size(needs.batch_bytes)} into /dev/shm, "
            f"where {text.size(room)} are free"
        )
        limits.append(Limit(int(USABLE_SHARE * room // (prefetch * needs.batch_bytes)), why))
    return min(limits, key=lambda limit: limit.workers)


def fits(workers: int, prefetch: int, needs: Needs) -> bool:
    """Tell whether so many batches ahead have room in /dev/shm."""
    return most_workers(None, prefetch, Needs(0, needs.batch_bytes)).workers >= workers


def candidates(limit: int) -> list[int]:
    """Return the numbers of workers to try, upward: each one at first, then in steps of a third to a half."""
    found, step = [0, 1, 2, 3, 4], 4
    while found[-1] < limit:
        found += [step + step // 2, 2 * step]
        step *= 2
    return sorted({number for number in found if number <= limit} | {limit})
