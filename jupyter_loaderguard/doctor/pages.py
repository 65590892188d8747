"""Pages of memory, by the system's own files: which a forked worker has copied, and which file lies behind one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_EXCLUSIVE, _PRESENT = 1 << 56, 1 << 63


def own_pages(pid: int, pages: Iterable[int]) -> int | None:
    """Return how many of these pages this process alone has; None if the system does not tell.

    A page that a forked worker shares with the kernel is mapped by both. As soon as one writes to it, it gets a
    copy that it alone has; a reference count is enough for that.
    """
    try:
        with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as file:
            entries = [int.from_bytes(os.pread(file.fileno(), 8, 8 * page), "little") for page in pages]
    except OSError:  # gone, not Linux, or not allowed
        return None
    if not any(entry & _PRESENT for entry in entries):
        return None
    return sum(1 for entry in entries if entry & _EXCLUSIVE and entry & _PRESENT)


@dataclass(frozen=True)
class Mapping:
    """A range of this process's memory, and the file behind it."""

    start: int
    stop: int
    is_writable: bool
    offset: int
    file: tuple[str, int]
    """Device and inode; the inode is 0 where there is no file."""


def mappings() -> list[Mapping]:
    """Return the memory map of this process; empty where the system does not tell."""
    try:
        with open("/proc/self/maps") as file:
            return [_mapping(line) for line in file]
    except OSError:
        return []


def _mapping(line: str) -> Mapping:
    extent, rights, offset, device, inode = line.split(None, 5)[:5]
    start, stop = (int(word, 16) for word in extent.split("-"))
    return Mapping(start, stop, "w" in rights, int(offset, 16), (device, int(inode)))


def mapping_at(found: list[Mapping], address: int) -> Mapping | None:
    """Return the range that an address lies in."""
    return next((one for one in found if one.start <= address < one.stop), None)
