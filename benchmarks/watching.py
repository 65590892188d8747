"""What the live widget costs, and how soon a click on Stop has ended a running cell's workers."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kernel.driver import Kernel

from .figures import Figure, interleave, median, quartiles, spread

SECONDS = 30
PAIRS = 12
BLOCK_SECONDS = 3.0
CLICKS = 5
THREADS = ("loaderguard-status", "IOPub")
"""The one that looks and draws, and ipykernel's, which sends."""


@contextmanager
def _kernel() -> Iterator[Kernel]:
    kernel = Kernel(setup="import jupyter_loaderguard as lg\nfrom benchmarks import watching")
    try:
        yield kernel
    finally:
        kernel.close()


def refresh() -> list[Figure]:
    """Watch 16 workers for a while, every one in a row of its own, from the front end's side."""
    with _kernel() as kernel:
        kernel.ok("%loaderguard widget\nlg.StatusWidget()._turn_fold()")
        cell = kernel.begin(f"watching.load({SECONDS})")
        sizes: list[int] = []
        messages: list[dict] = []  # type: ignore[type-arg]
        while True:
            message = kernel.client.get_iopub_msg(timeout=60)
            is_own = message["parent_header"].get("msg_id") == cell
            if message["msg_type"] == "comm_msg":
                messages.append(message)
            elif message["msg_type"] == "execute_result" and is_own:
                shares = json.loads(message["content"]["data"]["text/plain"].strip("'"))
                break
            assert message["msg_type"] != "error", message["content"]
        boards = [message for message in messages if "<table" in str(message["content"]["data"])]
        for message in boards:
            sizes.append(sum(map(len, kernel.client.session.serialize(message))))
    share = 100 * sum(shares.values())
    detail = ", ".join(f"{name} {100 * one:.2f} %" for name, one in shares.items())
    return [
        Figure(
            f"live widget, 16 workers in 16 rows, refreshed each second for {SECONDS} s: CPU in the kernel",
            "–",
            f"{share:.2f} % of a core ({detail})",
            "≤ 1 %",
            share <= 1,
            {"percent": [share]},
        ),
        Figure(
            "the same: size of a refresh on the wire",
            "–",
            f"{spread([size / 1000 for size in sizes], 'kB', 1)}, {len(messages) / len(boards):.2f} messages",
            "≤ 6 kB, 1 message",
            max(sizes) <= 6000 and len(messages) <= len(boards) + 3,  # the dropdown and the button, once
            {"bytes": [float(size) for size in sizes]},
        ),
    ]


def load(seconds: float) -> str:
    """In the kernel: load with 16 workers, and return how busy the widget's threads were."""
    from torch.utils.data import DataLoader

    from tests.programs.datasets import Slow

    it = iter(DataLoader(Slow(1_000_000), batch_size=4, num_workers=16))
    next(it)
    time.sleep(3)  # the first looks at each worker's memory
    clocks = {one.name: time.pthread_getcpuclockid(one.ident) for one in threading.enumerate() if one.name in THREADS}
    wall, before = time.perf_counter(), {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    while time.perf_counter() - wall < seconds:
        next(it)
    wall = time.perf_counter() - wall
    return json.dumps({name: (time.clock_gettime(clock) - before[name]) / wall for name, clock in clocks.items()})


def watched_throughput() -> list[Figure]:
    """Plain torch against a guarded loader with the widget on, in turn, in a kernel."""
    with _kernel() as kernel:
        pairs = json.loads(str(kernel.ok("watching.compare()", timeout=300).value))
    ratios = [guarded / plain for plain, guarded in zip(*pairs, strict=True)]
    low, middle, high = quartiles(ratios)
    return [
        Figure(
            "throughput with the widget on, 2 workers, tiny samples",
            f"1 ({median(pairs[0]):,.0f} batches/s)",
            f"{middle:.3f} ({low:.3f}–{high:.3f}, n={PAIRS} × {BLOCK_SECONDS:g} s)",
            "≥ 0.99",
            middle >= 0.99,
            {"ratio": ratios},
        )
    ]


def compare() -> str:
    """In the kernel: return batches per second of plain torch and of guarded, watched loaders."""
    from IPython import get_ipython
    from torch.utils.data import DataLoader

    from tests.programs.datasets import Quick

    shell = get_ipython()

    def measure() -> float:
        it = iter(DataLoader(Quick(10_000_000), batch_size=8, num_workers=2))
        for _ in range(300):
            next(it)
        done, since = 0, time.perf_counter()
        while time.perf_counter() - since < BLOCK_SECONDS:
            next(it)
            done += 1
        return done / (time.perf_counter() - since)

    def plain() -> float:
        shell.run_line_magic("loaderguard", "off")
        return measure()

    def watched() -> float:
        shell.run_line_magic("loaderguard", "on")
        shell.run_line_magic("loaderguard", "widget")
        return measure()

    return json.dumps(interleave(plain, watched, PAIRS))


def click() -> list[Figure]:
    """From the click on "Stop all" in JupyterLab, while a cell waits for stuck workers, until none is left."""
    from tests.browser.driver import LOOP, Server, chromium, wait_until

    took: list[float] = []
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        server = Server("lab", browser, Path(folder), Path(folder))
        try:
            for number in range(CLICKS):
                page = server.open(
                    f"click{number}", LOOP.replace("Slow()", "Stuck()").replace("workers=2", "workers=4")
                )
                wait_until(lambda: len(server.workers()) == 4, 90, page)
                button = page.locator(".lgw").first.get_by_role("button", name="Stop all")
                button.wait_for()
                page.wait_for_timeout(2000)
                since = time.perf_counter()
                button.click()
                wait_until(lambda: not server.workers(), 30, pause=0.01)
                took.append(time.perf_counter() - since)
                page.close()
        finally:
            server.close()
    return [
        Figure(
            "click on Stop all during a running cell (JupyterLab, 4 stuck workers) → 0 left",
            "–",
            f"{spread(took)}, worst {max(took):.2f} s",
            "≤ 1.5 s, of which 0.5 s grace",
            max(took) <= 1.5,
            {"seconds": took},
        )
    ]
