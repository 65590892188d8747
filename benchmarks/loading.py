"""What the guard costs while all is well: throughput, time per batch, first batch, snapshot, helpers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import torch.utils.data.dataloader as dataloader
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard import guarding
from jupyter_loaderguard.registry import registry
from tests.programs.datasets import Quick

from .figures import Figure, interleave, median, quartiles, spread

PAIRS = 15
BLOCKS = 30
SETTLE_SECONDS = 0.5
"""Users load the extension long before their first loader: the reaper's own start is not part of that."""


@contextmanager
def guard_on():
    """The plain extension's guard, as `%load_ext` turns it on."""
    holder = object()
    guarding.activate(holder)
    try:
        yield
    finally:
        guarding.deactivate(holder)


def under_guard(measure: Callable[[], float]) -> Callable[[], float]:
    def measured() -> float:
        with guard_on():
            registry.reaper.ensure()
            return measure()

    return measured


METHODS = ("__next__", "_next_data", "_next_index", "_try_get_data")


def _block(take: Callable[[], object], batches: int = 100) -> tuple[float, float]:
    """Return wall seconds and the main thread's CPU seconds per batch."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(batches):
        take()
    return (time.perf_counter() - wall) / batches, (time.thread_time() - cpu) / batches


def _compare_once(block=guard_on) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Load tiny samples with 2 workers: plain ones and torch's own methods, guarded ones and ours, in turn."""
    own = {name: getattr(dataloader._MultiProcessingDataLoaderIter, name) for name in METHODS}
    with block():
        guarded = iter(DataLoader(Quick(10_000_000), batch_size=8, num_workers=2))
        registry.is_guarding = False
        plain = iter(DataLoader(Quick(10_000_000), batch_size=8, num_workers=2))
        registry.is_guarding = True
        vars(plain).update({name: types.MethodType(method, plain) for name, method in own.items()})
        take_plain, take_guarded = (
            vars(plain)["__next__"],
            guarded.__next__,
        )  # next() would ask the class, which is patched
        for take in (take_guarded, take_plain):
            _block(take, 300)
        pairs = interleave(lambda: _block(take_plain), lambda: _block(take_guarded), BLOCKS)
        for name in own:  # a method bound to itself would keep it alive
            del vars(plain)[name]
        lg.clean()
    return pairs


def throughput() -> list[Figure]:
    return throughput_in("", guard_on)


def accounted_throughput() -> list[Figure]:
    """The same in a guarded run, which keeps accounts of every batch."""
    return throughput_in(" in a guarded run, with its accounts", lg.guard)


def throughput_in(where: str, block: Callable[[], AbstractContextManager[object]], least: float = 0.99) -> list[Figure]:
    ratios, costs, rates = [], [], []
    for _ in range(PAIRS):
        plain, guarded = _compare_once(block)
        ratios.append(median([wall for wall, _ in plain]) / median([wall for wall, _ in guarded]))
        costs.append((median([cpu for _, cpu in guarded]) - median([cpu for _, cpu in plain])) * 1e6)
        rates.append(1 / median([wall for wall, _ in plain]))
    low, middle, high = quartiles(ratios)
    return [
        Figure(
            f"throughput, 2 workers, tiny samples{where}",
            f"1 ({median(rates):,.0f} batches/s)",
            f"{middle:.3f} ({low:.3f}–{high:.3f}, n={PAIRS} × {BLOCKS} pairs)",
            f"≥ {least}",
            middle >= least,
            {"ratio": ratios},
        ),
        Figure(
            f"cost in the kernel per batch (CPU of its main thread){where}",
            "–",
            spread(costs, "µs", 1),
            "≤ 5 µs",
            median(costs) <= 5,
            {"cost_us": costs},
        ),
    ]


def first_batch() -> list[Figure]:
    def measure() -> float:
        loader = DataLoader(Quick(64), batch_size=8, num_workers=4)
        time.sleep(SETTLE_SECONDS)
        since = time.perf_counter()
        it = iter(loader)
        next(it)
        took = time.perf_counter() - since
        del it
        return took

    plain, guarded = interleave(measure, under_guard(measure), 2 * PAIRS)
    ratio = median(guarded) / median(plain)
    return [
        Figure(
            "first batch after iter(loader), 4 workers, fork",
            f"1 ({spread([s * 1000 for s in plain], 'ms', 1)})",
            f"{ratio:.3f} ({spread([s * 1000 for s in guarded], 'ms', 1)})",
            "≤ 1.05",
            ratio <= 1.05,
            {"plain": plain, "guarded": guarded},
        )
    ]


def snapshot() -> list[Figure]:
    costs: dict[int, float] = {}
    with guard_on():
        for workers in (16, 32, 64):
            it = iter(DataLoader(Quick(), batch_size=8, num_workers=workers))
            next(it)
            samples = []
            for _ in range(31):
                since = time.perf_counter()
                assert len(lg.snapshot().workers) == workers
                samples.append((time.perf_counter() - since) * 1000)
            costs[workers] = median(samples)
            del it
    return [
        Figure(
            "snapshot() at 64 workers",
            "–",
            f"{costs[64]:.1f} ms (16: {costs[16]:.1f}, 32: {costs[32]:.1f})",
            "≤ 20 ms, linear",
            costs[64] <= 20 and costs[64] <= 6 * costs[16],
            {str(workers): [cost] for workers, cost in costs.items()},
        )
    ]


def _tasks(pid: int | str = "self") -> list[Path]:
    """Return the threads of a process."""
    return list(Path(f"/proc/{pid}/task").iterdir())


def _cpu_seconds(task: Path) -> float:
    """Return the CPU time of a thread, to the nanosecond: the usual counters have ticks of 10 ms."""
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def helpers() -> list[Figure]:
    threads = threading.active_count()
    with guard_on():
        registry.reaper.ensure()
        loader = DataLoader(Quick(8), num_workers=1, persistent_workers=True)
        list(loader)
        time.sleep(3)  # the watchdog's thread leaves a second after the last wait
        reaper = psutil.Process(registry.reaper.pid)
        more = threading.active_count() - threads - 1  # the feeder thread of torch's own index queue
        tasks = [*_tasks(reaper.pid), *(task for task in _tasks() if task.name != str(os.getpid()))]
        before = sum(map(_cpu_seconds, tasks))
        time.sleep(10)
        cpu = (sum(map(_cpu_seconds, tasks)) - before) / 10 * 100
        rss = reaper.memory_info().rss / 1e6
        lg.clean()
    return [
        Figure(
            "resident cost of helper processes and threads, idle",
            "–",
            f"{rss:.1f} MB, {more} threads, {cpu:.3f} % CPU",
            "≤ 20 MB, 0 % CPU",
            rss <= 20 and cpu < 0.005 and more == 0,
            {"rss_mb": [rss], "cpu_percent": [cpu]},
        )
    ]


LOAD = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
since = time.perf_counter()
shell.run_line_magic("load_ext", "jupyter_loaderguard")
took = time.perf_counter() - since
assert "torch" not in sys.modules and "ipywidgets" not in sys.modules
print(took)
"""


def load_ext() -> list[Figure]:
    samples = [
        float(subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True).stdout)
        for _ in range(15)
    ]
    return [
        Figure(
            "%load_ext",
            "–",
            spread(samples, "s", 3),
            "≤ 0.1 s, no torch, no ipywidgets",
            median(samples) <= 0.1,
            {"guarded": samples},
        )
    ]


SPAWNED = """
from tests.programs.datasets import Quick as Imported
class OfTheNotebook(Imported):
    def __len__(self): return self.length
    def __getitem__(self, index): return torch.full((4,), index)
def first_batch(dataset):
    since = time.perf_counter()
    it = iter(DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="spawn"))
    next(it)
    took = time.perf_counter() - since
    del it
    return took
"""


def by_value() -> list[Figure]:
    """The first batch under spawn, of a dataset class of the notebook and of the same in a module."""
    from tests.kernel.driver import Kernel

    kernel = Kernel()
    try:
        kernel.ok(SPAWNED)
        imported, own = interleave(
            lambda: float(str(kernel.ok("first_batch(Imported(64))").value)),
            lambda: float(str(kernel.ok("first_batch(OfTheNotebook(64))").value)),
            PAIRS,
        )
    finally:
        kernel.close()
    plain = Kernel(load=False)
    try:
        plain.ok(SPAWNED)
        since = time.perf_counter()
        reply = plain.run("first_batch(OfTheNotebook(64))", timeout=120)
        failed = f"{reply.ename} after {time.perf_counter() - since:.1f} s"
    finally:
        plain.close()
    ratio = median(own) / median(imported)
    return [
        Figure(
            "first batch under spawn, dataset class of the notebook, against the same in a module",
            failed,
            f"{ratio:.3f} ({spread(own)} against {spread(imported)})",
            "≤ 1.1",
            ratio <= 1.1,
            {"own": own, "imported": imported},
        )
    ]


def single_batch() -> list[Figure]:
    """`next(iter(loader))` without workers, as a notebook looks at one batch."""
    loader = DataLoader(Quick(1000), batch_size=4)

    def measure() -> float:
        seconds = []
        for _ in range(1000):
            since = time.perf_counter()
            next(iter(loader))
            seconds.append(time.perf_counter() - since)
        return median(seconds) * 1e6

    plain, guarded = interleave(measure, under_guard(measure), PAIRS)
    bound = 1.5 * median(plain) + 10
    holds = median(guarded) <= bound
    what = "next(iter(loader)) without workers"
    row = spread(plain, "µs", 1), spread(guarded, "µs", 1), f"≤ 1.5 × plain + 10 µs = {bound:.0f} µs"
    return [Figure(what, *row, holds, {"plain": plain, "guarded": guarded})]


def compiled() -> list[Figure]:
    """An epoch of small steps in a function that torch.compile has compiled."""
    import torch

    loader = DataLoader(Quick(400), batch_size=4)

    def epoch() -> torch.Tensor:
        total = torch.zeros(())
        for batch in loader:
            total = total + batch.float().mean()
        return total

    def measure() -> float:
        torch._dynamo.reset()
        run = torch.compile(epoch, backend="eager")
        run(), run()
        seconds = []
        for _ in range(8):
            since = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - since)
        return min(seconds) * 1e3

    plain, guarded = interleave(measure, under_guard(measure), PAIRS)
    ratio = median(guarded) / median(plain)
    row = spread(plain, "ms", 1), f"{spread(guarded, 'ms', 1)}, {ratio:.2f} ×", "≤ 1.2 × plain"
    what = "an epoch of 100 steps under torch.compile(backend='eager'), without workers"
    return [Figure(what, *row, ratio <= 1.2, {"plain": plain, "guarded": guarded})]
