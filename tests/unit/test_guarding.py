"""The guard as a block: off after it, wherever an interrupt hits it, and quiet if it is never left."""

from __future__ import annotations

import contextlib
import linecache
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.utils.data.dataloader as dataloader
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard import guarding, interrupts
from jupyter_loaderguard.registry import registry
from tests.programs.datasets import Quick, Stuck

ROOT = Path(__file__).parents[2]


def interrupted_at(number: int) -> bool:
    """Guard a block, and interrupt at so many lines of the guard's own; tell whether there are so many."""
    counted = 0
    files = {guarding.__file__, interrupts.__file__, contextlib.__file__}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal counted
        if frame.f_code.co_filename not in files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # Python looks for interrupts where something is called, and these lines call nothing
        if event == "line" and not line.startswith(("try:", "return run")):
            counted += 1
            if counted == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    previous = sys.gettrace()
    try:
        sys.settrace(trace)
        with lg.guard():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    assert counted < number, "an interrupt was lost"
    return False


def interrupt_at_every_line() -> None:
    """Interrupt a guard at each of its lines, and see that it is off after it."""
    number = 1
    while interrupted_at(number):
        assert not lg.snapshot().guarding, f"line {number}"
        assert registry.runs == []
        assert guarding._holders == set()
        assert not hasattr(dataloader._MultiProcessingDataLoaderIter.__init__, "__wrapped__")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        number += 1
    assert number > 50


def test_an_interrupt_at_any_line_of_a_guards_begin_and_end_leaves_it_off() -> None:
    """In a process of its own: where a child is alive, each beginning looks at all objects for iterators."""
    code = f"from {__name__} import interrupt_at_every_line as check; check(); print('done')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def test_a_guard_can_be_a_decorator_and_is_not_entered_twice() -> None:
    @lg.guard()
    def work() -> bool:
        return lg.snapshot().guarding

    assert work() and work()
    block = lg.guard()
    with block:
        with pytest.raises(lg.LoaderGuardError, match="this guard is on"), block:
            pass
        assert lg.snapshot().guarding
    assert not lg.snapshot().guarding
    with block:
        assert lg.snapshot().guarding


@pytest.mark.parametrize("torch_is_imported", [False, True])
@pytest.mark.parametrize("how", ["lg.guard().__enter__()", "it = lg.guard(); run = it.__enter__()"])
def test_a_guard_that_is_never_left_ends_with_the_script_without_a_word(how: str, torch_is_imported: bool) -> None:
    code = f"import jupyter_loaderguard as lg\n{how}\nassert lg.snapshot().guarding\n"
    if torch_is_imported:
        code += "from torch.utils.data import DataLoader\nnext(iter(DataLoader(range(8), num_workers=1)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TooLate(Exception):
    """What a time limit of the user's raises."""


class Limit:
    """Handlers as users write them."""

    def method(self, signum: int, frame: FrameType | None) -> None:
        self.give_up()

    def resets(self, signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        raise TooLate

    def takes_all(self, *arguments: object) -> None:
        raise TooLate

    def __call__(self, signum: int, _: object) -> None:
        raise TooLate

    def give_up(self) -> None:
        raise TooLate


@pytest.fixture(params=["method", "resets", "takes_all", "__call__"])
def time_limit(request: pytest.FixtureRequest) -> Iterator[Callable[[float], None]]:
    """A time limit by a signal, which raises wherever Python is; not SIGALRM, which is pytest-timeout's here."""
    handler = Limit() if request.param == "__call__" else getattr(Limit(), request.param)
    previous = signal.getsignal(signal.SIGUSR1)
    timers: list[threading.Timer] = []

    def set_limit(seconds: float) -> None:
        signal.signal(signal.SIGUSR1, handler)
        timers.append(threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)))
        timers[-1].start()

    yield set_limit
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, previous)


def test_a_time_limit_of_the_users_ends_a_wait_for_workers(time_limit: Callable[[float], None]) -> None:
    with lg.guard(), pytest.raises(TooLate):
        it = iter(DataLoader(Stuck(), num_workers=1))
        time_limit(0.5)
        next(it)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_time_limit_of_the_users_ends_a_loop_wherever_it_hits(
    time_limit: Callable[[float], None], workers: int
) -> None:
    """Not in the end of an iterator: there Python itself has nobody to raise it to."""
    with lg.guard():
        it = iter(DataLoader(Quick(10_000_000), num_workers=workers))
        for hundredths in range(5, 40, 5):
            time_limit(hundredths / 100)
            deadline = time.monotonic() + 10
            with pytest.raises(TooLate):
                while time.monotonic() < deadline:
                    next(it)
