"""What an epoch loses when its workers are killed: batches, order, time."""

from __future__ import annotations

import random
import signal
import time

import psutil
import torch
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from tests.programs.frail import Frail

from .figures import Figure, median, spread
from .loading import throughput_in

BATCHES, KILLS, WORKERS = 5000, 100, 4


def _loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        Frail(8 * BATCHES), batch_size=8, shuffle=True, generator=generator, num_workers=WORKERS, prefetch_factor=2
    )


def _epoch(kill_after: set[int]) -> tuple[list[torch.Tensor], float, lg.RunReport]:
    """Return the batches of an epoch, its seconds and its report; kill a worker after each of these batches."""
    choice, batches = random.Random(7), []
    since = time.perf_counter()
    with lg.guard(retry=10 * KILLS) as run:
        for number, batch in enumerate(_loader()):
            batches.append(batch.clone())  # the batch itself holds a descriptor
            if number in kill_after:
                pids = {worker.pid for worker in lg.snapshot().workers if worker.state != "dead"}
                own = [child for child in psutil.Process().children() if child.pid in pids]
                if own:
                    choice.choice(own).send_signal(signal.SIGKILL)
    assert run.report is not None
    return batches, time.perf_counter() - since, run.report


def mending_throughput() -> list[Figure]:
    """What retry and skip cost when nothing fails."""
    figures = throughput_in(" with retry and skip on", lambda: lg.guard(retry=3, skip=3), least=0.98)
    return figures[:1]


def recovery() -> list[Figure]:
    """100 kills over one epoch of 5,000 batches."""
    kills = set(random.Random(1).sample(range(BATCHES - 50), KILLS))
    expected, undisturbed, _ = _epoch(set())
    got, disturbed, report = _epoch(kills)
    same = sum(torch.equal(one, other) for one, other in zip(expected, got, strict=False))
    lost = (disturbed - undisturbed) / KILLS
    took = [retry.seconds for retry in report.retried]
    return [
        Figure(
            f"{KILLS} kills over one epoch of {BATCHES:,} batches, {WORKERS} workers: identical batches",
            "the first kill ends the epoch",
            f"{same:,} of {len(got):,}; {report.retries} retries",
            f"{BATCHES:,}",
            same == len(got) == BATCHES,
        ),
        Figure(
            f"time lost per kill, {WORKERS} workers, fork",
            "–",
            f"{lost:.3f} s (epoch {undisturbed:.1f} → {disturbed:.1f} s); the replacement itself {spread(took)}",
            "≤ 0.5 s",
            lost <= 0.5 and median(took) <= 0.5,
            {"replacement_s": took},
        ),
    ]
