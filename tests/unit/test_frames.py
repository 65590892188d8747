"""The stacks of other threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

from jupyter_loaderguard import frames


def test_a_thread_that_makes_garbage_can_be_looked_at_without_a_crash() -> None:
    command = [sys.executable, "-m", "tests.programs.walked", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 4), done.stderr[-2000:]


def test_the_stack_of_a_thread_and_of_all() -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        is_inside.set()
        may_end.wait()

    thread = threading.Thread(target=outer)
    thread.start()
    is_inside.wait()
    try:
        names = [frame.f_code.co_name for frame in frames.stack_of(thread.ident)]
        everybody = [frame.f_code.co_name for frame in frames.running()]
        tops = frames.innermost()
    finally:
        may_end.set()
        thread.join()
    assert names[-5:] == ["inner", "outer", "run", "_bootstrap_inner", "_bootstrap"]
    assert {"inner", "outer", "test_the_stack_of_a_thread_and_of_all"} <= set(everybody)
    assert {thread.ident, threading.get_ident()} <= set(tops)
    assert frames.stack_of(thread.ident) == []
    assert frames.stack_of(None) == []


def test_the_collector_stays_as_it_was() -> None:
    gc.disable()
    try:
        frames.running()
        assert not gc.isenabled()
    finally:
        gc.enable()
    frames.running()
    assert gc.isenabled()
