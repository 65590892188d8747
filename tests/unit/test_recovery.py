"""An epoch survives its workers, and delivers what an undisturbed one would. Real workers, really killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_sharer
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, Subset

import jupyter_loaderguard as lg
from jupyter_loaderguard.model import RunReport
from jupyter_loaderguard.torch_adapter.recipe import derive_seed
from tests.programs.datasets import Stream
from tests.programs.frail import (
    AsksForAll,
    Augmented,
    Counts,
    Exits,
    Frail,
    KeySampler,
    LiveState,
    NamedKeys,
    ReadsAhead,
    Resumable,
    StopsAtItsEnd,
    Uneven,
    fragile_collate,
)

WAYS = [("fork", False), ("fork", True), ("spawn", True), ("forkserver", False)]
"""Start methods, and whether workers are persistent."""


def _take(loader: DataLoader) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in loader]


def _numbers(samples: list[torch.Tensor]) -> list[int]:
    return [int(sample[0]) for sample in samples]


def _without(batches: list[list[int]], *missing: int) -> list[list[int]]:
    rest = [[index for index in batch if index not in missing] for batch in batches]
    return [batch for batch in rest if batch]


def _plain(length: int, size: int) -> list[list[int]]:
    return [list(range(start, min(length, start + size))) for start in range(0, length, size)]


def _workers() -> list[psutil.Process]:
    """Return this process's own workers, by the guard's list: psutil checks that a pid has not been used again."""
    pids = {worker.pid for worker in lg.snapshot().workers}
    return [child for child in psutil.Process().children() if child.pid in pids]


def _kill_one(signum: int = signal.SIGKILL, choice: random.Random | None = None) -> int | None:
    """Send a signal to a worker, and return which."""
    workers = _workers()
    if workers:
        worker = (choice or random.Random(0)).choice(workers)
        try:
            worker.send_signal(signum)
        except psutil.NoSuchProcess:
            return None
        return worker.pid
    return None


@contextmanager
def _killing(every_seconds: float, signals: list[int], seed: int = 1) -> Iterator[list[tuple[int, int | None]]]:
    """Kill a random worker every now and then, from another thread; the list has signals and pids."""
    over, choice = threading.Event(), random.Random(seed)
    sent: list[tuple[int, int | None]] = []

    def run() -> None:
        while not over.wait(every_seconds):
            signum = choice.choice(signals)
            sent.append((signum, _kill_one(signum, choice)))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()


# -- retry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "persistent"), WAYS)
def test_c2_a_killed_worker_is_replaced_and_nothing_is_lost(method: str, persistent: bool, tmp_path: Path) -> None:
    dataset = Frail(40, kills=(13, 30), once=str(tmp_path))
    loader = DataLoader(
        dataset, batch_size=4, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
    )
    with lg.guard(retry=2) as run:
        assert _take(loader) == _plain(40, 4)
        assert _take(loader) == _plain(40, 4)
    assert (run.report.retries, run.report.skipped, run.report.left) == (2, (), 0)
    assert "SIGKILL, on sample 13 of batch 3" in run.report.retried[0].why
    assert "undisturbed run" in run.report.remarks[0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGTERM, signal.SIGABRT])
def test_c2_whatever_ends_a_worker(signum: int) -> None:
    got = []
    with lg.guard(retry=1) as run:
        for number, batch in enumerate(DataLoader(Frail(60, seconds=0.005), batch_size=4, num_workers=2)):
            if number == 3:
                _kill_one(signum)
            got.append(batch[:, 0].tolist())
    assert got == _plain(60, 4)
    assert run.report.retries == 1


class _AfterADeath(BatchSampler):
    """Gives the keys of a second batch when a worker is dead of the first."""

    def __iter__(self) -> Iterator[list[int]]:
        for number, keys in enumerate(super().__iter__()):
            if number == 1:
                _await_dead_child()
            yield keys


def _await_dead_child() -> None:
    deadline = time.monotonic() + 30
    while not any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children()):
        assert time.monotonic() < deadline, "no worker died"
        time.sleep(0.01)


def test_c2_a_worker_dies_while_the_first_batches_are_handed_out(tmp_path: Path) -> None:
    """torch's handler of SIGCHLD would raise then, in `iter(loader)`, where nobody can mend it."""
    sampler = _AfterADeath(SequentialSampler(range(40)), 4, drop_last=False)
    with lg.guard(retry=1) as run:
        loader = DataLoader(Frail(40, kills=(0,), once=str(tmp_path)), batch_sampler=sampler, num_workers=2)
        assert _take(loader) == _plain(40, 4)
    assert run.report.retries == 1


def test_c2_without_retry_a_worker_that_dies_while_the_first_batches_are_handed_out_is_told_of_at_once() -> None:
    sampler = _AfterADeath(SequentialSampler(range(40)), 4, drop_last=False)
    with lg.guard(), pytest.raises(RuntimeError, match="killed by signal"):
        iter(DataLoader(Frail(40, kills=(0,)), batch_sampler=sampler, num_workers=2))


def test_c2_an_exit_is_a_death_too(tmp_path: Path) -> None:
    with lg.guard(retry=1) as run:
        assert _take(DataLoader(Exits(40, kills=(22,), once=str(tmp_path)), batch_size=4, num_workers=2)) == _plain(
            40, 4
        )
    assert "exit code 3" in run.report.retried[0].why


def test_c2_without_retry_it_is_raised_as_ever() -> None:
    with pytest.raises(RuntimeError, match="was ended by SIGKILL"), lg.guard():
        _take(DataLoader(Frail(40, kills=(13,)), batch_size=4, num_workers=2))


def test_c2_a_sample_that_always_kills_uses_the_retries_up() -> None:
    with pytest.raises(RuntimeError, match="was ended by SIGKILL") as caught, lg.guard(retry=2) as run:
        _take(DataLoader(Frail(40, kills=(13,)), batch_size=4, num_workers=2))
    assert run.report.retries == 2
    assert "replaced 2 times (retry=2)" in "".join(caught.value.__notes__)


SAMPLERS = {
    "shuffled": lambda data: DataLoader(
        data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(7), num_workers=3, drop_last=True
    ),
    "batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(SequentialSampler(data), 5, False), num_workers=2, prefetch_factor=4
    ),
    "with replacement": lambda data: DataLoader(
        data,
        batch_size=4,
        sampler=RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(7)),
        num_workers=2,
    ),
    "one by one": lambda data: DataLoader(data, batch_size=None, num_workers=2, collate_fn=lambda sample: sample[None]),
    "timeout": lambda data: DataLoader(data, batch_size=4, num_workers=2, timeout=20),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_c2_every_kind_of_sampler_goes_on_as_it_was(kind: str) -> None:
    expected = _take(SAMPLERS[kind](Frail(90)))
    got, choice = [], random.Random(3)
    with lg.guard(retry=9) as run:
        for number, batch in enumerate(SAMPLERS[kind](Frail(90, seconds=0.002))):
            got.append(batch[:, 0].tolist())
            if number in (2, 5, 9):
                _kill_one(signal.SIGKILL, choice)
    assert got == expected
    assert run.report.retries >= 1


def test_c2_out_of_order_batches_are_the_same_set() -> None:
    with lg.guard(retry=1000) as run, _killing(0.15, [signal.SIGKILL]):
        got = _take(DataLoader(Frail(120, seconds=0.005), batch_size=4, num_workers=2, in_order=False))
    assert sorted(got) == _plain(120, 4)
    assert run.report.retries >= 1


def test_c2_a_worker_that_died_between_two_epochs() -> None:
    loader = DataLoader(Frail(24), batch_size=4, num_workers=2, persistent_workers=True)
    with lg.guard(retry=1) as run:
        assert _take(loader) == _plain(24, 4)
        worker = _workers()[0]
        worker.kill()
        worker.wait(10)
        assert _take(loader) == _plain(24, 4)
        assert _take(loader) == _plain(24, 4)
    assert run.report.retries == 1


def test_c2_what_a_worker_started_goes_with_it(tmp_path: Path) -> None:
    from tests.programs.datasets import StartsProcesses

    with lg.guard(retry=1):
        for number, _ in enumerate(DataLoader(StartsProcesses(str(tmp_path), 40), batch_size=4, num_workers=2)):
            if number == 2:
                families = [int(pid) for marker in tmp_path.iterdir() for pid in marker.read_text().split()]
                healthy = _workers()[1]
                own = [int(pid) for pid in (tmp_path / str(healthy.pid)).read_text().split()]
                _workers()[0].kill()
    assert len(families) >= 2
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in own) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in own)
    for pid in families:  # of the one that was killed: they had lost their parent before anyone could look
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def test_c2_a_training_loop_is_the_same_to_the_bit() -> None:
    def train(killed: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        losses: list[float] = []
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            Frail(96, seconds=0.002),
            batch_size=8,
            shuffle=True,
            generator=generator,
            num_workers=2,
            persistent_workers=True,
        )
        for _ in range(3):
            for number, batch in enumerate(loader):
                if killed and number in (1, 6):
                    _kill_one()
                loss = (model(batch.float()) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    with lg.guard():
        expected = train(False)
    with lg.guard(retry=20) as run:
        assert train(True) == expected
    assert run.report.retries >= 3


def test_replaced_workers_repeat_no_random_stream(tmp_path: Path) -> None:
    torch.manual_seed(3)
    with lg.guard(retry=3) as run:
        loader = DataLoader(Augmented(64, kills=(20, 40), once=str(tmp_path)), batch_size=4, num_workers=2)
        noise = torch.cat([batch[:, 1] for batch in loader])
    assert run.report.retries == 2
    assert len(set(noise.tolist())) == 64
    assert "drawn anew" in run.report.remarks[0]
    seeds = {
        derive_seed(base, generation) + worker for base in range(50) for generation in range(50) for worker in range(8)
    }
    assert len(seeds) == 50 * 50 * 8


def test_a_loader_is_usable_after_the_retries_are_used_up(tmp_path: Path) -> None:
    loader = DataLoader(
        Frail(40, kills=(13, 30), once=str(tmp_path)), batch_size=4, num_workers=2, persistent_workers=True
    )
    with lg.guard(retry=1):
        with pytest.raises(RuntimeError, match="SIGKILL"):
            _take(loader)
        assert _take(loader) == _plain(40, 4)


def test_a_loader_of_before_the_guard_is_not_retried() -> None:
    iterator = iter(DataLoader(Frail(200, seconds=0.01), batch_size=4, num_workers=2))
    next(iterator)
    with lg.guard(retry=1):
        _workers()[0].kill()
        with pytest.raises(RuntimeError) as caught:
            for _ in iterator:
                pass
        lg.clean()
    assert "started before the guard" in "".join(caught.value.__notes__)


# -- skip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_c4_a_sample_that_raises_is_left_out(method: str) -> None:
    loader = DataLoader(Frail(40, raises=(5, 6, 22)), batch_size=4, num_workers=2, multiprocessing_context=method)
    with lg.guard(skip=3) as run:
        assert _take(loader) == _without(_plain(40, 4), 5, 6, 22)
    skipped = run.report.skipped
    assert [(one.index, one.reason, one.error) for one in skipped] == [
        (index, "raised", f"ValueError: sample {index} is corrupt") for index in (5, 6, 22)
    ]
    assert {one.worker_id for one in skipped} <= {0, 1}
    assert run.report.retries == 0


def test_c4_without_workers_too() -> None:
    with lg.guard(skip=3) as run:
        assert _take(DataLoader(Frail(40, raises=(5, 6, 22)), batch_size=4)) == _without(_plain(40, 4), 5, 6, 22)
    assert [(one.index, one.worker_id, one.reason) for one in run.report.skipped] == [
        (index, None, "raised") for index in (5, 6, 22)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_c4_a_batch_left_empty_is_passed_over(workers: int) -> None:
    with lg.guard(skip=9) as run:
        got = _take(DataLoader(Frail(20, raises=(4, 5, 6, 7)), batch_size=4, num_workers=workers))
        assert got == _without(_plain(20, 4), 4, 5, 6, 7)
        one_by_one = DataLoader(Frail(9, raises=(2, 8)), batch_size=None, num_workers=workers)
        assert [int(sample[0]) for sample in one_by_one] == [0, 1, 3, 4, 5, 6, 7]
    assert len(run.report.skipped) == 6
    assert run.report.batches == 4 + 7


@pytest.mark.parametrize("workers", [0, 2])
def test_c4_after_the_last_skip_the_error_is_raised_with_the_list(workers: int) -> None:
    with pytest.raises(ValueError, match="sample 22 is corrupt") as caught, lg.guard(skip=2) as run:
        _take(DataLoader(Frail(40, raises=(5, 6, 22)), batch_size=4, num_workers=workers))
    assert [one.index for one in run.report.skipped] == [5, 6]
    assert "2 left out (skip=2): samples 5, 6" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("retry", [0, 1, 5])
def test_c3_a_sample_that_kills_every_worker_is_found(retry: int) -> None:
    with lg.guard(retry=retry, skip=2) as run:
        assert _take(DataLoader(Frail(40, kills=(13,)), batch_size=4, num_workers=2)) == _without(_plain(40, 4), 13)
    (sample,) = run.report.skipped
    assert (sample.index, sample.reason, sample.error) == (13, "killed", "was ended by SIGKILL")
    assert run.report.retries == min(retry, 1)


def test_c3_a_worker_that_is_killed_by_chance_costs_no_sample(tmp_path: Path) -> None:
    with lg.guard(retry=5, skip=5) as run:
        dataset = Frail(60, kills=(13, 40), once=str(tmp_path))
        assert _take(DataLoader(dataset, batch_size=4, num_workers=2)) == _plain(60, 4)
    assert (run.report.retries, run.report.skipped) == (2, ())


@pytest.mark.parametrize("workers", [0, 2])
def test_c5_a_sample_that_hangs_is_left_out(workers: int) -> None:
    with lg.guard(stall_seconds=0.4, on_stall="retry", retry=1, skip=1) as run:
        assert _take(DataLoader(Frail(40, hangs=(9,)), batch_size=4, num_workers=workers)) == _without(_plain(40, 4), 9)
    (sample,) = run.report.skipped
    assert (sample.index, sample.reason) == (9, "hung")
    assert run.report.stalls
    assert "replacement" in (run.report.stalls[0].ended or "")


def test_c5_a_worker_that_was_stopped_is_replaced() -> None:
    got = []
    with lg.guard(stall_seconds=0.4, on_stall="retry", retry=1) as run:
        for number, batch in enumerate(DataLoader(Frail(80, seconds=0.005), batch_size=4, num_workers=2)):
            if number == 3:
                _kill_one(signal.SIGSTOP)
            got.append(batch[:, 0].tolist())
    assert got == _plain(80, 4)
    assert run.report.retries == 1


def test_c5_without_retries_a_stall_is_raised() -> None:
    loader = DataLoader(Frail(40, hangs=(9,)), batch_size=4, num_workers=2)
    with pytest.raises(lg.LoaderStalled) as caught, lg.guard(stall_seconds=0.4, on_stall="retry"):
        _take(loader)
    assert caught.value.index == 9
    with pytest.raises(lg.LoaderStalled) as caught, lg.guard(stall_seconds=0.4, on_stall="retry", retry=1):
        _take(loader)
    assert "replaced once" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_c3_c4_c5_all_at_once(method: str) -> None:
    dataset = Frail(60, raises=(5, 21), kills=(13, 22), hangs=(20, 41))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=method)
    with lg.guard(stall_seconds=0.5, on_stall="retry", retry=2, skip=6) as run:
        assert _take(loader) == _without(_plain(60, 4), 5, 21, 13, 22, 20, 41)
    assert sorted((one.index, one.reason) for one in run.report.skipped) == sorted(
        [(5, "raised"), (21, "raised"), (13, "killed"), (22, "killed"), (20, "hung"), (41, "hung")]
    )


@pytest.mark.parametrize("fault", ["raises", "kills"])
def test_c3_c4_a_dataset_that_takes_whole_batches_is_searched(fault: str) -> None:
    with lg.guard(skip=2) as run:
        loader = DataLoader(AsksForAll(48, **{fault: (13, 30)}), batch_size=8, num_workers=2)
        assert _take(loader) == _without(_plain(48, 8), 13, 30)
    assert sorted(one.index for one in run.report.skipped) == [13, 30]


def test_c3_a_sample_that_kills_in_collate_fn_is_searched() -> None:
    with lg.guard(skip=1, retry=1) as run:
        loader = DataLoader(Frail(48), batch_size=8, num_workers=2, collate_fn=fragile_collate)
        assert _take(loader) == _without(_plain(48, 8), 13)
    assert [(one.index, one.reason) for one in run.report.skipped] == [(13, "killed")]


def _dies_of_eight(samples: list[torch.Tensor]) -> torch.Tensor:
    if len(samples) == 8 and int(samples[0][0]) == 16:
        signal.raise_signal(signal.SIGKILL)
    return torch.stack(samples)


def test_a_batch_that_kills_only_as_a_whole_blames_nobody() -> None:
    loader = DataLoader(Frail(48), batch_size=8, num_workers=2, collate_fn=_dies_of_eight)
    with pytest.raises(RuntimeError, match="SIGKILL"), lg.guard(skip=5, retry=1) as run:
        _take(loader)
    assert run.report.skipped == ()


def _odd_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    if any(int(sample[0]) == 13 for sample in samples):
        raise TypeError("cannot collate")
    return torch.stack(samples)


def test_an_error_of_collate_fn_or_worker_init_fn_is_no_samples() -> None:
    with pytest.raises(TypeError, match="cannot collate"), lg.guard(skip=5) as run:
        _take(DataLoader(Frail(48), batch_size=8, num_workers=2, collate_fn=_odd_collate))
    assert run.report.skipped == ()
    with pytest.raises(ZeroDivisionError), lg.guard(skip=5, retry=5) as run:
        _take(DataLoader(Frail(48), batch_size=8, num_workers=2, worker_init_fn=lambda worker: 1 // 0))
    assert (run.report.skipped, run.report.retries) == ((), 0)


def test_a_sample_that_was_left_out_stays_out_and_counts_once(tmp_path: Path) -> None:
    loader = DataLoader(Counts(str(tmp_path), raises=(5,)), batch_size=4, num_workers=2, persistent_workers=True)
    fresh = DataLoader(loader.dataset, batch_size=4, num_workers=2)
    with lg.guard(skip=1) as run:
        for one in (loader, loader, fresh):
            assert _take(one) == _without(_plain(40, 4), 5)
    assert [sample.index for sample in run.report.skipped] == [5]
    assert (tmp_path / "asked").read_text().split().count("5") == 1


def test_samples_of_other_datasets_with_the_same_number_are_not_left_out() -> None:
    with lg.guard(skip=1):
        assert _take(DataLoader(Frail(8, raises=(5,)), batch_size=4, num_workers=1)) == [[0, 1, 2, 3], [4, 6, 7]]
        assert _take(DataLoader(Frail(8), batch_size=4, num_workers=1)) == _plain(8, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_quarantine_is_kept_and_handed_to_a_later_run(workers: int, tmp_path: Path) -> None:
    with lg.guard(skip=2) as run:
        _take(DataLoader(Frail(40, raises=(5, 20)), batch_size=4, num_workers=2))
    path = tmp_path / "bad.json"
    run.report.save_quarantine(path)
    assert [row["index"] for row in json.loads(path.read_text())["samples"]] == [5, 20]
    asked = Counts(str(tmp_path), raises=(5, 20))
    asked.__class__ = type("Frail", (Counts,), {})  # it goes by the name of the class and the length
    for known in (path, str(path), run.report, run.report.skipped):
        with lg.guard(quarantine=known) as later:
            loader = DataLoader(asked, batch_size=4, num_workers=workers)
            assert _take(loader) == _without(_plain(40, 4), 5, 20)
        assert later.report.skipped == ()
    assert not {"5", "20"} & set((tmp_path / "asked").read_text().split())


def test_keys_of_any_kind_can_be_left_out_and_kept(tmp_path: Path) -> None:
    def load(**options: object) -> tuple[list[list[int]], RunReport]:
        with lg.guard(**options) as run:
            got = [batch.tolist() for batch in DataLoader(NamedKeys(), batch_sampler=KeySampler(), num_workers=2)]
        return got, run.report

    got, report = load(skip=1)
    assert got[3] == [[5, 3]]
    assert [one.index for one in report.skipped] == [("left", 3)]
    report.save_quarantine(tmp_path / "bad.json")
    assert load(quarantine=tmp_path / "bad.json")[0] == got


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "loaderguard quarantine", "version": 1, "samples": [3]}']
)
def test_a_file_that_is_no_quarantine_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(lg.LoaderGuardError, match="is not a quarantine"), lg.guard(quarantine=path):
        pass
    with pytest.raises(lg.LoaderGuardError, match="cannot be read"), lg.guard(quarantine=tmp_path / "none.json"):
        pass
    with pytest.raises(lg.LoaderGuardError, match="quarantine must be"), lg.guard(quarantine=5):
        pass


@pytest.mark.parametrize("options", [{"retry": -1}, {"skip": 1.5}, {"retry": True}, {"skip": "3"}])
def test_a_bad_number_is_refused_by_name(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(lg.LoaderGuardError, match=f"{name} must be a whole number"), lg.guard(**options):
        pass


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "persistent"), WAYS)
def test_c8_a_stream_that_knows_its_place_is_resumed(method: str, persistent: bool, tmp_path: Path) -> None:
    def make(**faults: object) -> DataLoader:
        return DataLoader(
            Resumable(58, **faults),
            batch_size=4,
            num_workers=2,
            multiprocessing_context=method,
            persistent_workers=persistent,
        )

    expected = _take(make())
    loader = make(kills=(21, 56), once=str(tmp_path))
    with lg.guard(retry=3) as run:
        assert _take(loader) == expected
        assert _take(loader) == expected
    assert run.report.retries == 2
    assert "load_state_dict" in run.report.remarks[0]


@pytest.mark.parametrize("persistent", [False, True])
def test_c8_a_stream_that_has_just_ended_does_not_begin_again(persistent: bool, tmp_path: Path) -> None:
    """Its last batch is here, but not yet its word that there is no more; its state is that of a new beginning."""
    dataset = StopsAtItsEnd(24, kills=(16,), once=str(tmp_path))
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        prefetch_factor=1,
        persistent_workers=persistent,
        collate_fn=_numbers,  # a tensor of a worker that is stopped could not be fetched
    )
    got = []
    with lg.guard(retry=1) as run:
        for batch in loader:
            got.append(batch)
            time.sleep(0.5)  # worker 1 is stopped when it is asked for more
    assert got == [[0, 2, 4, 6], [1], [8, 10, 12, 14], [16, 18, 20, 22]]
    assert (run.report.retries, run.report.left) == (1, 0)


def test_c8_a_stream_that_does_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="SIGKILL") as caught, lg.guard(retry=3, skip=3) as run:
        for _ in DataLoader(Stream(4000), batch_size=4, num_workers=2):
            _kill_one()
    assert "iterable dataset without state_dict" in "".join(caught.value.__notes__)
    assert any("iterable dataset without state_dict" in remark for remark in run.report.remarks)
    assert run.report.retries == 0


def test_c8_torchdatas_loader_is_refused_with_a_reason() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with pytest.raises(RuntimeError) as caught, lg.guard(retry=3):
        for _ in StatefulDataLoader(Frail(400, seconds=0.002), batch_size=4, num_workers=2):
            _kill_one()
    assert "StatefulDataLoader keeps the state" in "".join(caught.value.__notes__)


# -- other threads -------------------------------------------------------------------------------


def test_a_loader_that_is_stopped_while_its_workers_are_replaced_leaves_none() -> None:
    for seed in range(4):
        loader = DataLoader(Frail(4000, seconds=0.002), batch_size=4, num_workers=2)
        choice = random.Random(seed)

        def stop(choice: random.Random = choice) -> None:
            time.sleep(choice.uniform(0.2, 0.5))
            lg.clean()

        stopper = threading.Thread(target=stop)
        with pytest.raises((lg.LoaderGuardError, RuntimeError)), lg.guard(retry=1000) as run, _killing(0.02, [9], seed):
            stopper.start()
            _take(loader)
        stopper.join()
        assert run.report.left == 0


def test_a_loop_in_another_thread_is_mended_too(tmp_path: Path) -> None:
    got: list[list[int]] = []
    with lg.guard(retry=2, skip=1, stall_seconds=0.5, on_stall="retry") as run:
        loader = DataLoader(Frail(60, kills=(13,), hangs=(30,), once=str(tmp_path)), batch_size=4, num_workers=2)
        thread = threading.Thread(target=lambda: got.extend(_take(loader)))
        thread.start()
        thread.join()
    assert got == _plain(60, 4)
    assert run.report.retries == 2


@pytest.mark.usefixtures("accelerator")
def test_c2_pinned_memory(tmp_path: Path) -> None:
    dataset = Frail(60, kills=(13, 30), raises=(41,), once=str(tmp_path))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True)
    with lg.guard(retry=5, skip=1) as run:
        assert _take(loader) == _without(_plain(60, 4), 41)
        assert _take(loader) == _without(_plain(60, 4), 41)
    assert run.report.retries >= 2
    assert [thread.name for thread in threading.enumerate() if "pin" in thread.name] == []


# -- what a review had broken ------------------------------------------------------------------------


def test_a_stream_is_the_users_own_when_the_run_is_over() -> None:
    loader = DataLoader(Resumable(24), batch_size=4, num_workers=2, persistent_workers=True)
    with lg.guard(retry=2, keep=True):
        expected = _take(loader)
    assert _take(loader) == expected
    with lg.guard():
        assert _take(loader) == expected


class _SlowAt(Frail):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            time.sleep(0.5)
        return super().__getitem__(index)


def test_an_iterator_goes_on_after_the_run_in_which_samples_were_left_out() -> None:
    with lg.guard():
        loader = DataLoader(_SlowAt(24, raises=(8, 9, 10, 11)), batch_size=4, num_workers=2, prefetch_factor=4)
        iterator = iter(loader)
        with lg.guard(skip=10, keep=True):
            got = [next(iterator)[:, 0].tolist() for _ in range(2)]
        got += [batch[:, 0].tolist() for batch in iterator]
    assert got == _without(_plain(24, 4), 8, 9, 10, 11)


class _SlowHalves(AsksForAll):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(0.2 if len(indices) == 4 else 0.05)
        return super().__getitems__(indices)


def test_a_search_that_is_not_over_with_the_run_delivers_no_half_batch() -> None:
    with lg.guard():
        iterator = iter(DataLoader(_SlowHalves(40, raises=(15,)), batch_size=8, num_workers=2))
        with lg.guard(skip=10, keep=True):
            got = [next(iterator)[:, 0].tolist()]
        with pytest.raises(ValueError, match="sample 15 is corrupt"):
            got += [batch[:, 0].tolist() for batch in iterator]
    assert all(len(batch) == 8 for batch in got)


def test_a_dataset_at_the_place_of_another_one_loses_nothing() -> None:
    base = Frail(40, raises=(5,))
    with lg.guard(skip=50) as run:
        for number in range(40):
            part = Subset(base, list(range(20) if number % 2 == 0 else range(20, 40)))
            got = {int(row) for batch in DataLoader(part, batch_size=4) for row in batch[:, 0]}
            assert set(part.indices) - got - {5} == set()
            del part
    assert run.report.skipped


@pytest.mark.parametrize("kind", ["live", "raises", "unpicklable"])
def test_c8_a_state_is_taken_at_once_and_a_bad_one_costs_nothing(kind: str) -> None:
    got = []
    with lg.guard(retry=50) as run:
        iterator = iter(DataLoader(LiveState(400, kind), batch_size=2, num_workers=1, prefetch_factor=8))
        for number, batch in enumerate(iterator):
            got += batch[:, 0].tolist()
            if kind == "live" and number % 40 == 20:
                _kill_one()
    assert got == list(range(400))
    if kind == "live":
        assert run.report.retries
    else:
        assert "fails, or what it returns cannot be pickled" in run.report.remarks[0]


def test_c8_a_stream_that_had_ended_begins_anew_in_the_next_epoch() -> None:
    loader = DataLoader(Uneven(), batch_size=2, num_workers=2, persistent_workers=True)
    with lg.guard(retry=3) as run:
        for epoch in range(3):
            got = []
            for number, batch in enumerate(loader):
                got += batch[:, 0].tolist()
                if epoch == 0 and number == 11:
                    assert loader._iterator is not None
                    psutil.Process(loader._iterator._workers[1].pid).kill()
            assert sorted(got) == [*range(6), *range(100, 130)]
    assert run.report.retries == 1


def _needs_two(samples: list[torch.Tensor]) -> torch.Tensor:
    if len(samples) < 2:
        raise RuntimeError("collate needs two")
    return torch.stack(samples)


def test_a_trial_that_fails_in_collate_fn_blames_nobody() -> None:
    loader = DataLoader(AsksForAll(32, raises=(13,)), batch_size=8, num_workers=2, collate_fn=_needs_two)
    with lg.guard(skip=5) as run:
        assert _take(loader) == _without(_plain(32, 8), 13)
    assert [one.index for one in run.report.skipped] == [13]


def test_a_slow_batch_is_no_hanging_sample() -> None:
    with lg.guard(retry=1, skip=10, stall_seconds=0.6, on_stall="retry") as run:
        assert _take(DataLoader(Frail(24, seconds=0.12), batch_size=12, num_workers=2)) == _plain(24, 12)
    assert (run.report.skipped, run.report.retries) == ((), 0)


class _ByPath(Dataset):
    def __getitem__(self, key: str) -> torch.Tensor:
        number = int(key[-2:])
        if number in (4, 9):
            time.sleep(0.5)
        return torch.tensor([number, 0])


def test_samples_with_long_names_are_told_apart_and_forgiven_when_they_come() -> None:
    names = [f"/{'folder/' * 20}{number:02}" for number in range(12)]
    loader = DataLoader(
        _ByPath(), batch_size=1, sampler=names, num_workers=1, persistent_workers=True, prefetch_factor=1
    )
    with lg.guard(retry=20, skip=5) as run:
        for epoch in range(2):
            got = []
            for batch in loader:
                got.append(int(batch[0, 0]))
                if got[-1] in ((3, 8) if epoch == 0 else (3,)):
                    time.sleep(0.1)
                    _kill_one()
            assert got == list(range(12))
    assert run.report.skipped == ()
    assert run.report.retries == 3


def test_killing_all_workers_by_chance_leaves_no_sample_out() -> None:
    got = []
    with lg.guard(skip=10, retry=1) as run:
        for number, batch in enumerate(DataLoader(Frail(120, seconds=0.005), batch_size=4, num_workers=4)):
            got.append(batch[:, 0].tolist())
            if number in (3, 12):
                for worker in _workers():
                    worker.kill()
    assert got == _plain(120, 4)
    assert run.report.skipped == ()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [AsksForAll, ReadsAhead])
def test_c4_whole_batches_are_searched_with_and_without_workers(kind: type[Frail], workers: int) -> None:
    with lg.guard(skip=2) as run:
        assert _take(DataLoader(kind(40, raises=(5, 21)), batch_size=8, num_workers=workers)) == _without(
            _plain(40, 8), 5, 21
        )
    assert sorted(one.index for one in run.report.skipped) == [5, 21]


@pytest.mark.parametrize("dataset", [Frail(40, raises=(6,)), Resumable(40)])
def test_a_new_epoch_after_a_break_throws_away_what_was_under_way(dataset: Frail | Resumable) -> None:
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True, prefetch_factor=4)
    with lg.guard(skip=3, retry=2):
        iterator = iter(loader)
        next(iterator)
        time.sleep(0.5)
        del iterator
        rows = sorted(row for batch in _take(loader) for row in batch)
    if isinstance(dataset, Frail):
        assert rows == [row for row in range(40) if row != 6]
    else:
        assert set(rows) <= set(range(40))


def test_a_sample_in_several_batches_or_loaders_is_left_out_once() -> None:
    dataset = Frail(10, raises=(5,))
    with lg.guard(skip=1) as run:
        list(DataLoader(dataset, batch_size=2, sampler=[5, 0, 5, 1, 5, 2], num_workers=2))
        loaders = [DataLoader(dataset, batch_size=2, num_workers=1) for _ in range(2)]
        list(zip(*loaders, strict=True))
    assert [one.index for one in run.report.skipped] == [5]


class _TensorKeys(Sampler):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.tensor([[index, 0] for index in range(6)]))


class _TakesTensors(Dataset):
    def __getitem__(self, key: torch.Tensor) -> torch.Tensor:
        if int(key[0]) == 3:
            raise ValueError("corrupt")
        return key


def test_tensors_as_keys_are_known_by_their_content() -> None:
    dataset = _TakesTensors()
    with lg.guard(skip=1) as run:
        for _ in range(3):
            loader = DataLoader(dataset, batch_size=2, sampler=_TensorKeys(), num_workers=2)
            assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2], [4, 5]]
    assert len(run.report.skipped) == 1
    resource_sharer.stop(5)  # Python's own thread, for tensors that go to workers


def test_a_loader_that_a_later_run_takes_over_is_seen_and_mended() -> None:
    loader = DataLoader(Frail(60, seconds=0.005), batch_size=2, num_workers=2, persistent_workers=True)
    with lg.guard(keep=True, retry=1):
        _take(loader)
    with lg.guard(retry=5) as run:
        got = []
        for number, batch in enumerate(loader):
            got.append(batch[:, 0].tolist())
            if number == 5:
                _kill_one()
        assert loader._iterator is not None
        assert {worker.pid for worker in lg.snapshot().workers} == {one.pid for one in loader._iterator._workers}
        assert lg.clean().left == 0
    assert got == _plain(60, 2)
    assert run.report.retries == 1


def test_the_file_system_strategy_works(tmp_path: Path) -> None:
    """torch's manager of shared memory is started by a worker, and aborts the kernel if it is ended."""
    code = (
        "import sys, torch, torch.multiprocessing, jupyter_loaderguard as lg\n"
        "from torch.utils.data import DataLoader\n"
        "from tests.programs.frail import Frail\n"
        "torch.multiprocessing.set_sharing_strategy('file_system')\n"
        f"dataset = Frail(200, kills=(50, 120), once={str(tmp_path)!r})\n"
        "with lg.guard(retry=3) as run:\n"
        "    kept = [batch for batch in DataLoader(dataset, batch_size=4, num_workers=2)]\n"
        "print([int(row) for batch in kept for row in batch[:, 0]] == list(range(200)), run.report.retries)\n"
        "del kept\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "True 2\n"), done.stderr


def test_a_quarantine_file_is_written_safely(tmp_path: Path) -> None:
    with lg.guard(skip=1) as run:
        _take(DataLoader(Frail(8, raises=(5,)), batch_size=4))
    path, victim = tmp_path / "bad.json", tmp_path / "victim"
    victim.write_text("mine")
    path.symlink_to(victim)
    run.report.save_quarantine(path)
    assert victim.read_text() == "mine"
    assert not path.is_symlink()
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["bad.json", "victim"]
    with pytest.raises(OSError, match="No such file"):
        run.report.save_quarantine(tmp_path / "none" / "bad.json")


@pytest.mark.parametrize("depth", [900, 100_000])
def test_a_quarantine_of_nested_lists_is_refused(depth: int, tmp_path: Path) -> None:
    row = f'{{"index": {"[" * depth}{"]" * depth}, "worker_id": 0, "reason": "odd", "error": ""}}'
    (tmp_path / "bad.json").write_text(f'{{"format": "loaderguard quarantine", "version": 1, "samples": [{row}]}}')
    with pytest.raises(lg.LoaderGuardError, match="is not a quarantine"), lg.guard(quarantine=tmp_path / "bad.json"):
        pass


def test_halves_of_a_dataset_do_not_share_a_quarantine(tmp_path: Path) -> None:
    base = Frail(40, raises=(5,))
    halves = [Subset(base, range(20)), Subset(base, range(20, 40))]
    with lg.guard(skip=1) as run:
        _take(DataLoader(halves[0], batch_size=4, num_workers=1))
    with lg.guard(quarantine=run.report) as later:
        assert _take(DataLoader(halves[0], batch_size=4, num_workers=1))[1] == [4, 6, 7]
        assert sum(map(len, _take(DataLoader(halves[1], batch_size=4, num_workers=1)))) == 20
    assert "1 sample was not touched" in later.report.remarks[0]


def test_out_of_order_is_not_called_in_order(tmp_path: Path) -> None:
    with lg.guard(retry=1) as run:
        _take(DataLoader(Frail(40, kills=(13,), once=str(tmp_path)), batch_size=4, num_workers=2, in_order=False))
    assert "in any order" in run.report.remarks[0]
