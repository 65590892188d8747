"""B1-B6, B10, B11: a batch that does not come; the card says which worker, which sample, what it does, and where."""

from __future__ import annotations

import html
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .driver import CAN_UNSHARE, SETUP, Kernel, is_gone, wait_gone, wait_until

PROGRAMS = "tests/programs/stalls.py"
# torch is imported once in the forkserver, not in every worker
STALLS = f"{SETUP}\nfrom tests.programs import stalls\nimport multiprocessing\nNAMES |= set(globals())\n"
PRELOAD = "multiprocessing.set_forkserver_preload(['torch', 'tests.programs.stalls'])"


@pytest.fixture(scope="module")
def _stall_kernel() -> Iterator[Kernel]:
    kernel = Kernel(setup=STALLS)
    kernel.ok(PRELOAD)
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(_stall_kernel: Kernel) -> Iterator[Kernel]:
    yield _stall_kernel
    wait_until(lambda: not _stall_kernel.children(), what=f"the end of {_stall_kernel.children()}")


def card_of(kernel: Kernel, loader: str, stall: float = 1.0, before: str = "") -> tuple[str, str, dict[int, str]]:
    """Return the card of a loop that waits for ever, as text and as HTML, and the workers' names; then interrupt it."""
    cell = kernel.begin(f"%%guarded_loader --stall {stall} --no-widget\n{before}\nfor batch in {loader}:\n    pass")
    card = kernel.wait_for_display(cell)
    workers = kernel.children()
    names = {process.pid: Path(f"/proc/{process.pid}/comm").read_text().strip() for process in workers}
    kernel.interrupt()
    reply = kernel.finish(cell)
    assert reply.ename == "KeyboardInterrupt", (reply.stderr, reply.traceback)
    wait_gone(workers)
    return card["text/plain"], card["text/html"], names


def loader_of(dataset: str, method: str, options: str = "") -> str:
    return f"DataLoader({dataset}, num_workers=2, multiprocessing_context={method!r}, {options})"


# what the loader is made of, what is said of the sample, what it is doing, in which function
CASES = {
    "B1 loop": ("stalls.Loops()", "", "on sample 5", r"CPU-bound \(\d+ % of a CPU\)", "get_stuck"),
    "sleep": ("stalls.Sleeps()", "batch_size=4", "on sample 5", "sleeping", "get_stuck"),
    "B5 GIL": ("stalls.HoldsGil()", "", "on sample 5", "sleeping", "get_stuck"),
    "collate": (
        "stalls.Dawdles(0)",
        "batch_size=2, collate_fn=stalls.stuck_collate",
        "in collate_fn of samples 4, 5",
        "sleeping",
        "stuck_collate",
    ),
    "init": (
        "stalls.Dawdles(0)",
        "worker_init_fn=stalls.stuck_init",
        r"in its start \(imports, worker_init_fn\)",
        "sleeping",
        "stuck_init",
    ),
    "getitems": ("stalls.Whole()", "batch_size=4", "on samples 4, 5, 6, 7", r"CPU-bound \(\d+ % of a CPU\)", "get_stuck"),
    "getitems at once": ("stalls.AtOnce()", "batch_size=4", "on samples 4, 5, 6, 7", "sleeping", "__getitems__"),
    "iterable": ("stalls.StuckStream()", "batch_size=2", "on sample 5 of its stream", "sleeping", "__iter__"),
    "iterable unbatched": ("stalls.StuckStream()", "batch_size=None", "on sample 5 of its stream", "sleeping", "__iter__"),
    "unbatched": ("stalls.Sleeps()", "batch_size=None", "on sample 5", "sleeping", "get_stuck"),
    "keys": ("stalls.ByName()", "batch_sampler=stalls.Keys()", r"on sample \('cat', 5\)", "sleeping", "__getitem__"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_b1_b5_the_card_names_worker_sample_and_line(kernel: Kernel, method: str, case: str) -> None:
    dataset, options, samples, kind, function = CASES[case]
    text, drawn, workers = card_of(kernel, loader_of(dataset, method, options))
    lines = text.splitlines()
    assert re.match(r"loaderguard: batch \d+( of \d+)? of DataLoader #\d+ \(\w+\) has not come for \d.* s$", lines[0])
    said = re.match(
        rf"  worker (\d) \(pid (\d+)\) has been {samples} for [\d.]+ s, {kind}, in {function}\(\) at (\S+):(\d+)$",
        lines[1],
    )
    assert said, text
    assert workers[int(said[2])] in (f"pt_data_worker{said[1]}", "pt_data_worker")
    assert said[3].endswith(PROGRAMS)
    source = Path(PROGRAMS).read_text().splitlines()[int(said[4]) - 1].strip()
    assert lines[2] == f"    › {source}"
    assert f"{PROGRAMS}:{said[4]} in {function}" in text.partition("stack, most recent call first:")[2]
    assert "_worker_loop" in text
    assert "popen_fork" not in text, "what lies below torch's loop is the kernel at the moment of the fork"
    assert html.unescape(re.sub("<[^>]*>", " ", drawn)).find(f"pid {said[2]}") > 0
    assert "<details>" in drawn


def test_b3_two_locks_in_opposite_order(kernel: Kernel, method: str) -> None:
    text, _, workers = card_of(kernel, loader_of(f"stalls.OppositeLocks({method!r})", method))
    waits = re.findall(
        r"worker \d \(pid (\d+)\) has been on sample (\d) for [\d.]+ s, waiting for a lock "
        r"\(dataset\.locks\['(\w+)'\], a multiprocessing lock\), in (\w+)\(\) at",
        text,
    )
    assert {(sample, lock, function) for _, sample, lock, function in waits} == {
        ("4", "second", "take_first_then_second"),
        ("5", "first", "get_stuck"),
    }, text
    held = re.findall(r"held by worker \d \(pid (\d+)\), which is in (\w+)\(\) at \S+:\d+: with self\.locks", text)
    assert {int(pid) for pid, *_ in waits} == {int(pid) for pid, _ in held} == set(workers)
    assert {function for _, function in held} == {"take_first_then_second", "get_stuck"}


def test_b3_a_lock_inherited_locked_by_fork(kernel: Kernel) -> None:
    kernel.ok("dataset = stalls.InheritedLock()")
    text, _, _ = card_of(kernel, loader_of("dataset", "fork"))
    kernel.ok("dataset.is_needed = False; del dataset")
    assert "on sample 5" in text
    assert "waiting for a lock (dataset.lock, a threading lock), in get_stuck()" in text
    assert "held by nobody in this worker: a thread of the kernel had locked it when the worker was forked" in text
    assert "→ Make the lock in worker_init_fn" in text


def test_b3_a_lock_that_the_kernel_itself_holds(kernel: Kernel, method: str) -> None:
    kernel.ok(f"dataset = stalls.HeldByKernel({method!r}); dataset.lock.acquire()")
    text, _, _ = card_of(kernel, loader_of("dataset", method))
    kernel.ok("dataset.lock.release(); del dataset")
    assert "waiting for a lock (dataset.lock, a multiprocessing lock), in get_stuck()" in text
    assert f"held by the kernel (pid {kernel.pid})" in text


def test_b3_a_lock_on_a_file_names_the_process_that_holds_it(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    code = f"import fcntl, time; f = open({str(path)!r}); fcntl.flock(f, 2); print(1, flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        text, _, _ = card_of(kernel, loader_of(f"stalls.FileLock({str(path)!r})", "fork"))
    finally:
        holder.kill()
        holder.communicate()
    assert f"waiting for a lock (the file lock on {path}), in get_stuck()" in text
    assert f"held by pid {holder.pid}" in text


def test_b4_a_file_that_cannot_be_read(kernel: Kernel, method: str, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    dataset = f"stalls.ReadsFifo({str(path)!r})"
    text, _, _ = card_of(kernel, loader_of(dataset, method))
    assert f"waiting for a file ({path}, which it is opening), in get_stuck()" in text
    threading.Thread(target=lambda: os.open(path, os.O_WRONLY), daemon=True).start()  # now it opens, and says nothing
    text, _, _ = card_of(kernel, loader_of(dataset, method))
    assert f"waiting for a file ({path}), in get_stuck()" in text


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_b4_a_server_that_does_not_answer(kernel: Kernel, method: str, timeout: float | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text, _, _ = card_of(kernel, loader_of(f"stalls.ReadsSocket({port}, {timeout})", method))
    assert re.search(rf"waiting for a socket \(127\.0\.0\.1:\d+ ↔ 127\.0\.0\.1:{port}\), in get_stuck\(\)", text), text


@pytest.mark.parametrize("reads", [True, False])
def test_b4_a_program_that_does_not_end(kernel: Kernel, reads: bool) -> None:
    text, _, _ = card_of(kernel, loader_of(f"stalls.WaitsForChild({reads})", "fork"))
    assert re.search(r"waiting for a child process \(sleep \(pid \d+\)\), in get_stuck\(\)", text), text


def test_b6_a_stopped_worker_and_how_to_continue_it(kernel: Kernel, method: str) -> None:
    loop = loader_of("stalls.StopsItself()", method)
    cell = kernel.begin(f"%%guarded_loader --stall 1\nn = sum(1 for batch in {loop})")
    text = kernel.wait_for_display(cell)["text/plain"]
    said = re.search(r"pid (\d+)\) has been on sample 5 for [\d.]+ s, stopped \(by a signal\)", text)
    assert said, text
    assert f"→ `kill -CONT {said[1]}` lets it go on." in text
    assert int(said[1]) in {process.pid for process in kernel.children()}
    os.kill(int(said[1]), signal.SIGCONT)
    reply = kernel.finish(cell)
    assert reply.status == "ok"
    assert kernel.ok("n").value == 64
    assert re.search(r"came after \d", reply.updates[-1]["text/plain"])


def test_b10_a_batch_that_cannot_be_sent(kernel: Kernel, method: str) -> None:
    text, _, workers = card_of(
        kernel, loader_of("stalls.Unpicklable()", method, "batch_size=4, collate_fn=stalls.as_list")
    )
    said = re.search(
        r"worker (\d) \(pid (\d+)\), sample 5: done, but its batch could not be sent: "
        r"TypeError: cannot pickle '_thread\.lock' object, at batch\[1\]\['handle'\]",
        text,
    )
    assert said, text
    assert workers[int(said[2])] == f"pt_data_worker{said[1]}"
    reply = kernel.run(
        "%%guarded_loader --stall 1 --on-stall raise\nfor batch in "
        + loader_of("stalls.Unpicklable()", method, "batch_size=4, collate_fn=stalls.as_list")
        + ": pass"
    )
    assert reply.ename == "LoaderStalled"
    assert "cannot pickle" in reply.evalue


def test_b10_an_error_that_cannot_be_sent_is_raised_as_one_that_can(kernel: Kernel) -> None:
    reply = kernel.run(f"for batch in {loader_of('stalls.UnpicklableError()', 'fork')}: pass")
    assert reply.ename == "RuntimeError"
    assert "LocalError: of sample 5" in reply.evalue
    assert "cannot be sent to the kernel, so this is a RuntimeError" in reply.traceback


def test_keys_that_cannot_be_sent_to_a_worker(kernel: Kernel) -> None:
    text, _, _ = card_of(kernel, loader_of("stalls.Dawdles(0)", "fork", "batch_sampler=stalls.UnpicklableKeys()"))
    assert "is idle: its task could not be sent to it (TypeError: cannot pickle '_thread.lock' object)" in text


@pytest.mark.skipif(not CAN_UNSHARE, reason="a /dev/shm of its own needs the right to unshare")
def test_b11_shared_memory_is_full() -> None:
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    kernel = Kernel(setup=STALLS, wrapper=("unshare", "-m", "sh", "-c", mount, "sh"))
    try:
        loader = loader_of("stalls.Large()", "fork", "batch_size=8, collate_fn=stalls.as_list")
        text, _, _ = card_of(kernel, loader)
    finally:
        kernel.close()
    assert "blocked because shared memory is full: its batch is done, but could not be sent" in text
    assert re.search(r"/dev/shm has 17 MB, \d+ MB free", text), text
    assert "needed are up to 2 workers × 2 batches × 32.0 MB = 128 MB" in text
    assert "--shm-size" in text


RAISE = "%%guarded_loader --stall 1 --on-stall raise --name report\n"
CATCH = """
try:
    for batch in {loader}:
        pass
except lg.LoaderStalled as error:
    caught = error
(caught.worker_id, caught.pid, caught.index, caught.seconds, caught.stack)
"""


@pytest.mark.parametrize("program", ["Loops", "Sleeps", "HoldsGil", "StopsItself"])
def test_raise_raises_in_the_loop_with_all_fields(kernel: Kernel, method: str, program: str) -> None:
    reply = kernel.ok(RAISE + CATCH.format(loader=loader_of(f"stalls.{program}()", method)))
    worker_id, pid, index, seconds, stack = reply.value  # type: ignore[misc]
    assert (worker_id, index) == (1, 5)
    assert not psutil.pid_exists(pid)
    assert 1 <= seconds < 10
    assert ("get_stuck" in stack) is (program != "StopsItself")
    assert kernel.ok("(len(report.stalls), report.left)").value == (1, 0)
    stall_line = reply.stdout.splitlines()[1]
    assert stall_line.startswith("loaderguard: stall: batch ")
    assert f"worker 1 (pid {pid}) has been on sample 5" in stall_line


def test_raise_shows_the_line_of_the_loop(any_kernel: Kernel) -> None:
    any_kernel.ok("from tests.programs import stalls")
    reply = any_kernel.run(
        f"{RAISE}loader = DataLoader(stalls.Loops(), num_workers=2)\nfor batch in loader:\n    train = 1"
    )
    assert reply.ename == "LoaderStalled"
    plain = re.sub(r"\x1b\[[\d;]*m", "", reply.traceback)
    assert re.search(r"----> 3 for batch in loader", plain)
    assert reply.displays == [], "the exception says it all"
    assert any_kernel.ok("next(iter(DataLoader(stalls.Dawdles(0), num_workers=2)))[0].tolist()").value == [0, 0]


def test_raise_with_persistent_workers_leaves_a_usable_loader(kernel: Kernel) -> None:
    kernel.ok(
        "dataset = stalls.Dawdles(3600)\n"
        "loader = DataLoader(dataset, num_workers=2, persistent_workers=True)\n"
        "%config LoaderGuard.stall_seconds = 1\n"
        "%config LoaderGuard.on_stall = 'raise'"
    )
    try:
        reply = kernel.run("for batch in loader: pass")
        assert reply.ename == "LoaderStalled"
        wait_until(lambda: not kernel.workers())
        kernel.ok("dataset.seconds = 0")
        assert kernel.ok("sum(1 for batch in loader)").value == 64
    finally:
        kernel.ok("%config LoaderGuard.stall_seconds = 30.0\n%config LoaderGuard.on_stall = 'warn'\ndel loader")


@pytest.mark.parametrize("program", ["Loops", "Sleeps", "SwallowsAll"])
def test_b2_without_workers_raise_stops_it(any_kernel: Kernel, program: str) -> None:
    any_kernel.ok("from tests.programs import stalls")
    reply = any_kernel.ok(RAISE + CATCH.format(loader=f"DataLoader(stalls.{program}(), batch_size=4)"), timeout=30)
    worker_id, pid, index, seconds, stack = reply.value  # type: ignore[misc]
    assert (worker_id, pid, index) == (None, any_kernel.pid, 5)
    assert 1 <= seconds < 10
    assert "get_stuck" in stack


def test_b2_without_workers_the_same_card(any_kernel: Kernel) -> None:
    any_kernel.ok("from tests.programs import stalls")
    text, _, _ = card_of(any_kernel, "DataLoader(stalls.Loops(), batch_size=4)")
    assert re.search(
        rf"the kernel itself \(pid {any_kernel.pid}\) has been on sample 5 for [\d.]+ s, "
        r"CPU-bound \(\d+ % of a CPU\), in get_stuck\(\) at \S+:\d+",
        text,
    ), text


def test_b2_in_a_thread_of_the_users(kernel: Kernel) -> None:
    code = (
        RAISE
        + "def work():\n"
        + "\n".join(f"    {line}" for line in CATCH.splitlines()[1:-1])
        + (
            "\n    results.append(caught.index)\nresults = []\nthread = threading.Thread(target=work)\n"
            "thread.start(); thread.join(30)\nresults"
        )
    )
    assert kernel.ok(code.format(loader="DataLoader(stalls.Loops())")).value == [5]
    assert kernel.ok(code.format(loader=loader_of("stalls.Loops()", "fork"))).value == [5]


def test_the_card_is_updated_once_and_says_when_the_batch_came(any_kernel: Kernel) -> None:
    any_kernel.ok("from tests.programs import stalls")
    reply = any_kernel.ok(
        "%%guarded_loader --stall 0.5 --name report\n"
        "n = sum(1 for batch in DataLoader(stalls.Dawdles(4), num_workers=2))\nprint('after')"
    )
    assert len(reply.displays) == 1
    assert "has not come for" in reply.displays[0]["text/plain"]
    first, last = (update["text/plain"] for update in reply.updates)
    assert re.search(r"has not come for (2|3)", first)
    assert re.match(r"loaderguard: batch 5 of 64 of DataLoader #\d+ came after \d", last)
    assert re.search(r"loaderguard: stall: batch 5 .* came after [\d.]+ s$", reply.stdout)
    assert any_kernel.ok("len(report.stalls)").value == 1
    assert any_kernel.ok("3 < report.stalls[0].came_after_seconds < 30").value is True


def test_a_cell_of_the_notebook_is_named_as_a_cell(any_kernel: Kernel) -> None:
    any_kernel.ok(
        "class Mine(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index):\n"
        "        while index == 3: pass\n"
        "        return index\n"
        "train_loader = DataLoader(Mine(), num_workers=2)"
    )
    text, _, _ = card_of(any_kernel, "train_loader")
    assert "batch 3 of 8 of train_loader (Mine) has not come" in text
    assert re.search(r"on sample 3 .*, in __getitem__\(\) at Cell In\[\d+\]:4\n    › while index == 3: pass", text), (
        text
    )


def test_a_persistent_loader_whose_next_epoch_does_not_begin(kernel: Kernel) -> None:
    kernel.ok(
        "loader = DataLoader(stalls.Sleeps(), num_workers=2, persistent_workers=True, prefetch_factor=2)\n"
        "it = iter(loader)\nfor _ in range(3): next(it)\ntime.sleep(0.5)"
    )
    text, _, _ = card_of(kernel, "loader")
    assert "the next epoch of loader" in text
    assert "on sample 5" in text
    kernel.ok("del it, loader")


def test_a_worker_is_named_for_ps_and_top(kernel: Kernel, method: str) -> None:
    kernel.ok(f"it = iter({loader_of('stalls.Dawdles(0)', method)}); next(it)")
    paths = [Path(f"/proc/{process.pid}/comm") for process in kernel.workers()]
    wait_until(lambda: [path.read_text().strip() for path in paths] == ["pt_data_worker0", "pt_data_worker1"], 30)
    kernel.ok("del it")


def test_the_watching_thread_is_there_only_while_loops_wait(kernel: Kernel) -> None:
    kernel.ok("it = iter(DataLoader(stalls.Dawdles(0), num_workers=1)); next(it)")
    names = "[thread.name for thread in threading.enumerate() if 'loaderguard' in thread.name]"
    assert kernel.ok(names).value == ["loaderguard-watch"]
    wait_until(lambda: kernel.ok(names).value == [], 20)
    assert kernel.ok(f"next(it); {names}").value == ["loaderguard-watch"]
    kernel.ok("del it")


def test_stacks_of_live_and_stuck_workers(any_kernel: Kernel) -> None:
    any_kernel.ok("from tests.programs import stalls\nloader = DataLoader(stalls.HoldsGil(), num_workers=2)")
    any_kernel.ok("it = iter(loader)\nfor _ in range(3): next(it)\ntime.sleep(0.5)")
    idle, stuck = (process.pid for process in any_kernel.wait_for_workers(2))
    found = any_kernel.ok("lg.stacks()").value
    assert set(found) == {idle, stuck}  # type: ignore[call-overload]
    assert found[stuck].startswith(f"worker 1 (pid {stuck}) of loader · on sample 5\n")  # type: ignore[index]
    assert "in get_stuck\n      ctypes.PyDLL(None).sleep(3600)" in found[stuck]  # type: ignore[index]
    assert "_worker_loop" in found[idle]  # type: ignore[index]
    (shown,) = any_kernel.ok(f"%loaderguard stacks {idle}").displays
    assert f"pid {idle}" in shown["text/plain"]
    assert f"pid {stuck}" not in shown["text/plain"]
    assert f"pid {idle}" in shown["text/html"]
    assert any_kernel.run("lg.stacks(1)").ename == "LoaderGuardError"
    os.kill(stuck, signal.SIGSTOP)
    assert "It is stopped" in any_kernel.ok(f"print(lg.stacks({stuck})[{stuck}])").stdout
    os.kill(stuck, signal.SIGCONT)
    any_kernel.ok("del it, loader")


def test_stacks_of_a_worker_that_is_older_than_the_guard(own_kernel: Kernel) -> None:
    own_kernel.ok("%unload_ext jupyter_loaderguard\nit = iter(DataLoader(Slow(), num_workers=1)); next(it)")
    own_kernel.ok("%load_ext jupyter_loaderguard")
    (worker,) = own_kernel.workers()
    assert "started before the guard" in own_kernel.ok(f"print(lg.stacks()[{worker.pid}])").stdout
    assert not is_gone(worker), "it has no handler for the signal, which would have ended it"


def test_a_signal_handler_of_the_users_is_not_lost(kernel: Kernel) -> None:
    kernel.ok(
        "taken = [number for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)\n"
        "         if signal.getsignal(number) is signal.SIG_DFL][-8:]\n"
        "handlers = {number: (lambda signum, frame: None) for number in taken}\n"
        "for number in taken: signal.signal(number, handlers[number])\n"
        "it = iter(DataLoader(stalls.Dawdles(0), num_workers=1)); next(it)"
    )
    (worker,) = kernel.workers()
    caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{worker.pid}/status").read_text())[1], 16)  # type: ignore[index]
    taken = kernel.ok("taken").value
    assert all(caught >> (number - 1) & 1 for number in taken)  # type: ignore[attr-defined]
    assert "_worker_loop" in kernel.ok("str(lg.stacks())").value  # type: ignore[operator]
    kernel.ok("for number in taken: signal.signal(number, signal.SIG_DFL)\ndel it")


def test_a_guarded_script_writes_the_card_to_standard_error() -> None:
    code = (
        "import jupyter_loaderguard as lg\nfrom torch.utils.data import DataLoader\nfrom tests.programs import stalls\n"
        "with lg.guard(stall_seconds=0.5) as run:\n"
        "    for batch in DataLoader(stalls.Dawdles(1.5), num_workers=2): pass\n"
        "print(run.report.stalls[0].workers[0].index, run.report.left)"
    )
    since = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - since < 60
    assert done.stdout == "5 0\n"
    assert re.search(r"worker 1 \(pid \d+\) has been on sample 5 for .* s, sleeping, in get_stuck\(\)", done.stderr)
    assert "came after" in done.stderr
