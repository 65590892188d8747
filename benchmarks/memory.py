"""What the guard costs in memory: a large dataset that travels to a spawned worker."""

from __future__ import annotations

from tests.kernel.driver import Kernel

from .figures import Figure, median

BOUND = 1.05
RUNS = 1
MEGABYTES = 300
SHAPES = {
    "a numpy array": f"numpy.random.default_rng(0).integers(0, 256, {MEGABYTES}_000_000, dtype=numpy.uint8)",
    "a tensor": f"torch.ones({MEGABYTES}_000_000, dtype=torch.uint8)",
    "a list of bytes": f"[os.urandom(1_000_000) for _ in range({MEGABYTES})]",
    "a list of short bytes": f"[os.urandom(1_000) for _ in range({MEGABYTES}_000)]",
}
SETUP = """
import numpy
from tests.programs.datasets import Holds as Imported
class OfTheNotebook(Imported):
    def __getitem__(self, index): return index
def peak(pid):
    return next(int(line.split()[1]) for line in open(f"/proc/{pid}/status") if line.startswith("VmHWM"))
def peaks(dataset):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    it = iter(DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="spawn"))
    next(it)
    found = peak("self"), peak(it._workers[0].pid)
    del it
    return found
"""


def _measure(shape: str, kind: str, is_guarded: bool) -> tuple[int, int]:
    """Return the peaks, in kilobytes, of the kernel from before the worker's start on, and of the worker."""
    kernel = Kernel(load=is_guarded)
    try:
        kernel.ok(SETUP)
        kernel.ok(f"dataset = {kind}({shape})")
        in_kernel, in_worker = kernel.ok("peaks(dataset)", timeout=120).value  # type: ignore[misc]
    finally:
        kernel.close()
    return in_kernel, in_worker


def spawn_memory() -> list[Figure]:
    """The peak of kernel and worker with a dataset of 300 MB under spawn; of an imported class, and of the notebook."""
    figures = []
    for name, shape in SHAPES.items():
        ways = {"plain": ("Imported", False), "imported": ("Imported", True), "notebook": ("OfTheNotebook", True)}
        taken: dict[str, list[tuple[int, int]]] = {way: [] for way in ways}
        for _ in range(RUNS):
            for way, (kind, is_guarded) in ways.items():
                taken[way].append(_measure(shape, kind, is_guarded))
        for place, where in enumerate(("kernel", "worker")):
            peaks = {way: [float(one[place]) / 1024 for one in measured] for way, measured in taken.items()}
            plain = median(peaks["plain"])
            ratios = {way: median(peaks[way]) / plain for way in ("imported", "notebook")}
            said = ", ".join(f"{ratio:.3f} ({way} class)" for way, ratio in ratios.items())
            figures.append(
                Figure(
                    f"peak memory of the {where} under spawn, dataset with {name} of {MEGABYTES} MB",
                    f"{plain:,.0f} MB",
                    said,
                    f"≤ {BOUND}",
                    max(ratios.values()) <= BOUND,
                    peaks,
                )
            )
    return figures
