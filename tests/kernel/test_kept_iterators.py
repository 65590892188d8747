"""Loaders that keep one iterator for ever, wherever in themselves: they stay usable, however a cell ends."""

from __future__ import annotations

import time

import psutil
import pytest

from .driver import Kernel, is_helper, wait_until

MAKE = """
from tests.programs.endless import HeldElsewhere, InfiniteLoader
loader = {loader}(Quick(16), batch_size=4, num_workers=2{how})
"""
COUNT = "len(list(loader))"
LOOP = "for epoch in range(10_000):\n    for batch in loader:\n        time.sleep(0.01)"


def interrupt(kernel: Kernel, cell: str) -> None:
    msg = kernel.begin(cell)
    wait_until(lambda: len(kernel.children()) >= 2, 30, "its workers")
    time.sleep(0.5)
    kernel.interrupt(group=False)
    reply = kernel.finish(msg, when_lost=lambda: kernel.interrupt(group=False))
    assert reply.ename == "KeyboardInterrupt", reply.traceback


@pytest.mark.parametrize("how", ["object", "list", "closure", "generator"])
def test_it_may_be_kept_anywhere(kernel: Kernel, how: str) -> None:
    reply = kernel.run(MAKE.format(loader="HeldElsewhere", how=f", how={how!r}") + f"{COUNT}\n1/0")
    assert reply.ename == "ZeroDivisionError"
    assert kernel.ok(COUNT).value == 4, "after an error in the cell that made it"
    assert kernel.run("undefined_name").ename == "NameError"
    assert kernel.ok(COUNT).value == 4, "after an error in another cell"
    if how != "generator":  # one that is hit by an interrupt itself has ended, in plain torch too
        interrupt(kernel, LOOP)
        wait_until(lambda: not kernel.children(), 30, "the end of its workers")
        assert kernel.ok(COUNT).value == 4, "after an interrupt"
    kernel.ok("lg.clean()")
    assert kernel.ok(COUNT).value == 4, "after it was stopped on demand"
    kernel.ok("lg.clean()\ndel loader")


def test_one_that_is_older_than_the_guard(kernel: Kernel) -> None:
    kernel.ok("%unload_ext jupyter_loaderguard")
    kernel.ok(MAKE.format(loader="InfiniteLoader", how=""))
    kernel.ok("%load_ext jupyter_loaderguard")
    interrupt(kernel, LOOP)
    assert kernel.ok(COUNT).value == 4
    kernel.ok("lg.clean()\ndel loader")


def test_one_that_was_stopped_before_the_guard_left(kernel: Kernel) -> None:
    kernel.ok(MAKE.format(loader="InfiniteLoader", how=""))
    interrupt(kernel, LOOP)
    kernel.ok("%unload_ext jupyter_loaderguard")
    try:
        assert kernel.ok(COUNT).value == 4
        kernel.ok("loader.iterator._shutdown_workers()\ndel loader")
    finally:
        kernel.ok("%load_ext jupyter_loaderguard")


def test_a_child_of_the_users_is_the_only_one(kernel: Kernel) -> None:
    """`os.wait()` returns whichever child has ended: none of them is ours."""
    kernel.ok("%unload_ext jupyter_loaderguard")
    kernel.ok("%load_ext jupyter_loaderguard")
    python = psutil.Process(kernel.pid)
    helpers = {child.pid for child in python.children() if is_helper(child) and child.status() != "zombie"}
    wait_until(
        lambda: not {child.pid for child in python.children()} - helpers, 30, "the end of the reaper's first half"
    )
    cell = "pid = os.fork()\nif not pid: os._exit(3)\nfound, status = os.wait()\nfound == pid, os.waitstatus_to_exitcode(status)"
    assert kernel.ok(cell).value == (True, 3)


def test_an_interrupt_ends_the_packing_of_a_dataset(kernel: Kernel) -> None:
    cell = """
class Endless(list):
    def __reduce_ex__(self, protocol):
        print("begun", flush=True)
        time.sleep(600)
list(DataLoader(Endless(range(4)), num_workers=1, multiprocessing_context="spawn"))
"""
    msg = kernel.begin(cell)
    time.sleep(2)
    since = time.monotonic()
    kernel.interrupt(group=False)
    reply = kernel.finish(msg, 60)
    assert reply.ename == "KeyboardInterrupt", reply.traceback
    assert time.monotonic() - since < 30
    wait_until(lambda: not kernel.children(), 30, "its workers' end")
