"""A script under guard whose workers are stuck: prints the pids of its reaper and of its workers, and stays.

`python -m tests.programs.guarded_script [DATASET [WORKERS [METHOD]]]`; with GUARD=0 in the environment it is not under guard.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

if __name__ == "__main__":
    from torch.utils.data import DataLoader

    from jupyter_loaderguard import guarding
    from jupyter_loaderguard.registry import registry
    from tests.programs import datasets

    dataset, workers, method = (sys.argv[1:] + ["Stuck", "2", "fork"][len(sys.argv) - 1 :])[:3]
    if os.environ.get("GUARD") != "0":
        guarding.activate(object())
    loader = DataLoader(getattr(datasets, dataset)(), num_workers=int(workers), multiprocessing_context=method)
    iterator = iter(loader)
    print(registry.reaper.pid or 0, *[process.pid for process in iterator._workers], flush=True)
    signal.pause()


def python() -> list[str]:
    """Return a command line that no other run of the tests has: its orphans would be in doubt."""
    return [sys.executable, "-W", "ignore", "-X", f"run={os.getpid()}"]


class Script:
    """Such a script, from a test's side."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*python(), "-m", "tests.programs.guarded_script", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.pid = self.process.pid
        reaper, *self.workers = map(int, self.process.stdout.readline().split())
        self.processes = [psutil.Process(pid) for pid in self.workers]
        self.reaper = psutil.Process(reaper) if reaper else None

    def die(self, signum: int = signal.SIGKILL) -> None:
        """Leave the workers behind: the reaper goes first, which would end them."""
        if self.process.poll() is None:
            if self.reaper is not None:
                self.reaper.kill()
                self.reaper.wait(10)
            self.process.send_signal(signum)
            self.process.wait()
            self.process.stdout.close()

    def close(self) -> None:
        """End all that is left."""
        self.die()
        for process in self.processes:
            if process.is_running():
                process.kill()
