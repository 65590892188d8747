"""Many ranks: what reports cost, how soon a hang on one rank is shown, and how soon an interrupt has cleaned all."""

from __future__ import annotations

import json
import threading
import time

from tests.kernel.driver import is_gone
from tests.kernel.test_cluster import ENGINES, ON_ENGINES, Ranks

from .figures import Figure, spread

SECONDS = 30
WORKERS = 4
HANGS = 5
INTERRUPTS = 5
REPORTING = ("loaderguard-reporter", "IOPub", "Control")
"""On an engine: the thread that looks and reports, and ipykernel's, which send and answer."""


def ranks() -> list[Figure]:
    """One cluster of 8 engines for all three."""
    found = Ranks()
    try:
        found.kernel.ok("%loaderguard cluster rc", timeout=60)
        found.kernel.ok("from benchmarks import ranks as bench")
        found.kernel.ok(ON_ENGINES, timeout=120)
        found.kernel.ok("%px from benchmarks import ranks as bench", timeout=120)
        found.look_up_engines()
        return [*_refresh(found), _hang(found), _interrupt(found)]
    finally:
        found.close()


def _refresh(found: Ranks) -> list[Figure]:
    started = f"running = view.execute('shares = bench.load({SECONDS})', silent=False, block=False)"
    found.kernel.ok(started)
    found.wait_for_workers(ENGINES * WORKERS)
    client = json.loads(str(found.kernel.ok(f"bench.measure({SECONDS})", timeout=120).value))
    found.kernel.ok("running.get(60)", timeout=90)
    engines = [json.loads(one) for one in found.kernel.ok("view.pull('shares')").value]  # type: ignore[attr-defined]
    shares = [100 * sum(one.get(name, 0.0) for name in REPORTING) for one in engines]
    own = 100 * sum(share for name, share in client.items() if name != "MainThread")
    detail = ", ".join(f"{name} {100 * share:.2f} %" for name, share in client.items() if share > 0.0005)
    return [
        Figure(
            f"{ENGINES} engines × {WORKERS} workers, refreshed each second for {SECONDS} s: CPU on each engine",
            "–",
            f"{spread(shares, '%', 2)}, most {max(shares):.2f} % of a core",
            "≤ 1 %",
            max(shares) <= 1,
            {"percent": shares},
        ),
        Figure(
            "the same: CPU in the notebook's kernel",
            "–",
            f"{own:.2f} % of a core ({detail})",
            "≤ 2 %",
            own <= 2,
            {"percent": [own]},
        ),
    ]


def load(seconds: float) -> str:
    """On an engine: load, and return how busy each thread was."""
    from torch.utils.data import DataLoader

    from tests.programs.datasets import Slow

    it = iter(DataLoader(Slow(1_000_000), batch_size=4, num_workers=WORKERS))
    next(it)
    time.sleep(5)  # the first looks at each worker's memory
    return measure(seconds, lambda: next(it))


def measure(seconds: float, work=lambda: time.sleep(0.1)) -> str:
    """Return how busy each thread of this process was meanwhile."""
    clocks = {one.name: time.pthread_getcpuclockid(one.ident) for one in threading.enumerate() if one.ident}
    wall, before = time.perf_counter(), {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    while time.perf_counter() - wall < seconds:
        work()
    wall = time.perf_counter() - wall
    alive = {one.name for one in threading.enumerate()}
    return json.dumps(
        {name: (time.clock_gettime(clock) - before[name]) / wall for name, clock in clocks.items() if name in alive}
    )


def _hang(found: Ranks) -> Figure:
    late = [_show_late(found, number % ENGINES) for number in range(HANGS)]
    return Figure(
        f"a hang on one of {ENGINES} ranks: shown in the notebook after its limit has passed",
        "–",
        f"{spread(late)}, worst {max(late):.2f} s",
        "≤ 1 s",
        max(late) <= 1,
        {"seconds": late},
    )


def _show_late(found: Ranks, number: int, limit: float = 1.0) -> float:
    loop = "it = iter(DataLoader(Stuck(), num_workers=1))\ntime.sleep(1)\nsince = time.time()\nnext(it)"
    cell = f"get_ipython().run_cell({f'%%guarded_loader --stall {limit}{chr(10)}{loop}'!r})"
    found.kernel.ok(f"hung = rc[{number}].execute({cell!r}, silent=False, block=False)")
    while True:
        message = found.kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "comm_msg" and "has not come" in str(message["content"]):
            shown = time.time()
            break
    found.kernel.ok(f"lg.cluster().interrupt({number})")
    since = float(found.kernel.ok(f"rc[{number}].pull('since', block=True)").value)  # type: ignore[arg-type]
    found.wait_for_table("·  0 workers")
    return shown - since - limit


def _interrupt(found: Ranks) -> Figure:
    took = [_stop_all(found) for _ in range(INTERRUPTS)]
    return Figure(
        f"interrupt of the notebook with {ENGINES} × {WORKERS} stuck workers → none left on any rank",
        "–",
        f"{spread(took)}, worst {max(took):.2f} s",
        "≤ 3 s",
        max(took) <= 3,
        {"seconds": took},
    )


def _stop_all(found: Ranks) -> float:
    cell = found.kernel.begin(f"%%px\nfor batch in DataLoader(Stuck(), num_workers={WORKERS}): pass")
    workers = found.wait_for_workers(ENGINES * WORKERS)
    time.sleep(2)
    since = time.perf_counter()
    found.kernel.interrupt()
    while not all(is_gone(one) for one in workers):
        time.sleep(0.01)
        assert time.perf_counter() - since < 30, "workers are left"
    took = time.perf_counter() - since
    found.kernel.finish(cell)
    return took
