"""What a thread of a process is doing at this moment, by the system's own files: computing, or waiting for what.

Linux only; elsewhere the kind is unknown, and the stack alone speaks.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .processes import LINUX, children_of, name_of, socket_ends
from .worker.locks import read_memory

LOOK_SECONDS = 0.12
LOOKS = 6
BUSY_SHARE = 0.3
FAULTS = 10
"""Major page faults within one look that make it swapping."""

CPU, LOCK, FILE, SOCKET, CHILD, SLEEP = "CPU-bound", "lock", "file", "socket", "child", "sleeping"
PIPE, STOPPED, SWAPPING, SYSTEM, GONE, UNKNOWN = "pipe", "stopped", "swapping", "system call", "gone", "unknown"

_CALLS = {  # by machine: what a system call waits for; "fd" means the descriptor in its first argument
    "x86_64": {
        "fd": {0, 1, 16, 17, 18, 19, 20, 42, 43, 44, 45, 46, 47, 74, 75, 288, 295, 296, 299, 307},
        "poll": {7, 271},
        "select": {23, 270},
        "epoll": {232, 281},
        "lock": {202},
        "sleep": {35, 230},
        "child": {61, 247},
        "filelock": {72, 73},
        "open": {257},
    },
    "aarch64": {
        "fd": {29, 63, 64, 65, 66, 67, 68, 69, 70, 82, 83, 202, 203, 206, 207, 211, 212, 242, 243, 269},
        "poll": {73},
        "select": {72},
        "epoll": {22},
        "lock": {98},
        "sleep": {101, 115},
        "child": {95, 260},
        "filelock": {25, 32},
        "open": {56},
    },
}


@dataclass(frozen=True)
class Doing:
    """What one thread does."""

    kind: str
    detail: str = ""
    """What it waits for, in words; for a stopped one, what stopped it."""
    address: int = 0
    """The futex that it waits on."""
    holder: int = 0
    """The process that holds what it waits for, where the system tells."""


@dataclass
class _Look:
    state: str
    cpu_seconds: float
    process_seconds: float
    faults: int


def look(threads: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Doing]:
    """Watch these threads, given as (pid, thread id), for a moment; all at once."""
    threads = list(threads)
    if not LINUX:
        return {thread: Doing(UNKNOWN) for thread in threads}
    looks: dict[tuple[int, int], list[_Look]] = {thread: [] for thread in threads}
    since = time.monotonic()
    for number in range(LOOKS):
        if number:
            time.sleep(LOOK_SECONDS / (LOOKS - 1))
        for thread in threads:
            found = _look(*thread)
            if found is not None:
                looks[thread].append(found)
    seconds = time.monotonic() - since
    return {thread: _judge(*thread, looks[thread], seconds) for thread in threads}


def _look(pid: int, tid: int) -> _Look | None:
    try:
        with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
            text = file.read()
        with open(f"/proc/{pid}/stat", "rb") as file:
            whole = file.read()
    except OSError:  # gone
        return None
    fields, all_fields = (line[line.rindex(b")") + 2 :].split() for line in (text, whole))
    tick = os.sysconf("SC_CLK_TCK")
    return _Look(
        state=fields[0].decode(),
        cpu_seconds=_scheduled_seconds(pid, tid, (int(fields[11]) + int(fields[12])) / tick),
        process_seconds=(int(all_fields[11]) + int(all_fields[12])) / tick,
        faults=int(fields[9]),
    )


def _scheduled_seconds(pid: int, tid: int, rough: float) -> float:
    """Return the CPU time of a thread, to the nanosecond where the system counts so."""
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, IndexError):
        return rough


def _judge(pid: int, tid: int, looks: list[_Look], seconds: float) -> Doing:
    if len(looks) < LOOKS or looks[-1].state in "ZX":
        return Doing(GONE)
    first, last = looks[0], looks[-1]
    states = [one.state for one in looks]
    if last.state in "Tt":
        return Doing(STOPPED, _stopper(pid))
    if last.faults - first.faults >= FAULTS and "D" in states:
        return Doing(SWAPPING, f"{last.faults - first.faults} pages were read back from disk in {seconds:.1f} s")
    share = (last.cpu_seconds - first.cpu_seconds) / seconds
    if share >= BUSY_SHARE or states.count("R") > LOOKS // 2:
        return Doing(CPU, f"{100 * min(share, 1):.0f} % of a CPU")
    doing = waits_for(pid, tid)
    whole_share = (last.process_seconds - first.process_seconds) / seconds
    if doing.kind == LOCK and whole_share >= BUSY_SHARE:
        return Doing(CPU, f"other threads of this process use {whole_share:.1f} CPUs", doing.address)
    if doing.kind in (UNKNOWN, SYSTEM) and states.count("D") > LOOKS // 2:
        return Doing(FILE, "the disk or a network file system does not answer")
    return doing


def _stopper(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/status") as file:
            tracer = file.read().partition("TracerPid:")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return f"by the debugger {name_of(int(tracer))} (pid {tracer})" if tracer != "0" else "by a signal"


def waits_for(pid: int, tid: int) -> Doing:
    """Return which system call a thread waits in at this moment; unknown if it runs, or the system does not tell."""
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall") as file:
            words = file.read().split()
    except OSError:  # the system does not tell
        return Doing(UNKNOWN)
    if not words or not words[0].isdigit():
        return Doing(UNKNOWN)  # running, or in the system for another reason than a call
    call, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    calls = _CALLS.get(platform.machine(), {})
    kind = next((name for name, numbers in calls.items() if call in numbers), "")
    return _EXPLAIN[kind](pid, arguments) if kind else Doing(SYSTEM, f"system call {call}")


def _of_descriptor(pid: int, arguments: list[int]) -> Doing:
    return _descriptors(pid, [arguments[0] & 0xFFFFFFFF])


def _of_poll(pid: int, arguments: list[int]) -> Doing:
    number = min(arguments[1], 64)
    memory = read_memory(pid, arguments[0], 8 * number)
    fds = [struct.unpack_from("i", memory, 8 * place)[0] for place in range(len(memory) // 8)]
    return _descriptors(pid, fds) if number else Doing(SLEEP)


def _of_select(pid: int, arguments: list[int]) -> Doing:
    number = min(arguments[0] & 0xFFFFFFFF, 1024)
    fds: set[int] = set()
    for address in arguments[1:3]:  # read and write; the third is for exceptions
        memory = read_memory(pid, address, (number + 7) // 8) if address else b""
        fds |= {fd for fd in range(8 * len(memory)) if fd < number and memory[fd // 8] >> fd % 8 & 1}
    return _descriptors(pid, sorted(fds)) if number else Doing(SLEEP)


def _of_epoll(pid: int, arguments: list[int]) -> Doing:
    try:
        with open(f"/proc/{pid}/fdinfo/{arguments[0]}") as file:
            lines = [line.split() for line in file if line.startswith("tfd:")]
    except OSError:
        return Doing(SYSTEM, "epoll")
    return _descriptors(pid, [int(words[1]) for words in lines])


def _of_lock(pid: int, arguments: list[int]) -> Doing:
    return Doing(LOCK, address=arguments[0])


def _of_sleep(pid: int, arguments: list[int]) -> Doing:
    return Doing(SLEEP)


def _of_child(pid: int, arguments: list[int]) -> Doing:
    children = children_of(pid)
    asked = arguments[0] & 0xFFFFFFFF
    wanted = [child for child in children if child in (asked, arguments[1])] or children
    names = ", ".join(f"{name_of(child)} (pid {child})" for child in wanted[:3])
    return Doing(CHILD, names, holder=wanted[0] if wanted else 0)


def _of_file_lock(pid: int, arguments: list[int]) -> Doing:
    """Explain a wait for a lock on a file; /proc/locks knows who holds it."""
    path = f"/proc/{pid}/fd/{arguments[0] & 0xFFFFFFFF}"
    try:
        name, inode = os.readlink(path), os.stat(path).st_ino
        with open("/proc/locks") as file:
            lines = [line.split() for line in file]
    except OSError:
        return Doing(LOCK, "a file lock")
    owners = [int(words[4]) for words in lines if words[1] != "->" and words[5].endswith(f":{inode}")]
    return Doing(LOCK, f"the file lock on {name}", holder=next((owner for owner in owners if owner != pid), 0))


def _of_open(pid: int, arguments: list[int]) -> Doing:
    path = read_memory(pid, arguments[1], 256).partition(b"\0")[0].decode("utf-8", "replace")
    return Doing(FILE, f"{path}, which it is opening" if path else "one that it is opening")


_EXPLAIN = {
    "fd": _of_descriptor,
    "poll": _of_poll,
    "select": _of_select,
    "epoll": _of_epoll,
    "lock": _of_lock,
    "sleep": _of_sleep,
    "child": _of_child,
    "filelock": _of_file_lock,
    "open": _of_open,
}


def _descriptors(pid: int, fds: list[int]) -> Doing:
    """Explain a wait for one of these descriptors by the first that says something."""
    found = [_descriptor(pid, fd) for fd in fds if 0 <= fd < 1 << 20]
    return next((doing for doing in found if doing.kind != SYSTEM), found[0] if found else Doing(SYSTEM))


def _descriptor(pid: int, fd: int) -> Doing:
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return Doing(SYSTEM, f"descriptor {fd}")
    if target.startswith("socket:"):
        return Doing(SOCKET, _socket(pid, fd))
    if target.startswith("pipe:"):
        return _pipe(pid, target)
    if target.startswith("anon_inode:"):
        return Doing(SYSTEM, target)
    return Doing(FILE, target)


def _socket(pid: int, fd: int) -> str:
    ends = socket_ends(pid, fd)
    if ends is None:
        return f"descriptor {fd}"
    ours, theirs = (_address(end) for end in ends)
    return f"{ours} ↔ {theirs}" if theirs else ours or f"descriptor {fd}"


def _address(end: object) -> str:
    if isinstance(end, tuple) and len(end) >= 2:
        return f"[{end[0]}]:{end[1]}" if ":" in str(end[0]) else f"{end[0]}:{end[1]}"
    return str(end) if end else ""


def _pipe(pid: int, target: str) -> Doing:
    """Explain a pipe by the child that holds its other end."""
    for child in children_of(pid):
        try:
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{child}/fd")]
        except OSError:
            continue
        if target in links:
            return Doing(CHILD, f"{name_of(child)} (pid {child})", holder=child)
    return Doing(PIPE, target)
