"""What a process is doing, told by the system's files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jupyter_loaderguard import waits

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these are Linux's files")


@contextmanager
def running(code: str) -> Iterator[int]:
    """Run Python code that says when it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os, sys, time, select, threading\nprint(flush=True)\n{code}"],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def doing(pid: int) -> waits.Doing:
    return waits.look([(pid, pid)])[pid, pid]


@pytest.mark.parametrize(
    ("code", "kind", "detail"),
    [
        ("while True: pass", waits.CPU, "of a CPU"),
        ("time.sleep(600)", waits.SLEEP, ""),
        ("select.select([], [], [], 600)", waits.SLEEP, ""),
        ("sys.stdin.read()", waits.PIPE, "pipe:["),
        ("select.select([0], [], [])", waits.PIPE, "pipe:["),
        ("p = select.poll(); p.register(0, select.POLLIN); p.poll(600_000)", waits.PIPE, "pipe:["),
        ("e = select.epoll(); e.register(0, select.EPOLLIN); e.poll(600)", waits.PIPE, "pipe:["),
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", waits.LOCK, ""),
        ("threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()", waits.CPU, "other threads"),
    ],
)  # fmt: skip
def test_kinds(code: str, kind: str, detail: str) -> None:
    with running(code) as pid:
        found = doing(pid)
    assert found.kind == kind, found
    assert detail in found.detail


def test_a_stopped_process_and_one_that_is_gone() -> None:
    with running("time.sleep(600)") as pid:
        os.kill(pid, signal.SIGSTOP)
        assert doing(pid) == waits.Doing(waits.STOPPED, "by a signal")
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        assert doing(pid).kind == waits.GONE, "a zombie"
    assert doing(pid).kind == waits.GONE


def test_many_are_looked_at_in_the_time_of_one() -> None:
    with running("time.sleep(600)") as first, running("while True: pass") as second:
        since = time.monotonic()
        found = waits.look([(first, first), (second, second)] * 8)
        assert time.monotonic() - since < 2
    assert {one.kind for one in found.values()} == {waits.SLEEP, waits.CPU}


def test_a_machine_whose_system_calls_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with running("time.sleep(600)") as pid:
        assert doing(pid).kind == waits.SYSTEM
