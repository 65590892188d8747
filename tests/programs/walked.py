"""Looks at the stack of a thread that makes cyclic garbage with finalizers: `python -m tests.programs.walked SECONDS`.

Where the look itself lets the collector run, Python 3.11 crashes here or finds what is no frame; with NAIVE as the
second word it looks so, to show that.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from types import FrameType

from jupyter_loaderguard import frames


class Finalized:
    """Something whose end runs code."""

    def __del__(self) -> None:
        self.rest = [number + 1 for number in range(3)]


def work(depth: int) -> None:
    if depth:
        return work(depth - 1)
    cycle = Finalized()
    cycle.me = cycle
    return None


def naive(thread: int) -> list[FrameType]:
    found, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def main(seconds: float, is_naive: bool) -> None:
    main_thread = threading.get_ident()
    look = naive if is_naive else frames.stack_of
    looks: list[None] = []
    strange: list[object] = []

    def watch() -> None:
        while True:
            for frame in look(main_thread):
                if type(frame) is not FrameType:
                    strange.append(frame)
            looks.append(None)

    sys.setswitchinterval(1e-5)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and watcher.is_alive():  # calls, so that what lay on the stack is overwritten
        work(8)
    print(watcher.is_alive(), len(looks) > 1000, strange == [], gc.isenabled(), flush=True)
    os._exit(0)  # the thread goes on


if __name__ == "__main__":
    main(float(sys.argv[1]), "NAIVE" in sys.argv)
