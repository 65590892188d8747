"""The census as text, for terminals and `%loaderguard sweep`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..population import Census, KernelLoader, KernelState, Orphan, SweptProcess
from .text import clean, clip, count, seconds, size

_WORKERS = ("worker>", "pid>", "state", "memory>", "age>")
_ORPHANS = ("pid>", "state", "memory>", "age>", "dataset", "kernel>", "notebook", "known by")
"""Headings; figures, marked with >, end at the right."""
_HOWS = {
    "ended": "ended",
    "gone": "had ended already",
    "spared": "left alone: it is not certain any more that it is an orphan",
    "unkillable": "not ended yet: it is blocked in the system, or another user's",
}


def census(census: Census) -> str:
    """Draw the kernels under guard with their workers, then the orphans."""
    lines = [line for kernel in census.kernels for line in _kernel(kernel, census.taken)]
    if census.orphans:
        lines += orphans(census.orphans, census.taken)
    return "\n".join([*lines, summary(census)])


def notes(census: Census) -> list[str]:
    """Draw what was left aside; names of files and processes are in it."""
    return [clean(note) for note in census.notes]


def summary(census: Census) -> str:
    """Say in a line how many there are."""
    loaders = [loader for kernel in census.kernels for loader in kernel.loaders]
    workers = sum(len(loader.workers) for loader in loaders)
    kernels = count(len(census.kernels), "kernel")
    words = f"{kernels} under guard, {count(len(loaders), 'loader')}, {count(workers, 'worker')}"
    if not census.orphans:
        return f"{words}  ·  no orphans"
    them = "it" if len(census.orphans) == 1 else "them"
    return f"{words}  ·  {count(len(census.orphans), 'orphan')}; jupyter loaderguard sweep ends {them}"


def orphans(found: Iterable[Orphan], now: float) -> list[str]:
    """Draw workers whose kernel is dead."""
    rows = [_orphan_row(orphan, now) for orphan in found]
    head = f"{count(len(rows), 'orphan')}: {'a worker' if len(rows) == 1 else 'workers'} whose kernel is dead"
    return [head, *(f"  {line}" for line in _table(_ORPHANS, rows))]


def swept(report: Iterable[SweptProcess]) -> list[str]:
    """Say what became of each process, and sum it up."""
    report = list(report)
    lines = [f"{one.pid}  {one.what}: {_HOWS[one.how]}" for one in report]
    ways = Counter(one.how for one in report)
    left = ways["spared"] + ways["unkillable"]
    return [*lines, f"loaderguard: {count(ways['ended'], 'process', 'processes')} ended, {left} left"]


def _kernel(kernel: KernelState, now: float) -> list[str]:
    name, age = clip(kernel.notebook), seconds(max(0.0, now - kernel.started))
    lines = [f"{name}: kernel {kernel.pid}  ·  up {age}{'' if kernel.loaders else '  ·  no loader with workers'}"]
    for loader in kernel.loaders:
        lines.append(f"  {clip(loader.name)}: {'  ·  '.join(_facts(loader))}")
        rows = [
            (str(one.worker_id), str(one.pid), one.state, size(one.memory_bytes), seconds(max(0.0, now - one.started)))
            for one in loader.workers
        ]
        lines += [f"    {line}" for line in _table(_WORKERS, rows)]
    return lines


def _facts(loader: KernelLoader) -> list[str]:
    words = [clip(loader.dataset)]
    if loader.start_method is not None:
        words.append(clip(loader.start_method))
    if loader.cell is not None:
        words.append(f"cell {loader.cell}")
    return words


def _orphan_row(orphan: Orphan, now: float) -> tuple[str, ...]:
    return (
        str(orphan.pid),
        orphan.state,
        size(orphan.memory_bytes),
        seconds(max(0.0, now - orphan.started)),
        clip(orphan.dataset or "–"),
        str(orphan.kernel_pid or "–"),
        clip(orphan.notebook or "–"),
        orphan.recognised,
    )


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align columns: the figures to the right, words to the left."""
    table = [tuple(name.rstrip(">") for name in header), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    signs = [">" if name.endswith(">") else "<" for name in header]
    cells = [[f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)] for row in table]
    return ["  ".join(row).rstrip() for row in cells]
