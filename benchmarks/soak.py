"""Press the stop button again and again, in many kernels, and count the presses that a kernel did not hear.

`python -m benchmarks.soak [--presses 1000] [--kernels 50]`: each press is meant for a cell that would run for ever.
The kinds of cell take turns; half of the presses reach the whole process group, as JupyterLab's do, the others the
kernel alone. The moment is left to chance: also the start of the workers is hit. A press is lost if the cell still
runs PATIENCE seconds later; then it is pressed again, and said where the kernel was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.kernel.driver import SETUP, Kernel, is_gone, wait_gone

PATIENCE = 8.0
"""A stop takes 0.7 s on a quiet machine; so long it may take beside others."""
LATEST = 0.8
"""How many seconds after its first sign of life a cell is interrupted, at most."""
TRAIN = "def train(loader):\n    for batch in loader: pass\n"
CELLS = {
    "8 stuck workers, in a function": TRAIN + "train(DataLoader(Stuck(), num_workers=8))",
    "2 stuck workers, in the cell": "for batch in DataLoader(Stuck(), num_workers=2): pass",
    "slow workers, again and again": TRAIN + "while True: train(DataLoader(Slow(20), num_workers=2))",
    "quick workers, again and again": TRAIN + "while True: train(DataLoader(Quick(50), num_workers=2))",
    "persistent workers": TRAIN
    + "loader = DataLoader(Slow(20), num_workers=2, persistent_workers=True)\nwhile True: train(loader)",
    "no workers, slow": TRAIN + "train(DataLoader(Slow(100_000), num_workers=0))",
    "no workers, quick": TRAIN + "while True: train(DataLoader(Quick(), num_workers=0))",
    "guarded cell": "%%guarded_loader --no-widget --quiet\nfor batch in DataLoader(Stuck(), num_workers=2): pass",
    "lg.guard()": TRAIN + "with lg.guard():\n    train(DataLoader(Stuck(), num_workers=2))",
    "iterators in cycles": "class Box: pass\nwhile True:\n    box = Box(); box.me = box\n"
    "    box.it = iter(DataLoader(Quick(), num_workers=1)); next(box.it)",
    "collector at work": TRAIN + "import gc, weakref\nclass Box: pass\nboxes = weakref.WeakSet()\n"
    "for batch in DataLoader(Quick(100_000), num_workers=1):\n"
    "    for _ in range(100):\n        box = Box(); box.me = box; boxes.add(box)\n"
    "    del box\n    gc.collect()",
}
LOOK = """
import faulthandler
_look_file = open({path!r}, "w")
faulthandler.register(signal.SIGUSR1, file=_look_file)
NAMES |= {{"_look_file", "faulthandler"}}
"""
BUSY = "while True: pass"


@dataclass
class Tally:
    """What became of the presses."""

    presses: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Soak:
    """One kernel under presses."""

    tally: Tally
    number: int
    kernel: Kernel
    look: Path

    def press(self, what: str, group: bool, chance: random.Random) -> None:
        """Interrupt one cell, and note what came of it."""
        label = f"{what}, {'group' if group else 'kernel alone'}"
        cell = self.kernel.begin(_with_sign(CELLS[what]))
        self.kernel.wait_for_output(cell, "go")
        time.sleep(chance.uniform(0, LATEST))
        workers = self.kernel.children()
        since = time.monotonic()
        self.kernel.interrupt(group)
        is_lost = not self._ends(cell)
        with self.tally.lock:
            self.tally.presses[label] += 1
            if not is_lost:
                self.tally.seconds.append(time.monotonic() - since)
        if is_lost:
            self._note_loss(label, cell, group)
        left = [process for process in {*workers, *self.kernel.children()} if not is_gone(process)]
        if left:
            took = wait_gone(left, PATIENCE)
            self.tally.left.append(f"kernel {self.number}: {label}: {len(left)} workers left, gone {took:.1f} s later")

    def _ends(self, cell: str) -> bool:
        try:
            self.kernel.finish(cell, PATIENCE, when_lost=lambda: None)
            return True
        except AssertionError:
            if not self.kernel.manager.is_alive():
                raise
            return False

    def _note_loss(self, label: str, cell: str, group: bool) -> None:
        os.kill(self.kernel.pid, signal.SIGUSR1)
        time.sleep(0.5)
        line = f"kernel {self.number}: {label}\n{self.look.read_text()}"
        with self.tally.lock:
            self.tally.lost.append(line)
        print(f"LOST: {line}", flush=True)
        for _ in range(5):
            self.kernel.interrupt(group)
            if self._ends(cell):
                return
        raise AssertionError("five more presses did not end it")


def _with_sign(code: str) -> str:
    """Let a cell say that it runs, in a line of its own."""
    first, _, rest = code.partition("\n")
    return f"{first}\nprint('go', flush=True)\n{rest}" if first.startswith("%%") else f"print('go', flush=True)\n{code}"


def soak_kernel(tally: Tally, number: int, presses: int, python: str, seed: int, cells: list[str]) -> None:
    """Press so often in one kernel of its own."""
    chance = random.Random(f"{seed} {number}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        look = Path(folder, "stacks")
        try:
            kernel = Kernel(setup=SETUP + LOOK.format(path=str(look)), python=python)
            stack.callback(kernel.close)
            soak = Soak(tally, number, kernel, look)
            for press in range(presses):
                soak.press(cells[(number + press) % len(cells)], chance.random() < 0.5, chance)
            kernel.ok("assert 1 + 1 == 2")
        except Exception as error:
            tally.broken.append(f"kernel {number}: {type(error).__name__}: {error}")
            print(f"BROKEN: {tally.broken[-1]}", flush=True)


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Have so many processes compute beside."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def soak(presses: int, kernels: int, at_once: int, busy: int, pythons: list[str], seed: int, cells: list[str]) -> Tally:
    """Share the presses among the kernels, some of which run at a time."""
    tally = Tally()
    with busy_processes(busy), ThreadPoolExecutor(at_once) as pool:
        for number in range(kernels):
            share = presses // kernels + (number < presses % kernels)
            pool.submit(soak_kernel, tally, number, share, pythons[number % len(pythons)], seed, cells)
    return tally


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presses", type=int, default=1000)
    parser.add_argument("--kernels", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=2, help="how many kernels run at a time")
    parser.add_argument("--busy", type=int, default=0, help="how many processes compute beside them")
    parser.add_argument("--python", default=sys.executable, help="whose ipykernel is used")
    parser.add_argument("--every-fifth", metavar="PYTHON", help="whose is used for each fifth kernel")
    parser.add_argument("--cells", default="", help="only the kinds of cell with this in their names")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(arguments)
    since = time.monotonic()
    pythons = [options.python] * 4 + [options.every_fifth or options.python]
    cells = [name for name in CELLS if options.cells in name]
    tally = soak(options.presses, options.kernels, options.at_once, options.busy, pythons, options.seed, cells)
    for label, count in sorted(tally.presses.items()):
        print(f"{count:5d}  {label}")
    for line in [*tally.left, *tally.broken]:
        print(line)
    seconds = sorted(tally.seconds) or [0.0]
    print(
        f"{sum(tally.presses.values())} presses in {options.kernels} kernels, {len(tally.lost)} lost, "
        f"{len(tally.left)} left workers, {len(tally.broken)} kernels broken; prompt back after "
        f"{seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s (longest); "
        f"{time.monotonic() - since:.0f} s, seed {options.seed}, {options.busy} busy processes beside"
    )
    is_complete = sum(tally.presses.values()) == options.presses
    return 0 if is_complete and not (tally.lost or tally.left or tally.broken) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
