"""B7: what is no stall. Only a loop that waits for data is late; here the limit is short, and all must be silent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from .driver import Kernel, Reply, wait_until

GUARD = "%%guarded_loader --stall 0.5 --name report\n"


@pytest.fixture(scope="module")
def _quiet_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.ok("from tests.programs import stalls")
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(_quiet_kernel: Kernel) -> Iterator[Kernel]:
    yield _quiet_kernel
    wait_until(lambda: not _quiet_kernel.children(), what=f"the end of {_quiet_kernel.children()}")


def assert_silent(kernel: Kernel, reply: Reply) -> None:
    assert reply.status == "ok", reply.traceback
    assert reply.displays == reply.updates == []
    assert reply.stderr == ""
    assert "loaderguard: stall" not in reply.stdout
    assert kernel.ok("report.stalls").value == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_b7_a_slow_model(kernel: Kernel, workers: int) -> None:
    reply = kernel.run(f"{GUARD}for batch in DataLoader(Quick(3), num_workers={workers}): time.sleep(1.2)")
    assert_silent(kernel, reply)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_whose_every_batch_is_a_little_slow(kernel: Kernel, workers: int) -> None:
    reply = kernel.run(f"{GUARD}for batch in DataLoader(Slow(400), batch_size=10, num_workers={workers}): pass")
    assert_silent(kernel, reply)


def test_b7_an_idle_notebook_between_two_batches(kernel: Kernel) -> None:
    kernel.ok("%config LoaderGuard.stall_seconds = 0.5\nit = iter(DataLoader(Quick(), num_workers=2)); next(it)")
    time.sleep(1.5)
    replies = [kernel.ok("next(it)[0].tolist()") for _ in range(2)]
    assert [reply.displays for reply in replies] == [[], []]
    kernel.ok("%config LoaderGuard.stall_seconds = 30.0\ndel it")


def test_a_long_validation_between_two_epochs(kernel: Kernel) -> None:
    reply = kernel.run(
        GUARD + "loader = DataLoader(Quick(8), num_workers=2, persistent_workers=True)\n"
        "for epoch in range(2):\n"
        "    for batch in loader: pass\n"
        "    time.sleep(1.5)\n"
        "del loader"
    )
    assert_silent(kernel, reply)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_slow_first_batch_because_workers_import_torch(kernel: Kernel, method: str) -> None:
    kernel.ok("multiprocessing.set_forkserver_preload([])  # of a forkserver that has not started yet")
    reply = kernel.run(
        f"{GUARD}for batch in DataLoader(Quick(4), num_workers=2, multiprocessing_context={method!r}): pass"
    )
    assert_silent(kernel, reply)
    assert float(kernel.ok("report.wait_seconds").value) > 0.5, "that was the point"  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_paused_kernel(kernel: Kernel, workers: int) -> None:
    """As when the machine sleeps, or somebody stops the kernel: it does not wait, it does not run at all."""
    cell = kernel.begin(
        GUARD.replace("0.5", "2")
        + f"print('go')\nfor batch in DataLoader(Slow(60), batch_size=15, num_workers={workers}): pass"
    )
    kernel.wait_for_output(cell, "go")
    time.sleep(0.1)
    children = kernel.children()
    for pid in (kernel.pid, *(child.pid for child in children)):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in (kernel.pid, *(child.pid for child in children)):
        os.kill(pid, signal.SIGCONT)
    assert_silent(kernel, kernel.finish(cell))


def debug(kernel: Kernel, code: str) -> Reply:
    """Run a cell that stops at a breakpoint, think for a while, and go on."""
    cell = kernel.begin(code, allow_stdin=True)
    wait_until(kernel.client.stdin_channel.msg_ready, 30, "the debugger's prompt")
    kernel.client.get_stdin_msg(timeout=5)
    time.sleep(2.5)
    kernel.client.input("c")
    return kernel.finish(cell)


def test_b7_a_breakpoint_in_the_loop(kernel: Kernel) -> None:
    reply = debug(
        kernel,
        GUARD + "for number, batch in enumerate(DataLoader(Quick(4), num_workers=2)):\n"
        "    if number == 1: __import__('pdb').set_trace()",
    )
    assert_silent(kernel, reply)


def test_b7_a_breakpoint_in_the_dataset_without_workers(kernel: Kernel) -> None:
    reply = debug(
        kernel,
        GUARD + "class Stops(Quick):\n"
        "    def __getitem__(self, index):\n"
        "        if index == 1: __import__('pdb').set_trace()\n"
        "        return super().__getitem__(index)\n"
        "for batch in DataLoader(Stops(4)): pass",
    )
    assert_silent(kernel, reply)


def test_b7_a_breakpoint_is_no_stall_under_raise_either(kernel: Kernel) -> None:
    reply = debug(
        kernel,
        GUARD.replace("--stall", "--on-stall raise --stall") + "class Stops(Quick):\n"
        "    def __getitem__(self, index):\n"
        "        if index == 1: __import__('pdb').set_trace()\n"
        "        return super().__getitem__(index)\n"
        "for batch in DataLoader(Stops(4)): pass",
    )
    assert_silent(kernel, reply)


def test_time_with_the_guard_off_is_not_watched(kernel: Kernel) -> None:
    kernel.ok("%config LoaderGuard.stall_seconds = 0.5\n%loaderguard off")
    reply = kernel.ok("n = sum(1 for batch in DataLoader(stalls.Dawdles(1.5), num_workers=2))")
    assert reply.displays == []
    kernel.ok("%loaderguard on\n%config LoaderGuard.stall_seconds = 30.0")
