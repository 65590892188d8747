"""What the agent costs in a worker, how soon a stall is shown, and how soon a stack is there."""

from __future__ import annotations

import time

from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard import guarding
from jupyter_loaderguard.watch import watchdog
from jupyter_loaderguard.worker.observed import key_observer
from jupyter_loaderguard.worker.slot import Slot
from tests.programs import stalls
from tests.programs.datasets import HoldsGil, Slow

from .figures import Figure, interleave, median, spread

KEYS = list(range(64))
ROUNDS = 2_000


def agent() -> list[Figure]:
    """The cost per sample: going through the keys of a batch with and without notes of each."""
    slot = Slot()
    slot.open()
    observe = key_observer(slot, is_batched=True)

    def measure(keys: list[int] | None) -> float:
        since = time.perf_counter()
        for _ in range(ROUNDS):
            for _ in observe(0, KEYS) if keys is None else keys:
                pass
        return (time.perf_counter() - since) / ROUNDS / len(KEYS)

    plain, observed = interleave(lambda: measure(KEYS), lambda: measure(None), 15)
    costs = [(late - early) * 1e6 for early, late in zip(plain, observed, strict=True)]
    return [
        Figure(
            "agent in the worker, per sample (batches of 64)",
            f"{median(plain) * 1e6:.3f} µs",
            spread(costs, "µs", 3) + " more",
            "≤ 0.5 µs",
            median(costs) <= 0.5,
            {"cost_us": costs},
        )
    ]


def card() -> list[Figure]:
    """From the moment when the limit has passed until the card has been drawn and handed over."""
    late = [_show_late(workers) for _ in range(10) for workers in (2, 0)]
    return [
        Figure(
            "stall card after the limit has passed (2 workers, and none)",
            "never",
            f"{spread(late, 's', 2)}, worst {max(late):.2f} s",
            "≤ 0.5 s",
            max(late) <= 0.5,
            {"seconds": late},
        )
    ]


def _show_late(workers: int, limit: float = 1.0) -> float:
    shown: list[float] = []
    before, watchdog.show = watchdog.show, lambda stall, record, key: shown.append(time.perf_counter())
    try:
        with lg.guard(stall_seconds=limit):
            it = iter(DataLoader(stalls.Dawdles(limit + 0.8), num_workers=workers))
            for _ in range(stalls.BAD):
                next(it)
            since = time.perf_counter()
            next(it)
    finally:
        watchdog.show = before
    return shown[0] - since - limit


def stacks() -> list[Figure]:
    """Stacks of workers in a C call that holds the GIL, and of 16 workers at once."""
    with lg.guard():
        it = iter(DataLoader(HoldsGil(), num_workers=1))
        (worker,) = lg.snapshot().workers
        time.sleep(1)
        since = time.perf_counter()
        text = lg.stacks(worker.pid)[worker.pid]
        held = time.perf_counter() - since
        assert "ctypes.PyDLL(None).sleep" in text, text
        del it
    with lg.guard():
        it = iter(DataLoader(Slow(), num_workers=16))
        next(it)
        many: list[float] = []
        for _ in range(10):
            since = time.perf_counter()
            texts = guarding.stacks()
            many.append(time.perf_counter() - since)
            assert len(texts) == 16
            assert all("_worker_loop" in one for one in texts.values())
        del it
    return [
        Figure(
            "stack of a worker in a C call that holds the GIL",
            "–",
            f"{held * 1000:.0f} ms",
            "≤ 500 ms",
            held <= 0.5,
            {"seconds": [held]},
        ),
        Figure(
            "stacks of 16 workers at once",
            "–",
            spread([one * 1000 for one in many], "ms", 0),
            "≤ 500 ms",
            max(many) <= 0.5,
            {"seconds": many},
        ),
    ]
