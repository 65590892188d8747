"""Reports of ranks: what they mean together, and how they are drawn."""

from __future__ import annotations

import dataclasses
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard import frames
from jupyter_loaderguard.cluster import engine, gather
from jupyter_loaderguard.launched import Ranked
from jupyter_loaderguard.model import (
    Frame,
    Holder,
    LateWorker,
    LoaderState,
    MachineState,
    RankState,
    Snapshot,
    Stall,
    WorkerState,
)
from jupyter_loaderguard.registry import registry
from jupyter_loaderguard.reporter import Reporter, _find_collective, state_from
from jupyter_loaderguard.views import ranks as views
from jupyter_loaderguard.views.ranks_widget import RanksView
from jupyter_loaderguard.watch import watchdog
from tests.programs.datasets import Stuck

TAG = "<script>x</script>"
FRAME = Frame("/data.py", 57, "decode", "data.py", "while not header.complete:", True)
LATE = LateWorker(
    2, 4711, 9, 77, "on sample 77", 3.0, "sleeping", "", "", (FRAME,), FRAME, "stack", Holder("nobody", None, FRAME)
)
STALL = Stall(1, "loader", TAG, 3, 9, 100, 3.1, 3.0, (LATE,))


def _loader(
    rate: float | None = 10.0, share: float | None = 0.1, words: tuple[str, ...] = ("loading", "full")
) -> LoaderState:
    workers = tuple(WorkerState(n, 100 + n, 0.0, "running", 1, word=word) for n, word in enumerate(words))
    return LoaderState(
        1,
        TAG,
        TAG,
        None,
        None,
        None,
        "fork",
        False,
        "busy",
        0.0,
        5,
        1.0,
        workers,
        batches_per_second=rate,
        wait_share=share,
    )


def _rank(number: int, *loaders: LoaderState, **changes: object) -> RankState:
    snapshot = Snapshot(0.0, 1, True, loaders, MachineState(2, 10, 5, None, None))
    state = RankState(number, "node", 1000 + number, "live", 0.0, number, is_busy=True, snapshot=snapshot)
    return dataclasses.replace(state, **changes)


def test_a_report_travels_as_json() -> None:
    rank = _rank(1, _loader(), stalls=(STALL,), stall_count=1)
    data = dataclasses.asdict(rank)
    for name in ("status", "heard", "engine", "waits_for", "is_slowest"):
        del data[name]
    assert state_from(json.dumps(data), 0.0, 1) == rank


def test_a_stalled_rank_is_slowest_and_those_in_a_collective_wait_for_it() -> None:
    waiting = _rank(0, _loader(), collective="all_reduce()", collective_seconds=2.0)
    elsewhere = _rank(2, _loader(), collective="all_reduce()", collective_seconds=0.1)
    state = gather.gather([waiting, _rank(1, _loader(), stalls=(STALL,)), elsewhere])
    assert [one.waits_for for one in state.ranks] == [1, None, None]
    assert [one.is_slowest for one in state.ranks] == [False, True, False]
    assert "rank 0 (node) waits for rank 1 in all_reduce()" in views.table(state)
    assert "batch 9 of 100 of loader on rank 1 (node)" in views.table(state)
    assert "worker 2 (pid 4711) has been on sample 77" in views.table(state)


@pytest.mark.parametrize(
    ("paces", "shares", "slowest"),
    [
        ((10, 10, 10), (0.1, 0.5, 0.1), 1),
        ((10, 10, 5), (0.1, 0.1, 0.1), 2),
        ((10, 10, 0), (0.1, 0.1, 0.1), 2),
        ((10, 9, 10), (0.1, 0.1, 0.1), None),
        ((10, 10, 10), (0.1, 0.1, 0.1), None),
        ((10, 10, None), (0.1, 0.1, None), None),
        ((10,), (0.9,), None),
    ],
)
def test_the_slowest_rank(paces: tuple, shares: tuple, slowest: int | None) -> None:
    pairs = enumerate(zip(paces, shares, strict=True))
    ranks = [_rank(number, _loader(*pair), pid=7) for number, pair in pairs]  # as it may be on different machines
    found = gather.find_slowest(ranks)
    assert (found.rank if found else None) == slowest


def test_ranks_wait_only_for_those_of_their_own_job() -> None:
    waiting = {"collective": "all_reduce()", "collective_seconds": 2.0}
    ranks = [
        _rank(0, _loader(), job="a", **waiting),
        _rank(1, _loader(), job="a"),
        _rank(0, _loader(), job="b", **waiting),
        _rank(1, _loader(), job="b", stalls=(STALL,)),
    ]
    told = gather.gather(ranks).ranks
    assert [one.waits_for for one in told if one.rank == 0] == [None, 1]
    assert [(one.job, one.rank) for one in told if one.is_slowest] == [("b", 1)]


def test_the_job_of_a_process_is_where_its_ranks_met() -> None:
    code = """
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # a backend without other processes
from jupyter_loaderguard.torch_adapter.job import job
print([job()])
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
dist.init_process_group("fake", store=store, rank=0, world_size=2)
print(job() == f"2 ranks at 127.0.0.1:{store.port}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['']\nTrue\n", done.stderr


def test_a_lost_rank_stays_and_has_no_workers() -> None:
    lost = _rank(1, _loader(), status="lost", stalls=(STALL,))
    table = views.table(gather.gather([_rank(0, _loader()), lost]))
    assert table.splitlines()[2].split() == ["1", "node", "lost", "0", "0"]
    assert table.endswith("1 rank  ·  2 workers  ·  1 lost")


@pytest.mark.parametrize(
    ("rooms", "call"),
    [
        (["torch.distributed.distributed_c10d"], "run()"),
        (["torch.distributed.elastic.multiprocessing.api", "torch.distributed.launcher.api"], ""),
        (["torch.distributed.launcher.api", "user", "torch.distributed.distributed_c10d"], "run()"),
        (["torch.nn.parallel.distributed", "torch.nn.modules.linear"], ""),
        (["torch.nn.parallel.distributed", "torch.distributed.utils"], "DistributedDataParallel"),
        (["torch.distributed.distributed_c10d", "user"], ""),
    ],
)
def test_what_counts_as_a_collective_call(rooms: list[str], call: str) -> None:
    run: Callable[[], tuple[int, str]] = lambda: _find_collective(frames.below(sys._getframe(1)))  # noqa: E731
    for room in reversed(rooms):
        space = {"__name__": room, "inner": run}
        exec("def run(): return inner()", space)
        run = space["run"]
    assert run()[1] == call


def test_a_stall_that_ends_by_clean_is_over() -> None:
    reports: list[dict] = []
    reporter = Reporter(lambda report: reports.append(json.loads(report)), lambda: 3)
    before, watchdog.show = watchdog.show, lambda stall, record, key: None

    def clean_when_stalled() -> None:
        _wait_until(lambda: any(one["stalls"] for one in list(reports)))
        lg.clean()

    cleaner = threading.Thread(target=clean_when_stalled)
    try:
        with lg.guard(stall_seconds=0.3):
            reporter.start()
            cleaner.start()
            with pytest.raises(RuntimeError, match="was stopped by loaderguard"):
                next(iter(DataLoader(Stuck(), num_workers=1, multiprocessing_context="fork")))
            _wait_until(lambda: not reports[-1]["stalls"])
    finally:
        cleaner.join()
        reporter.stop()
        watchdog.show = before
    assert reports[-1]["stall_count"] == 1


def test_a_reporter_outlives_what_fails_once() -> None:
    sent, ticks = [], []

    def fail_once(calls: list[int]) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("once")

    reporter = Reporter(lambda report: fail_once(sent), lambda: 0, is_busy=True)
    reporter.on_tick = lambda: fail_once(ticks)
    reporter.start()
    try:
        _wait_until(lambda: len(sent) > 1 and len(ticks) > 1)
    finally:
        reporter.stop()


def test_workers_that_an_interrupt_leaves_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with lg.guard():
        cell = registry.begin_cell(None)
        cell.is_interrupted = True  # or this test would be
        iterator = iter(DataLoader(Stuck(), num_workers=2, multiprocessing_context="fork"))
        with monkeypatch.context() as patched:
            patched.setattr(registry, "stop", lambda *arguments: None)  # as if they could not be ended
            left = engine._settle({})
        registry.end_cell(cell)
        del iterator
    assert left == {"was_busy": True, "is_busy": True, "left": 2}


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_only_engines_can_be_chosen_in_the_widget_and_by_their_own_number() -> None:
    chosen: list[int | None] = []
    view = RanksView({"Act": ("", lambda engine: str(chosen.append(engine)))})
    launched = _rank(0, engine=None)
    view.draw(gather.gather([launched]))
    assert view._row.layout.display == "none"
    view.draw(gather.gather([launched, _rank(0, engine=1), _rank(1, engine=0), _rank(0, engine=2, status="lost")]))
    assert view._row.layout.display == ""
    dropdown, button = view._row.children
    assert [value for _, value in dropdown.options] == [None, 1, 0]
    dropdown.value = 1
    button.value = True
    assert chosen == [1]
    view.close_all()


def test_html_is_escaped() -> None:
    rank = _rank(1, _loader(), stalls=(STALL,), host=TAG, collective=TAG, status="live")
    lost = _rank(2, status=f"not guarded: {TAG}", host=TAG)
    state = gather.gather([rank, lost, _rank(0, _loader(), collective=TAG, collective_seconds=9)], TAG)
    for drawn in (views.drawing(state), views.static(state)):
        assert "<script" not in drawn
        assert "&lt;script" in drawn


def test_ranked_without_a_launch_is_the_function_under_guard() -> None:
    assert lg.ranked(len)([1, 2]) == 2
    assert lg.ranked(len).__name__ == "len"
    with pytest.raises(lg.LoaderGuardError, match="wants the function"):
        lg.ranked(5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="only be shared between processes"):
        pickle.dumps(Ranked(len))


def test_ranked_without_such_sockets_is_the_function_under_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "SOCK_SEQPACKET", 99)  # as on macOS, where a pair of them is refused
    assert lg.ranked(len)([1, 2]) == 2


def test_a_closed_cluster_says_so_and_is_forgotten() -> None:
    ranks = lg.cluster()
    ranks.close()
    assert repr(ranks) == "0 ranks  ·  0 workers  ·  closed; lg.cluster() follows the ranks again"
    other = lg.cluster()
    other.close()
    assert other is not ranks
    assert ranks not in lg.cluster._clusters


def test_without_ipyparallel_there_is_one_line() -> None:
    code = "import sys; sys.modules['ipyparallel'] = None\nimport jupyter_loaderguard as lg\nlg.cluster(object())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'jupyter_loaderguard[cluster]'" in done.stderr.splitlines()[-1]
    with pytest.raises(lg.LoaderGuardError, match="this int is not an ipyparallel Client"):
        lg.cluster(5)
