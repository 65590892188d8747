"""Terminal IPython, through a pseudo-terminal."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator

import pexpect
import psutil
import pytest

from .driver import is_gone, wait_until


@pytest.fixture
def terminal() -> Iterator[pexpect.spawn]:
    """An IPython at its prompt, with the extension loaded."""
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor", "--quick"]
    child = pexpect.spawn(
        command[0],
        command[1:],
        timeout=60,
        encoding="utf-8",
        dimensions=(50, 200),
        env={**os.environ, "PYTHONPATH": os.getcwd(), "IPYTHONDIR": "/nonexistent-ipython"},
    )
    child.expect(r"In \[1\]: ")
    run(child, "%load_ext jupyter_loaderguard")
    run(child, "from tests.programs.datasets import *; from torch.utils.data import DataLoader")
    yield child
    child.close(force=True)


def run(terminal: pexpect.spawn, line: str) -> str:
    """Type a line and return what is printed until the next prompt."""
    terminal.sendline(line)
    terminal.expect(r"In \[\d+\]: ")
    return terminal.before


def workers(terminal: pexpect.spawn) -> list[psutil.Process]:
    found = psutil.Process(terminal.pid).children(recursive=True)
    return [process for process in found if process.name().startswith("pt_data_work")]


def test_status_is_text(terminal: pexpect.spawn) -> None:
    run(terminal, "loader = DataLoader(Quick(), num_workers=2); it = iter(loader); next(it);")
    said = run(terminal, "%loaderguard")
    assert re.search(r"loader: Quick of 1,000 samples", said)
    assert "<table" not in said
    assert "2 workers" in said


def test_control_c_ends_the_workers(terminal: pexpect.spawn) -> None:
    terminal.sendline("for batch in DataLoader(Stuck(), num_workers=2): pass")
    wait_until(lambda: len(workers(terminal)) == 2, 30)
    processes = workers(terminal)
    time.sleep(0.3)
    terminal.sendintr()
    terminal.expect("KeyboardInterrupt")
    terminal.expect(r"In \[\d+\]: ")
    assert all(is_gone(process) for process in processes)


def test_a_guarded_cell_and_the_end_of_the_session(terminal: pexpect.spawn) -> None:
    said = run(
        terminal,
        "get_ipython().run_cell_magic('guarded_loader', '', 'for b in DataLoader(Quick(8), num_workers=2): pass')",
    )
    assert "8 batches" in said
    assert "0 workers left" in said
    run(terminal, "it = iter(DataLoader(Stubborn(), num_workers=2))")
    wait_until(lambda: len(workers(terminal)) == 2, 30)
    processes = workers(terminal)
    time.sleep(0.3)
    terminal.sendline("exit")
    terminal.expect(pexpect.EOF, timeout=20)
    assert all(is_gone(process) for process in processes)


def test_the_widget_is_a_table_in_a_terminal(terminal: pexpect.spawn) -> None:
    run(terminal, "loader = DataLoader(Quick(), num_workers=2); it = iter(loader); next(it);")
    said = run(terminal, "%loaderguard widget")
    assert re.search(r"loader: Quick of 1,000 samples", said)
