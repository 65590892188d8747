"""A test that leaves a process, a thread, a signal handler or a patch behind has failed."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.utils.data.dataloader as dataloader

multiprocessing.set_forkserver_preload(["torch.utils.data"])  # or each worker imports it
SIGNALS = [signum for signum in (signal.SIGINT, signal.SIGTERM) if signum in signal.valid_signals()]
CLASSES = (dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter, dataloader.DataLoader)


def _traces(earlier: frozenset[int] = frozenset()) -> dict[str, object]:
    """Look what there is; children of `earlier` tests, of other folders, may end whenever somebody looks for them."""
    helpers = ("resource_tracker", "forkserver")
    children = [
        f"{child.pid} {_command(child)[:80]}"
        for child in psutil.Process().children(recursive=True)
        if child.pid not in earlier
        if not any(helper in _command(child) for helper in helpers)
    ]
    return {
        "children": children,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": [signal.getsignal(signum) for signum in SIGNALS],
        "patches": [{name: id(value) for name, value in vars(cls).items()} for cls in CLASSES],
        "finders": [type(finder).__name__ for finder in sys.meta_path],
    }


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    earlier = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    before = _traces(earlier)
    yield
    if _traces(earlier) != before:
        gc.collect()  # errors that a test has caught hold what they went through
    deadline = time.monotonic() + 5
    while _traces(earlier) != before and time.monotonic() < deadline:
        time.sleep(0.02)  # a thread or process may be on its way out
    assert _traces(earlier) == before


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch start its thread that pins memory; only the accelerator, which is not here, is made up."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", lambda data, device=None: data)
