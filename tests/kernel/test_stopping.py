"""However a cell ends, its workers are gone and nothing else is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .driver import CAN_UNSHARE, Kernel, Reply, is_gone, wait_gone, wait_until

LOOP = "for batch in DataLoader({dataset}(), batch_size=4, num_workers={n}, multiprocessing_context='{method}'): pass"


def loop(dataset: str, method: str = "fork", n: int = 2) -> str:
    return LOOP.format(dataset=dataset, method=method, n=n)


def interrupted(kernel: Kernel, code: str, workers: int, group: bool = True) -> tuple[Reply, list[psutil.Process]]:
    """Run a cell, interrupt it once its workers load, and return what it said and who they were."""
    cell = kernel.begin(code)
    processes = kernel.wait_for_workers(workers)
    time.sleep(0.2)  # into the dataset's code; earlier would be a different, also valid, test
    kernel.interrupt(group)
    reply = kernel.finish(cell, 30, when_lost=lambda: kernel.interrupt(group))
    return reply, processes


def assert_interrupted_and_clean(reply: Reply, processes: list[psutil.Process]) -> None:
    assert reply.ename == "KeyboardInterrupt"
    assert [process for process in processes if not is_gone(process)] == []
    assert "pid" not in reply.stderr
    assert "Traceback" not in reply.stderr


def test_a1_interrupt_of_the_group_leaves_no_worker_and_no_text(any_kernel: Kernel, method: str) -> None:
    reply, processes = interrupted(any_kernel, loop("Slow", method), 2)
    assert_interrupted_and_clean(reply, processes)
    assert reply.stdout == ""


def test_a2_interrupt_of_the_kernel_alone_leaves_no_worker(any_kernel: Kernel, method: str) -> None:
    reply, processes = interrupted(any_kernel, loop("Slow", method), 2, group=False)
    assert_interrupted_and_clean(reply, processes)


@pytest.mark.parametrize("dataset", ["Stuck", "Stubborn", "HoldsGil"])
def test_a3_workers_that_never_return_are_gone_after_an_interrupt(kernel: Kernel, method: str, dataset: str) -> None:
    reply, processes = interrupted(kernel, loop(dataset, method, n=3), 3)
    assert_interrupted_and_clean(reply, processes)
    assert reply.seconds < 5


def test_a3_a_stopped_worker_is_gone_after_an_interrupt(kernel: Kernel) -> None:
    cell = kernel.begin(loop("Slow"))
    processes = kernel.wait_for_workers(2)
    processes[0].suspend()
    kernel.interrupt()
    assert_interrupted_and_clean(kernel.finish(cell, 30), processes)


@pytest.mark.parametrize("dataset", ["Stuck", "Stubborn"])
def test_a4_deleting_an_iterator_over_stuck_workers_is_quick(kernel: Kernel, dataset: str) -> None:
    kernel.ok(f"it = iter(DataLoader({dataset}(), num_workers=8))")
    processes = kernel.wait_for_workers(8)
    reply = kernel.ok("since = time.time(); del it; time.time() - since")
    assert float(reply.result["text/plain"]) < 5  # plain torch: 40 s
    assert all(is_gone(process) for process in processes)


def test_a5_a_persistent_loader_works_again_after_an_interrupt(any_kernel: Kernel, method: str) -> None:
    any_kernel.ok(
        f"loader = DataLoader(Slow(200), num_workers=2, persistent_workers=True, multiprocessing_context='{method}')"
    )
    reply, processes = interrupted(any_kernel, "for batch in loader: pass", 2)
    assert_interrupted_and_clean(reply, processes)
    assert any_kernel.ok("[int(batch[0, 0]) for batch in loader] == list(range(200))").value is True
    again = any_kernel.workers()
    assert len(again) == 2
    assert not set(again) & set(processes)


@pytest.mark.parametrize(
    "holder",
    [
        "it = iter(loader)\n    for batch in it:\n        raise ValueError",
        "for batch in enumerate(tqdm(loader)):\n        raise ValueError",
        "it = iter(loader); next(it)\n    kept.append(it)\n    raise ValueError",
    ],
    ids=["local", "wrapped", "kept by an object"],
)
def test_a9_a_failed_cell_leaves_no_worker_however_often_it_is_run(any_kernel: Kernel, holder: str) -> None:
    any_kernel.ok(
        "def tqdm(things):\n    for thing in things:\n        yield thing\n"
        "kept = []\nerrors = []\n"
        f"def train():\n    loader = DataLoader(Quick(), num_workers=4)\n    {holder}\n"
    )
    for _ in range(4):
        assert any_kernel.run("train()").ename == "ValueError"
        assert any_kernel.children() == []


def test_a9_an_error_that_the_user_keeps_does_not_keep_workers(kernel: Kernel) -> None:
    kernel.ok("errors = []\ndef train():\n    it = iter(DataLoader(Quick(), num_workers=2))\n    next(it)\n    1 / 0")
    reply = kernel.run("try:\n    train()\nexcept ZeroDivisionError as error:\n    errors.append(error)\n    raise")
    assert reply.ename == "ZeroDivisionError"
    assert kernel.children() == []
    assert kernel.ok("len(errors)").value == 1


def test_contract_an_error_spares_named_persistent_and_threaded_loaders(kernel: Kernel) -> None:
    reply = kernel.run(
        "it = iter(DataLoader(Quick(), num_workers=1))\n"
        "persistent = DataLoader(Quick(8), num_workers=1, persistent_workers=True)\n"
        "for batch in persistent: pass\n"
        "def work():\n    for batch in DataLoader(Slow(300), num_workers=1): seen.append(1)\n"
        "seen = []\nthread = threading.Thread(target=work); thread.start()\n"
        "while not seen: time.sleep(0.01)\n"
        "raise KeyError('mine')"
    )
    assert reply.ename == "KeyError"
    assert len(kernel.workers()) == 3
    assert kernel.ok("len([next(it) for _ in range(5)])").value == 5
    assert kernel.ok("len(list(persistent))").value == 8
    assert kernel.ok("count = len(seen); time.sleep(0.3); len(seen) > count").value is True
    kernel.ok("lg.clean(); thread.join(10)")


def test_contract_a_named_iterator_is_gone_once_only_a_traceback_holds_it(kernel: Kernel) -> None:
    code = "it = iter(DataLoader(Quick(), num_workers=2))\ndef use(it):\n    next(it); assert not failing\nuse(it)"
    kernel.ok("failing = True")
    assert kernel.run(code).ename == "AssertionError"
    first = kernel.workers()
    assert len(first) == 2
    kernel.ok("failing = False")
    kernel.ok(code)
    assert all(is_gone(process) for process in first)
    assert len(kernel.workers()) == 2


def test_contract_a_normal_end_keeps_what_is_referenced_and_ends_what_is_not(kernel: Kernel) -> None:
    kernel.ok(
        "class Box: pass\n"
        "box = Box(); box.it = iter(DataLoader(Quick(), num_workers=1))\n"
        "lost = Box(); lost.me = lost; lost.it = iter(DataLoader(Stuck(), num_workers=2)); del lost"
    )
    assert len(kernel.workers()) == 1
    assert kernel.ok("next(box.it).shape[0]").value == 1


def test_contract_a_normal_end_ends_a_stuck_iterator_in_a_cycle_at_once(kernel: Kernel) -> None:
    kernel.ok(
        "class Box: pass\nbox = Box(); box.me = box; box.it = iter(DataLoader(Stubborn(), num_workers=2)); del box"
    )
    assert kernel.children() == []


def test_contract_what_the_collector_ends_in_another_thread_is_gone_with_the_cell(kernel: Kernel) -> None:
    kernel.ok(
        "import gc\ngc.disable()\nclass Box: pass\n"
        "box = Box(); box.me = box; box.it = iter(DataLoader(Stuck(), num_workers=2)); del box\n"
        "collecting = threading.Thread(target=gc.collect); collecting.start()\n"
        "time.sleep(0.2)  # into the grace that its workers have"
    )
    assert kernel.children() == []
    kernel.ok("gc.enable(); collecting.join()")


def test_contract_an_interrupt_spares_what_the_cell_did_not_iterate(kernel: Kernel) -> None:
    kernel.ok(
        "idle = DataLoader(Quick(8), num_workers=1, persistent_workers=True)\n"
        "for batch in idle: pass\n"
        "waiting = iter(DataLoader(Quick(), num_workers=1)); next(waiting)\n"
        "used = iter(DataLoader(Slow(), num_workers=1)); next(used)\n"
        "done = DataLoader(Quick(8), num_workers=1, persistent_workers=True)\n"
    )
    before = dict(_worker_by_loader(kernel))
    reply, _ = interrupted(kernel, "for batch in done: pass\nfor batch in used: pass", 4)
    assert reply.ename == "KeyboardInterrupt"
    assert len(kernel.workers()) == 2  # `done` was started in the interrupted cell, `used` was being iterated in it
    assert before["idle"] in [process.pid for process in kernel.workers()]
    assert kernel.ok("len(list(idle)), int(next(waiting)[0, 0])").value == (8, 1)
    assert kernel.ok("len(list(done))").value == 8


def test_contract_an_interrupt_spares_a_persistent_loader_whose_epoch_was_over(kernel: Kernel) -> None:
    kernel.ok("val = DataLoader(Quick(8), num_workers=1, persistent_workers=True)\nfor batch in val: pass")
    before = kernel.workers()
    reply, _ = interrupted(kernel, "for batch in val: pass\n" + loop("Slow", n=1), 2)
    assert reply.ename == "KeyboardInterrupt"
    assert kernel.workers() == before
    assert kernel.ok("len(list(val))").value == 8


def _worker_by_loader(kernel: Kernel) -> list[tuple[str, int]]:
    return kernel.ok("[(l.name, w.pid) for l in lg.snapshot().loaders for w in l.workers]").value  # type: ignore[return-value]


SWALLOWING = """
try:
    {loop}
except KeyboardInterrupt:
    print("swallowed")
"""
OWN_HANDLER = """
class Enough(Exception): pass
def mine(signum, frame):
    raise Enough
signal.signal(signal.SIGINT, mine)
try:
    {loop}
except Enough:
    print("swallowed")
signal.getsignal(signal.SIGINT) is mine
"""
AS_LIGHTNING_DOES = """
try:
    {loop}
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("swallowed")
    raise SystemExit
"""


@pytest.mark.parametrize("code", [SWALLOWING, OWN_HANDLER, AS_LIGHTNING_DOES], ids=["swallow", "handler", "exit"])
def test_a10_an_interrupt_that_user_code_takes_for_itself_still_ends_workers(any_kernel: Kernel, code: str) -> None:
    held = (
        "def train():\n    global kept\n    kept = iter(DataLoader(Slow(), num_workers=2))\n    for b in kept: pass\n"
    )
    any_kernel.ok(held)
    reply, processes = interrupted(any_kernel, code.format(loop="train()"), 2)
    assert "swallowed" in reply.stdout
    assert all(is_gone(process) for process in processes)
    if code is OWN_HANDLER:
        assert reply.value is True


def test_a11_interrupts_in_a_row_shorten_the_stop_and_never_break_it(kernel: Kernel) -> None:
    cell = kernel.begin(
        "lg_config = get_ipython().run_line_magic('config', 'LoaderGuard.grace_seconds = 20')\n" + loop("Stubborn", n=4)
    )
    processes = kernel.wait_for_workers(4)
    time.sleep(0.3)
    kernel.interrupt()
    since = time.monotonic()
    while any(not is_gone(process) for process in processes):
        assert time.monotonic() - since < 15, "a second interrupt did not shorten the grace of 20 s"
        time.sleep(0.05)
        kernel.interrupt(group=False)
    # one that hits IPython when it is done with the code makes ipykernel give up the reply
    assert kernel.finish(cell, 30, when_lost=kernel.interrupt).status in ("error", "aborted")
    assert kernel.ok("1 + 1").value == 2
    kernel.ok("%config LoaderGuard.grace_seconds = 0.5")
    assert kernel.workers() == []


def test_a11_an_interrupt_inside_of_ipython_itself_leaves_no_worker_either(any_kernel: Kernel) -> None:
    any_kernel.ok(
        "events = get_ipython().events\ndef interrupted(*arguments):\n    del events.trigger\n    raise KeyboardInterrupt"
    )
    cell = any_kernel.begin("events.trigger = interrupted\n" + loop("Stuck", n=2))
    processes = any_kernel.wait_for_workers(2)
    time.sleep(0.3)
    since = time.monotonic()
    while any(not is_gone(process) for process in processes):  # without another cell
        assert time.monotonic() - since < 20, "workers live on"
        any_kernel.interrupt()  # again, if Python has lost one; none is heard when the cell is over
        time.sleep(1)
    assert any_kernel.finish(cell, 30, when_lost=lambda: None).status == "aborted"
    assert any_kernel.ok("len(lg.snapshot().loaders), 'trigger' in vars(events)").value == (0, False)


def test_a12_what_a_worker_started_goes_with_it(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.begin(f"for batch in DataLoader(StartsProcesses({str(tmp_path)!r}, stuck=True), num_workers=2): pass")
    wait_until(lambda: len([name for name in os.listdir(tmp_path) if "." not in name]) == 2, 30)
    family = _family(tmp_path)
    kernel.interrupt(group=False)
    kernel.finish(cell, 30)
    assert [process for process in family if not is_gone(process)] == []


def test_a12_also_when_the_epoch_ends_by_itself(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(f"for batch in DataLoader(StartsProcesses({str(tmp_path)!r}, length=20), num_workers=2): pass")
    assert [process for process in _family(tmp_path) if not is_gone(process)] == []


def _family(folder: Path) -> list[psutil.Process]:
    pids = [int(pid) for path in folder.iterdir() if "." not in path.name for pid in path.read_text().split()]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_a13_other_children_of_the_user_are_neither_listed_nor_touched(kernel: Kernel) -> None:
    kernel.ok(
        "import multiprocessing, subprocess\n"
        "sleeper = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "pool = multiprocessing.get_context('spawn').Pool(1)\n"
        "pool.apply(os.getpid)"
    )
    pids = kernel.ok("(sleeper.pid, pool.apply(os.getpid))").value
    reply, _ = interrupted(kernel, loop("Stuck"), 2, group=False)
    assert reply.ename == "KeyboardInterrupt"
    assert kernel.workers() == []
    assert kernel.ok("lg.clean().pids").value == ()
    refused = kernel.run(f"lg.clean({pids[0]})")  # type: ignore[index]
    assert refused.ename == "LoaderGuardError"
    assert kernel.ok("(sleeper.poll(), pool.apply(os.getpid))").value == (None, pids[1])  # type: ignore[index]
    kernel.ok("sleeper.kill(); sleeper.wait(); pool.terminate(); pool.join()")


def test_a13_code_that_waits_for_all_children_does_not_wait_for_the_guard(own_kernel: Kernel) -> None:
    own_kernel.ok("for batch in DataLoader(Quick(8), num_workers=2): pass")
    reply = own_kernel.ok(
        "import subprocess\nsubprocess.Popen(['true'])\n"
        "try:\n    while True: os.wait()\nexcept ChildProcessError: pass\n'done'"
    )
    assert reply.value == "done"


PINNED = """
import queue
loader = DataLoader({dataset}(), batch_size=4, num_workers=2, prefetch_factor=8)
it = iter(loader)
def pin():
    # torch's pin-memory thread needs an accelerator; this one does the same with the same queues
    while not it._pin_memory_thread_done_event.is_set():
        try:
            item = it._worker_result_queue.get(timeout=5)
        except queue.Empty:
            continue
        if not it._pin_memory_thread_done_event.is_set():
            it._data_queue.put(item)
it._data_queue = queue.Queue(1)
it._pin_memory = True
it._pin_memory_thread_done_event = threading.Event()
it._pin_memory_thread = threading.Thread(target=pin, daemon=True)
it._pin_memory_thread.start()
"""


@pytest.mark.parametrize("dataset", ["Big", "Stuck"])
def test_a14_a_thread_between_queue_and_loop_ends_first_and_nothing_hangs(kernel: Kernel, dataset: str) -> None:
    kernel.ok(PINNED.format(dataset=dataset))
    processes = kernel.wait_for_workers(2)
    kernel.ok("thread = it._pin_memory_thread")
    reply = kernel.ok("since = time.time(); lg.clean(it); time.time() - since")
    assert float(reply.result["text/plain"]) < 5
    assert all(is_gone(process) for process in processes)


def test_a14_full_queues_in_both_directions_do_not_hang_the_stop(kernel: Kernel) -> None:
    kernel.ok(
        "it = iter(DataLoader(Stuck(2_000_000), batch_size=200_000, num_workers=2, prefetch_factor=4))\n"
        "out = iter(DataLoader(Big(), batch_size=4, num_workers=2, prefetch_factor=16))"
    )
    processes = kernel.wait_for_workers(4)
    assert kernel.ok("lg.clean().left").value == 0
    assert all(is_gone(process) for process in processes)


THREAD = """
seen = []
def work():
    for batch in DataLoader(Slow(), num_workers=2):
        seen.append(len(batch))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
NESTED = """
for batch in DataLoader(Quick(), num_workers=1):
    for inner in DataLoader(Slow(), num_workers=1):
        pass
"""


def test_a15_loaders_of_a_thread_that_the_cell_started_end_with_an_interrupt(kernel: Kernel) -> None:
    reply, processes = interrupted(kernel, THREAD, 2)
    assert reply.ename == "KeyboardInterrupt"
    assert all(is_gone(process) for process in processes)
    kernel.ok("thread.join(10); assert not thread.is_alive()")


def test_a15_nested_loops_end_together(kernel: Kernel) -> None:
    reply, processes = interrupted(kernel, NESTED, 2)
    assert_interrupted_and_clean(reply, processes)


def test_a15_a_thread_of_an_earlier_cell_keeps_its_loaders(kernel: Kernel) -> None:
    kernel.ok(
        "seen, stop = [], threading.Event()\n"
        "def work():\n"
        "    while not stop.is_set():\n"
        "        for batch in DataLoader(Slow(20), num_workers=1): seen.append(1)\n"
        "thread = threading.Thread(target=work); thread.start()"
    )
    cell = kernel.begin("print('go')\n" + loop("Stuck", n=1))
    kernel.wait_for_output(cell, "go")
    wait_until(lambda: len(kernel.children()) >= 2, 30)
    time.sleep(1)  # several epochs of the thread begin while this cell runs
    kernel.interrupt()
    assert kernel.finish(cell, 30).ename == "KeyboardInterrupt"
    assert kernel.ok("count = len(seen); time.sleep(1.0); len(seen) > count, thread.is_alive()").value == (True, True)
    kernel.ok("stop.set(); thread.join(20)")


def test_a16_too_many_workers_run_and_are_gone(kernel: Kernel) -> None:
    reply = kernel.ok(
        "data = torch.zeros(2000, 64, 64)\nsum(len(b) for b in DataLoader(data, batch_size=50, num_workers=8))"
    )
    assert reply.value == 2000
    assert kernel.children() == []


RESOURCES = """
import gc, psutil
gc.collect()
me = psutil.Process()
(len(me.children(recursive=True)), me.num_threads(), me.num_fds(), len(os.listdir('/dev/shm')), me.memory_info().rss)
"""


@pytest.fixture
def secluded_kernel() -> Iterator[Kernel]:
    """A kernel with a /dev/shm of its own, where that can be had: others' files do not count."""
    kernel = Kernel(
        wrapper=("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh") if CAN_UNSHARE else ()
    )
    yield kernel
    kernel.close()


def test_a17_interrupted_reruns_leave_nothing_behind(secluded_kernel: Kernel) -> None:
    kernel = secluded_kernel
    code = "loader = DataLoader(Slow(), num_workers=2)\ndef train():\n    for batch in loader: pass\ntrain()"
    for _ in range(3):
        interrupted(kernel, code, 2)
    before = kernel.ok(RESOURCES).value
    for _ in range(12):
        interrupted(kernel, code, 2)
    # one more or less is the moment's chance; a leak of one per run would be twelve, and would stay
    measured: list[tuple[int, ...]] = []

    def is_as_before() -> bool:
        measured.append(kernel.ok(RESOURCES).value)  # type: ignore[arg-type]
        return all(now - then <= 2 for now, then in zip(measured[-1][:4], before[:4], strict=True))  # type: ignore[index]

    wait_until(is_as_before, what=f"resources as before, {before},")
    after = measured[-1]
    assert after[4] - before[4] < 20e6  # type: ignore[index]


def test_a20_an_interrupt_while_nothing_runs_spares_idle_workers(any_kernel: Kernel, method: str) -> None:
    any_kernel.ok(
        f"loader = DataLoader(Quick(20), num_workers=2, persistent_workers=True, multiprocessing_context='{method}')\n"
        "for batch in loader: pass"
    )
    processes = any_kernel.workers()
    any_kernel.interrupt(group=True)
    time.sleep(0.5)
    assert [process for process in processes if is_gone(process)] == []
    assert any_kernel.ok("len(list(loader))").value == 20
    assert any_kernel.workers() == processes


def test_workers_are_named_in_time_even_if_the_start_is_interrupted(kernel: Kernel) -> None:
    """An interrupt while workers are still being started: none is lost between birth and record."""
    for pause in (0.05, 0.2, 0.6, 1.0):
        cell = kernel.begin("print('go')\n" + loop("Stuck", "spawn", n=3))
        kernel.wait_for_output(cell, "go")
        time.sleep(pause)
        kernel.interrupt()
        assert kernel.finish(cell, 30).ename == "KeyboardInterrupt"
        wait_gone(kernel.children(), 5)
