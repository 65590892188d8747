"""A fork of the kernel that does something for the doctor or for tune, and is ended when that is no longer wanted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import interrupts, processes
from ..processes import Handle
from ..registry import registry

GRACE_SECONDS = 0.2


@contextmanager
def forked(target: Callable[[Any, Any], None], subject: Any) -> Iterator[tuple[Any, Any]]:
    """Run `target(subject, pipe)` in a fork; yield its process and our end of the pipe."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(subject, theirs), name="loaderguard-aside", daemon=True)
    handle: Handle | None = None
    try:  # an interrupt that was held back comes when the reaper, and when the process is there
        registry.prepare_birth()
        with interrupts.held(), interrupts.blocked_for_child("fork"):
            process.start()
            handle = Handle(process.pid or 0)
            registry.reaper.born(handle)
        theirs.close()
        yield process, ours
    finally:
        with interrupts.held():
            ours.close()
            theirs.close()
            if handle is not None:
                _end(process, handle)
            if not registry.is_guarding:
                registry.reaper.stop()


def _end(process: Any, handle: Handle) -> None:
    processes.stop([handle], GRACE_SECONDS)
    process.join(0)
    registry.reaper.gone([handle])
    handle.close()
