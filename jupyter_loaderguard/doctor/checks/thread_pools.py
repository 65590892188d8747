"""LG101: libraries run a pool of threads in every worker, and together these are too many for the CPUs.

OpenCV, OpenBLAS, OpenMP and others start as many threads as there are CPUs, in each worker anew. Measured: the threads
of each worker that wanted a CPU for a good part of the run (they ran, or stood in the queue for one), less those
that Python itself started, and how many CPUs all of them wanted together. A pool that is there but idle, or
that is used by a single worker alone, is no finding. The guard caps pools by itself (`worker_threads`): the finding is
about pools that were made larger again, or that it does not know.

NOTE [ Whose thread ]
While a thread waits, the system tells its stack pointer, and the kernel may read the memory of its workers: the stack
of a thread that Python started has return addresses into Python's own code in it, that of a pool's thread has none.
Threads of a pool may also spin, and are never seen waiting; a busy thread of Python's waits for the GIL at
least. Asking the worker for its stacks would tell the same, but not safely: it reads the stacks of threads
that run meanwhile.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ... import machine
from ...model import Finding
from ...worker.locks import read_memory
from ..check import Check, Moment
from ..trial import Trial

BUSY_SHARE = 0.25
OVERLOAD = 1.4
"""How many times more CPUs than there are have to be wanted."""
POOL_SHARE = 0.3
"""The part of it, in usable CPUs, that has to be the pools'."""
STACK_BYTES = 16384
FEWEST_HITS = 3
FEWEST_LOOKS = 30
_PYTHON = re.compile(r"/(lib)?python[\d.]*[^/]*$")
_LIBRARIES = {
    "OpenCV": re.compile(r"/cv2[./]|libopencv"),
    "OpenBLAS": re.compile("openblas"),
    "MKL": re.compile("libmkl"),
    "OpenMP": re.compile("libgomp|libiomp|libomp"),
    "tokenizers": re.compile("/tokenizers[./]"),
}
_FIXES = {
    "OpenCV": "import cv2; cv2.setNumThreads(0)",
    "OpenBLAS": "import threadpoolctl; threadpoolctl.threadpool_limits(1)",
    "MKL": "import threadpoolctl; threadpoolctl.threadpool_limits(1)",
    "OpenMP": "import torch; torch.set_num_threads(1)",
    "tokenizers": 'import os; os.environ["TOKENIZERS_PARALLELISM"] = "false"',
}


@dataclass
class _Thread:
    """What is known of a thread. See NOTE [ Whose thread ]."""

    looks: int = 0
    is_python: bool | None = None
    """None if it was never seen waiting."""

    @property
    def is_native(self) -> bool:
        return not self.is_python if self.is_python is not None else self.looks >= FEWEST_LOOKS


class ThreadPoolsCheck(Check):
    """See the docstring of this file."""

    code = "LG101"
    looks_for = "native thread pools in workers"

    def __init__(self, subject: Any) -> None:
        super().__init__(subject)
        self._threads: dict[tuple[int, int], _Thread] = {}
        self._code: dict[int, list[range]] = {}
        self._libraries: list[str] = []

    def look(self, moment: Moment) -> None:
        """Find out whose the busy threads are."""
        if self.subject.workers < 2:
            return
        for pid, threads in moment.load.items():
            for tid in _busy(pid, threads):
                thread = self._threads.setdefault((pid, tid), _Thread())
                if thread.is_python is None:
                    self._look_at(pid, tid, thread)

    def _look_at(self, pid: int, tid: int, thread: _Thread) -> None:
        if pid not in self._code:
            maps = _maps(pid)
            self._code[pid] = _python_code(maps)
            self._libraries = [name for name, pattern in _LIBRARIES.items() if pattern.search(maps)]
        thread.looks += 1
        pointer = _stack_pointer(pid, tid)
        if pointer is not None:
            thread.is_python = _is_python(read_memory(pid, pointer, STACK_BYTES), self._code[pid])

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return the figures, if pools make the CPUs scarce."""
        cpus = machine.usable_cpus()
        pools = {pid: self._pool(pid, threads) for pid, threads in trial.load.items()}
        threads = sum(len(pool) for pool in pools.values())
        wanted = sum(one.wanted for per_worker in trial.load.values() for one in per_worker.values())
        of_pools = sum(share for pool in pools.values() for share in pool)
        if sum(map(bool, pools.values())) < 2 or wanted < OVERLOAD * cpus or of_pools < POOL_SHARE * cpus:
            return []
        workers = self.subject.workers
        evidence = (
            f"{workers} workers ran {threads + workers} busy threads, {threads} of them not Python's own, which wanted "
            f"{wanted:.1f} CPUs; this process may use {cpus}. {self._words()}"
        )
        return self.finding("warning", "native thread pools crowd the workers", evidence, _fix(self._libraries))

    def _pool(self, pid: int, threads: dict[int, Any]) -> list[float]:
        """Return what the busy threads of a worker wanted that are not Python's."""
        known = {tid: self._threads.get((pid, tid)) for tid in _busy(pid, threads)}
        return [threads[tid].wanted for tid, thread in known.items() if thread is not None and thread.is_native]

    def _words(self) -> str:
        sizes = []
        cv2 = sys.modules.get("cv2")
        if cv2 is not None and "OpenCV" in self._libraries:
            sizes.append(f"cv2.getNumThreads() is {cv2.getNumThreads()} here")
        loaded = f"Loaded in a worker: {', '.join(self._libraries)}" if self._libraries else ""
        return "; ".join([word for word in (loaded, *sizes) if word]) + ("." if loaded or sizes else "")


def _busy(pid: int, threads: dict[int, Any]) -> list[int]:
    return [tid for tid, load in threads.items() if tid != pid and load.wanted >= BUSY_SHARE]


def _stack_pointer(pid: int, tid: int) -> int | None:
    """Return where the stack of a thread is, if it waits in a system call at this moment."""
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall") as file:
            words = file.read().split()
    except OSError:  # gone, or the system does not tell
        return None
    return int(words[-2], 16) if len(words) > 2 else None


def _python_code(maps: str) -> list[range]:
    """Return where the code of Python itself lies."""
    lines = [line.split(None, 5) for line in maps.splitlines()]
    ends = [words[0].split("-") for words in lines if len(words) == 6 and "x" in words[1] and _PYTHON.search(words[5])]
    return [range(int(start, 16), int(stop, 16)) for start, stop in ends]


def _is_python(stack: bytes, code: list[range]) -> bool | None:
    """Tell whether a stack has return addresses into Python in it; None if it could not be read."""
    words = [word for (word,) in struct.iter_unpack("Q", stack[: len(stack) // 8 * 8])]
    hits = sum(1 for word in words if any(word in part for part in code))
    return hits >= FEWEST_HITS if words and code else None


def _maps(pid: int) -> str:
    """Return the memory map of a process."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            return file.read()
    except OSError:
        return ""


def _fix(libraries: list[str]) -> str:
    calls = list(dict.fromkeys(_FIXES[name] for name in libraries))
    calls = [call for call in calls if not call.startswith("import torch;")] or calls
    if not calls:
        return "Limit the library to one thread in worker_init_fn."
    code = "; ".join(calls)
    is_missing = "threadpoolctl" in code and importlib.util.find_spec("threadpoolctl") is None
    return f"In worker_init_fn: `{code}`" + (" after `%pip install threadpoolctl`" if is_missing else "")
