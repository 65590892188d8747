"""Interrupts during a stop shorten it, and are neither lost nor raised in its midst."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jupyter_loaderguard import interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_held_back_and_then_raised() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts.held() as hurry:
        assert not hurry()
        interrupt()
        time.sleep(0.05)
        reached = hurry()
    assert reached


def test_never_drops_it() -> None:
    with interrupts.held(interrupts.NEVER) as hurry:
        interrupt()
        time.sleep(0.05)
    assert hurry()


def test_later_raises_it_after_the_caller_has_returned() -> None:
    with interrupts.held(interrupts.LATER):
        interrupt()
        time.sleep(0.05)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)


def test_holds_nest() -> None:
    outer_done = False
    with pytest.raises(KeyboardInterrupt), interrupts.held() as outer:
        with interrupts.held(interrupts.NOW):
            interrupt()
            time.sleep(0.05)
        outer_done = outer()
    assert outer_done


def test_the_users_handler_gets_it_and_stays() -> None:
    got = []
    previous = signal.signal(signal.SIGINT, lambda signum, frame: got.append(signum))
    try:
        mine = signal.getsignal(signal.SIGINT)
        with interrupts.held():
            interrupt()
            time.sleep(0.05)
            assert got == []
        assert got == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_ignored_signal_stays_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.held() as hurry:
            interrupt()
            time.sleep(0.05)
            assert not hurry()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with interrupts.held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_sigint_is_blocked_for_a_child_that_is_forked_or_spawned_only() -> None:
    for method, expected in (("fork", True), ("spawn", True), ("forkserver", False), (None, False)):
        with interrupts.blocked_for_child(method):
            inside = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert (signal.SIGINT in inside) == expected
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_the_breaker_ends_a_sleep_of_the_main_thread() -> None:
    wanted = [True]
    breaker = interrupts.Breaker()
    breaker.install(lambda frame: wanted[0])
    timer = threading.Timer(0.2, breaker.break_off, (threading.get_ident(),))
    timer.start()
    try:
        with pytest.raises(interrupts.WaitBroken):
            time.sleep(30)
        wanted[0] = False  # the wait is over: what comes now must not raise
        breaker.break_off(threading.get_ident())
        time.sleep(0.05)
    finally:
        timer.join()
        breaker.remove()


def test_the_breaker_passes_an_except_of_the_users_and_leaves_no_handler() -> None:
    breaker = interrupts.Breaker()
    before = interrupts.free_signal()
    breaker.install(lambda frame: True)
    assert interrupts.free_signal() != before
    timer = threading.Timer(0.2, breaker.break_off, (threading.get_ident(),))
    timer.start()
    with pytest.raises(interrupts.WaitBroken):
        while True:
            try:
                time.sleep(30)
            except Exception:
                continue
    timer.join()
    breaker.remove()
    assert interrupts.free_signal() == before


def test_the_breaker_reaches_python_code_in_another_thread() -> None:
    ended: list[str] = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.01)
        except interrupts.WaitBroken:
            ended.append("broken")

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    interrupts.Breaker().break_off(thread.ident)
    thread.join(10)
    assert ended == ["broken"]


CALLED_OFF = """
import sys, threading
from jupyter_loaderguard import interrupts

breaker, is_ready, said = interrupts.Breaker(), threading.Event(), []

def work(is_to_be_broken):
    try:
        while is_to_be_broken:
            is_ready.set()
    except interrupts.WaitBroken:
        said.append("broken")
    breaker.call_off()
    said.append("went on")

thread = threading.Thread(target=work, args=("now" in sys.argv,))
thread.start()
if "now" in sys.argv:
    is_ready.wait()
    breaker.break_off(thread.ident)
thread.join()
sys.settrace(lambda *arguments: None)
work(False)
sys.settrace(None)
print(*said)
"""


@pytest.mark.parametrize("when", ["never", "now"])
def test_what_the_breaker_called_off_does_not_hang_a_traced_program(when: str) -> None:
    command = [sys.executable, "-c", CALLED_OFF, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.removeprefix("broken ") == "went on went on\n", done.stderr


def test_a_watch_knows_of_an_interrupt_that_an_inner_cell_has_taken() -> None:
    watch = interrupts.InterruptWatch()
    watch.begin()
    try:
        with interrupts.held(interrupts.NEVER):
            assert not watch.has_come()
            signal.raise_signal(signal.SIGINT)
            assert watch.has_come()
            assert watch.take()
            assert watch.has_come()
            assert not watch.take()
        watch.end()
        watch.begin()
        assert not watch.has_come()
    finally:
        watch.close()
