"""What reports of single ranks mean together: who is slowest, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

from ..model import ClusterState, RankState
from ..reporter import on_rank

IN_COLLECTIVE_SECONDS = 0.5
"""A rank that has been in one call of torch.distributed for so long, while another one stalls, waits for that one."""
LAGGING, WAITING = 0.25, 0.1
"""A rank is the slowest if its pace is behind the others' by this share, or if it waits more for data by this one."""


def gather(ranks: Iterable[RankState], note: str = "") -> ClusterState:
    """Put the ranks in order, and say of each what only all of them tell."""
    found = sorted(ranks, key=lambda one: (one.rank, one.status == "lost"))
    slowest = [find_slowest([one for one in found if one.job == job]) for job in {one.job for one in found}]
    stalled = [one for one in found if one.status == "live" and one.stalls]
    told = tuple(
        replace(
            one,
            is_slowest=any(one is other for other in slowest),
            waits_for=_awaited(one, stalled),
            stalls=tuple(on_rank(stall, one.name) for stall in one.stalls),
        )
        for one in found
    )
    return ClusterState(time.time(), told, note)


def _awaited(rank: RankState, stalled: list[RankState]) -> int | None:
    """Return the rank of the same job whose late loader keeps this one waiting."""
    is_waiting = rank.status == "live" and not rank.stalls and rank.collective_seconds >= IN_COLLECTIVE_SECONDS
    return next((one.rank for one in stalled if one.job == rank.job), None) if is_waiting else None


def find_slowest(ranks: list[RankState]) -> RankState | None:
    """Return the rank of a job that the others have to wait for.

    Ranks of a synchronous job all have the same pace; there it is the one that waits most for its own data.
    """
    at_work = [one for one in ranks if one.status == "live" and one.is_busy]
    stalled = [one for one in at_work if one.stalls]
    if stalled:
        return stalled[0]
    behind = _outlier([one for one in at_work if _pace(one) is not None], lambda one: -(_pace(one) or 0.0), LAGGING)
    waiting = [one for one in at_work if one.wait_share is not None]
    return behind or _outlier(waiting, lambda one: one.wait_share or 0.0, None)


def _outlier(ranks: list[RankState], value: Callable[[RankState], float], share: float | None) -> RankState | None:
    """Return the rank whose value is above the others' middle one by this share of it, or by WAITING."""
    if len(ranks) < 2:
        return None
    most = max(ranks, key=value)
    usual = median(value(one) for one in ranks if one is not most)
    return most if value(most) - usual > (WAITING if share is None else share * abs(usual)) else None


def _pace(rank: RankState) -> float | None:
    """Return its batches per second."""
    loaders = rank.snapshot.loaders if rank.snapshot is not None else ()
    paces = [one.batches_per_second for one in loaders if one.in_use and one.batches_per_second is not None]
    return sum(paces) if paces else None
