"""What is left of kernels on this machine: seen from a terminal, swept from there and from another notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from .driver import Kernel, is_gone, wait_gone, wait_until
from .test_outliving import reaper_of

METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Start kernels with a ledger of the test's own: what is done here must not be seen by other tests."""
    started: list[Kernel] = []

    def start(**options: object) -> Kernel:
        started.append(Kernel(JUPYTER_RUNTIME_DIR=str(tmp_path), **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for kernel in started:
        kernel.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "jupyter_loaderguard.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path)},
        )

    return run


def load(kernel: Kernel, *methods: str) -> list[psutil.Process]:
    """Start a loader with two stuck workers for each start method."""
    for method in methods:
        kernel.ok(
            f"loader_{method} = DataLoader(Stuck(), num_workers=2, multiprocessing_context='{method}')\n"
            f"it_{method} = iter(loader_{method})"
        )
    return kernel.wait_for_workers(2 * len(methods))


def ps(run) -> dict:
    done = run("ps", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def orphans(run) -> dict[int, str]:
    return {orphan["pid"]: orphan["recognised"] for orphan in ps(run)["orphans"]}


def workers(run) -> dict[int, set[int]]:
    """Return the workers of each kernel."""
    return {
        kernel["pid"]: {worker["pid"] for loader in kernel["loaders"] for worker in loader["workers"]}
        for kernel in ps(run)["kernels"]
    }


def pids(processes: list[psutil.Process]) -> set[int]:
    return {process.pid for process in processes}


def test_a_terminal_sees_loaders_of_all_start_methods_come_and_go(start, run, tmp_path: Path) -> None:
    kernel = start(JPY_SESSION_NAME="/home/me/train.ipynb")
    wait_until(lambda: workers(run) == {kernel.pid: set()})
    processes = load(kernel, *METHODS)
    wait_until(lambda: workers(run) == {kernel.pid: pids(processes)})
    (seen,) = ps(run)["kernels"]
    assert seen["notebook"] == "/home/me/train.ipynb"
    assert [(one["name"], one["start_method"]) for one in seen["loaders"]] == [(f"loader_{m}", m) for m in METHODS]
    stack = run("stacks", str(processes[0].pid))
    assert stack.returncode == 0 and "in __getitem__" in stack.stdout
    kernel.ok("%loaderguard clean loader_fork")
    left = {process.pid for process in processes if not is_gone(process)}
    wait_until(lambda: workers(run) == {kernel.pid: left} and len(left) == 4)
    kernel.ok("%unload_ext jupyter_loaderguard")
    assert workers(run) == {}
    assert not left & set(orphans(run))
    kernel.ok("%load_ext jupyter_loaderguard")
    wait_until(lambda: workers(run) == {kernel.pid: left})
    kernel.manager.shutdown_kernel()
    assert workers(run) == {}
    assert os.listdir(tmp_path / f"loaderguard-{os.geteuid()}") == []


def test_what_a_killed_kernel_and_its_killed_reaper_leave_is_mentioned_listed_and_swept(start, run) -> None:
    kernel, other = start(), start(load=False, setup="")
    processes = load(kernel, *METHODS)
    wait_until(lambda: workers(run) == {kernel.pid: pids(processes)})
    reaper_of(kernel).kill()
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until(
        lambda: {pid: orphans(run).get(pid) for pid in pids(processes)} == dict.fromkeys(pids(processes), "ledger")
    )
    line = "loaderguard: 6 workers of 1 dead kernel left on this machine; %loaderguard sweep lists them.\n"
    assert other.ok("%load_ext jupyter_loaderguard").stderr == line
    words = " ".join(str(process.pid) for process in processes[:2])
    listed = other.ok("%loaderguard sweep").stdout
    assert all(str(process.pid) in listed for process in processes)
    assert not any(map(is_gone, processes))
    assert "loaderguard: 2 processes ended, 0 left" in other.ok(f"%loaderguard sweep --yes {words}").stdout
    assert [is_gone(process) for process in processes] == [True] * 2 + [False] * 4
    done = run("sweep", "--yes", *(str(process.pid) for process in processes[2:]))
    assert (done.returncode, done.stderr) == (0, "")
    wait_gone(processes)
    assert list(workers(run)) == [other.pid]
    assert other.ok("%reload_ext jupyter_loaderguard").stderr == ""
    refused = other.run(f"%loaderguard sweep --yes {os.getpid()}")
    assert "is not the pid of an orphan" in refused.stderr


def test_orphans_of_kernels_that_were_never_guarded_are_known_by_their_marks(start, run) -> None:
    kernel = start(load=False)
    processes = load(kernel, *METHODS)
    assert not pids(processes) & set(orphans(run))
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until(
        lambda: {pid: orphans(run).get(pid) for pid in pids(processes)} == dict.fromkeys(pids(processes), "marks")
    )
    done = run("sweep", "--yes", *map(str, pids(processes)))
    assert (done.returncode, done.stderr) == (0, "")
    wait_gone(processes)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP], ids=lambda s: s.name)
def test_however_a_guarded_kernel_dies_its_reaper_leaves_no_orphans_and_the_ledger_is_cleaned(
    start, run, signum: signal.Signals, tmp_path: Path
) -> None:
    kernel = start()
    processes = load(kernel, "fork")
    wait_until(lambda: workers(run) == {kernel.pid: pids(processes)})
    os.kill(kernel.pid, signum)
    wait_gone(processes)
    wait_until(lambda: not kernel.manager.is_alive())
    assert workers(run) == {}
    assert not pids(processes) & set(orphans(run))
    assert os.listdir(tmp_path / f"loaderguard-{os.geteuid()}") == []
