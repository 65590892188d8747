"""A6, A7, A8, A12, A21, A23, A24, A26: workers do not outlive their kernel, however it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from .driver import Kernel, is_gone, wait_gone, wait_until

SECONDS = 5  # generous: the promise of 1 s is measured by benchmarks/


def load_forever(kernel: Kernel, dataset: str, method: str, n: int = 2) -> list[psutil.Process]:
    """Start workers that are busy for ever and return them."""
    kernel.ok(f"it = iter(DataLoader({dataset}, num_workers={n}, multiprocessing_context='{method}'))")
    processes = kernel.wait_for_workers(n)
    time.sleep(0.3)
    return processes


def reaper_of(kernel: Kernel) -> psutil.Process:
    return psutil.Process(kernel.ok("from jupyter_loaderguard.registry import registry; registry.reaper.pid").value)  # type: ignore[arg-type]


def shm_files(*processes: psutil.Process) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped or open, and that still have a name."""
    found = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        names = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line]
        names += [_readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        found |= {name for name in names if name.startswith("/dev/shm/") and not name.endswith(" (deleted)")}
    return found


def _readlink(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def assert_removed(files: set[str]) -> None:
    wait_until(lambda: not any(os.path.exists(name) for name in files), 5, f"the end of {files}")


@pytest.mark.parametrize("dataset", ["Quick()", "Stuck()", "Stubborn()", "HoldsGil()"])
def test_a6_a7_a21_a_killed_kernel_takes_its_workers_along(
    own_kernel: Kernel, method: str, dataset: str, bystander: psutil.Process
) -> None:
    processes = load_forever(own_kernel, dataset, method)
    reaper = reaper_of(own_kernel)
    files = shm_files(psutil.Process(own_kernel.pid), *processes)
    os.kill(own_kernel.pid, signal.SIGKILL)
    wait_gone(processes, SECONDS)
    wait_gone([reaper], SECONDS)
    assert_removed(files)


def test_a7_a_stopped_worker_goes_too(own_kernel: Kernel) -> None:
    processes = load_forever(own_kernel, "Stuck()", "fork")
    processes[0].suspend()
    os.kill(own_kernel.pid, signal.SIGKILL)
    wait_gone(processes, SECONDS)


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_a7_whatever_signal_the_kernel_dies_of(own_kernel: Kernel, signum: signal.Signals) -> None:
    processes = load_forever(own_kernel, "Stuck()", "fork")
    os.kill(own_kernel.pid, signum)
    wait_gone(processes, SECONDS)


def test_a12_descendants_of_workers_go_with_a_killed_kernel(own_kernel: Kernel, tmp_path: Path) -> None:
    processes = load_forever(own_kernel, f"StartsProcesses({str(tmp_path)!r}, stuck=True)", "fork")
    wait_until(lambda: len([name for name in os.listdir(tmp_path) if "." not in name]) == 2, 30)
    pids = [int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()]
    family = [psutil.Process(pid) for pid in pids]
    assert len(family) == 4
    os.kill(own_kernel.pid, signal.SIGKILL)
    wait_gone(processes + family, SECONDS)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a23_killing_the_whole_group_leaves_no_semaphore(own_kernel: Kernel, method: str) -> None:
    processes = load_forever(own_kernel, "Quick()", method)
    files = shm_files(psutil.Process(own_kernel.pid), *processes)
    assert len([name for name in files if "/sem." in name]) >= 8
    os.killpg(own_kernel.pid, signal.SIGKILL)
    wait_gone(processes, SECONDS)
    assert_removed(files)


@pytest.mark.quiet  # the front end's own patience is a time
@pytest.mark.parametrize("dataset", ["Quick()", "Stuck()", "Stubborn()"])
def test_a24_a_shutdown_from_the_menu_does_not_wait_for_workers(own_kernel: Kernel, method: str, dataset: str) -> None:
    processes = load_forever(own_kernel, dataset, method)
    files = shm_files(psutil.Process(own_kernel.pid), *processes)
    since = time.monotonic()
    own_kernel.manager.shutdown_kernel()
    assert time.monotonic() - since < 2.4  # 2.5 s is when jupyter_client loses its patience and kills
    wait_gone(processes, SECONDS)
    assert_removed(files)


def test_a8_a_restart_while_a_stuck_loader_is_iterated_leaves_nothing(own_kernel: Kernel) -> None:
    own_kernel.begin("for batch in DataLoader(Stuck(), num_workers=2): pass")
    processes = own_kernel.wait_for_workers(2)
    time.sleep(0.3)
    own_kernel.manager.restart_kernel()
    wait_gone(processes, SECONDS)
    own_kernel.client.wait_for_ready(timeout=60)
    own_kernel.pid = own_kernel.manager.provisioner.pid  # type: ignore[union-attr]
    assert own_kernel.ok("1 + 1").value == 2


def test_a26_a_killed_reaper_is_back_before_the_next_worker_and_says_so(own_kernel: Kernel) -> None:
    first = load_forever(own_kernel, "Stuck()", "fork")
    old = reaper_of(own_kernel)
    old.kill()
    wait_until(lambda: is_gone(old))
    reply = own_kernel.ok("more = iter(DataLoader(Stuck(), num_workers=1))")
    new = reaper_of(own_kernel)
    assert reply.stderr.count("loaderguard:") == 1
    assert f"the reaper (pid {old.pid})" in reply.stderr
    assert f"pid {new.pid}" in reply.stderr
    second = own_kernel.wait_for_workers(3)
    os.kill(own_kernel.pid, signal.SIGKILL)
    wait_gone(first + second, SECONDS)


def test_a26_the_reaper_ignores_polite_signals_and_lives_in_a_session_of_its_own(own_kernel: Kernel) -> None:
    load_forever(own_kernel, "Quick()", "fork", n=1)
    reaper = reaper_of(own_kernel)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        reaper.send_signal(signum)
    time.sleep(0.2)
    assert not is_gone(reaper)
    assert os.getsid(reaper.pid) not in (own_kernel.pid, os.getsid(0))
    assert reaper.ppid() != own_kernel.pid
    assert reaper.cwd() == "/"


def test_a26_two_kernels_never_touch_each_others_workers(own_kernel: Kernel) -> None:
    other = Kernel()
    try:
        mine, theirs = load_forever(own_kernel, "Stuck()", "fork"), load_forever(other, "Stuck()", "fork")
        refused = own_kernel.run(f"lg.clean({theirs[0].pid})")
        assert refused.ename == "LoaderGuardError"
        own_kernel.ok("%loaderguard clean")
        assert all(is_gone(process) for process in mine)
        mine = load_forever(own_kernel, "Stuck()", "fork")
        os.kill(own_kernel.pid, signal.SIGKILL)
        wait_gone(mine, SECONDS)
        assert not any(is_gone(process) for process in theirs)
        assert len(other.workers()) == 2
    finally:
        other.close()


def test_a_kernel_that_is_killed_while_workers_start_leaves_none(own_kernel: Kernel, method: str) -> None:
    cell = own_kernel.begin(
        f"print('go')\nit = iter(DataLoader(Stuck(), num_workers=6, multiprocessing_context='{method}'))"
    )
    own_kernel.wait_for_output(cell, "go")
    wait_until(lambda: len(own_kernel.children()) >= 2, 30)
    born = own_kernel._note(own_kernel.children())
    os.kill(own_kernel.pid, signal.SIGKILL)
    wait_gone(born, SECONDS)


def test_a_kernel_that_is_killed_before_it_could_tell_of_a_worker_leaves_none(
    own_kernel: Kernel, method: str, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    own_kernel.begin(
        f"""
        import os, signal
        from jupyter_loaderguard.reaper import Reaper
        def die(self, handle):
            open({str(note)!r}, "w").write(f"{{handle.pid}}\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        Reaper.born = die
        it = iter(DataLoader(Stuck(), num_workers=2, multiprocessing_context='{method}'))
        """
    )
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"), 30)
    try:
        worker = own_kernel._note([psutil.Process(int(note.read_text()))])
    except psutil.NoSuchProcess:
        return
    wait_gone(worker, 30)
