"""SIGINT during an async cell: letting it end a wait for data."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

from ..registry import registry
from ..torch_adapter import is_loader_frame


class InterruptibleWaits:
    """Lets SIGINT end a wait for data in an async cell, where ipykernel only notes it for the event loop.

    It raises only inside of such a wait, or at the beginning of the next one: anywhere else it would
    raise in the event loop and end the kernel. In a task that the cell made, KeyboardInterrupt would do
    so too; there it is CancelledError. And the loop is woken: tornado's add_callback, which ipykernel's
    handler uses, leaves it asleep until something else happens.
    """

    is_repeatable = True
    """Two calls of the handler for one press do no harm: ipykernel's cancels the cell once."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._loop = task.get_loop()
        self._owner = os.getpid()
        self._previous = signal.getsignal(signal.SIGINT)
        self._handler = self._handle  # one object, to be known again
        self.is_installed = (
            threading.current_thread() is threading.main_thread()
            and callable(self._previous)
            and self._previous is not signal.default_int_handler  # that one raises by itself
        )
        if self.is_installed:
            signal.signal(signal.SIGINT, self._handler)

    def restore(self) -> None:
        """Give SIGINT back to the handler that was there, unless user code has installed another one."""
        registry.interrupt_wait = None
        if self.is_installed and signal.getsignal(signal.SIGINT) is self._handler:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: Any) -> None:
        is_waiting = os.getpid() == self._owner and is_loader_frame(frame)
        if is_waiting and asyncio.current_task() is self._task:
            self._raise_in_wait()
        assert callable(self._previous)
        self._previous(signum, frame)
        if os.getpid() == self._owner:
            self._loop.call_soon_threadsafe(self._forget)
            if is_waiting:
                self._raise_in_wait()
            registry.interrupt_wait = self._raise_in_wait

    def _raise_in_wait(self) -> None:
        self._forget()
        raise KeyboardInterrupt if asyncio.current_task() is self._task else asyncio.CancelledError

    def _forget(self) -> None:
        registry.interrupt_wait = None
