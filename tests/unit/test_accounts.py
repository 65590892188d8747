"""Where the time of a run goes: counted with a clock of the test's own, and with real loaders."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard.accounts import MOST_LOADERS, Accounts
from jupyter_loaderguard.accounts.account import MOST_EPOCHS, MOST_PARTS, MOST_WAITS, Account
from jupyter_loaderguard.accounts.curve import BINS, Curve
from jupyter_loaderguard.registry import registry
from jupyter_loaderguard.timing import Wait
from jupyter_loaderguard.views import text, timeline
from jupyter_loaderguard.worker.observed import key_observer
from jupyter_loaderguard.worker.slot import Slot
from tests.programs.datasets import Quick, Slow, Stream
from tests.programs.paces import Locked, Sleeps


class Record(SimpleNamespace):
    """What accounts see of a loader."""

    __hash__ = object.__hash__

    def __init__(self) -> None:
        super().__init__(batches=0, wait_seconds=0.0, waiting_since=None, is_in_epoch=True, accounts=())
        vars(self).update(slots=[], workers=[], loader=lambda: None, loader_id=1, dataset="Quick", alive=list)

    def deliver(self, since: float, now: float, batch: object = None) -> None:
        """Do what an iterator does when a batch has come."""
        self.wait_seconds += now - since
        self.batches += 1
        for account in self.accounts:
            account.note(self, since, now, batch)


def counted(record: Record) -> tuple[Accounts, Account]:
    book = Accounts(1.0)
    book.add(record)
    return book, record.accounts[0]


def test_ten_million_batches_take_no_more_room_than_ten_thousand() -> None:
    record = Record()
    book, account = counted(record)
    for number in range(200_000):
        account.note(record, book.began, book.began + 1e-4 * (1 + number % 977), None)
    assert len(account._waits) < 2 * MOST_WAITS
    assert len(account._counts) < 400
    assert len(account._sizes) < 20
    found = account.sum_up(1.0, "loader")
    assert found.batches == 200_000
    assert found.wait_p50 == pytest.approx(1e-4 * 977 * 0.5, rel=0.02)
    assert found.wait_p95 == pytest.approx(1e-4 * 977 * 0.95, rel=0.02)
    assert found.wait_p99 == pytest.approx(1e-4 * 977 * 0.99, rel=0.02)
    assert min(wait.seconds for wait in found.longest_waits) > 0.09, "the longest are kept"


def test_waiting_and_looping_by_epochs() -> None:
    record = Record()
    book, account = counted(record)
    at = book.began
    account.begin_epoch(record, at)
    record.deliver(at + 0.5, at + 1.0)  # 0.5 s of start, 0.5 s of waiting
    record.deliver(at + 3.0, at + 4.0)  # 2 s in the loop, 1 s of waiting
    account.end_epoch(record, at + 4.5)
    account.begin_epoch(record, at + 5.0)
    record.deliver(at + 5.0, at + 5.25)
    account.end_epoch(record, at + 6.0)
    one, two = account.epochs
    assert (one.batches, one.wait_seconds, one.loop_seconds) == (2, pytest.approx(1.5), pytest.approx(2.5))
    assert (one.first_batch_seconds, two.first_batch_seconds) == (pytest.approx(1.0), pytest.approx(0.25))
    assert (two.wait_seconds, two.loop_seconds) == (pytest.approx(0.25), pytest.approx(0.75))
    found = account.sum_up(6.0, "loader")
    assert (found.wait_seconds, found.loop_seconds) == (pytest.approx(1.75), pytest.approx(3.25))


def test_many_epochs_are_counted_and_the_latest_kept() -> None:
    record = Record()
    book, account = counted(record)
    for number in range(150):
        account.begin_epoch(record, book.began + number)
        record.deliver(book.began + number, book.began + number + 0.5)
    account.end_epoch(record, book.began + 150)
    assert len(account.epochs) == MOST_EPOCHS
    assert account.epochs_before == 50
    assert account.sum_up(150.0, "loader").wait_seconds == pytest.approx(75.0)


def test_the_bins_become_wider_when_a_run_gets_longer() -> None:
    curve = Curve()
    curve.add(1.0, 0.0, 2.0, 0.025)
    assert sum(curve.seconds) == pytest.approx(1.0)
    assert curve.shares(2.0, 0.025)[0] == 0.5
    curve.halve()
    assert (len(curve.seconds), sum(curve.seconds)) == (BINS, pytest.approx(1.0))
    assert curve.shares(2.0, 0.05)[0] == 0.5
    record = Record()
    book, account = counted(record)
    account.begin_epoch(record, book.began)
    record.waiting_since = book.began
    for hour in range(1, 25):
        book._tick(book.began + 3600 * hour)
    assert BINS * book.bin_seconds >= 24 * 3600
    found = account.sum_up(24 * 3600, "loader")
    assert len(found.waiting) <= BINS
    assert min(found.waiting) == 1.0, "it waited all the time"


def test_a_batch_that_raises_when_it_is_looked_at_is_none_of_our_business() -> None:
    class Rude(dict):
        def values(self):
            raise OSError("do not look")

    record = Record()
    _, account = counted(record)
    record.deliver(0.0, 0.1, Rude(a=1))
    assert account.sum_up(1.0, "loader").batch_bytes is None


class Counted(list):
    """A list that counts how many of its elements are looked at."""

    looks = 0

    def __iter__(self):
        Counted.looks += len(self)
        return super().__iter__()


def test_a_batch_of_very_many_parts_is_not_weighed() -> None:
    record = Record()
    _, account = counted(record)
    record.deliver(0.0, 0.1, [Counted([1] * 2000) for _ in range(512)])
    assert Counted.looks <= MOST_PARTS
    assert account.sum_up(1.0, "loader").batch_bytes is None
    nested = {"a": [torch.zeros(4), (torch.zeros(2),)], "b": 5}
    record.deliver(0.2, 0.3, nested)
    assert account.sum_up(1.0, "loader").batch_bytes == 24


def test_an_error_of_ours_does_not_enter_the_users_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("list modified during sort")

    monkeypatch.setattr(Account, "_keep", fail)
    with pytest.warns(lg.LoaderGuardWarning, match="report of a guarded run is incomplete"), lg.guard() as run:
        assert len(list(DataLoader(Quick(4)))) == 4
    assert run.report.batches == 4


def test_several_threads_go_through_one_loader() -> None:
    record = Record()
    _, account = counted(record)
    errors: list[Exception] = []

    def go() -> None:
        try:
            for number in range(20_000):
                account._keep(0.0, 1e-3 + 1e-6 * number)
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=go) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert len(account._waits) <= 2 * MOST_WAITS + 4


def test_many_loaders_in_one_run_are_bounded() -> None:
    book = Accounts(1.0)
    for _ in range(100):
        record = Record()
        book.add(record)
        record.deliver(0.0, 0.1)
        book.close(record)
    assert len(book._accounts) == MOST_LOADERS
    assert book.loaders_before == 90
    assert book._records == [record]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_does_not_grow_with_its_epochs(workers: int) -> None:
    with lg.guard() as run:
        loader = DataLoader(Quick(4), batch_size=2, num_workers=workers)
        epochs = 3 if workers else 200
        for _ in range(epochs):
            assert len(list(loader)) == 2
        assert len(run.born) == 1
        assert run.has(run.born[0])
        assert workers or not run.born[0].slots
        for _ in range(epochs):
            list(DataLoader(Quick(2), num_workers=workers))
        assert workers or len(run.born) <= 2 * MOST_LOADERS
    report, seconds = run.report, sum(time.wait_seconds for time in run.report.times)
    assert (report.loaders, report.batches) == (1 + epochs, 4 * epochs)
    assert report.workers == (1 + epochs) * workers
    assert report.wait_seconds >= seconds - 1e-6
    assert not workers or report.wait_seconds == pytest.approx(seconds, rel=0.1)


def test_workers_that_are_older_than_the_run_have_a_peak_of_memory() -> None:
    with lg.guard(keep=True):
        loader = DataLoader(Slow(24), batch_size=2, num_workers=1, persistent_workers=True)
        idle = DataLoader(Slow(2), num_workers=1, persistent_workers=True)
        for one in (loader, idle):
            list(one)
        with lg.guard(keep=True) as run:
            list(loader)
        with lg.guard(keep=True) as other:
            time.sleep(0.3)
        lg.clean()
    assert run.report.peak_bytes > 0
    assert other.report.peak_bytes == 0, "it used none of them"


def test_what_was_before_the_run_is_not_in_its_report() -> None:
    with lg.guard(keep=True):
        loader = DataLoader(Slow(8), batch_size=2, num_workers=1, persistent_workers=True)
        list(loader)
        time.sleep(0.1)
        with lg.guard(keep=True) as run:
            list(loader)
        lg.clean()
    (found,) = run.report.times
    assert len(found.slowest) == 8
    assert all(sample.began_seconds >= 0 for sample in found.slowest)
    events = json.loads(run.report.to_trace())["traceEvents"]
    assert all(event.get("ts", 0) >= 0 for event in events)


def test_of_a_wait_that_is_older_than_the_run_the_rest_counts() -> None:
    record, book = Record(), Accounts(1.0)
    record.waiting_since = since = book.began - 5.0
    book.join(record)
    now = book.began + 2.0
    record.waiting_since = None
    record.deliver(since, now)
    (account,) = record.accounts
    account.end_epoch(record, now)
    found = account.sum_up(2.0, "loader")
    assert found.wait_seconds == pytest.approx(2.0, abs=0.1)
    assert found.longest_waits == (Wait(0.0, pytest.approx(2.0)),)


def test_the_slowest_samples_of_an_epoch() -> None:
    slot = Slot()
    slot.open()
    observe = key_observer(slot, is_batched=True)
    for task in range(5):
        for key in observe(task, [f"{task}{place}" for place in range(8)]):
            time.sleep(0.15 if key in ("13", "47") else 0.0)
        slot.end()
    found = slot.read_slowest()
    assert len(found) == 10
    assert {key for _, _, key in found[:2]} == {"'13'", "'47'"}
    assert found[0][0] >= 0.15
    slot.begin_epoch()
    assert slot.read_slowest() == []


@pytest.mark.quiet  # compares a stopwatch with the accounts
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_says_where_its_time_went(workers: int) -> None:
    loader = DataLoader(Slow(48), batch_size=4, num_workers=workers)
    wait = loop = 0.0
    with lg.guard() as run:
        for _ in range(2):
            iterator = iter(loader)
            while True:
                since = time.perf_counter()
                batch = next(iterator, None)
                wait += time.perf_counter() - since
                if batch is None:
                    break
                since = time.perf_counter()
                time.sleep(0.01)
                del batch
                loop += time.perf_counter() - since
    (found,) = run.report.times
    assert (found.batches, found.workers, found.dataset) == (24, workers, "Slow")
    assert found.wait_seconds == pytest.approx(wait, rel=0.1)
    assert found.loop_seconds == pytest.approx(loop, rel=0.25)
    assert [epoch.batches for epoch in found.epochs] == [12, 12]
    assert found.first_batch_seconds >= 0.08
    assert found.batch_bytes == 4 * 4 * 8
    assert len(found.slowest) == 10
    assert all(sample.seconds >= 0.02 and sample.index.isdigit() for sample in found.slowest)
    assert [lane.worker_id for lane in found.lanes] == list(range(workers))
    for lane in found.lanes:
        assert lane.samples == 48
        assert lane.blocked > 0.5, "it sleeps"
        assert lane.busy + lane.blocked + lane.idle == pytest.approx(1.0)
    assert registry.runs == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_is_all_of_next(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(torch.autograd.profiler.record_function):
        """What torch does around a wait, slower than it is."""

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            time.sleep(0.02)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Late)
    loader = DataLoader(Quick(40), batch_size=2, num_workers=workers)
    with lg.guard() as run:
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
    (found,) = run.report.times
    assert len(found.longest_waits) == 10
    assert min(wait.seconds for wait in found.longest_waits) >= 0.02
    assert found.wait_seconds >= 10 * 0.02


def test_workers_that_wait_are_blocked_and_those_without_a_task_idle() -> None:
    loader = DataLoader(Locked(64), batch_size=2, num_workers=2)
    with lg.guard() as run:
        for _ in loader:
            time.sleep(0.1)
    (found,) = run.report.times
    assert all(lane.idle > 0.3 for lane in found.lanes), "the loop is slower than they are"
    assert found.loop_seconds > found.wait_seconds
    assert sum(found.looping) > sum(found.waiting)


def test_persistent_workers_an_older_iterator_and_a_run_within_a_run() -> None:
    holder = lg.guard(keep=True)
    with holder as outer:
        loader = DataLoader(Sleeps(16), batch_size=4, num_workers=1, persistent_workers=True)
        older = iter(loader)
        next(older)
        with lg.guard(keep=True) as run:
            assert len(list(older)) == 3
            assert len(list(loader)) == 4
        (found,) = run.report.times
        assert [epoch.batches for epoch in found.epochs] == [3, 4]
        assert found.epochs[0].first_batch_seconds is None, "it began before the run"
        assert found.epochs[1].first_batch_seconds is not None
        lg.clean()
    assert outer.report.times[0].batches == 8


def test_streams_single_samples_and_a_loop_that_breaks_off() -> None:
    with lg.guard() as run:
        for number, _ in enumerate(DataLoader(Stream(1000), batch_size=8, num_workers=2)):
            if number == 5:
                break
        for _ in DataLoader(Slow(3), batch_size=None):
            pass
    stream, single = run.report.times
    assert stream.batches == 6
    assert stream.slowest[0].index.endswith("of its stream")
    assert sorted(sample.index for sample in single.slowest) == ["0", "1", "2"]
    assert single.slowest[0].seconds >= 0.02


@pytest.fixture(scope="module")
def report() -> lg.RunReport:
    with lg.guard() as run:
        for _ in range(2):
            for _ in DataLoader(Slow(24), batch_size=4, num_workers=2):
                time.sleep(0.005)
    return run.report


def test_a_report_travels_as_json(report: lg.RunReport) -> None:
    assert lg.RunReport.from_json(report.to_json()) == report
    keys = [5, "five", (1, "a"), ((1, 2), None), [1, 2]]
    skipped = tuple(lg.SkippedSample(key, 0, "raised", "ValueError: corrupt") for key in keys)
    other = replace(report, skipped=skipped)
    assert lg.RunReport.from_json(other.to_json()) == other


def test_a_trace_for_perfetto(report: lg.RunReport) -> None:
    events = json.loads(report.to_trace())["traceEvents"]
    kinds = {event["ph"] for event in events}
    assert kinds == {"X", "M", "C"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and {"name", "pid", "tid", "ts"} <= set(event) for event in slices)
    names = [event["name"] for event in slices]
    assert names.count("epoch 0") == 2
    assert names.count("wait for a batch") == 12
    assert sum(name.startswith("sample ") for name in names) == 20
    assert {"worker 0 loading", "worker 1 loading"} == {event["name"] for event in events if event["ph"] == "C"}


def test_a_report_draws_itself(report: lg.RunReport) -> None:
    drawn = str(report)
    assert drawn == timeline.report(report)
    assert repr(report).startswith("RunReport(loaders=2, workers=4"), "a failing test shows its figures"
    shell = DisplayFormatter()  # without the extension
    assert shell.format(report)[0] == {"text/plain": drawn, "text/html": timeline.report_html(report)}
    assert drawn.startswith(text.run(report))
    assert "wait for a batch: " in drawn
    assert "(p99)" in drawn
    assert "slowest samples: " in drawn
    markup = timeline.report_html(report)
    assert markup.count("<svg") == 2
    assert "worker 1" in markup
    assert "var(--jp-warn-color1,#c77700)" in markup


def test_what_the_user_named_is_escaped() -> None:
    class Bad(Quick):
        pass

    Bad.__name__ = "<script>alert(1)</script>"
    with lg.guard() as run:
        for _ in DataLoader(Bad(4)):
            pass
    assert "<script>" not in timeline.report_html(run.report)
    assert "&lt;script&gt;" in timeline.report_html(run.report)


def test_a_run_without_loaders_has_one_line() -> None:
    with lg.guard() as run:
        torch.zeros(1)
    assert timeline.report(run.report) == "loaderguard: no DataLoader was iterated · 0 workers left"
