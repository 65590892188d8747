"""Ways to end workers when their kernel is killed: the experiment behind NOTE [ Outliving the kernel ].

`python -m benchmarks.outlive` prints the seconds until two busy workers were gone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

from tests.kernel.driver import is_gone

NEVER = 4.0
WAYS = ("nothing", "pdeathsig", "thread", "reaper")
CASES = (
    ("Stuck", "fork", "Python loop"),
    ("HoldsGil", "fork", "C call with the GIL"),
    ("Stuck", "forkserver", "forkserver"),
)
PROGRAM = """
import sys, time
from torch.utils.data import DataLoader
from benchmarks.outlive import INITS
from jupyter_loaderguard import guarding
from tests.programs import datasets
if __name__ == "__main__":
    way, dataset, method = sys.argv[1:]
    if way == "reaper":
        guarding.activate(object())
    it = iter(DataLoader(getattr(datasets, dataset)(), num_workers=2, multiprocessing_context=method, worker_init_fn=INITS[way]))
    print(*[process.pid for process in it._workers], flush=True)
    time.sleep(600)
"""


def die_with_parent(worker_id: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def watch_parent(worker_id: int) -> None:
    sentinel = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


INITS = {"nothing": None, "pdeathsig": die_with_parent, "thread": watch_parent, "reaper": None}


def measure(way: str, dataset: str, method: str) -> float:
    """Return the seconds until the workers of a killed process are gone."""
    kernel = subprocess.Popen([sys.executable, "-c", PROGRAM, way, dataset, method], stdout=subprocess.PIPE, text=True)
    workers = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
    time.sleep(4.0 if method != "fork" else 1.0)  # forkserver workers import torch first
    kernel.kill()
    since = time.perf_counter()
    while not all(is_gone(worker) for worker in workers) and time.perf_counter() - since < NEVER:
        time.sleep(0.005)
    took = time.perf_counter() - since
    for worker in workers:
        if not is_gone(worker):
            worker.kill()
    kernel.wait()
    kernel.stdout.close()
    return took


def main() -> None:
    print(f"{'':12}" + "".join(f"{case:>22}" for *_, case in CASES))
    for way in WAYS:
        took = [measure(way, dataset, method) for dataset, method, _ in CASES]
        print(f"{way:12}" + "".join(f"{f'{seconds:.2f}' if seconds < NEVER else 'never':>22}" for seconds in took))


if __name__ == "__main__":
    main()
