"""How long the doctor takes, what it claims about healthy loaders, and what it finds in ill ones."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jupyter_loaderguard as lg
from tests.programs.healthy import HEALTHY
from tests.programs.ill import ILL

from .figures import Figure, spread

ROUNDS = 3


def doctor() -> list[Figure]:
    """Examine all healthy and all ill loaders of the tests, several times."""
    healthy = [_examine(make) for _ in range(ROUNDS) for make in HEALTHY.values()]
    ill = [(one, *_examine(one.make)) for _ in range(ROUNDS) for one in ILL]
    claims = sum(len(codes) for _, codes in healthy)
    right = sum(one.code in codes for one, _, codes in ill)
    wrong = sum(code != one.code for one, _, codes in ill for code in codes)
    took = [seconds for seconds, _ in healthy]
    return [
        Figure(
            f"doctor, {len(HEALTHY)} healthy loaders × {ROUNDS}: findings, and seconds",
            "–",
            f"{claims} findings, {spread(took)}, worst {max(took):.2f} s",
            "0 findings, worst ≤ 5 s",
            claims == 0 and max(took) <= 5,
            {"seconds": took},
        ),
        Figure(
            f"doctor, {len(ILL)} ill loaders × {ROUNDS}: found, and false claims",
            "–",
            f"{right} of {len(ill)} found, {wrong} false claims, worst {max(seconds for _, seconds, _ in ill):.2f} s",
            "all found, 0 false claims, worst ≤ 5 s",
            right == len(ill) and wrong == 0 and max(seconds for _, seconds, _ in ill) <= 5,
            {"seconds": [seconds for _, seconds, _ in ill]},
        ),
    ]


def _examine(make: Callable[[Path], Any]) -> tuple[float, list[str]]:
    """Return how long it took, and the codes that were found."""
    with tempfile.TemporaryDirectory() as folder:
        loader = make(Path(folder))
        since = time.perf_counter()
        found = lg.doctor(loader)
        return time.perf_counter() - since, [finding.code for finding in found]
