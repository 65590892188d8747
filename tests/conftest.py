"""What all tests begin with."""

from __future__ import annotations

import signal
import warnings

import pytest

# as a terminal has them: `make test &` or `nohup make test` hands down signals that are ignored, and so would kernels
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONG = (
    "test_fail_open",
    "test_cluster",
    "test_notebooks",
    "test_outliving",
    "test_recovery",
    "test_recovery_soak",
    "test_stalls",
)
"""Files that take long, and so begin early: or one process still works on them when the others have nothing left."""


_said: list[str] = []
"""What the guard said of its own limits where no test expected it."""


def pytest_warning_recorded(warning_message: warnings.WarningMessage, nodeid: str) -> None:
    if warning_message.category.__name__ == "LoaderGuardWarning":
        _said.append(f"{nodeid}: {warning_message.message}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _said and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _said:
        terminalreporter.write_line(f"FAILED: the guard said what no test expects: {line}", red=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG)
