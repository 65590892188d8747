"""Loaders where descriptors are few: what works in plain torch works under guard. Real limits, in scripts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from jupyter_loaderguard import processes, usage
from jupyter_loaderguard.interrupts import InterruptWatch
from jupyter_loaderguard.processes import Handle

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")


def run(limit: int, method: str, how: str, workers: int = 4, kept: int = 0) -> subprocess.CompletedProcess[str]:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    command = [sys.executable, "-W", "ignore", "-m", "tests.programs.scarce", method, how, str(workers), str(kept)]
    return subprocess.run(command, preexec_fn=lower, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("method", "kept"), [("fork", 0), ("fork", 16), ("spawn", 0)])
def test_the_guard_works_with_as_few_descriptors_as_plain_torch(method: str, kept: int) -> None:
    # batches arrive in bursts, of which each takes some: so one above what sufficed three times
    def suffices(limit: int) -> bool:
        return all(run(limit, method, "plain", kept=kept).returncode == 0 for _ in range(3))

    least = next(limit for limit in range(28, 120, 6) if suffices(limit)) + 1
    ran = run(least, method, "guard", kept=kept)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[0] == "16"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_four_workers_with_a_limit_of_100(method: str) -> None:
    ran = run(100, method, "guard")
    assert (ran.returncode, ran.stdout.split()[0]) == (0, "16"), ran.stderr


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "600"])
    handle = Handle(child.pid)
    handle.close()  # without its pidfd
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert handle.is_alive()
        assert handle.send(processes.KILL), "a child that nobody has reaped is itself"
        processes.wait([handle], 5)
        assert not handle.is_alive()
        assert usage.free_descriptors(0) <= 0
        assert not InterruptWatch().has_come()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        child.kill()
        child.wait()


def test_a_watch_without_a_descriptor_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socketpair", refuse)
    watch = InterruptWatch()
    watch.begin()
    assert not watch.take()
    watch.end()
    watch.close()
