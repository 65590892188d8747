"""`tune` on loaders whose best number of workers is known by construction."""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import jupyter_loaderguard as lg
from jupyter_loaderguard import machine
from jupyter_loaderguard.lending import loan
from jupyter_loaderguard.lending.fork import forked
from jupyter_loaderguard.lending.keys import EndlessKeys
from jupyter_loaderguard.lending.loan import lend, own_order
from jupyter_loaderguard.lending.subject import describe
from jupyter_loaderguard.processes import Handle
from jupyter_loaderguard.reaper import Reaper
from jupyter_loaderguard.registry import registry
from jupyter_loaderguard.tuning import bench, limits
from jupyter_loaderguard.tuning.choice import choose, code_line, explain, margin_of
from jupyter_loaderguard.tuning.visit import Visit
from jupyter_loaderguard.views import curve
from tests.programs import paces
from tests.programs.datasets import Quick, Stream, Stuck

pytestmark = pytest.mark.quiet
CPUS = machine.usable_cpus()
needs_two = pytest.mark.skipif(CPUS < 2, reason="one CPU: there is nothing to choose")


def tuned(loader: DataLoader, seconds: float = 4.0, **options: Any) -> lg.TuneResult:
    """Tune, and hold what is true of every result."""
    result = lg.tune(loader, seconds=seconds, **options)
    top = max(row.batches_per_second for row in result.rows)
    assert result.best_row.batches_per_second >= 0.95 * top
    assert result.best <= CPUS
    assert result.seconds <= seconds + 1.5
    assert f"num_workers={result.best}" in result.reason
    assert f"num_workers={result.best}" in result.code
    assert str(result.best) in result.plot().text
    assert result.plot().html.startswith("<svg")
    return result


@needs_two
def test_e8_a_loader_that_waits_for_a_network_gets_as_many_workers_as_there_are_cpus() -> None:
    result = tuned(paces.loader(paces.Sleeps()), max_workers=2)
    rates = {row.num_workers: row.batches_per_second for row in result.rows}
    assert [*rates] == [0, 1, 2], "0 first, then upward"
    assert result.best == 2
    assert rates[2] > 1.5 * rates[0]


@needs_two
def test_e8_a_cpu_bound_loader() -> None:
    result = tuned(paces.loader(paces.Computes()), max_workers=2)
    assert {row.num_workers for row in result.rows} == {0, 1, 2}
    assert result.best_row.batches_per_second > 0


@needs_two
def test_e8_a_lock_bound_loader_is_told_that_workers_do_not_help_and_which_lock() -> None:
    result = tuned(paces.loader(paces.Locked()), seconds=6.0, max_workers=2)
    assert result.best < 2
    assert result.lock == "dataset.lock"
    assert "not help, they wait for dataset.lock" in result.reason


@needs_two
def test_e8_one_disk_for_all(tmp_path: Path) -> None:
    result = tuned(paces.loader(paces.OneDisk(tmp_path)), seconds=6.0, max_workers=2)
    assert result.best < 2
    assert "disk" in (result.lock or "")


def test_e8_a_memory_bound_loader() -> None:
    tuned(paces.loader(paces.Moves(), batch_size=1))


@needs_two
def test_a16_workers_that_would_not_fit_into_memory_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.look
    monkeypatch.setattr(machine, "look", lambda: replace(real(), memory_available_bytes=200_000_000))
    result = tuned(paces.loader(paces.Holds()), seconds=3.0)
    assert max(row.num_workers for row in result.rows) == 1
    assert "of memory, and 200 MB are available" in result.limited_by


def test_a16_never_more_than_the_usable_cpus_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.most_workers(64, 2, limits.Needs()).workers == CPUS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * CPUS))
    limit = limits.most_workers(None, 2, limits.Needs())
    assert limit.workers == 1
    assert f"shared by {2 * CPUS} local ranks" in limit.why


def test_a16_batches_that_would_fill_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.look
    monkeypatch.setattr(machine, "look", lambda: replace(real(), shm_bytes=64_000_000, shm_used_bytes=0))
    limit = limits.most_workers(None, 2, limits.Needs(batch_bytes=20_000_000))
    assert limit.workers == 1
    assert "into /dev/shm, where 64 MB are free" in limit.why
    assert not limits.fits(1, 4, limits.Needs(batch_bytes=20_000_000))


def test_numbers_to_try() -> None:
    assert limits.candidates(0) == [0]
    assert limits.candidates(2) == [0, 1, 2]
    assert limits.candidates(20) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]


class Counting(BatchSampler):
    """A sampler with a state that a run would change."""

    def __init__(self, size: int) -> None:
        super().__init__(RandomSampler(range(size)), 4, False)
        self.epochs = 0

    def __iter__(self):
        self.epochs += 1
        yield from super().__iter__()


class Remembers(Quick):
    """A dataset with a state that a run would change."""

    def __init__(self) -> None:
        super().__init__(200)
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(index)
        time.sleep(0.001)
        return super().__getitem__(index) + random.randrange(2)


def test_what_is_the_users_stays_as_it_is() -> None:
    generator = torch.Generator().manual_seed(7)
    dataset, sampler = Remembers(), Counting(200)
    loader = DataLoader(dataset, batch_sampler=sampler, generator=generator)
    before = generator.get_state(), torch.get_rng_state(), random.getstate()
    tuned(loader, seconds=6.0, max_workers=1)
    after = generator.get_state(), torch.get_rng_state(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
    assert (dataset.seen, sampler.epochs, loader.num_workers) == ([], 0, 0)


def test_with_a_step_it_is_the_time_per_step_that_counts() -> None:
    steps: list[int] = []

    def step(batch: torch.Tensor) -> None:
        steps.append(len(batch))
        time.sleep(0.02)

    result = tuned(paces.loader(paces.Sleeps()), seconds=4.0, max_workers=1, step=step)
    rates = {row.num_workers: row.batches_per_second for row in result.rows}
    assert set(steps) == {4}
    assert result.best == 1
    assert rates[1] > 1.3 * rates[0], "loading and step overlap"
    assert rates[1] < 50, "a step takes 20 ms"
    assert "steps/s" in result.reason


def test_warnings_of_the_step_are_shown_and_those_about_copies_are_not() -> None:
    def step(batch: torch.Tensor) -> None:
        warnings.warn("mine", UserWarning, stacklevel=1)

    loader = paces.loader(paces.Sleeps(seconds=0.001))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lg.tune(loader, seconds=3.0, max_workers=1, step=step)
    assert {str(one.message) for one in caught} == {"mine"}


def test_an_error_of_the_step_is_the_users() -> None:
    def step(batch: torch.Tensor) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        lg.tune(paces.loader(paces.Sleeps()), seconds=6.0, max_workers=1, step=step)


def test_a_short_epoch_gets_persistent_workers() -> None:
    result = tuned(paces.loader(paces.Sleeps(40)), seconds=4.0, max_workers=1, step=lambda batch: time.sleep(0.01))
    assert result.best == 1
    assert result.persistent_workers
    assert "persistent_workers=True saves" in result.reason
    assert result.settings["persistent_workers"] is True


def test_an_iterable_dataset_and_what_is_left_of_a_short_stream() -> None:
    result = tuned(DataLoader(Stream(5000), batch_size=8), seconds=6.0, max_workers=1)
    assert {row.num_workers for row in result.rows} == {0, 1}


def test_what_tune_and_the_doctor_run_is_not_in_the_report_of_the_run_around_them() -> None:
    loader = DataLoader(Quick(64), batch_size=4)
    with lg.guard() as run:
        list(loader)
        tuned(loader, seconds=2.0, max_workers=1)
        lg.doctor(loader)
    assert (run.report.loaders, run.report.workers, run.report.batches) == (1, 0, 16)
    assert [one.batches for one in run.report.times] == [16]


class Multiplies(Quick):
    """Computes with torch's threads, and notes how many there are."""

    def __init__(self, notes: Path, is_bound: bool) -> None:
        super().__init__(4000)
        self.notes, self.thread = notes, threading.get_ident() if is_bound else None
        self.matrix = torch.randn(400, 400)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.thread not in (None, threading.get_ident()):
            raise RuntimeError("made in another thread")  # as connections to SQLite do
        self.notes.write_text(f"{torch.get_num_threads()}")
        return (self.matrix @ self.matrix)[0]


@pytest.mark.parametrize("is_bound", [False, True], ids=["free", "bound"])
def test_without_workers_torch_has_as_many_threads_as_in_the_kernel(tmp_path: Path, is_bound: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        dataset = Multiplies(tmp_path / "threads", is_bound)
        for _ in range(3):
            dataset[0]  # the kernel has a pool of threads, which is not in a fork
        result = lg.tune(DataLoader(dataset), seconds=4.0, max_workers=0)
    finally:
        torch.set_num_threads(before)
    assert dataset.notes.read_text() == ("1" if is_bound else "2")
    assert [row.num_workers for row in result.rows] == [0]
    assert any("with 1 thread of torch's; the kernel has 2" in one for one in result.remarks) == is_bound


def test_a_loader_without_a_batch_says_so() -> None:
    for empty in ([], Stream(0)):
        with pytest.raises(lg.LoaderGuardError, match="the loader gives no batch, so nothing could be measured"):
            lg.tune(DataLoader(empty), seconds=3.0, max_workers=1)


class HangsAlone(Quick):
    """Hangs without workers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005 if torch.utils.data.get_worker_info() else 600)
        return super().__getitem__(index)


def test_if_the_loader_hangs_without_workers_that_is_said() -> None:
    result = tuned(DataLoader(HangsAlone(1000), batch_size=4), seconds=4.0, max_workers=1)
    assert [row.num_workers for row in result.rows] == [1]
    assert result.remarks == ("num_workers=0 was not measured: no two batches came in time without workers",)


def test_what_was_tried_in_vain_is_not_said_to_be_untried() -> None:
    limit, rows = limits.Limit(2, "interrupted"), [row(0, 50)]
    assert explain(rows, rows[0], limit, None, False, is_complete=False).endswith("so workers were not measured")
    assert explain(rows, rows[0], limit, None, False, is_complete=True).endswith("so workers were not tried")
    assert explain([row(1, 9)], row(1, 9), limit, None, False, is_complete=False).endswith("so more were not measured")


def test_where_the_sampler_cannot_be_copied_batches_have_their_size_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loan, "_uses_cuda", lambda generators: True)  # as with torch.Generator("cuda")
    sizes: set[int] = set()
    loader = DataLoader(paces.Sleeps(seconds=0.001), batch_sampler=Counting(100))
    result = lg.tune(loader, seconds=2.0, max_workers=1, step=lambda batch: sizes.add(len(batch)))
    assert sizes == {4}
    assert result.remarks == (
        "workers were measured with samples 0, 1, 2, …, 4 at a time, "
        "because the sampler cannot run in a copy of this process",
    )


class LateAgain(IterableDataset):
    """A short stream, whose source does not answer when a worker asks it for a second time."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __iter__(self):
        if torch.utils.data.get_worker_info() is not None:
            if self.flag.exists():
                time.sleep(600)
            self.flag.touch()
        for _ in range(100):
            time.sleep(0.002)
            yield torch.zeros(2)


def test_the_time_is_kept_also_when_a_later_epoch_hangs(tmp_path: Path) -> None:
    began = time.monotonic()
    result = lg.tune(DataLoader(LateAgain(tmp_path / "asked"), batch_size=4), seconds=6.0, max_workers=1)
    assert time.monotonic() - began < 12
    assert {row.num_workers for row in result.rows} == {0, 1}


class ShortStream(IterableDataset):
    """Ends soon, so that workers which do not stay start again and again."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for _ in range(info.id if info else 0, 24, info.num_workers if info else 1):
            time.sleep(0.005)
            yield torch.zeros(2)


@needs_two
def test_a_short_stream_is_measured_with_the_starts_of_its_workers_and_with_workers_that_stay() -> None:
    def start(number: int) -> None:
        time.sleep(0.2)

    result = tuned(DataLoader(ShortStream(), batch_size=2, worker_init_fn=start), seconds=8.0, max_workers=2)
    rates = {(row.num_workers, row.persistent_workers): row.batches_per_second for row in result.rows}
    assert rates[1, False] < 0.6 * rates[0, False], "12 batches take 0.12 s, and the start 0.2 s"
    assert rates[1, True] > 1.5 * rates[1, False]
    assert (result.best, result.persistent_workers) == (2, True)
    assert "persistent_workers=True" in result.code
    assert "the stream is short, and workers start again" in result.reason
    assert "2 persistent" in str(result)


def test_a_stream_of_one_batch_is_measured_too() -> None:
    result = tuned(DataLoader(ShortStream(), batch_size=24), seconds=5.0, max_workers=1)
    assert {row.num_workers for row in result.rows} == {0, 1}


def test_whole_epochs_make_blocks() -> None:
    found = Visit(marks=[1.0, 2.0])
    found.end_epoch(3.0, seconds=16.0, is_persistent=False)
    assert found.blocks == [(2, 3.0)]
    found.marks = [7.0]
    found.end_epoch(1.5, seconds=16.0, is_persistent=False)
    found.marks = [9.0, 9.1]
    found.sum_up(1, 16.0)
    assert found.blocks == [(2, 3.0), (1, 1.5)], "what is left is not counted"
    staying = Visit(marks=[1.0])
    staying.end_epoch(9.0, seconds=16.0, is_persistent=True)
    staying.marks = [2.0]
    staying.end_epoch(2.5, seconds=16.0, is_persistent=True)
    assert staying.blocks == [(1, 2.5)], "without the first one"
    alone = Visit(marks=[1.0])
    alone.end_epoch(9.0, seconds=16.0, is_persistent=True)
    alone.sum_up(1, 16.0)
    assert alone.blocks == [(1, 9.0)]


def test_a_loader_that_fails_or_never_comes_says_so() -> None:
    class Fails(Quick):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise ValueError("sample is broken")

    with pytest.raises(lg.LoaderGuardError, match="the loader failed: ValueError: sample is broken"):
        lg.tune(DataLoader(Fails()), seconds=6.0)
    with pytest.raises(lg.LoaderGuardError, match=r"no two batches came within 1.00 s"):
        lg.tune(DataLoader(Stuck()), seconds=1.0, max_workers=1)


def test_a_dataset_that_wants_workers_is_measured_with_workers() -> None:
    class Sharded(Quick):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.002)
            return super().__getitem__(index) + torch.utils.data.get_worker_info().id

    result = tuned(DataLoader(Sharded()), seconds=6.0, max_workers=1)
    assert {row.num_workers for row in result.rows} == {1}
    assert "the loader failed with 0 workers (AttributeError" in result.remarks[0]


def test_bad_arguments_are_refused() -> None:
    loader = DataLoader(Quick())
    for arguments, said in (
        ({"seconds": 0}, "seconds must be a number of seconds from 1 to 3600"),
        ({"max_workers": -1}, "max_workers must be a whole number"),
        ({"max_workers": True}, "max_workers must be a whole number"),
        ({"step": 5}, "step must be a function"),
        ({"step": print, "max_workers": 0}, "with it, max_workers must be at least 1"),
    ):
        with pytest.raises(lg.LoaderGuardError, match=said):
            lg.tune(loader, **arguments)
    with pytest.raises(lg.LoaderGuardError, match="this list is not a DataLoader"):
        lg.tune([1])


def test_a_loader_over_a_queue_is_not_run() -> None:
    import multiprocessing

    dataset = Quick()
    dataset.queue = multiprocessing.get_context("fork").SimpleQueue()
    with pytest.raises(lg.LoaderGuardError, match=r"dataset.queue is a multiprocessing queue"):
        lg.tune(DataLoader(dataset))


def row(workers: int, rate: float, spread: float = 0.01, prefetch: int = 2) -> lg.TuneRow:
    blocks = tuple(rate * (1 + spread * step / 4) for step in range(-4, 5))
    low, high = rate * (1 - spread / 2), rate * (1 + spread / 2)
    return lg.TuneRow(workers, prefetch if workers else None, False, rate, low, high, blocks, 100, 2.0, 0.1, 1.0, 0.0)


def test_the_fewest_workers_that_are_as_fast_as_the_fastest() -> None:
    rows = [row(0, 50), row(1, 49), row(2, 97), row(3, 98.5), row(4, 99)]
    assert margin_of(rows) == 0.02
    assert choose(rows, 0.02).num_workers == 2 or choose(rows, 0.02).num_workers == 3
    assert choose(rows, 0.05).num_workers == 2
    noisy = [row(0, 90, 0.5), row(1, 100, 0.5)]
    assert margin_of(noisy) == 0.05, "never more than 5 % is given away to noise"


def test_blocks_are_whole_rounds_without_the_start() -> None:
    found = Visit(marks=[0.9, 1.0, 1.4, 1.5, 1.9, 2.0, 2.4])
    found.sum_up(workers=2, seconds=4.0)
    assert found.blocks == [(2, pytest.approx(0.5)), (2, pytest.approx(0.5))]
    alone = Visit(marks=[1.0])
    alone.sum_up(2, 4.0)
    assert alone.blocks == []


def test_bursts_do_not_make_a_loader_faster_than_it_is() -> None:
    bursts = [(2, 0.06), (2, 0.06), (2, 0.12)] * 8  # 2 in 80 ms on average
    assert bench.typical_rate(bursts) == pytest.approx(25.0, rel=0.08)
    hiccup = [(2, 0.08)] * 15 + [(2, 5.0)]
    assert bench.typical_rate(hiccup) == pytest.approx(25.0)


def test_the_line_of_code_makes_the_same_loader() -> None:
    def mine(batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(batch)

    settings = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    loader = DataLoader(Quick(100), batch_size=8, shuffle=True, drop_last=True, collate_fn=mine)
    line = code_line(loader, "train", settings)
    assert line == (
        "train = DataLoader(train.dataset, batch_size=8, shuffle=True, drop_last=True, collate_fn=train.collate_fn, "
        "num_workers=2, prefetch_factor=4, persistent_workers=True)"
    )
    names = {"train": loader, "DataLoader": DataLoader}
    exec(line, names)
    made = names["train"]
    assert (made.num_workers, made.prefetch_factor, made.batch_size, made.drop_last) == (2, 4, 8, True)
    own = DataLoader(Quick(), batch_sampler=Counting(8), num_workers=1)
    assert code_line(own, None, {"num_workers": 0}) == (
        "loader = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=0)"
    )


def made_by(loader: DataLoader, workers: int = 1) -> DataLoader:
    """Return the loader that the line to paste makes."""
    names: dict[str, Any] = {"loader": loader, "DataLoader": DataLoader}
    exec(code_line(loader, None, {"num_workers": workers}), names)
    return names["loader"]


def test_the_line_of_code_keeps_a_sampler_that_torch_would_not_make() -> None:
    dataset, generator = Quick(100), torch.Generator()
    batches = BatchSampler(RandomSampler(dataset), 16, True)
    assert made_by(DataLoader(dataset, batch_sampler=batches)).batch_sampler is batches
    for sampler in (
        SequentialSampler(range(20)),
        RandomSampler(range(20)),
        RandomSampler(dataset, generator=generator),
    ):
        made = made_by(DataLoader(dataset, batch_size=4, sampler=sampler))
        assert (made.sampler, made.batch_size) == (sampler, 4)
    assert made_by(DataLoader(dataset, batch_size=None)).batch_size is None
    shuffled = made_by(DataLoader(dataset, shuffle=True, generator=generator))
    assert shuffled.sampler.generator is generator


def test_the_line_of_code_names_no_class_that_may_not_be_there() -> None:
    class Mine(DataLoader):
        pass

    assert type(made_by(Mine(Quick(8)))) is Mine


@pytest.mark.skipif(not hasattr(DataLoader([0]), "in_order"), reason="torch before 2.6 has no in_order")
def test_batches_that_may_come_in_any_order_stay_so() -> None:
    loader = DataLoader(Quick(100), num_workers=1, in_order=False)
    assert made_by(loader).in_order is False
    subject = describe(loader)
    assert lend(subject, 1, own_order(subject)).in_order is False
    assert lend(subject, 0, own_order(subject)).in_order is False


def test_a_result_travels_as_json_and_is_drawn() -> None:
    result = tuned(paces.loader(paces.Sleeps(seconds=0.001)), seconds=1.5, max_workers=1)
    again = lg.TuneResult.from_json(result.to_json())
    assert again == result
    assert again.plot().html == result.plot().html
    assert str(result) == curve.result(result)
    shell = DisplayFormatter()  # without the extension
    assert shell.format(result)[0] == {"text/plain": str(result), "text/html": curve.result_html(result)}
    smuggled = json.dumps({**json.loads(result.to_json()), "drawing": {"html": "<script>", "text": "<script>"}})
    assert "drawing" not in result.to_json()
    assert "<script>" not in curve.result_html(lg.TuneResult.from_json(smuggled))
    assert lg.TuneResult.from_json(smuggled).plot().html == result.plot().html
    hostile = replace(result, reason="<script>", code="<b>", loader="<img>")
    drawn = curve.result_html(hostile)
    assert not any(word in drawn for word in ("<script>", "<b>", "<img>"))
    assert "num_workers  prefetch_factor  batches/s" in curve.result(result)


def test_importing_the_package_does_not_make_the_function_a_module() -> None:
    assert "jupyter_loaderguard.tuning" in sys.modules
    assert callable(lg.tune)
    assert bench.Bench.__module__ == "jupyter_loaderguard.tuning.bench"


def test_an_interrupt_while_a_copy_of_the_process_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    born = registry.reaper.born

    def interrupted(handle: Handle) -> None:
        born(handle)
        made.append(handle.pid)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(registry.reaper, "born", interrupted)
    with pytest.raises(KeyboardInterrupt), forked(lambda subject, pipe: time.sleep(600), None):
        raise AssertionError("the interrupt was lost")
    assert len(made) == 1
    assert not psutil.pid_exists(made[0])


def test_an_interrupt_while_the_reaper_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Reaper._settle

    def interrupted(reaper: Reaper) -> None:
        if reaper._starting is not None:
            signal.raise_signal(signal.SIGINT)
        settle(reaper)

    monkeypatch.setattr(Reaper, "_settle", interrupted)
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt), forked(lambda subject, pipe: time.sleep(600), None):
        raise AssertionError("the interrupt was lost")
    assert set(psutil.Process().children()) == before
    assert registry.reaper.identity() is None


@pytest.mark.parametrize("moment", ["while it loads", "afterwards"], ids=["loads", "afterwards"])
def test_an_interrupt_does_not_lose_what_was_measured_without_workers(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupt(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    if moment == "afterwards":
        monkeypatch.setattr(EndlessKeys, "skip", interrupt)
    else:
        tell = bench.Bench._tell
        looks: list[float] = []

        def show(one: bench.Bench) -> None:
            tell(one)
            looks.append(time.monotonic())
            if looks[-1] - looks[0] > 1.0:
                interrupt()

        monkeypatch.setattr(bench.Bench, "_tell", show)
    result = lg.tune(paces.loader(paces.Sleeps(seconds=0.001)), seconds=20.0)
    assert [row.num_workers for row in result.rows] == [0]
    assert (result.is_complete, result.limited_by) == (False, "interrupted")
