"""How fast workers are gone: after an interrupt, `del`, the collector, errors, and the kernel's own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.kernel.driver import Kernel, is_gone, wait_gone

from .figures import Figure, median, spread

PATIENCE = 10.0
"""How long plain torch is waited for before it counts as never."""


def _interrupt_once(kernel: Kernel) -> tuple[float, int]:
    """Return the seconds from SIGINT to the prompt, and how many workers are left then."""
    cell = kernel.begin("def train():\n    for batch in DataLoader(Stuck(), num_workers=8): pass\ntrain()")
    processes = kernel.wait_for_workers(8)
    time.sleep(0.5)
    since = time.perf_counter()
    kernel.interrupt(group=False)
    kernel.finish(cell)
    took = time.perf_counter() - since
    left = [process for process in processes if not is_gone(process)]
    return took, len(left)


def _kill_left(kernel: Kernel) -> None:
    for process in kernel.children():
        process.kill()


def interrupt() -> list[Figure]:
    plain = Kernel(load=False)
    _, left = _interrupt_once(plain)
    time.sleep(PATIENCE)
    left = len([process for process in plain.started if not is_gone(process)])
    plain.close()
    kernel = Kernel()
    runs = [_interrupt_once(kernel) for _ in range(15)]
    kernel.close()
    samples = [took for took, _ in runs]
    worst = max(left for _, left in runs)
    return [
        Figure(
            "interrupt with 8 workers stuck for ever → prompt back and 0 left",
            f"never ({left} of 8 alive {PATIENCE:.0f} s later)",
            f"{spread(samples)}, {worst} left",
            "≤ 1.5 s, of which 0.5 s grace",
            median(samples) <= 1.5 and worst == 0,
            {"guarded": samples},
        )
    ]


DELETE = """
import gc, sys, time
from torch.utils.data import DataLoader
from tests.programs.datasets import Quick, Stuck
from jupyter_loaderguard import guarding
import warnings; warnings.simplefilter("ignore")
if sys.argv[1] == "guarded":
    guarding.activate(object())
def stuck():
    it = iter(DataLoader(Stuck(), num_workers=8))
    time.sleep(0.5)
    since = time.perf_counter()
    del it
    print(time.perf_counter() - since, flush=True)
class Box: pass
def collected():
    box = Box(); box.me = box
    box.it = iter(DataLoader(Quick(100_000), num_workers=16))
    for _ in range(50): next(box.it)
    gc.collect(); gc.disable()
    del box
    since = time.perf_counter()
    gc.collect()
    print(time.perf_counter() - since, flush=True)
    gc.enable()
for _ in range(int(sys.argv[3])):
    {"stuck": stuck, "collected": collected}[sys.argv[2]]()
"""


def _deletions(guarded: str, kind: str, runs: int) -> list[float]:
    command = [sys.executable, "-c", DELETE, guarded, kind, str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def delete() -> list[Figure]:
    plain, guarded = _deletions("plain", "stuck", 1), _deletions("guarded", "stuck", 15)
    ratio = median(plain) / median(guarded)
    return [
        Figure(
            "`del it` with 8 stuck workers",
            spread(plain),
            f"{spread(guarded)}, {ratio:.0f}× faster",
            "≤ 1.5 s, ≥ 25× faster",
            median(guarded) <= 1.5 and ratio >= 25,
            {"plain": plain, "guarded": guarded},
        )
    ]


def collector() -> list[Figure]:
    plain, guarded = _deletions("plain", "collected", 1), _deletions("guarded", "collected", 15)
    return [
        Figure(
            "collector frees 16 healthy workers",
            spread(plain),
            spread(guarded),
            "≤ 1 s",
            median(guarded) <= 1,
            {"plain": plain, "guarded": guarded},
        )
    ]


def _killed(dataset: str, method: str, load: bool = True) -> float:
    """Return the seconds from the kernel's SIGKILL to the end of its last worker; infinity if it does not come."""
    kernel = Kernel(load=load)
    kernel.ok(f"it = iter(DataLoader({dataset}(), num_workers=2, multiprocessing_context='{method}'))")
    processes = kernel.wait_for_workers(2)
    time.sleep(0.5)
    since = time.perf_counter()
    os.kill(kernel.pid, signal.SIGKILL)
    try:
        wait_gone(processes, PATIENCE)
        return time.perf_counter() - since
    except AssertionError:
        return float("inf")
    finally:
        kernel.close()


def killed_kernel() -> list[Figure]:
    figures = []
    for dataset, method, what in (
        ("Stuck", "fork", "workers stuck"),
        ("HoldsGil", "fork", "GIL held in C code"),
        ("Stuck", "forkserver", "under forkserver"),
    ):
        plain = _killed(dataset, method, load=False)
        samples = [_killed(dataset, method) for _ in range(5)]
        figures.append(
            Figure(
                f"kernel SIGKILLed, {what} → all gone",
                f"{plain:.1f} s" if plain < PATIENCE else f"never (alive after {PATIENCE:.0f} s)",
                f"{spread(samples)}, worst {max(samples):.2f} s",
                "≤ 1 s",
                max(samples) <= 1,
                {"guarded": samples},
            )
        )
    return figures


TRAIN = """
def train():
    it = iter(DataLoader(Quick(), num_workers=4))
    next(it)
    raise ValueError("mine")
kept = []
def run():
    try:
        train()
    except ValueError as error:
        kept.append(error)
        raise
"""


def failed_reruns() -> list[Figure]:
    left = {}
    for load in (False, True):
        kernel = Kernel(load=load)
        kernel.ok(TRAIN)
        for _ in range(20):
            kernel.run("run()")
        left[load] = len(kernel.children())
        _kill_left(kernel)
        kernel.close()
    return [
        Figure(
            "failed re-runs of train() ×20, iterator in a local: workers left",
            str(left[False]),
            str(left[True]),
            "0",
            left[True] == 0,
        )
    ]


def _shutdown(load: bool, workers: bool) -> float:
    kernel = Kernel(load=load)
    if workers:
        kernel.ok("it = iter(DataLoader(Quick(), num_workers=4)); next(it)")
    since = time.perf_counter()
    kernel.manager.shutdown_kernel()
    took = time.perf_counter() - since
    kernel.close()
    return took


def shutdown() -> list[Figure]:
    runs = [(_shutdown(False, False), _shutdown(False, True), _shutdown(True, True)) for _ in range(5)]
    idle, plain, guarded = (list(samples) for samples in zip(*runs, strict=True))
    return [
        Figure(
            f"kernel shutdown with a live loader (without workers: {median(idle):.2f} s)",
            spread(plain),
            spread(guarded),
            "≤ 1.2 s",
            median(guarded) <= 1.2,
            {"idle": idle, "plain": plain, "guarded": guarded},
        )
    ]


# with plain torch the collector takes 5 s for each worker that was left: it may come in any cell, so it is off there
RESOURCES = """
import gc, psutil
if "jupyter_loaderguard" in get_ipython().extension_manager.loaded: gc.collect()
me = psutil.Process()
(len(me.children(recursive=True)), me.num_threads(), me.num_fds(), len(os.listdir('/dev/shm')), me.memory_info().rss)
"""


WARM_UP = 15
"""Runs until the allocator has what it needs."""


def _growth(load: bool, runs: int) -> list[int]:
    kernel = Kernel(load=load)
    if not load:
        kernel.ok("import gc; gc.disable()")
    code = "loader = DataLoader(Slow(), num_workers=4)\ndef train():\n    it = iter(loader)\n    print('go')\n    for batch in it: pass\ntrain()"
    counts = []
    for number in range(runs + WARM_UP):
        cell = kernel.begin(code)
        kernel.wait_for_output(cell, "go")
        time.sleep(0.15)
        kernel.interrupt(group=False)
        kernel.finish(cell, 60, when_lost=lambda: kernel.interrupt(group=False))
        if number in (WARM_UP - 1, runs + WARM_UP - 1):
            counts.append(kernel.ok(RESOURCES).value)
    _kill_left(kernel)
    kernel.close()
    return [after - before for before, after in zip(*counts, strict=True)]


def reruns() -> list[Figure]:
    plain, guarded = _growth(False, 10), _growth(True, 50)

    def words(growth: list[int]) -> str:
        return f"{growth[0]:+d} processes, {growth[1]:+d} threads, {growth[2]:+d} descriptors, {growth[3]:+d} shm files, {growth[4] / 1e6:+.1f} MB"

    holds = all(count <= 2 for count in guarded[:4]) and guarded[4] < 20e6
    return [Figure("50 interrupted re-runs: growth", f"after 10: {words(plain)}", words(guarded), "none", holds)]
