"""Corners of cells: pools, tasks, subshells, forks, and interrupts at the worst moment."""

from __future__ import annotations

import time

import pytest

from .driver import Kernel, is_gone, wait_gone, wait_until


def test_interrupts_at_any_moment_of_a_start_lose_no_worker_and_no_interrupt(kernel: Kernel) -> None:
    code = "print('go')\nfor _ in range(1000):\n    it = iter(DataLoader(Quick(), num_workers=4)); del it"
    for number in range(12):
        cell = kernel.begin(code)
        kernel.wait_for_output(cell, "go")
        time.sleep(0.05 + 0.013 * number)
        kernel.interrupt(group=number % 2 == 0)
        reply = kernel.finish(cell, 30, when_lost=kernel.interrupt)
        assert reply.ename == "KeyboardInterrupt"
        wait_gone(kernel.children(), 5)
        assert kernel.workers() == []


POOL = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
def train():
    it = iter(DataLoader(Quick(), num_workers=2))
    next(it)
    raise ValueError("mine")
"""


@pytest.mark.parametrize("call", ["pool.submit(train).result()", "import asyncio\nawait asyncio.to_thread(train)"])
def test_a9_a_failed_job_of_a_pool_leaves_no_worker(kernel: Kernel, call: str) -> None:
    kernel.ok(POOL)
    for _ in range(3):
        assert kernel.run(call).ename == "ValueError"
        assert kernel.children() == []
    kernel.ok("pool.shutdown()")


def test_a15_a_job_of_a_pool_that_was_idle_belongs_to_the_cell_that_gave_it(kernel: Kernel) -> None:
    kernel.ok(
        POOL + "pool.submit(int).result()\ndef wait():\n    for batch in DataLoader(Stuck(), num_workers=2): pass"
    )
    cell = kernel.begin("job = pool.submit(wait); job.result()")
    processes = kernel.wait_for_workers(2)
    time.sleep(0.3)
    kernel.interrupt(group=False)
    assert kernel.finish(cell, 30).ename == "KeyboardInterrupt"
    assert all(is_gone(process) for process in processes)
    assert kernel.ok("type(job.exception(10)).__name__").value == "LoaderGuardError"
    kernel.ok("pool.shutdown()")


def test_an_async_cell_stays_alive_while_other_code_runs_cells(kernel: Kernel) -> None:
    reply = kernel.run(
        "import asyncio\n"
        "it = iter(DataLoader(Quick(20), num_workers=1))\n"
        "async def other():\n    get_ipython().run_cell('1 + 1')\n"
        "task = asyncio.create_task(other())\n"
        "await asyncio.sleep(0.3)\n"
        "await task\n"
        "print(len(list(it)))"
    )
    assert reply.stdout.endswith("20\n")
    assert reply.status == "ok"


def test_a_sigint_for_a_process_that_the_user_forked_is_no_interrupt_of_the_cell(kernel: Kernel) -> None:
    kernel.ok(
        "it = iter(DataLoader(Quick(), num_workers=1)); next(it)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try:\n        time.sleep(30)\n    except BaseException:\n        os._exit(0)\n"
        "time.sleep(0.3); os.kill(pid, signal.SIGINT); os.waitpid(pid, 0)"
    )
    assert len(kernel.workers()) == 1
    assert kernel.ok("int(next(it)[0, 0])").value == 1


def _in_subshell(kernel: Kernel, code: str) -> str:
    """Send a cell to a subshell of its own; return the message's id."""
    kernel.client.control_channel.send(kernel.client.session.msg("create_subshell_request"))
    subshell = kernel.client.get_control_msg(timeout=10)["content"]["subshell_id"]
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    request = kernel.client.session.msg("execute_request", {**content, "stop_on_error": True})
    request["header"]["subshell_id"] = subshell
    kernel.client.shell_channel.send(request)
    return request["header"]["msg_id"]


def test_a_guarded_cell_leaves_the_loaders_of_a_subshell_alone(own_kernel: Kernel) -> None:
    main = own_kernel.begin("%%guarded_loader --name report\nprint('go'); time.sleep(2)")
    own_kernel.wait_for_output(main, "go")
    other = _in_subshell(own_kernel, "count = len(list(DataLoader(Slow(200), num_workers=1)))")
    own_kernel.finish(main, 30)
    reply = own_kernel.finish(other, 30)
    assert reply.status == "ok", reply.traceback
    assert own_kernel.ok("count, report.batches, report.loaders").value == (200, 0, 0)


def test_async_cells_in_main_and_in_a_subshell_at_once(own_kernel: Kernel) -> None:
    main = own_kernel.begin(
        "import asyncio\nprint('go')\nfor batch in DataLoader(Stuck(), num_workers=1): await asyncio.sleep(0)"
    )
    own_kernel.wait_for_output(main, "go")
    own_kernel.wait_for_workers(1)
    reply = own_kernel.finish(_in_subshell(own_kernel, "import asyncio\nawait asyncio.sleep(0.1)\nx = 5"), 30)
    assert reply.status == "ok"
    assert "Error in callback" not in reply.stdout + reply.stderr
    own_kernel.interrupt()
    assert own_kernel.finish(main, 30).ename == "KeyboardInterrupt"
    wait_until(lambda: own_kernel.children() == [])


def test_clean_takes_an_expression_with_quotes(kernel: Kernel) -> None:
    kernel.ok("loaders = {'train': DataLoader(Quick(), num_workers=1)}; it = iter(loaders['train'])")
    assert "stopped 1 worker of 1 loader" in kernel.ok("%loaderguard clean loaders['train']").stdout
    assert kernel.run("%loaderguard clean ²").stderr.startswith("UsageError: %loaderguard clean: '²' is not a loader")


def test_cells_are_numbered_as_ipython_numbers_them(any_kernel: Kernel) -> None:
    any_kernel.ok("it = iter(DataLoader(Quick(), num_workers=1)); seen = lg.snapshot().loaders[0].cell")
    number = any_kernel.ok(
        "max(number for number, source in enumerate(In) if 'seen = ' in source and 'max' not in source)"
    ).value
    assert any_kernel.ok("seen, lg.snapshot().loaders[0].cell").value == (number, number)
    any_kernel.ok("it = None")
