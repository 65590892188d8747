"""A18, A19, A22, A25: the kernel itself survives its workers, and can be interrupted."""

from __future__ import annotations

import time

import pytest

from .driver import Kernel, is_gone, wait_until


@pytest.mark.parametrize("signame", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a18_a_worker_that_dies_while_the_notebook_is_idle_leaves_the_kernel_alive(
    any_kernel: Kernel, signame: str
) -> None:
    any_kernel.ok("it = iter(DataLoader(Quick(), num_workers=2, prefetch_factor=2)); next(it)")
    victim = any_kernel.workers()[1]
    victim.send_signal(getattr(__import__("signal"), signame))
    wait_until(lambda: is_gone(victim))
    time.sleep(0.3)
    assert any_kernel.ok("1 + 1").value == 2
    reply = any_kernel.run("for batch in it: pass")
    assert reply.ename == "RuntimeError"
    assert f"(pid(s) {victim.pid}) exited unexpectedly" in reply.evalue
    assert f"worker 1 (pid {victim.pid}) was ended by {signame}" in reply.evalue


def test_a18_a_persistent_loader_says_which_worker_died_and_then_works_again(kernel: Kernel, method: str) -> None:
    kernel.ok(
        f"loader = DataLoader(Quick(20), num_workers=2, persistent_workers=True, multiprocessing_context='{method}')\n"
        "for batch in loader: pass"
    )
    first = kernel.workers()
    first[0].kill()
    wait_until(lambda: is_gone(first[0]))
    reply = kernel.run("for batch in loader: pass")
    assert reply.ename == "RuntimeError"
    assert f"worker 0 (pid {first[0].pid}) was ended by SIGKILL" in reply.evalue
    assert reply.seconds < 4  # plain torch needs 5 s to notice
    assert all(is_gone(process) for process in first), "the other worker stayed, held by the traceback"
    assert kernel.ok("len(list(loader))").value == 20


def test_a18_a_worker_that_dies_in_the_loops_body_is_told_by_the_next_batch_not_inside_of_the_body(
    kernel: Kernel,
) -> None:
    reply = kernel.run(
        "body_ends = 0\n"
        "for batch in DataLoader(Quick(), num_workers=2):\n"
        "    os.kill(lg.snapshot().workers[0].pid, signal.SIGKILL)\n"
        "    time.sleep(0.5)\n"
        "    body_ends += 1"
    )
    assert reply.ename == "RuntimeError"
    assert "was ended by SIGKILL" in reply.evalue
    # a batch of the other worker may have arrived before the death, and is delivered
    assert kernel.ok("body_ends").value in (1, 2)


@pytest.mark.parametrize(
    ("way", "fate"),
    [("os._exit(3)", "ended with exit code 3"), ("os._exit(0)", "ended with exit code 0")],
)
def test_a18_a_worker_that_leaves_while_the_loop_waits_is_told_at_once(kernel: Kernel, way: str, fate: str) -> None:
    kernel.ok(f"class Leaves(Quick):\n    def __getitem__(self, index):\n        {way}")
    reply = kernel.run("for batch in DataLoader(Leaves(), num_workers=1): pass")
    assert reply.ename == "RuntimeError"
    assert fate in reply.evalue
    assert reply.seconds < 4


def test_iterable_datasets_whose_workers_end_one_after_the_other_are_no_deaths(kernel: Kernel, method: str) -> None:
    kernel.ok("def values(**options):\n    return sorted(int(b[0]) for b in DataLoader(Stream(30), None, **options))")
    reply = kernel.ok(
        f"values(num_workers=3, multiprocessing_context='{method}') == sorted("
        "index for first in range(3) for index in range(first, 30 * (first + 1), 3))"
    )
    assert reply.value is True


def test_a_timeout_of_the_user_still_counts_from_the_wait(kernel: Kernel) -> None:
    reply = kernel.run("for batch in DataLoader(Stuck(), num_workers=2, timeout=1): pass")
    assert reply.ename == "RuntimeError"
    assert "timed out after 1 seconds" in reply.evalue
    assert 1 <= reply.seconds < 6
    reply = kernel.run("for batch in DataLoader(Stream(8), None, num_workers=3, timeout=2): time.sleep(0.05)")
    assert reply.status == "ok"


CYCLE = """
class Box: pass
box = Box(); box.me = box
box.it = iter(DataLoader({dataset}(), num_workers={n}))
if "{dataset}" == "Quick": next(box.it)
"""


@pytest.mark.parametrize(("dataset", "n"), [("Quick", 8), ("Stuck", 4)])
def test_a19_the_collector_does_not_freeze_the_kernel(kernel: Kernel, dataset: str, n: int) -> None:
    kernel.ok(CYCLE.format(dataset=dataset, n=n))
    processes = kernel.wait_for_workers(n)
    kernel.ok("import gc; gc.collect(); gc.disable()")
    reply = kernel.ok("del box; since = time.time(); gc.collect(); took = time.time() - since; gc.enable(); took")
    assert float(reply.result["text/plain"]) < 4  # plain torch: 5 s per worker
    assert all(is_gone(process) for process in processes)


def test_a19_an_interrupt_while_the_collector_stops_workers_is_not_lost(kernel: Kernel) -> None:
    kernel.ok("%config LoaderGuard.grace_seconds = 3")
    kernel.ok("class Box: pass\nbox = Box(); box.it = iter(DataLoader(Stuck(), num_workers=2))")
    kernel.wait_for_workers(2)
    cell = kernel.begin("print('go')\ndel box\nwhile True: time.sleep(0.01)")
    kernel.wait_for_output(cell, "go")
    time.sleep(0.5)
    kernel.interrupt(group=False)
    reply = kernel.finish(cell, 20)
    kernel.ok("%config LoaderGuard.grace_seconds = 0.5")
    assert reply.ename == "KeyboardInterrupt"
    assert "Exception ignored" not in reply.stderr


ASYNC = """
import asyncio
await asyncio.sleep(0)
print("go")
{body}
"""
IN_A_TASK = """
async def train():
    for batch in DataLoader(Stuck(), num_workers=2): pass
await asyncio.gather(train())
"""


def test_a22_an_interrupt_reaches_a_wait_for_data_in_an_async_cell(any_kernel: Kernel) -> None:
    cell = any_kernel.begin(ASYNC.format(body="for batch in DataLoader(Stuck(), num_workers=2): pass"))
    any_kernel.wait_for_output(cell, "go")
    processes = any_kernel.wait_for_workers(2)
    any_kernel.interrupt()
    reply = any_kernel.finish(cell, 20)
    assert reply.ename == "KeyboardInterrupt"
    assert reply.seconds < 5
    assert all(is_gone(process) for process in processes)


def test_a22_also_in_a_task_of_the_cell_and_the_kernel_lives_on(any_kernel: Kernel) -> None:
    cell = any_kernel.begin(ASYNC.format(body=IN_A_TASK))
    processes = any_kernel.wait_for_workers(2)
    time.sleep(0.3)
    any_kernel.interrupt()
    reply = any_kernel.finish(cell, 20)
    assert reply.ename in ("CancelledError", "KeyboardInterrupt")
    assert all(is_gone(process) for process in processes)
    assert any_kernel.ok("1 + 1").value == 2


def test_a22_an_async_cell_that_awaits_is_cancelled_as_ever_and_its_workers_are_gone(any_kernel: Kernel) -> None:
    cell = any_kernel.begin(
        ASYNC.format(body="it = iter(DataLoader(Quick(), num_workers=2)); await asyncio.sleep(600)")
    )
    processes = any_kernel.wait_for_workers(2)
    time.sleep(0.2)
    any_kernel.interrupt()
    reply = any_kernel.finish(cell, 20)
    assert reply.ename == "CancelledError"
    assert all(is_gone(process) for process in processes)


THREAD = """
said = []
def work():
    try:
        for batch in DataLoader(Stuck(), num_workers=2): pass
    except RuntimeError as error:
        said.append(str(error))
thread = threading.Thread(target=work); thread.start()
"""


def test_a25_a_dead_worker_of_a_threads_loader_is_noticed_at_once(any_kernel: Kernel) -> None:
    any_kernel.ok(THREAD)
    victim = any_kernel.wait_for_workers(2)[0]
    time.sleep(0.3)
    victim.kill()
    reply = any_kernel.ok("since = time.time(); thread.join(20); took = time.time() - since; took")
    assert float(reply.result["text/plain"]) < 4  # plain torch: 5 s
    assert "was ended by SIGKILL" in any_kernel.ok("said[0]").value  # type: ignore[operator]


def test_a25_also_when_the_iterator_was_made_in_a_subshell(own_kernel: Kernel) -> None:
    message = own_kernel.client.session.msg("create_subshell_request")
    own_kernel.client.control_channel.send(message)
    subshell = own_kernel.client.get_control_msg(timeout=10)["content"]["subshell_id"]
    request = own_kernel.client.session.msg(
        "execute_request",
        {
            "code": "for batch in DataLoader(Stuck(), num_workers=2): pass",
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        },
    )
    request["header"]["subshell_id"] = subshell
    own_kernel.client.shell_channel.send(request)
    victim, other = own_kernel.wait_for_workers(2)
    time.sleep(0.3)
    victim.kill()
    reply = own_kernel.finish(request["header"]["msg_id"], 20)
    assert reply.ename == "RuntimeError"
    assert "was ended by SIGKILL" in reply.evalue
    assert is_gone(other), "the cell of the subshell failed, and its other worker stayed"
