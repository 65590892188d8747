"""What the workers share: CPUs, memory and /dev/shm, within the limits of the container."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path

from . import usage
from .model import MachineState

_CGROUPS = Path("/sys/fs/cgroup")
_SHM = "/dev/shm"


def look() -> MachineState:
    """Look at the machine as this process may use it."""
    total, available = _memory()
    shm = os.statvfs(_SHM) if os.path.isdir(_SHM) else None
    return MachineState(
        cpus=usable_cpus(),
        memory_bytes=total,
        memory_available_bytes=available,
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_used_bytes=(shm.f_blocks - shm.f_bfree) * shm.f_frsize if shm else None,
    )


def shm_used_bytes() -> int:
    """Return how much of /dev/shm is in use, 0 where there is none."""
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        return 0
    return (shm.f_blocks - shm.f_bfree) * shm.f_frsize


def usable_cpus() -> int:
    """Return how many CPUs this process may use: by its affinity, and by the container's share of time."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    shares = [share for group in _groups("cpu") if (share := _cpu_share(group)) is not None]
    return max(1, min(cpus, *(math.ceil(share) for share in shares))) if shares else cpus


def _memory() -> tuple[int, int]:
    """Return the bytes of memory that there are and that are available; of the container, if it has a limit."""
    whole, available = usage.system_memory()
    total = whole
    for group in _groups("memory"):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < whole:
            left = max(0, limit - used + _reclaimable(group))
            total, available = min(total, limit), min(available, left)
    return total, available


def oom_kills() -> int:
    """Return how many processes of this container the system has ended for memory."""
    for group in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            try:
                found = dict(line.split()[:2] for line in (group / name).read_text().splitlines())
            except (OSError, ValueError):
                continue
            if "oom_kill" in found:
                return int(found["oom_kill"])
    return 0


def _reclaimable(group: Path) -> int:
    """Return the bytes of files in memory that the system gives up first: they count as used, and are not."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split()[:2] for line in lines)
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


def _cpu_share(group: Path) -> float | None:
    """Return how many CPUs' time a control group may use; None if it has no limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        one, other = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        return one / other if one is not None and other and one > 0 else None
    return None if quota == "max" else int(quota) / int(period)


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # not of this version of control groups, or no limit ("max")
            continue
    return None


@functools.lru_cache(maxsize=4)
def _groups(controller: str) -> tuple[Path, ...]:
    """Return the control groups that this process is in, up to the root: the limit of each one holds."""
    return tuple(_walk(controller))


def _walk(controller: str) -> Iterator[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = _CGROUPS / controller if names else _CGROUPS
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):
            if ".." not in part.parts and (root / part).is_dir():
                yield root / part
