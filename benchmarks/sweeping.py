"""What the command line takes, and whom a sweep ends: orphans and nobody else, among decoys."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time

import psutil

from jupyter_loaderguard.orphans import sweep
from jupyter_loaderguard.population import Orphan
from jupyter_loaderguard.processes import start_mark
from tests.kernel.driver import is_gone, wait_until
from tests.programs.decoys import LOST, everything, fork
from tests.programs.guarded_script import Script

from .figures import Figure, median, spread

WORKERS = 32
ROUNDS = 15
SWEEPS = 1000
HEAVY = ("torch", "IPython", "ipywidgets")
PS = "import sys; from jupyter_loaderguard.cli import main; main(['ps', '--json']); print([name in sys.modules for name in {}])"


def ps() -> list[Figure]:
    """Time `ps` as a terminal sees it, with 32 workers alive."""
    with tempfile.TemporaryDirectory() as runtime:
        environment = {**os.environ, "JUPYTER_RUNTIME_DIR": runtime}
        script = Script("Stuck", str(WORKERS), JUPYTER_RUNTIME_DIR=runtime)
        try:
            samples, seen, heavy = _time_ps(environment)
        finally:
            script.close()
    return [
        Figure(
            f"jupyter loaderguard ps, {WORKERS} workers",
            "–",
            f"{spread(samples, 's', 3)}, {seen} workers listed",
            "≤ 0.3 s, no torch, no IPython, no ipywidgets",
            median(samples) <= 0.3 and seen == WORKERS and not heavy,
            {"seconds": samples},
        )
    ]


def _time_ps(environment: dict[str, str]) -> tuple[list[float], int, bool]:
    def run(*command: str) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    command = (sys.executable, "-m", "jupyter_loaderguard.cli", "ps")
    wait_until(lambda: _listed(run(*command, "--json")) == WORKERS, 60)
    samples = []
    for _ in range(ROUNDS):
        since = time.perf_counter()
        run(*command)
        samples.append(time.perf_counter() - since)
    listing, modules = run(sys.executable, "-c", PS.format(HEAVY)).splitlines()
    return samples, _listed(listing), "True" in modules


def _listed(text: str) -> int:
    kernels = json.loads(text)["kernels"]
    return sum(len(loader["workers"]) for kernel in kernels for loader in kernel["loaders"])


class Ground:
    """Real orphans and decoys: forks of this process, which has torch loaded, each in another state."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.decoys = {fork(make, is_lost=True): name for name, make in LOST.items() for _ in range(2)}
        self.decoys |= {fork(everything, is_lost=False): "with_parent" for _ in range(2)}
        self.processes = {pid: psutil.Process(pid) for pid in self.decoys}

    def orphan(self) -> int:
        pid = fork(everything, is_lost=True)
        self.processes[pid] = psutil.Process(pid)
        return pid

    def claims(self, orphans: list[int]) -> list[Orphan]:
        """Claim that all of these are orphans, as a wrong or stale list would: in any order, some with a wrong start."""
        chance = self._chance
        claims = [_claim(pid, "marks") for pid in orphans]
        for pid in chance.sample(sorted(self.decoys), chance.randint(1, len(self.decoys))):
            claims.append(_claim(pid, chance.choice(("ledger", "marks")), is_stale=chance.random() < 0.3))
        claims += [_claim(pid, "marks") for pid in (1, os.getpid(), os.getppid()) if chance.random() < 0.5]
        chance.shuffle(claims)
        return claims

    def wrongly_ended(self) -> int:
        return sum(is_gone(self.processes[pid]) for pid in self.decoys)

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_running():
                process.kill()
        for pid, name in self.decoys.items():
            if name == "with_parent":
                os.waitpid(pid, 0)


def _claim(pid: int, kind: str, is_stale: bool = False) -> Orphan:
    mark = int(start_mark(pid) or 0) - is_stale
    return Orphan(pid, str(mark), 0.0, "sleeping", 0, kind)


def sweeps() -> list[Figure]:
    """Sweep many times, with a real orphan or none and random claims about innocent processes."""
    chance, wrong, missed, took = random.Random(8), 0, 0, []
    ground = Ground(chance)
    try:
        for _ in range(SWEEPS):
            orphans = [ground.orphan() for _ in range(chance.randint(0, 2))]
            claims = ground.claims(orphans)
            since = time.perf_counter()
            sweep(claims)
            took.append(time.perf_counter() - since)
            missed += sum(not is_gone(ground.processes.pop(pid)) for pid in orphans)
            wrong += ground.wrongly_ended()
    finally:
        ground.close()
    return [
        Figure(
            f"{SWEEPS:,} randomised sweeps among {len(ground.decoys)} decoys: wrongly ended, missed",
            "–",
            f"{wrong} wrongly ended, {missed} orphans missed, {spread([s * 1000 for s in took], 'ms', 1)} each",
            "0 and 0",
            wrong == 0 and missed == 0,
            {"seconds": took},
        )
    ]
