"""Print every figure beside plain torch's, and write them to benchmarks/results.json.

`python -m benchmarks [NAME ...]` runs all of them, or those named.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import warnings
from pathlib import Path

import torch

from . import loading, memory, recovering, stalling, stopping, sweeping, timing, watching
from .figures import Figure


def _doctor() -> list[Figure]:
    from . import doctoring  # with OpenCV and h5py, which would make every fork of the others slower

    return doctoring.doctor()


def _ranks() -> list[Figure]:
    from . import ranks  # with ipyparallel

    return ranks.ranks()


BENCHMARKS = {
    "interrupt": stopping.interrupt,
    "delete": stopping.delete,
    "killed_kernel": stopping.killed_kernel,
    "collector": stopping.collector,
    "failed_reruns": stopping.failed_reruns,
    "throughput": loading.throughput,
    "accounted_throughput": loading.accounted_throughput,
    "first_batch": loading.first_batch,
    "single_batch": loading.single_batch,
    "compiled": loading.compiled,
    "load_ext": loading.load_ext,
    "by_value": loading.by_value,
    "spawn_memory": memory.spawn_memory,
    "shutdown": stopping.shutdown,
    "helpers": loading.helpers,
    "snapshot": loading.snapshot,
    "reruns": stopping.reruns,
    "agent": stalling.agent,
    "card": stalling.card,
    "stacks": stalling.stacks,
    "refresh": watching.refresh,
    "watched_throughput": watching.watched_throughput,
    "click": watching.click,
    "recovery": recovering.recovery,
    "mending_throughput": recovering.mending_throughput,
    "ps": sweeping.ps,
    "sweeps": sweeping.sweeps,
    "stopwatch": timing.stopwatch,
    "accounting": timing.accounting,
    "tune": timing.tune,
    "doctor": _doctor,
    "ranks": _ranks,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there is {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    print("| what | plain torch | with the guard | bound | |\n|---|---|---|---|---|", flush=True)
    figures: list[Figure] = []
    since = time.monotonic()
    for name in names or BENCHMARKS:
        for figure in BENCHMARKS[name]():
            figures.append(figure)
            verdict = "ok" if figure.holds else "MISSED"
            print(f"| {figure.what} | {figure.plain} | {figure.guarded} | {figure.bound} | {verdict} |", flush=True)
    print(
        f"\n{len(figures)} figures in {time.monotonic() - since:.0f} s on {platform.python_version()}, torch {torch.__version__}"
    )
    results = Path(__file__).with_name("results.json")
    results.write_text(json.dumps([figure.to_dict() for figure in figures], indent=1))
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
