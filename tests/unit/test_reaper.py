"""The reaper, with a Python process that plays the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jupyter_loaderguard.processes import Handle
from jupyter_loaderguard.reaper import Reaper, semaphore_path

KERNEL = """
import subprocess, sys, time
from jupyter_loaderguard.processes import Handle
from jupyter_loaderguard.reaper import Reaper
reaper = Reaper()
reaper.start()
known = subprocess.Popen(["sleep", "600"])
unknown = subprocess.Popen(["sleep", "600"])
finished = subprocess.Popen(["sleep", "600"])
for process in (known, finished):
    reaper.born(Handle(process.pid))
reaper.gone([Handle(finished.pid)])
reaper._say("+ %d 1" % unknown.pid, "garbage", "+ x y", "+ 1", "", "- 999999", "+ -1 5")
reaper.semaphores_made(sys.argv[1:])
print(reaper.pid, known.pid, unknown.pid, finished.pid, flush=True)
sys.stdin.read()
reaper.stop()
"""


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_gone(*processes: psutil.Process, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not all(gone(process) for process in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.01)


class FakeKernel:
    """A process with a reaper and three children: one known to it, one with a wrong start time, one given up."""

    def __init__(self, *semaphores: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, *semaphores], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pids = [int(word) for word in self.process.stdout.readline().split()]
        self.reaper, self.known, self.unknown, self.finished = (psutil.Process(pid) for pid in pids)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        for process in (self.known, self.unknown, self.finished):
            if process.is_running():
                process.kill()
        wait_gone(self.reaper)


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    fake = FakeKernel()
    yield fake
    fake.close()


def test_it_ends_known_workers_only_and_then_itself(kernel: FakeKernel) -> None:
    os.kill(kernel.process.pid, signal.SIGKILL)
    wait_gone(kernel.known, kernel.reaper)
    assert not gone(kernel.unknown), "a wrong start time was not refused"
    assert not gone(kernel.finished), "a worker that had been given up was touched"


def test_it_leaves_when_it_is_told_to_and_touches_nothing(kernel: FakeKernel) -> None:
    kernel.process.stdin.close()
    wait_gone(kernel.reaper)
    assert not gone(kernel.known)
    kernel.process.wait(10)


def test_it_works_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSTARTUP", "")
    code = "import os; del os.pidfd_open\nimport runpy, sys; sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    import jupyter_loaderguard.reaper as module

    kernel = subprocess.Popen(["sleep", "600"])
    worker = subprocess.Popen(["sleep", "600"])
    from jupyter_loaderguard.processes import start_mark

    reaper = subprocess.Popen(
        [sys.executable, "-c", code, module.__file__, str(kernel.pid), str(start_mark(kernel.pid))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(reaper.stdout.readline())
        watcher = psutil.Process(pid)
        reaper.stdin.write(f"+ {worker.pid} {start_mark(worker.pid)}\n")
        reaper.stdin.flush()
        time.sleep(0.3)
        kernel.kill()
        wait_gone(psutil.Process(worker.pid), watcher)
    finally:
        for process in (kernel, worker, reaper):
            process.kill()
            process.wait()
        reaper.stdin.close()
        reaper.stdout.close()


def test_semaphores_of_a_dead_kernel_are_unlinked() -> None:
    from _multiprocessing import SemLock

    name = f"/lg-test-{os.getpid()}"
    semaphore = SemLock(1, 1, 1, name, False)
    fake = FakeKernel(name, "/lg-test-never-made")
    try:
        assert os.path.exists(semaphore_path(name))
        os.kill(fake.process.pid, signal.SIGKILL)
        wait_gone(fake.reaper)
        assert not os.path.exists(semaphore_path(name))
    finally:
        fake.close()
        del semaphore


def test_a_killed_reaper_is_replaced_and_told_everything_again() -> None:
    reaper = Reaper()
    worker = subprocess.Popen(["sleep", "600"])
    try:
        assert reaper.ensure() is None
        reaper.born(Handle(worker.pid))
        old = psutil.Process(reaper.pid)
        old.kill()
        wait_gone(old)
        line = reaper.ensure()
        assert line == f"loaderguard: the reaper (pid {old.pid}) was gone; started again as pid {reaper.pid}."
        assert reaper.ensure() is None
    finally:
        reaper.stop()
        worker.kill()
        worker.wait()


def test_threads_that_need_it_at_once_start_one() -> None:
    reaper = Reaper()
    reaper.ensure()
    old = psutil.Process(reaper.pid)
    old.kill()
    wait_gone(old)
    lines: list[str | None] = []
    threads = [threading.Thread(target=lambda: lines.append(reaper.ensure())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 10
    while len(_reapers()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)  # those of earlier tests are on their way out
    mine = _reapers()
    assert [process.pid for process in mine] == [reaper.pid]
    assert len([line for line in lines if line]) == 1
    reaper.stop()
    wait_gone(*mine)


def _reapers() -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if f"reaper.py {os.getpid()} " in " ".join(_cmdline(process))]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_stopped_reaper_never_blocks_the_kernel() -> None:
    reaper = Reaper()
    reaper.start()
    process = psutil.Process(reaper.pid)
    process.suspend()
    try:
        since = time.monotonic()
        for _ in range(5000):
            reaper._say("- 999999", "s /x" * 20)
        assert time.monotonic() - since < 10
    finally:
        process.resume()
        reaper.stop()
        wait_gone(process)


def test_it_holds_nothing_of_the_kernels(kernel: FakeKernel) -> None:
    assert kernel.reaper.cwd() == "/"
    assert kernel.reaper.num_fds() <= 6
    assert "-I" in kernel.reaper.cmdline()
    assert os.getsid(kernel.reaper.pid) != os.getsid(kernel.process.pid)
    assert kernel.reaper.memory_info().rss < 20e6


# -- a start that takes long ------------------------------------------------------------------------

DAWDLER = """#!/bin/sh
echo "Activating the environment"
sleep {seconds}
exec {python} "$@"
"""
SHORT_SECONDS = 0.5


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reaper]:
    """A reaper whose answer is not awaited for long."""
    monkeypatch.setattr("jupyter_loaderguard.reaper.ANSWER_SECONDS", SHORT_SECONDS)
    reaper = Reaper()
    yield reaper
    reaper.stop()


def _install(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_reaper_that_answers_late_is_awaited_once_and_used_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, impatient: Reaper
) -> None:
    _install(monkeypatch, tmp_path / "python", DAWDLER.format(seconds=2, python=sys.executable))
    worker = subprocess.Popen(["sleep", "600"])
    try:
        since = time.monotonic()
        line = impatient.ensure()
        assert time.monotonic() - since < SHORT_SECONDS + 1
        assert line is not None
        assert "may outlive a killed kernel" in line
        impatient.born(Handle(worker.pid))
        since = time.monotonic()
        assert [impatient.ensure() for _ in range(5)] == [None] * 5, "said once"
        assert time.monotonic() - since < SHORT_SECONDS, "nobody waits for it again"
        deadline = time.monotonic() + 15
        while impatient.pid is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        reaper = psutil.Process(impatient.pid)
        assert "reaper.py" in " ".join(reaper.cmdline())
        assert impatient.ensure() is None
        impatient.stop()
        wait_gone(reaper)
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    "script", ["#!/bin/sh\nsleep 600\n", "#!/bin/sh\nexit 3\n", "#!/bin/sh\nyes no\n", "no script"]
)
def test_what_never_answers_is_said_once_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, impatient: Reaper, script: str
) -> None:
    _install(monkeypatch, tmp_path / "python", script)
    since = time.monotonic()
    lines = [impatient.ensure() for _ in range(8)]
    assert time.monotonic() - since < SHORT_SECONDS + 2
    assert len([line for line in lines if line]) == 1
    first_half = impatient._starting
    started = psutil.Process(first_half.pid).children(recursive=True) if first_half and not first_half.poll() else []
    impatient.stop()
    wait_gone(*started)  # and the fixture looks for children


@pytest.mark.parametrize("executable", [None, "", "/nowhere/python"])
def test_no_python_to_start_it_with_is_a_line(
    monkeypatch: pytest.MonkeyPatch, impatient: Reaper, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    impatient.start()
    lines = [impatient.ensure() for _ in range(5)]
    assert len([line for line in lines if line]) == 1
    assert impatient.pid is None


def test_it_does_not_look_like_python_to_who_changes_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pydevd does: `python script` becomes `python debugger script`, and the debugger waits for somebody."""
    commands: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return real(command, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    reaper = Reaper()
    try:
        assert reaper.ensure() is None
        assert ["python" in os.path.basename(command[0]) for command in commands] == [False]
        assert psutil.Process(reaper.pid).cmdline()[0] == sys.executable, "and is Python all the same"
    finally:
        reaper.stop()


def test_a_reaper_that_was_done_without_is_told_all_when_it_is_back() -> None:
    reaper = Reaper()
    worker = subprocess.Popen(["sleep", "600"])
    try:
        assert reaper.ensure() is None
        old = psutil.Process(reaper.pid)
        before = len(os.listdir("/proc/self/fd"))
        line = reaper.ensure(is_scarce=True)
        assert line is not None
        assert "descriptors" in line
        assert len(os.listdir("/proc/self/fd")) == before - 2, "its pipe, and its pidfd"
        assert reaper.ensure(is_scarce=True) is None
        assert not gone(old), "it watches over what it knows"
        reaper.born(Handle(worker.pid))
        assert reaper.ensure() is None
        assert reaper.pid != old.pid
        wait_gone(old)
    finally:
        reaper.stop()
        worker.kill()
        worker.wait()
