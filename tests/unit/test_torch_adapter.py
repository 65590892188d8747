"""Real loaders in this very process, under `guard()`; the conftest sees that torch is left as it was."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.utils.data.dataloader as dataloader
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker

import jupyter_loaderguard as lg
from jupyter_loaderguard import guarding
from jupyter_loaderguard.registry import registry
from jupyter_loaderguard.torch_adapter.inside import fitted, name_arguments, prepare
from jupyter_loaderguard.worker.agent import WorkerEntry
from tests.programs.datasets import Quick, Slow, StartsProcesses, Stream, Stuck


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def values(loader: DataLoader) -> list[int]:
    return [int(batch.flatten()[0]) for batch in loader]


def test_batches_are_those_of_plain_torch(method: str) -> None:
    def load() -> list[int]:
        return values(DataLoader(Quick(40), batch_size=4, num_workers=2, multiprocessing_context=method))

    plain = load()
    with lg.guard():
        assert load() == plain


def test_a_loader_is_known_from_birth_to_end(method: str) -> None:
    with lg.guard() as run:
        loader = DataLoader(Quick(40), batch_size=4, num_workers=2, multiprocessing_context=method)
        it = iter(loader)
        (state,) = lg.snapshot().loaders
        assert (state.dataset, state.dataset_length, state.batches_total) == ("Quick", 40, 10)
        assert (state.start_method, state.persistent, state.batches, state.cell) == (method, False, 0, None)
        assert [worker.worker_id for worker in state.workers] == [0, 1]
        assert [worker.pid for worker in state.workers] == [process.pid for process in it._workers]
        assert all(abs(worker.started - time.time()) < 60 for worker in state.workers)
        next(it)
        (state,) = lg.snapshot().loaders
        assert (state.batches, state.activity) == (1, "busy")
        assert state.wait_seconds > 0
        rest = len(list(it))
        assert lg.snapshot().loaders == ()
        with pytest.raises(StopIteration):
            next(it)
    assert rest == 9
    assert run.report.batches == 10


def test_the_users_objects_are_not_touched(method: str) -> None:
    context = multiprocessing.get_context(method)
    loader = DataLoader(Quick(8), num_workers=1, multiprocessing_context=context, worker_init_fn=remember)
    before = dict(vars(loader))
    with lg.guard():
        it = iter(loader)
        assert loader.multiprocessing_context is context
        assert values(it) == list(range(8))
    after = dict(vars(loader))
    assert before == after


def remember(worker_id: int) -> None:
    assert get_worker_info().id == worker_id
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_workers_ignore_sigint_from_their_birth_on(method: str) -> None:
    with lg.guard():
        it = iter(DataLoader(Slow(40), num_workers=2, multiprocessing_context=method, worker_init_fn=remember))
        for process in it._workers:
            os.kill(process.pid, signal.SIGINT) if method != "forkserver" else None
        next(it)
        for process in it._workers:
            os.kill(process.pid, signal.SIGINT)
        assert len(list(it)) == 39


def test_a_start_that_fails_half_way_leaves_nothing() -> None:
    class Fails(Quick):
        def __getstate__(self):
            if len(registry.all()[0].workers) >= 2:
                raise TypeError("cannot travel")
            return super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__

    globals()["Fails"] = Fails
    Fails.__qualname__ = "Fails"
    with lg.guard(), pytest.raises(TypeError, match="cannot travel"), warnings.catch_warnings(record=True) as warned:
        iter(DataLoader(Fails(), num_workers=4, multiprocessing_context="spawn"))
    assert not any("Got pickle error" in str(warning.message) for warning in warned), "the guard's own words suffice"
    assert registry.all() == []


def test_a_worker_that_fails_raises_the_users_own_exception() -> None:
    with lg.guard(), pytest.raises(ZeroDivisionError, match="division by zero"):
        values(DataLoader(Quick(8), num_workers=1, collate_fn=divide))


def divide(samples: object) -> None:
    raise ZeroDivisionError("division by zero")


def test_iterable_datasets_and_persistent_workers_over_epochs(method: str) -> None:
    with lg.guard():
        loader = DataLoader(Stream(10), None, num_workers=2, persistent_workers=True, multiprocessing_context=method)
        first = sorted(values(loader))
        pids = [process.pid for process in loader._iterator._workers]
        assert sorted(values(loader)) == first
        assert [process.pid for process in loader._iterator._workers] == pids
        del loader


def test_a_half_written_message_of_a_killed_worker_does_not_hang() -> None:
    """SIGKILL in the midst of a write into the result pipe, which torch's SIGCHLD handler covers for."""
    with lg.guard(), pytest.raises(RuntimeError, match="was ended by SIGKILL"):
        it = iter(DataLoader(Stuck(), num_workers=1))
        record = registry.all()[0]
        os.write(it._worker_result_queue._writer.fileno(), b"\x00\x00\x10\x00half")
        threading.Timer(1.0, record.workers[0].send, [signal.SIGKILL]).start()
        next(it)


def test_the_copy_of_an_iterator_in_a_forked_process_is_inert() -> None:
    with lg.guard():
        it = iter(DataLoader(Slow(40), num_workers=2))
        next(it)
        pid = os.fork()
        if not pid:
            try:
                globals().pop("it", None)
                it.__del__()
                lg.clean()
                assert lg.snapshot().loaders == ()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(list(it)) == 39


def test_a_forked_process_guards_its_own_loaders() -> None:
    with lg.guard():
        values(DataLoader(Quick(8), num_workers=1))
        parents_reaper = registry.reaper.pid
        process = multiprocessing.get_context("fork").Process(target=load_in_fork, args=(parents_reaper,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert registry.reaper.pid == parents_reaper


def load_in_fork(parents_reaper: int) -> None:
    it = iter(DataLoader(Stuck(), num_workers=2))
    assert len(lg.snapshot().workers) == 2
    assert registry.reaper.pid != parents_reaper
    report = lg.clean()
    assert report.left == 0 and len(report.pids) == 2
    assert it._shutdown
    registry.reaper.stop()


def test_the_worker_entry_travels_with_torchs_loop() -> None:
    previous = signal.getsignal(signal.SIGINT)
    try:
        kernel = (os.getppid(), None)  # anybody who lives
        sent = WorkerEntry(dataloader._utils.worker._worker_loop, kernel, print, None, prepare)
        entry = pickle.loads(pickle.dumps(sent))
        assert entry._loop is dataloader._utils.worker._worker_loop
        assert entry._announce is None, "only a fork of the kernel has the reaper's pipe"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "it was not deaf before torch was imported"
    finally:
        signal.signal(signal.SIGINT, previous)


def test_iterators_that_were_alive_before_are_adopted() -> None:
    it = iter(DataLoader(Quick(40), num_workers=2))
    loader = DataLoader(Quick(8), num_workers=1, persistent_workers=True)
    values(loader)
    with lg.guard() as run:
        assert sorted(len(state.workers) for state in lg.snapshot().loaders) == [1, 2]
        next(it)
    assert run.report.batches == 1
    assert len(list(it)) == 39
    assert values(loader) == list(range(8))
    del loader
    gc.collect()


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("nothing", "'nothing' is not a loader with live workers; none is live"),
        (4_000_000, "pid 4000000 is not a live worker of a loader in this kernel, and is left alone"),
        pytest.param(os.getpid(), "is not a live worker", id="ourselves"),
        (True, "this bool is not a loader"),
        (3.5, "this float is not a loader"),
        (DataLoader(Quick()), "this DataLoader is not a loader with live workers"),
    ],
)
def test_clean_refuses_what_is_no_worker(target: object, complaint: str) -> None:
    with lg.guard(), pytest.raises(lg.LoaderGuardError, match=complaint):
        lg.clean(target)


def test_clean_stops_nothing_if_one_target_of_several_is_wrong() -> None:
    with lg.guard():
        loader = DataLoader(Quick(), num_workers=2)
        it = iter(loader)
        with pytest.raises(lg.LoaderGuardError):
            lg.clean([loader, "nothing"])
        assert all(process.is_alive() for process in it._workers)
        report = lg.clean([loader])
        assert set(report.how.values()) == {"left"}
        assert not any(psutil.pid_exists(pid) for pid in report.pids)


def test_a_wait_in_another_thread_ends_when_its_loader_is_stopped() -> None:
    said = []

    def work(it: object) -> None:
        try:
            next(it)  # type: ignore[call-overload]
        except lg.LoaderGuardError as error:
            said.append(str(error))

    with lg.guard():
        it = iter(DataLoader(Stuck(), num_workers=2))
        thread = threading.Thread(target=work, args=(it,))
        thread.start()
        time.sleep(0.5)
        assert lg.snapshot().loaders[0].activity == "waiting"
        lg.clean()
        thread.join(20)
    assert len(said) == 1
    assert "was stopped by loaderguard (clean)" in said[0]


def test_guards_nest_and_the_outer_one_goes_on() -> None:
    with lg.guard() as outer:
        mine = iter(DataLoader(Quick(8), num_workers=1))
        with lg.guard() as inner:
            values(DataLoader(Quick(4), num_workers=1))
            kept = iter(DataLoader(Quick(4), num_workers=1))
        assert kept._shutdown
        assert lg.snapshot().guarding
        assert len(list(mine)) == 8
    assert (inner.report.batches, outer.report.batches) == (4, 12)


def test_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.5.1+cpu")
    with pytest.warns(lg.LoaderGuardWarning, match=r"needs torch >= 2.6, found 2.5.1\+cpu.*not guarded"), lg.guard():
        assert values(DataLoader(Quick(4), num_workers=1)) == [0, 1, 2, 3]
        assert lg.snapshot().loaders == ()


def test_a_patch_on_top_of_ours_survives_us(monkeypatch: pytest.MonkeyPatch) -> None:
    multi = dataloader._MultiProcessingDataLoaderIter
    original = multi._next_data
    calls = []
    with lg.guard():
        guarded = multi._next_data

        def on_top(self: object) -> object:
            calls.append(1)
            return guarded(self)

        multi._next_data = on_top
    try:
        assert values(DataLoader(Quick(4), num_workers=1)) == [0, 1, 2, 3]
        assert len(calls) == 5
    finally:
        multi._next_data = original


def test_the_guard_is_off_when_nobody_holds_it() -> None:
    first, second = object(), object()
    guarding.activate(first)
    guarding.activate(first)
    guarding.activate(second)
    guarding.deactivate(first)
    assert registry.is_guarding
    guarding.deactivate(second)
    guarding.deactivate(second)
    assert not registry.is_guarding


def test_many_open_descriptors_do_no_harm() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
    try:
        with lg.guard() as run:
            assert values(DataLoader(Quick(20), num_workers=2)) == list(range(20))
            kept = iter(DataLoader(Stuck(), num_workers=2))
        assert kept._shutdown
        assert run.report.left == 0
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("in_thread", [False, True])
def test_half_a_message_of_a_worker_that_is_dead_already_does_not_hang(in_thread: bool) -> None:
    said = []

    def use(it: object) -> None:
        try:
            next(it)  # type: ignore[call-overload]
        except RuntimeError as error:
            said.append(str(error))

    with lg.guard():
        it = iter(DataLoader(Stuck(), num_workers=1))
        os.write(it._worker_result_queue._writer.fileno(), b"\x00\x00\x10\x00half")
        registry.all()[0].workers[0].send(signal.SIGKILL)
        time.sleep(0.2)
        thread = threading.Thread(target=use, args=(it,))
        thread.start() if in_thread else use(it)
        if in_thread:
            thread.join(20)
        lg.clean()
    assert len(said) == 1
    assert "was ended by SIGKILL" in said[0]


def test_big_messages_arrive_in_pieces() -> None:
    with lg.guard():
        loader = DataLoader(Quick(6), num_workers=2, collate_fn=large)
        assert [len(batch) for batch in loader] == [3_000_000] * 6


def large(samples: object) -> bytes:
    return bytes(3_000_000)


def test_an_exit_status_that_someone_else_took_is_no_endless_loop() -> None:
    with lg.guard():
        it = iter(DataLoader(Stuck(), num_workers=1, timeout=5))
        worker = registry.all()[0].workers[0]
        worker.send(signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        with pytest.raises(RuntimeError, match="is gone, and other code of this process took its exit code"):
            next(it)


def test_a_real_time_signal_has_no_name_and_does_no_harm() -> None:
    with lg.guard():
        it = iter(DataLoader(Stuck(), num_workers=1))
        time.sleep(0.5)
        registry.all()[0].workers[0].send(signal.SIGRTMIN + 7)
        with pytest.raises(RuntimeError, match=r"was ended by signal \d+"):
            next(it)


def test_helpers_of_idle_workers_are_gone_however_fast_the_workers_leave(tmp_path: Path) -> None:
    with lg.guard():
        for number in range(6):
            folder = tmp_path / str(number)
            folder.mkdir()
            it = iter(DataLoader(StartsProcesses(str(folder)), num_workers=2))
            next(it), next(it)
            assert len(list(folder.iterdir())) == 2
            lg.clean()
    pids = [int(pid) for path in tmp_path.rglob("*") if path.is_file() for pid in path.read_text().split()]
    assert len(pids) == 24
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []


def test_guards_of_two_threads_do_not_end_each_others_loaders() -> None:
    go, done = threading.Event(), []

    def first() -> None:
        with lg.guard():
            values(DataLoader(Quick(4), num_workers=1))
            go.wait(20)

    def second() -> None:
        with lg.guard():
            it = iter(DataLoader(Slow(60), num_workers=1))
            next(it)
            go.set()
            time.sleep(0.3)
            done.append(len(list(it)))

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(first), pool.submit(second)]
        for job in jobs:
            job.result(60)
    assert done == [59]


class Watched(Stuck):
    """Says that it has been asked for a sample, and does not leave when it is asked to."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    def __getitem__(self, index: int) -> torch.Tensor:
        Path(self.marker).touch()
        return super().__getitem__(index)


def test_an_interrupt_while_a_guard_ends_is_not_lost_and_the_guard_is_off(tmp_path: Path) -> None:
    ended = threading.Event()

    def interrupt_the_grace() -> None:
        """Press when the guard waits for its worker: until then, nothing is under way that could be interrupted."""
        while not ended.wait(0.01) and not (kept and kept[0]._shutdown):
            continue
        if not ended.wait(0.5):  # into the 60 s that the worker has
            os.kill(os.getpid(), signal.SIGINT)

    kept: list[Any] = []
    thread = threading.Thread(target=interrupt_the_grace)
    thread.start()
    since = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            with lg.guard(grace_seconds=60):
                kept.append(iter(DataLoader(Watched(str(tmp_path / "asked")), num_workers=1)))
                while not (tmp_path / "asked").exists():
                    time.sleep(0.01)
            time.sleep(5)
    finally:
        ended.set()
        thread.join()
    assert time.monotonic() - since < 50
    assert kept[0]._shutdown
    assert not lg.snapshot().guarding


def test_the_grace_of_a_run_holds_for_loaders_that_end_inside_of_it(tmp_path: Path) -> None:
    marker = tmp_path / "left"
    with lg.guard(grace_seconds=15):
        it = iter(DataLoader(LeavesSlowly(str(marker)), num_workers=1))
        next(it)
        deadline = time.monotonic() + 30
        while lg.snapshot().workers[0].sample != "2" and time.monotonic() < deadline:
            time.sleep(0.01)
        del it
    assert marker.exists()


class LeavesSlowly(Quick):
    """Its worker needs a second to leave."""

    def __init__(self, marker: str) -> None:
        super().__init__(100)
        self.marker = marker

    def __getitem__(self, index: int) -> object:
        if index == 2:
            time.sleep(1.2)
            Path(self.marker).touch()
        return super().__getitem__(index)


def test_clean_of_a_loader_stops_all_its_iterators() -> None:
    with lg.guard():
        loader = DataLoader(Quick(), num_workers=1)
        one, two = iter(loader), iter(loader)
        assert len(lg.clean(loader).pids) == 2
        assert one._shutdown
        assert two._shutdown


def test_the_users_own_forkserver_processes_hear_sigint() -> None:
    code = (
        "import multiprocessing, signal, sys, warnings\n"
        "from torch.utils.data import DataLoader\n"
        "import jupyter_loaderguard as lg\n"
        "from tests.programs.datasets import Quick\n"
        "from tests.unit.test_torch_adapter import is_sigint_blocked\n"
        "if __name__ == '__main__':\n"
        "    with lg.guard():\n"
        "        list(DataLoader(Quick(4), num_workers=1, multiprocessing_context='forkserver'))\n"
        "    with multiprocessing.get_context('forkserver').Pool(1) as pool:\n"
        "        print(pool.apply(is_sigint_blocked))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def is_sigint_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_loop_whose_loader_another_thread_stops_ends_when_the_workers_are_gone() -> None:
    with lg.guard() as run:
        it = iter(DataLoader(Stuck(), num_workers=2))
        timer = threading.Timer(0.5, lg.clean)
        timer.start()
        with pytest.raises(lg.LoaderGuardError, match="was stopped by loaderguard"):
            next(it)
        assert [record for record in run.born if record.alive()] == []
        timer.join()
    assert run.report is not None
    assert run.report.left == 0


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_lock_that_an_interrupt_left_locked_does_not_hang_the_stop(is_persistent: bool) -> None:
    """KeyboardInterrupt may come between the taking of a lock in Queue.put and the block that gives it back."""
    with lg.guard() as run:
        it = iter(DataLoader(Quick(40), num_workers=2, persistent_workers=is_persistent))
        next(it)
        workers = [psutil.Process(process.pid) for process in it._workers]
        for queue in it._index_queues:
            queue._notempty.acquire()
        since = time.monotonic()
        lg.clean()
        assert time.monotonic() - since < 10
    assert not any(worker.is_running() for worker in workers)
    assert run.report.left == 0  # the fixture sees that the queues' threads have ended


@pytest.mark.usefixtures("accelerator")
def test_a_pinning_thread_that_an_interrupt_locked_out_ends() -> None:
    with lg.guard():
        it = iter(DataLoader(Quick(40), num_workers=2, pin_memory=True))
        next(it)
        it._data_queue.mutex.acquire()
        lg.clean()


def _unknown_loop(*anything: object) -> None:
    """Stand for the worker loop of a torch that names its arguments otherwise."""
    return KNOWN_LOOP(*anything)


KNOWN_LOOP = worker._worker_loop


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_loop_that_is_unknown_starts_unobserved_and_works(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_worker_loop", _unknown_loop)
    loader = DataLoader(Quick(40), batch_size=4, num_workers=2, multiprocessing_context=method)
    with lg.guard() as run, pytest.warns(lg.LoaderGuardWarning, match="cannot be observed") as told:
        it = iter(loader)
        next(it)
        assert len(lg.snapshot().workers) == 2
        assert [int(batch.flatten()[0]) for batch in it] == list(range(4, 40, 4))
    assert len(told) == 1
    assert (run.report.batches, run.report.left) == (10, 0)


def test_a_dataset_that_travels_in_a_list_is_found_and_handed_on() -> None:
    """As torch does since 2.14, so that the list can be emptied in the worker."""
    seen = []

    def loop(kind: int, dataset_holder: list[object], worker_id: int) -> None:
        seen.append((kind, dataset_holder.pop(), worker_id))

    holder = ["the dataset"]
    named = name_arguments(loop, (1, holder), {"worker_id": 3})
    assert (named["dataset"], holder) == ("the dataset", ["the dataset"])
    fitted(loop)(**named)
    assert holder == []  # the very list, so that nothing else keeps the dataset
    fitted(loop)(kind=1, dataset="the dataset", worker_id=4)
    fitted(loop)(1, ["the dataset"], worker_id=5)
    assert seen == [(1, "the dataset", number) for number in (3, 4, 5)]
    assert fitted(KNOWN_LOOP) is KNOWN_LOOP or "dataset_holder" in KNOWN_LOOP.__code__.co_varnames


@pytest.mark.parametrize(
    ("hard", "where", "caught"),
    [
        (200, "body", "ValueError: mine"),
        (200, "wait", "Error: .*Too many open files"),
        (400, "wait", "Error: .*Too many open files"),  # Python's words, or torch's
        (400, "children", "ValueError: mine"),
    ],
)
def test_c7_workers_are_stopped_also_when_no_file_can_be_opened(
    hard: int, where: str, caught: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.programs.exhausted", str(hard), where, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said, left = done.stdout.splitlines()
    assert re.search(caught, said)
    assert left == "[] [] True"
    assert "LoaderGuard" not in done.stderr
