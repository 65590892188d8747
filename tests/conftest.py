"""What all tests begin with."""

from __future__ import annotations

import signal

import pytest

# as a terminal has them: `make test &` or `nohup make test` hands down signals that are ignored, and so would kernels
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONG = ("test_cluster", "test_notebooks", "test_outliving", "test_recovery", "test_recovery_soak", "test_stalls")
"""Files that take long, and so begin early: or one process still works on them when the others have nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)
