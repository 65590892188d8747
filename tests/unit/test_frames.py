"""The stacks of other threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

from jupyter_loaderguard import frames
from jupyter_loaderguard.ipython.holders import is_held_by_frames
from jupyter_loaderguard.registry.cell import Territory


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
    assert thread.ident in tops and threading.get_ident() not in tops
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


class Thing:
    """Something that a function looks at."""


def test_a_look_at_ones_own_stack_keeps_nothing_alive() -> None:
    def look() -> weakref.ref[Thing]:
        thing = Thing()
        frames.running()
        frames.stack_of(threading.get_ident())
        territory = Territory()
        assert territory.includes(threading.current_thread())
        is_held_by_frames(thing, None)
        return weakref.ref(thing)

    gc.collect()
    gc.disable()
    try:
        assert look()() is None, "it would live until the collector comes, and with it the workers of a loader"
    finally:
        gc.enable()
