"""What processes use: memory, CPU and descriptors; and how many descriptors this one may have."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from .processes import LINUX, NO_DESCRIPTOR, read, stat_of

FEW_DESCRIPTORS = 10
"""As many as torch itself tries to get before it says that there are too few."""
SPARE_DESCRIPTORS = 64
WORKERS_DESCRIPTORS = 6
"""As many as a loader needs for each worker: its pipes, and batches under way."""
LOADERS_DESCRIPTORS = 16


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 if it is gone."""
    if LINUX:
        try:
            return int(read(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):  # gone, or a zombie without memory
            return 0
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that is no file's and not /dev/shm's, 0 if it is gone or that is not known."""
    try:
        _, resident, shared = map(int, read(f"/proc/{pid}/statm").split()[:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def private_bytes(pid: int) -> int:
    """Return the memory that ends with this process: pages that it shares are not counted."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError):  # gone, or no descriptor is left to look with
        return 0


def system_memory() -> tuple[int, int]:
    """Return the bytes of memory that the machine has, and those that are available."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def count_preemptions() -> int:
    """Return how often this process was taken off a CPU that it wanted to keep; 0 where that is not counted."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, 0 if it is gone."""
    if LINUX:
        fields = stat_of(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def scheduled_seconds(pid: int) -> float | None:
    """Return the CPU time that the main thread of a process wanted: what it got, and its wait for a CPU (Linux)."""
    try:
        got, waited, _ = read(f"/proc/{pid}/task/{pid}/schedstat").split()
    except (OSError, ValueError):  # gone, or the system does not count
        return None
    return (int(got) + int(waited)) / 1e9


def descriptor_count(pid: int) -> int | None:
    """Return how many files a process has open, where that can be counted."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # not Linux, or gone
        return None


def free_descriptors(workers: int) -> float:
    """Return how many more files this process may open when a loader has what it needs for its workers.

    Below SPARE_DESCRIPTORS they are the user's: the guard does with fewer. A pipe, a kept batch, a file that the
    dataset opens: what plain torch has room for must have room with the guard too.
    """
    limit, _ = descriptor_limits()
    if not limit:
        return float("inf")
    try:
        taken = len(os.listdir("/proc/self/fd" if LINUX else "/dev/fd"))
    except OSError as error:  # it takes one itself
        return 0 if error.errno in NO_DESCRIPTOR else float("inf")
    return limit - taken - WORKERS_DESCRIPTORS * workers - LOADERS_DESCRIPTORS


def descriptor_limits() -> tuple[int, int]:
    """Return how many files this process may have open, and to how many it may raise that; 0 for no limit."""
    if sys.platform == "win32":
        return 0, 0
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (0 if soft == resource.RLIM_INFINITY else soft), hard


@contextlib.contextmanager
def spare_descriptors() -> Iterator[None]:
    """Let this process open some more files than it may, while it stops workers; where the system allows that.

    Who keeps batches until no file can be opened any more wants the workers, and what they started, gone all the same.
    """
    limit, hard = descriptor_limits()
    more = limit + SPARE_DESCRIPTORS if hard < 0 else min(limit + SPARE_DESCRIPTORS, hard)  # below 0: endless
    if not limit or more <= limit or not is_short_of_descriptors():
        yield
        return
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def is_short_of_descriptors() -> bool:
    """Tell whether this process cannot open a few more files: it has reached its limit, or the machine its own."""
    taken: list[int] = []
    try:
        while len(taken) < FEW_DESCRIPTORS:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in NO_DESCRIPTOR
    finally:
        for fd in taken:
            os.close(fd)
    return False
