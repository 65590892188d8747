"""Whatever of ours raises, in a loop, in iter(), in del, at a cell's start or end: torch's work goes on, and one line says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_loaderguard import seam
from tests.programs.faults import SCENARIOS

ROOT = Path(__file__).parents[2]
PARTS = {
    "even": (list(SCENARIOS)[::2], 100),
    "odd": (list(SCENARIOS)[1::2], 100),
    "workers": (["--workers", *SCENARIOS], 50),
}
"""What is tried, and how many functions are found at the least."""
LONGEST_RIM = 32


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("part", PARTS)
def test_each_of_our_functions_may_raise(part: str) -> None:
    words, least = PARTS[part]
    command = [sys.executable, "-m", "tests.programs.faults", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(trial["fired"] for trial in trials) > least, "too little was found, or reached"
    wrong = [trial for trial in trials if trial["wrong"]]
    assert wrong == []


def test_what_stands_around_ours_is_short() -> None:
    from jupyter_loaderguard.torch_adapter import patches  # noqa: F401 - marks its own

    lengths = {
        code.co_qualname: max(line for _, _, line in code.co_lines() if line) - code.co_firstlineno for code in seam.RIM
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > LONGEST_RIM} == {}
