"""Stalls and errors at their edges: in other threads, in samplers, at the ends of epochs, in torchdata's loaders."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

import jupyter_loaderguard as lg
from jupyter_loaderguard.registry import registry
from jupyter_loaderguard.watch import watchdog
from jupyter_loaderguard.worker.locks import find_locks
from tests.programs import failures, stalls


class Does(Dataset):
    """A dataset made of a function."""

    def __init__(self, function: Callable[[int], Any], length: int = 8) -> None:
        self.function, self.length = function, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


class Streams(IterableDataset):
    """An iterable dataset made of a function."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return self.function()


def loop(loader: Any) -> int:
    return sum(1 for _ in loader)


def caught(loader: Any, **options: Any) -> BaseException:
    """Return what a loop over the loader raises under `on_stall="raise"`."""
    with pytest.raises(BaseException) as info, lg.guard(stall_seconds=0.5, on_stall="raise", **options):  # noqa: PT011
        loop(loader)
    return info.value


def stalls_of(loader: Any, stall_seconds: float = 0.5) -> list[Any]:
    """Return the stalls of a loop, drawn nowhere."""
    before, watchdog.show = watchdog.show, lambda stall, record, key: None
    try:
        with lg.guard(stall_seconds=stall_seconds) as run:
            loop(loader)
    finally:
        watchdog.show = before
    return list(run.report.stalls)


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return results[0]


@pytest.mark.parametrize("late", [0.4, 0.5, 0.52, 0.56, 0.6, 0.66, 0.72])
def test_a_batch_that_comes_about_when_the_limit_passes_breaks_nothing_but_the_wait(late: float) -> None:
    def fail_late(index: int) -> int:
        if index == 1:
            time.sleep(late)
            raise ValueError("the user's own")
        return index

    def end_late() -> Iterator[int]:
        yield 1
        time.sleep(late)

    with lg.guard(stall_seconds=0.5, on_stall="raise"):
        for loader in (DataLoader(Does(fail_late)), DataLoader(Streams(end_late))):
            outcome = in_thread(lambda loader=loader: loop(loader))
            assert isinstance(outcome, (ValueError, lg.LoaderStalled, int)), outcome
            try:
                outcome = loop(loader)
            except (ValueError, lg.LoaderStalled):
                continue
            assert outcome == 1


def test_a_wait_that_is_over_is_no_stall_of_the_body() -> None:
    """Batches that take as long as the limit, and a slow body: no stall may be dated into the body."""
    seen = []
    before, watchdog.show = watchdog.show, lambda stall, record, key: seen.append(stall)
    try:
        with lg.guard(stall_seconds=0.2):
            for _ in DataLoader(Does(lambda index: time.sleep(0.19) or index, 12), num_workers=1, prefetch_factor=1):
                time.sleep(0.1)
    finally:
        watchdog.show = before
    assert all(stall.came_after_seconds is None or stall.came_after_seconds < 1 for stall in seen)


def test_a_stall_at_the_beginning_of_an_epoch_is_raised_as_loader_stalled() -> None:
    class SlowSampler:
        def __init__(self) -> None:
            self.epoch = 0

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            if self.epoch > 1:
                time.sleep(30)
            yield from range(4)

    loader = DataLoader(Does(int), sampler=SlowSampler(), num_workers=1, persistent_workers=True)
    with lg.guard(stall_seconds=0.5, on_stall="raise"):
        assert loop(loader) == 4
        with pytest.raises(lg.LoaderStalled):
            loop(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_sampler_is_named_as_such(workers: int) -> None:
    class SlowSampler:
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[int]:
            for number in range(8):
                if number == 6:
                    time.sleep(1.5)
                yield number

    (stall,) = stalls_of(DataLoader(Does(int), sampler=SlowSampler(), num_workers=workers))
    (late,) = stall.workers
    assert late.worker_id is None
    assert late.samples == "in the sampler, asked for the next samples"
    assert late.frame.function == "__iter__"
    assert late.frame.file == __file__
    assert stall.came_after_seconds is not None
    error = caught(DataLoader(Does(int), sampler=SlowSampler(), num_workers=workers))
    assert isinstance(error, lg.LoaderStalled)


def test_a_slow_epoch_that_ends_or_begins_is_said_to_have_done_so() -> None:
    def end_late() -> Iterator[int]:
        yield 1
        time.sleep(1)

    for workers in (0, 1):
        (stall,) = stalls_of(DataLoader(Streams(end_late), num_workers=workers))
        assert stall.ended == "with the end of the epoch"

    class SlowToBegin(IterableDataset):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            if self.epoch > 1:
                time.sleep(1)
            return iter(range(6))

    loader = DataLoader(SlowToBegin(), num_workers=1, persistent_workers=True)
    before, watchdog.show = watchdog.show, lambda stall, record, key: None
    try:
        with lg.guard(stall_seconds=0.5) as run:
            assert [loop(loader), loop(loader)] == [6, 6]
    finally:
        watchdog.show = before
    (stall,) = run.report.stalls
    assert "next epoch (__iter__ of the dataset)" in stall.workers[0].samples
    assert stall.came_after_seconds is not None


def test_streams_are_counted_from_the_beginning_of_each_epoch_and_ended_workers_are_not_late() -> None:
    class Uneven(IterableDataset):
        """Worker 0 ends at once; worker 1 gets stuck on its sample 5, in its second epoch."""

        epoch = 0

        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            assert info is not None
            self.epoch += 1
            for number in range(12 if info.id else 1):
                if self.epoch == 2 and number == 5:
                    time.sleep(1.2)
                yield number

    loader = DataLoader(Uneven(), num_workers=2, persistent_workers=True)
    before, watchdog.show = watchdog.show, lambda stall, record, key: None
    try:
        with lg.guard(stall_seconds=0.5) as run:
            loop(loader)
            loop(loader)
    finally:
        watchdog.show = before
    (stall,) = run.report.stalls
    assert [(late.worker_id, late.index) for late in stall.workers] == [(1, 5)]


def test_a_computing_kernel_is_not_a_sleeping_machine() -> None:
    """C code that holds the GIL keeps the watchdog from looking; the time counts nevertheless."""
    (stall,) = stalls_of(DataLoader(Does(lambda index: sum(range(60_000_000)) if index in (1, 2) else 0)), 0.3)[:1]
    assert stall.batch in (1, 2)


def test_a_computing_kernel_on_a_crowded_machine_is_not_a_sleeping_one() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        test_a_computing_kernel_is_not_a_sleeping_machine()
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_program_that_runs_under_a_debugger_is_watched() -> None:
    code = (
        "import jupyter_loaderguard as lg\nfrom torch.utils.data import DataLoader\nfrom tests.programs import stalls\n"
        "with lg.guard(stall_seconds=0.4) as run:\n"
        "    for batch in DataLoader(stalls.Dawdles(1.2), num_workers=1): pass\n"
        "print('stalls:', len(run.report.stalls))\n"
    )
    command = [sys.executable, "-c", f"import bdb; bdb.Bdb().run({code!r})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "stalls: 1" in done.stdout


def test_a_card_that_cannot_be_shown_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    words = "a stall could not be looked at or shown"
    with pytest.warns(lg.LoaderGuardWarning, match=words), lg.guard(stall_seconds=0.4):
        assert loop(DataLoader(stalls.Dawdles(1), num_workers=1)) == 64


def test_user_code_that_turns_our_break_into_its_own_error_does_not_hide_the_stall() -> None:
    def translate(index: int) -> int:
        try:
            time.sleep(20)
        except BaseException:
            raise KeyError("mine") from None
        return index

    error = caught(DataLoader(Does(translate)))
    assert isinstance(error, lg.LoaderStalled)
    assert error.__suppress_context__


def test_no_part_of_the_kernels_guard_runs_in_a_worker() -> None:
    def look(index: int) -> tuple[int, list[str]]:
        inner = loop(DataLoader([1, 2, 3]))
        return inner, [thread.name for thread in threading.enumerate() if "loaderguard" in thread.name]

    with lg.guard():
        for inner, names in DataLoader(Does(look, 2), batch_size=None, num_workers=1):
            assert (inner, names) == (3, [])


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (lambda: subprocess.CalledProcessError(1, ["ffmpeg"]), subprocess.CalledProcessError),
        (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), UnicodeDecodeError),
        (lambda: failures.DecodeError("5.jpg", 42), failures.DecodeError),
        (lambda: OSError(2, "no such file", "5.jpg"), OSError),
        (lambda: KeyError("key"), KeyError),
    ],
)
def test_the_workers_own_traceback_is_never_lost(error: Callable[[], Exception], kind: type[Exception]) -> None:
    def fail_here(index: int) -> None:
        raise error()

    with pytest.raises(kind) as info, lg.guard():
        loop(DataLoader(Does(fail_here), num_workers=1))
    said = "\n".join([str(info.value), *info.value.__notes__])
    assert "in fail_here" in said
    assert "sample 0" in said


def test_large_attributes_of_an_error_do_not_travel() -> None:
    class Heavy(ValueError):
        pass

    globals()["Heavy"] = Heavy
    Heavy.__qualname__ = "Heavy"

    def fail(index: int) -> None:
        error = Heavy("heavy")
        error.document = "x" * 50_000_000  # type: ignore[attr-defined]
        raise error

    with pytest.raises(Heavy) as info, lg.guard():
        loop(DataLoader(Does(fail), num_workers=1))
    assert not hasattr(info.value, "document")
    del globals()["Heavy"]


def test_none_in_a_subset_is_blamed_on_the_users_dataset() -> None:
    with pytest.raises(TypeError) as info, lg.guard():
        loop(DataLoader(Subset(failures.ReturnsNone(), [5]), num_workers=1))
    assert "ReturnsNone.__getitem__" in info.value.__notes__[0]
    assert "failures.py" in info.value.__notes__[0]


# -- what cannot be sent ---------------------------------------------------------------------------


def test_the_sample_of_an_unsendable_batch_is_named_only_if_it_is_known() -> None:
    def odd(index: int) -> tuple[int, Any]:
        return index, (lambda: 0) if index == 6 else None

    error = caught(
        DataLoader(Does(odd), batch_size=4, num_workers=1, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    )
    assert isinstance(error, lg.LoaderStalled)
    assert error.index == 6
    square = caught(
        DataLoader(Does(odd), batch_size=2, num_workers=1, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    )
    assert isinstance(square, lg.LoaderStalled)
    assert square.index == [6, 7], "two fields, two samples: which is which is not known"


def test_a_note_that_fails_does_not_end_the_sending() -> None:
    class Nasty:
        @property
        def nbytes(self) -> int:
            raise RuntimeError("no")

        def __reduce__(self) -> Any:
            raise TypeError("cannot travel")

    def sometimes(index: int) -> Any:
        return Nasty() if index == 0 else index

    got = []
    with lg.guard(stall_seconds=1, on_stall="raise"), pytest.raises(lg.LoaderStalled):
        for batch in DataLoader(Does(sometimes, 4), batch_size=None, num_workers=1, in_order=False):
            got.append(int(batch))
    assert sorted(got) == [1, 2, 3]


# -- torchdata ------------------------------------------------------------------------------------


def test_the_stateful_loader_names_the_right_sample() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(stalls.Sleeps(), batch_size=4, num_workers=2)
    error = caught(loader)
    assert isinstance(error, lg.LoaderStalled)
    assert (error.worker_id, error.index) == (1, 5)
    with pytest.raises(ValueError, match="broken") as info, lg.guard():
        loop(stateful.StatefulDataLoader(failures.Raises(), batch_size=4, num_workers=2))
    assert "sample 5" in info.value.__notes__[0]


# -- cost ------------------------------------------------------------------------------------------


def test_a_huge_index_in_the_dataset_is_not_walked() -> None:
    class Indexed(Does):
        pass

    dataset = Indexed(int)
    dataset.table = {number: number for number in range(1_000_000)}  # type: ignore[attr-defined]
    since = time.perf_counter()
    find_locks(dataset=dataset)
    assert time.perf_counter() - since < 0.5


def test_keys_of_batches_that_were_delivered_are_forgotten() -> None:
    with lg.guard():
        it = iter(DataLoader(Does(int, 2000), batch_size=2, num_workers=2))
        for _ in range(900):
            next(it)
            assert it._task_info.keys() <= registry.all()[0].sent.keys(), "those that are under way are known"
        (record,) = registry.all()
        assert len(record.sent) <= 100
        del it


def test_batches_are_the_same_with_observed_keys() -> None:
    class Whole(Does):
        def __getitems__(self, keys: list[int]) -> list[int]:
            assert keys == [*keys]
            return [int(torch.tensor(keys)[0]) + number for number, _ in enumerate(keys)]

    plain = [batch.tolist() for batch in DataLoader(Whole(int), batch_size=4, num_workers=2)]
    with lg.guard():
        assert [batch.tolist() for batch in DataLoader(Whole(int), batch_size=4, num_workers=2)] == plain
