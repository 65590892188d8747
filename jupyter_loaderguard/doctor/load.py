"""How busy the threads of workers are: the CPU time that each one got, and the time that it waited for a CPU.

The sum of both is what it wanted. Unlike CPU time alone it does not depend on what else the machine does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ThreadLoad:
    """One thread's share of the time, 0 to 1."""

    cpu: float
    wanted: float


class LoadMeter:
    """Adds up what the threads of some processes do, from its first look on. Linux only; elsewhere it is empty."""

    def __init__(self) -> None:
        self._first: dict[int, dict[int, tuple[float, float]]] = {}
        self._last: dict[int, dict[int, tuple[float, float]]] = {}
        self._since = self._until = 0.0

    def look(self, pids: Iterable[int]) -> None:
        """Look at all threads of these processes."""
        now = time.perf_counter()
        looks = {pid: _threads(pid) for pid in pids}
        if not self._first:
            self._first, self._since = looks, now
        if all(looks.values()):
            self._last, self._until = looks, now

    def loads(self) -> dict[int, dict[int, ThreadLoad]]:
        """Return the load of each thread, by pid and thread id; threads that came later began with nothing."""
        seconds = self._until - self._since
        if seconds <= 0:
            return {}
        return {pid: self._loads_of(pid, threads, seconds) for pid, threads in self._last.items()}

    def _loads_of(self, pid: int, threads: dict[int, tuple[float, float]], seconds: float) -> dict[int, ThreadLoad]:
        loads = {}
        for tid, (cpu, delay) in threads.items():
            cpu_before, delay_before = self._first.get(pid, {}).get(tid, (0.0, 0.0))
            got, waited = cpu - cpu_before, delay - delay_before
            loads[tid] = ThreadLoad(got / seconds, min(1.0, (got + waited) / seconds))
        return loads


def _threads(pid: int) -> dict[int, tuple[float, float]]:
    """Return the seconds that each thread ran, and waited for a CPU, so far."""
    found = {}
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
                cpu, delay, _ = file.read().split()
            found[int(tid)] = int(cpu) / 1e9, int(delay) / 1e9
    except (OSError, ValueError):  # a thread or the process has ended, or the system does not count
        return {}
    return found
