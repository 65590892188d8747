"""Workers killed at any time and in any way: every batch is that of an undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import jupyter_loaderguard as lg
from tests.programs.frail import Exits, Frail

from .test_recovery import _kill_one, _killing, _plain, _take

SOAK_SECONDS = float(os.environ.get("LOADERGUARD_SOAK_SECONDS", "60"))
SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]


def _sampler(kind: str, dataset: Frail, batch_size: int, drop_last: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    if kind == "batches":
        order = RandomSampler(dataset, generator=generator)
        return {"batch_sampler": BatchSampler(order, batch_size, drop_last)}
    if kind == "replacement":
        order = RandomSampler(dataset, replacement=True, generator=generator)
        return {"sampler": order, "batch_size": batch_size, "drop_last": drop_last}
    order = SequentialSampler(dataset) if kind == "in order" else RandomSampler(dataset, generator=generator)
    return {"sampler": order, "batch_size": batch_size, "drop_last": drop_last}


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    workers=st.integers(1, 3),
    prefetch=st.integers(1, 4),
    kind=st.sampled_from(["in order", "shuffled", "batches", "replacement"]),
    drop_last=st.booleans(),
    persistent=st.booleans(),
    kills=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 2), st.sampled_from(SIGNALS[:2])), max_size=4),
    fatal=st.lists(st.integers(0, 59), max_size=2),
)
def test_c2_batches_are_those_of_an_undisturbed_run(
    length: int,
    batch_size: int,
    workers: int,
    prefetch: int,
    kind: str,
    drop_last: bool,
    persistent: bool,
    kills: list[tuple[int, int, int]],
    fatal: list[int],
) -> None:
    def make(dataset: Frail) -> DataLoader:
        return DataLoader(
            dataset,
            **_sampler(kind, dataset, batch_size, drop_last),
            num_workers=workers,
            prefetch_factor=prefetch,
            persistent_workers=persistent,
        )

    undisturbed = make(Frail(length))
    expected = [_take(undisturbed) for _ in range(2)]
    del undisturbed
    folder = tempfile.mkdtemp()
    try:
        loader = make(Frail(length, kills=tuple(fatal), once=folder))
        with lg.guard(retry=100) as run:
            for epoch in expected:
                got = []
                for number, batch in enumerate(loader):
                    got.append(batch[:, 0].tolist())
                    for when, which, signum in kills:
                        if when == number:
                            _kill_one(signum, random.Random(which))
                assert got == epoch
        assert run.report.left == 0
        assert run.report.skipped == ()
    finally:
        shutil.rmtree(folder)


class Everything(Exits):
    """A sample in a hundred ends its worker by os._exit, each time that chance wants it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 100 == 50 and random.random() < 0.5:
            os._exit(7)
        return super().__getitem__(index)


@pytest.mark.timeout(300)
def test_c2_a_soak_of_every_way_to_die() -> None:
    expected, length = _plain(400, 8), 400
    until, epochs = time.monotonic() + SOAK_SECONDS, 0
    shm, born = set(Path("/dev/shm").glob("torch_*")), set()
    loader = DataLoader(Everything(length, seconds=0.001), batch_size=8, num_workers=3, persistent_workers=True)
    with (
        lg.guard(retry=100_000, stall_seconds=0.4, on_stall="retry") as run,
        _killing(0.1, SIGNALS, seed=5) as sent,
    ):
        while time.monotonic() < until:
            assert _take(loader) == expected
            born |= {worker.pid for worker in lg.snapshot().workers}
            epochs += 1
    assert epochs
    assert len(sent) > SOAK_SECONDS
    assert run.report.retries >= len(sent) / 20
    assert run.report.left == 0
    assert run.report.skipped == ()
    # torch gives a file its name for a moment: a worker that the test kills in it leaves the file; one that the guard
    # ends does not. Files of other pids are those of other tests that run at this time.
    born |= {pid for _, pid in sent}
    killed = {pid for signum, pid in sent if signum != signal.SIGSTOP}
    left = {int(file.name.split("_")[1]) for file in set(Path("/dev/shm").glob("torch_*")) - shm}
    assert not left & (born - killed)
    print(f"{epochs} epochs, {len(sent)} signals, {run.report.retries} retries")
