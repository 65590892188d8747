"""Identity, the tree, and ending processes: real ones, which the tests themselves start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jupyter_loaderguard import processes, usage
from jupyter_loaderguard.processes import Handle

SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
PARENT = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True, stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)


class Children:
    """Starts Python programs and ends what is left of them."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, code: str, **options: object) -> subprocess.Popen[str]:
        options.setdefault("args", [sys.executable, "-c", code])
        child = subprocess.Popen(stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
        self._all.append(child)
        return child

    def close(self) -> None:
        for child in self._all:
            child.kill()
            child.wait()
            child.stdout.close()


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


@pytest.fixture(params=["pidfd", "start time"])
def identity(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By pidfd, and as on systems without: by pid and start time."""
    if request.param == "start time":
        monkeypatch.delattr(os, "pidfd_open")
    return request.param


def test_a_handle_signals_its_process_and_sees_its_end(children: Children, identity: str) -> None:
    child = children.start(SLEEP)
    handle = Handle(child.pid)
    assert handle.is_alive()
    assert (handle.fileno() is not None) == (identity == "pidfd")
    assert handle.send(signal.SIGTERM)
    assert processes.wait([handle], 10) == []
    assert not handle.is_alive(), "a zombie is not alive"
    child.wait()
    assert not handle.send(signal.SIGTERM)


def test_a_wrong_start_time_is_refused(children: Children, identity: str) -> None:
    child = children.start(SLEEP)
    reused = Handle(child.pid, mark="1")
    assert not reused.is_alive()
    assert not reused.send(signal.SIGKILL)
    assert processes.stop([reused], 0) == ({child.pid: "dead"}, 0)
    assert child.poll() is None


def test_a_pid_that_was_reused_since_is_refused(children: Children, identity: str) -> None:
    child = children.start(SLEEP)
    handle = Handle(child.pid)
    handle.mark = str(int(handle.mark or 0) - 1)  # as if another process had had the pid at our birth
    handle.close()
    assert not handle.send(signal.SIGKILL)
    assert child.poll() is None


@pytest.mark.parametrize("pid", [0, -1, os.getpid()], ids=["group", "everybody", "ourselves"])
def test_our_own_group_and_ourselves_are_no_targets(pid: int) -> None:
    with pytest.raises(ValueError, match="is not another process"):
        Handle(pid)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_refused_also_by_root(children: Children) -> None:
    child = children.start("", user="nobody", executable="/bin/sleep", args=["sleep", "600"])
    handle = Handle(child.pid)
    assert not handle.send(signal.SIGKILL)
    how, _ = processes.stop([handle], 0)
    assert how == {child.pid: "unkillable"}
    assert child.poll() is None


def test_stop_gives_grace_then_sigterm_then_sigkill_to_all_at_once(children: Children, identity: str) -> None:
    leaves = children.start("import time; time.sleep(0.3)")
    sleeps = [children.start(SLEEP) for _ in range(3)]
    stubborn = [children.start(STUBBORN) for _ in range(3)]
    for child in stubborn:
        child.stdout.readline()
    handles = [Handle(child.pid) for child in (leaves, *sleeps, *stubborn)]
    since = time.monotonic()
    how, _ = processes.stop(handles, 1.0)
    assert time.monotonic() - since < 1.0 + processes.TERM_SECONDS + processes.KILL_SECONDS
    assert how[leaves.pid] == "left"
    assert {how[child.pid] for child in sleeps} == {"SIGTERM"}
    assert {how[child.pid] for child in stubborn} == {"SIGKILL"}


def test_hurry_skips_the_grace(children: Children) -> None:
    handle = Handle(children.start(SLEEP).pid)
    since = time.monotonic()
    processes.stop([handle], 60, hurry=lambda: time.monotonic() - since > 0.2)
    assert time.monotonic() - since < 20


def test_stop_takes_descendants_in_sessions_of_their_own_along(children: Children) -> None:
    parent = children.start(PARENT)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    handle = Handle(parent.pid)
    assert [found.pid for found in processes.descendants([handle])] == [grandchild.pid]
    how, descendants = processes.stop([handle], 0)
    assert (how, descendants) == ({parent.pid: "SIGTERM"}, 1)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_stop_of_a_suspended_process(children: Children) -> None:
    child = children.start(STUBBORN)
    child.stdout.readline()
    handle = Handle(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert processes.stop([handle], 0)[0] == {child.pid: "SIGKILL"}


def test_reap_for_good_ends_the_whole_tree(children: Children) -> None:
    parent = children.start(PARENT)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    ended = processes.reap_for_good([Handle(parent.pid)])
    assert {handle.pid for handle in ended} == {parent.pid, grandchild.pid}
    assert not any(handle.is_alive() for handle in ended)


def test_an_interrupt_while_the_tree_is_read_leaves_nobody_stopped(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = children.start(PARENT)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    send = Handle.send

    def interrupted(handle: Handle, signum: int) -> bool:
        done = send(handle, signum)
        if signum == signal.SIGSTOP and handle.pid == grandchild.pid:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Handle, "send", interrupted)
    held = Handle(grandchild.pid)
    with pytest.raises(KeyboardInterrupt):
        processes.reap_for_good([Handle(parent.pid)])
    assert processes.wait([held], 10) == []


def test_a_pid_that_is_no_child_any_more_when_it_is_held_is_no_descendant(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = children.start(SLEEP), children.start(SLEEP)
    monkeypatch.setattr(processes, "children_of", lambda pid: [other.pid])
    assert processes.descendants([Handle(one.pid)]) == []


def test_states_in_words(children: Children) -> None:
    child = children.start(SLEEP)
    handle = Handle(child.pid)
    assert handle.state() in ("running", "sleeping", "blocked")
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while handle.state() != "stopped" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handle.state() == "stopped"
    child.kill()
    child.wait()
    assert handle.state() == "dead"


def test_shared_memory_files_of_a_process_are_found_by_its_own_descriptors(children: Children, tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "mine = open(f'/dev/shm/torch_{os.getpid()}_1_0', 'w')\n"
        "other = open('/dev/shm/torch_1_2_0', 'w')\n"
        "gone = open(f'/dev/shm/torch_{os.getpid()}_3_0', 'w'); os.unlink(gone.name)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    child = children.start(code)
    child.stdout.readline()
    try:
        assert processes.held_shm_files(child.pid) == [f"/dev/shm/torch_{child.pid}_1_0"]
        processes.stop([Handle(child.pid)], 0)
        assert not os.path.exists(f"/dev/shm/torch_{child.pid}_1_0")
        assert os.path.exists("/dev/shm/torch_1_2_0")
    finally:
        os.unlink("/dev/shm/torch_1_2_0")


def test_memory_figures(children: Children) -> None:
    child = children.start("x = bytearray(50_000_000); print('ready', flush=True)\n" + SLEEP)
    child.stdout.readline()
    assert usage.resident_bytes(child.pid) > 50e6
    assert usage.private_bytes(child.pid) > 50e6
    assert usage.private_bytes(2**22) == usage.resident_bytes(2**22) == 0


def test_a_process_with_an_undecodable_name_is_ended_like_any_other(children: Children) -> None:
    code = "open('/proc/self/comm', 'wb').write(b'\\xff\\xfe\\xe2\\x82'); print('ready', flush=True); " + SLEEP
    child = children.start(code)
    child.stdout.readline()
    assert processes.stop([Handle(child.pid)], 0)[0] == {child.pid: "SIGTERM"}


def test_descendants_that_were_found_before_the_farewell_are_ended_too(children: Children) -> None:
    parent = children.start(PARENT)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    handle = Handle(parent.pid)
    family = processes.descendants([handle])
    parent.kill()
    parent.wait()
    processes.stop([handle], 0, family=family)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
