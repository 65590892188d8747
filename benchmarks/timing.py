"""How true the accounts of a run are against a stopwatch of the loop's own, and how long tune takes."""

from __future__ import annotations

import os
import signal
import threading
import time

from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from tests.programs import paces
from tests.programs.datasets import Slow

from .figures import Figure, interleave, median, quartiles, spread

ROUNDS = 5
CASES = {
    "2 workers, the loop waits": (2, 0.002),
    "2 workers, the loop computes": (2, 0.1),
    "no workers": (0, 0.02),
}


def stopwatch() -> list[Figure]:
    """Seconds of waiting and of computing, by the report and by clocks around `next` and the loop's body."""
    errors = [error for _ in range(ROUNDS) for workers, body in CASES.values() for error in _compare(workers, body)]
    worst = max(errors)
    return [
        Figure(
            f"accounts against an external stopwatch ({', '.join(CASES)}; {ROUNDS} times)",
            "–",
            f"off by {100 * median(errors):.2f} % of the time, worst {100 * worst:.2f} %",
            "≤ 2 %",
            worst <= 0.02,
            {"error": errors},
        )
    ]


def _compare(workers: int, body: float) -> tuple[float, float]:
    """Return how far waiting and computing are off, as shares of the loop's whole time."""
    wait = loop = 0.0
    with lg.guard() as run:
        iterator = iter(DataLoader(Slow(80), batch_size=4, num_workers=workers))
        while True:
            since = time.perf_counter()
            batch = next(iterator, None)
            between = time.perf_counter()
            wait += between - since
            if batch is None:
                break
            time.sleep(body)
            del batch  # which unmaps its memory, in the loop's own time
            loop += time.perf_counter() - between
    (found,) = run.report.times
    whole = wait + loop
    return abs(found.wait_seconds - wait) / whole, abs(found.loop_seconds - loop) / whole


def tune() -> list[Figure]:
    """The default budget, on loaders that are bound by different things; and what an interrupt leaves."""
    loaders = {
        "computes": paces.Computes(),
        "sleeps": paces.Sleeps(),
        "one lock": paces.Locked(),
        "tiny": paces.Quick(),
    }
    results = {name: lg.tune(paces.loader(dataset)) for name, dataset in loaders.items()}
    took = [result.seconds for result in results.values()]
    close = all(
        result.best_row.batches_per_second >= 0.95 * max(row.batches_per_second for row in result.rows)
        for result in results.values()
    )
    best = ", ".join(f"{name}: {result.best}" for name, result in results.items())
    named = results["one lock"].lock == "dataset.lock"
    return [
        Figure(
            f"tune with its default budget (workers recommended: {best})",
            "–",
            f"{spread(took, 's', 1)}, worst {max(took):.1f} s; the lock was {'named' if named else 'NOT named'}",
            "≤ 30 s on 2 cores, within 5 % of the fastest, lock named",
            max(took) <= 30 and close and named,
            {"seconds": took},
        ),
        _interrupted(),
    ]


def _interrupted() -> Figure:
    """From the interrupt to the result so far, with no worker left."""
    late = []
    for number in range(5):
        loader = paces.loader(paces.Sleeps())
        pressed: list[float] = []
        timer = threading.Timer(2.5 + 0.37 * number, _press, [pressed])
        timer.start()
        result = lg.tune(loader)
        late.append(time.perf_counter() - pressed[0])
        assert result.rows, result
        assert lg.snapshot().workers == ()
    return Figure(
        "tune, interrupted: result so far, no worker left",
        "–",
        f"{spread(late, 's', 2)}, worst {max(late):.2f} s",
        "≤ 1 s",
        max(late) <= 1,
        {"seconds": late},
    )


def _press(pressed: list[float]) -> None:
    pressed.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)


def accounting() -> list[Figure]:
    """What a run's accounts add to a loop over tiny samples, against the same guard without a run."""
    from .loading import guard_on

    def measure(block) -> float:
        with block():
            iterator = iter(DataLoader(paces.Quick(1_000_000), batch_size=8, num_workers=2))
            for _ in range(100):
                next(iterator)
            since = time.perf_counter()
            for _ in range(600):
                next(iterator)
            took = time.perf_counter() - since
            del iterator
            return 600 / took

    plain, counted = interleave(lambda: measure(guard_on), lambda: measure(lg.guard), 15)
    low, middle, high = quartiles([after / before for before, after in zip(plain, counted, strict=True)])
    return [
        Figure(
            "throughput in a guarded run, against the guard without a run",
            f"1 ({median(plain):,.0f} batches/s)",
            f"{middle:.3f} ({low:.3f}–{high:.3f}, n={len(plain)} pairs)",
            "≥ 0.99",
            middle >= 0.99,
            {"plain": plain, "counted": counted},
        )
    ]
