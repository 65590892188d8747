"""Processes that look like orphaned workers, each lacking one thing; and real orphans among them.

`python -m tests.programs.decoys NAME ...` starts one of each, prints `NAME pid` lines and stays; `Zoo` does that from a
test. All but those that say otherwise have lost their parent, as an orphan has. They are forks of a process that has
torch loaded, so that they are cheap.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil

NAME = "pt_data_worker"
SECONDS = 300


def rename(name: str = NAME) -> None:
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def set_handlers() -> None:
    import torch

    torch._C._set_worker_signal_handlers()


def hold_pipes() -> None:
    os.pipe()


def disguise() -> None:
    """Have a command line of its own, as if not the process that has forked this one but another program had done so."""
    name = b"program-%d" % os.getpid()
    with open("/proc/self/stat") as file:
        start_of_arguments = int(file.read().rpartition(")")[2].split()[45])
    ctypes.memmove(start_of_arguments, name, len(name))


def named_only() -> None:
    """A name, and nothing else."""
    rename()


def without_handlers() -> None:
    rename()
    hold_pipes()


def without_name() -> None:
    set_handlers()
    hold_pipes()


def without_pipes() -> None:
    rename()
    set_handlers()
    os.closerange(3, 4096)


def cautious_script() -> None:
    """A program of the user's with torch that handles many signals, and only its name is wrong."""
    import faulthandler

    rename("my_pt_data_work")
    faulthandler.enable()
    hold_pipes()


def without_torch() -> None:
    """The same name in a program without torch."""
    code = f"open('/proc/self/comm', 'w').write('{NAME}'); import os, time, faulthandler; faulthandler.enable(); os.pipe(); time.sleep({SECONDS})"
    os.execv(sys.executable, [sys.executable, "-c", code])


LOST = {
    one.__name__: one
    for one in (named_only, without_handlers, without_name, without_pipes, cautious_script, without_torch)
}
"""Those whose parent ends."""


def everything() -> None:
    """All marks; an orphan, if its parent is dead."""
    rename()
    set_handlers()
    hold_pipes()


def _rest(prepare, ready: int) -> None:
    """Become what `prepare` makes of this process, and stay."""
    try:
        if prepare is without_torch:
            os.write(ready, b"%d\n" % os.getpid())
            prepare()
        if prepare is not without_pipes:
            prepare()
            os.write(ready, b"%d\n" % os.getpid())
        else:
            os.write(ready, b"%d\n" % os.getpid())
            prepare()
        time.sleep(SECONDS)
    finally:
        os._exit(0)


def fork(prepare, is_lost: bool, has_kernel: bool = False) -> int:
    """Start one; lost ones are children of a process that has ended, and are not in a session of ours."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if is_lost and not has_kernel:
            os.setsid()
            disguise()
        if is_lost and os.fork():
            os._exit(0)
        os.close(read)
        _rest(prepare, write)
    os.close(write)
    if is_lost:
        os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return int(file.readline())


def loader(name: str) -> int:
    """Start a real worker of a live loader."""
    from torch.utils.data import DataLoader

    from .datasets import Stuck

    iterator = iter(DataLoader(Stuck(), num_workers=1))
    _kept.append(iterator)
    return iterator._workers[0].pid


_kept: list[object] = []


def main(names: list[str]) -> None:
    import torch  # noqa: F401 - inherited by all

    for name in names:
        if name == "live_worker":
            pid = loader(name)
        elif name == "with_parent":  # all marks, and a parent with torch
            pid = fork(everything, is_lost=False)
        elif name == "of_live_kernel":  # all marks; a dead worker has left it, but the kernel lives
            pid = fork(everything, is_lost=True, has_kernel=True)
        else:
            pid = fork(LOST[name], is_lost=True)
        print(name, pid, flush=True)
    print("ready", flush=True)
    signal.pause()


class Zoo:
    """All of these, in a process of their own, from a test's side."""

    def __init__(self, *names: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.programs.decoys", *names]
        self._parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.processes: dict[str, psutil.Process] = {}
        for line in self._parent.stdout:
            name, _, pid = line.strip().partition(" ")
            if name == "ready":
                break
            self.processes[name] = psutil.Process(int(pid))

    def dead(self) -> list[str]:
        """Return the names of those that have ended."""
        return [
            name
            for name, process in self.processes.items()
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        ]

    def close(self) -> None:
        """End them."""
        self._parent.kill()
        self._parent.wait()
        self._parent.stdout.close()
        for process in self.processes.values():
            if process.is_running():
                process.kill()


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main(sys.argv[1:])
