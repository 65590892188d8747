"""Orphans: workers whose kernel is dead. How they are recognised, and how they are ended.

NOTE [ A worker's own marks ]
A name proves nothing: any process can call itself `pt_data_worker`. What is taken for a worker of torch's, without
having been written down by its kernel, has all of these marks (Linux):
    - torch's worker loop has named it, and has set its C handlers for SIGBUS, SIGFPE and SIGSEGV;
    - torch's Python library is mapped in it;
    - it holds pipes to read from and to write to, besides its standard ones: its queues;
    - it is this user's own, by its real, effective and saved user.
It is an orphan if its kernel is dead. Whoever made it uses torch too, so that must be false of its parent: the
system gives an orphan to `init` or to another process that takes them in. A worker of a forkserver is that one's
child; there its parent is looked at. Where somebody who may be its kernel lives, it is none: a process with torch that
holds the other ends of its pipes, both to be read and to be written; a leader of its group or session with torch and
the same command line; and an older process with torch and the same command line, the same notebook, or, for workers of
spawn and forkserver, a pipe into which both can write: that to Python's resource tracker. The last three are for what
a worker has forked: it has all marks, and may outlive the loader, whose pipes the kernel then has closed. What hides
itself from its own user and is called as Python's programs are may be the kernel; if this process cannot read at all,
e.g. because it has no descriptor left, nothing is an orphan. So a worker may be missed, but never mistaken.

NOTE [ What the ledger says ]
is not enough either, because a file can be changed by hand. A worker that it names is ended only if its start time is
right, it has lost its parent as above, and it either holds a slot in which it has noted its own pid, as a worker
under guard does, or is an orphan by all its marks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterable

from .entries import LONGEST_TEXT
from .errors import LoaderGuardError
from .population import Orphan, SweptProcess
from .processes import (
    LINUX,
    Handle,
    has_own_proc,
    is_alive,
    lineage_of,
    name_of,
    owner_of,
    reap_for_good,
    start_mark,
    start_time,
    state_of,
    status_of,
)
from .usage import resident_bytes

NAME = "pt_data_work"
"""How torch's name begins; the guard adds the worker's number, and a name has 15 bytes."""
HANDLED = tuple(getattr(signal, name, 0) for name in ("SIGBUS", "SIGFPE", "SIGSEGV"))
NOBODY = 0
INIT = 1
"""In a container it may hide itself also from root."""
GONE = (FileNotFoundError, ProcessLookupError)
STRANGE_PROC = "/proc is of another namespace of pids, so that workers cannot be told from others; nothing is ended"
STANDARD = 3
"""Descriptors below this are the standard streams, which a whole family of processes may share."""


class Look:
    """One look at the processes of this machine; what it has read of one it does not read again."""

    def __init__(self) -> None:
        self._has_torch: dict[int, bool | None] = {}
        self._own: dict[int, bool] = {}
        self._is_worker: dict[int, bool] = {}
        self._pipes: dict[int, tuple[set[str], set[str]] | None] = {}

    def find(self, known: set[int]) -> tuple[list[Orphan], list[str]]:
        """Return the orphans that are recognised by their marks, without those known, and a line for each doubt."""
        found, doubts = [], []
        for pid in _pids() if LINUX and has_own_proc() else ():
            if pid in known or not name_of(pid).startswith(NAME):
                continue
            mark, heir = start_mark(pid), self.possible_kernel(pid)
            if mark is not None and heir == NOBODY:
                found.append(describe(pid, mark))
            elif heir > NOBODY:
                doubts.append(
                    f"loaderguard: pid {pid} looks like an orphan, but pid {heir} ({name_of(heir)}) may be its kernel; "
                    "it is not listed."
                )
        return [orphan for orphan in found if is_alive(orphan.pid, orphan.mark)], doubts

    def is_orphan(self, pid: int) -> bool:
        """Tell whether a process is an orphan by its marks."""
        return self.possible_kernel(pid) == NOBODY

    def possible_kernel(self, pid: int) -> int:
        """Return who may be the kernel of a worker without a parent; NOBODY for an orphan, -1 for what is neither."""
        try:
            is_alone = self.is_worker(pid) and self.has_lost_parent(pid)
            return self._heir(pid) if is_alone else -1
        except OSError:  # this process cannot look any more
            return -1

    def is_left(self, pid: int) -> bool:
        """Tell whether a worker that a dead kernel had written down is one. See NOTE [ What the ledger says ]."""
        if not LINUX:
            return True  # there is nothing to look at
        try:
            is_own = owner_of(pid) == os.geteuid() and self.has_lost_parent(pid)
            return is_own and (_has_slot(pid) or self.is_orphan(pid))
        except OSError:  # this process cannot look any more
            return False

    def is_still(self, orphan: Orphan) -> bool:
        """Tell whether a process is still what it was taken for."""
        return self.is_left(orphan.pid) if orphan.recognised == "ledger" else self.is_orphan(orphan.pid)

    def is_worker(self, pid: int) -> bool:
        """Tell whether a process has all marks of a worker. See NOTE [ A worker's own marks ]."""
        if pid not in self._is_worker:
            self._is_worker[pid] = self._has_marks(pid)
        return self._is_worker[pid]

    def _has_marks(self, pid: int) -> bool:
        status = status_of(pid)
        if not status or status.get("State", "Z")[:1] in "ZX" or set(status["Uid"].split()) != {str(os.geteuid())}:
            return False
        handled = int(status.get("SigCgt", "0"), 16)
        if not name_of(pid).startswith(NAME) or not all(handled >> (signum - 1) & 1 for signum in HANDLED):
            return False
        reads, writes = self.pipes(pid) or (None, None)
        return bool(reads and writes) and _maps(pid, "libtorch_python") is True

    def has_lost_parent(self, pid: int) -> bool:
        """Tell whether the parent of a worker is certainly not the process that made it."""
        parent = _parent(pid)
        if "multiprocessing.forkserver" in " ".join(_command(parent)):
            parent = _parent(parent)
        return parent > 0 and self._has_no_torch(parent)

    def _has_no_torch(self, pid: int) -> bool:
        """Tell whether a process certainly does not use torch; another user's, and init, is judged by its command."""
        found = self.has_torch(pid)
        if found is not None or (pid != INIT and _is_own(pid)):
            return found is False
        return bool(_command(pid)) and not _sounds_like_python(pid)

    def has_torch(self, pid: int) -> bool | None:
        """Tell whether torch is loaded in a process; None if that cannot be seen."""
        if pid not in self._has_torch:
            self._has_torch[pid] = _maps(pid, "/libtorch")
        return self._has_torch[pid]

    def _heir(self, pid: int) -> int:
        """Return a live process that may be the kernel of a worker which has lost its parent; else NOBODY."""
        for leader in _leaders(pid):
            if _command(leader) == _command(pid) and self.has_torch(leader) is not False:
                return leader
        reads, writes = self.pipes(pid) or (set(), set())
        parent = _parent(pid)  # a forkserver, which may have torch, has been looked through
        server = parent if "multiprocessing.forkserver" in " ".join(_command(parent)) else NOBODY
        for other in _pids():
            if other not in (pid, server) and self._is_own(other):
                theirs = self.pipes(other)
                if theirs is None and _sounds_like_python(other):  # it hides itself; others who do are agents for keys
                    return other
                others_reads, others_writes = theirs or (set(), set())
                is_near = bool(reads & others_writes and writes & others_reads)
                if (is_near or _may_have_made(other, pid, bool(writes & others_writes))) and self._may_load(other):
                    return other
        return NOBODY

    def _is_own(self, pid: int) -> bool:
        if pid not in self._own:
            self._own[pid] = _is_own(pid)
        return self._own[pid]

    def _may_load(self, pid: int) -> bool:
        """Tell whether a process may iterate a DataLoader; another worker does not."""
        return self.has_torch(pid) is not False and not self.is_worker(pid)

    def pipes(self, pid: int) -> tuple[set[str], set[str]] | None:
        """Return the pipes that a process reads and those that it writes, but standard ones; None if it hides them."""
        if pid not in self._pipes:
            self._pipes[pid] = _pipes(pid)
        return self._pipes[pid]


def _sounds_like_python(pid: int) -> bool:
    command = " ".join(_command(pid)).lower()
    return any(word in command for word in ("python", "jupyter", "kernel", "wsgi", "gunicorn"))


def _may_have_made(other: int, pid: int, has_pipe: bool) -> bool:
    """Tell whether an older process has something that a worker would have from it."""
    born, others_birth = start_mark(pid), start_mark(other)
    if born is None or others_birth is None or int(others_birth) > int(born):
        return False
    if _command(pid) == _command(other) or (has_pipe and "multiprocessing" in " ".join(_command(pid))):
        return True
    name = _session_name(pid)
    return name is not None and name == _session_name(other)


def _has_slot(pid: int) -> bool:
    from .worker.slot import borrow  # only now: it is seldom needed

    return borrow(pid) is not None


def describe(pid: int, mark: str) -> Orphan:
    """Say what can be seen of a worker that no ledger knows."""
    return Orphan(
        pid=pid,
        mark=mark,
        started=start_time(pid),
        state=state_of(pid),
        memory_bytes=resident_bytes(pid),
        recognised="marks",
        notebook=_session_name(pid),
    )


def choose(orphans: Iterable[Orphan], words: list[str]) -> list[Orphan]:
    """Return all of them, or those with the pids that were typed; else say which is none."""
    if not has_own_proc():
        raise LoaderGuardError(STRANGE_PROC)
    by_pid = {str(orphan.pid): orphan for orphan in orphans}
    wrong = [word for word in words if word not in by_pid]
    if wrong:
        raise LoaderGuardError(f"{wrong[0][:40]!r} is not the pid of an orphan, and is left alone")
    return [by_pid[word] for word in dict.fromkeys(words)] if words else list(by_pid.values())


def sweep(orphans: Iterable[Orphan]) -> list[SweptProcess]:
    """End orphans with all that they have started; say what became of each.

    Each one is held by a pidfd first, and then looked at once more: it is ended if it still is what it was.
    """
    handles: dict[int, Handle] = {}
    report: list[SweptProcess] = []
    own_line = _own_line()
    held = [(one, Handle(one.pid, one.mark) if one.pid not in own_line else None) for one in orphans]
    look = Look()  # only now: what it has read is of the processes that are held
    for orphan, handle in held:
        if handle is None or (handle.is_alive() and not look.is_still(orphan) and handle.is_alive()):
            report.append(SweptProcess(orphan.pid, "orphan", "spared"))
        elif not handle.is_alive():
            report.append(SweptProcess(orphan.pid, "orphan", "gone"))
        else:
            handles[orphan.pid] = handle
    for doomed in reap_for_good(list(handles.values())):
        what = "orphan" if doomed.pid in handles else "started by an orphan"
        report.append(SweptProcess(doomed.pid, what, "unkillable" if doomed.is_alive() else "ended"))
    return report


def _own_line() -> set[int]:
    """Return this process and those that it descends from: they are never swept."""
    line, pid = {os.getpid()}, os.getppid()
    while pid > 0 and pid not in line:
        line.add(pid)
        pid = _parent(pid)
    return line


# -- /proc ----------------------------------------------------------------------------------------


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    """Return the parent's pid, 0 if there is none."""
    lineage = lineage_of(pid) if LINUX else None
    return lineage[0] if lineage else 0


def _is_own(pid: int) -> bool:
    """Tell whether a process is this user's; the files of one that hides itself are root's, but not its status."""
    lines = (_read(pid, "status") or "").splitlines()
    return any(line.startswith("Uid:") and str(os.geteuid()) in line.split()[1:] for line in lines)


def _leaders(pid: int) -> set[int]:
    """Return the leaders of its group and session, if they are others and there."""
    lineage = lineage_of(pid)
    if lineage is None:
        raise ProcessLookupError(pid)
    return {leader for leader in set(lineage[1:]) - {0, pid} if os.path.exists(f"/proc/{leader}")}


def _read(pid: int, name: str) -> str | None:
    """Return a file of a process; None if it is gone or forbids it. Any other error is ours, and is raised."""
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:
            return file.read()
    except (*GONE, PermissionError):
        return None


def _command(pid: int) -> list[str]:
    return (_read(pid, "cmdline") or "").split("\0")[:-1]


def _session_name(pid: int) -> str | None:
    """Return the notebook that a worker's kernel was told by Jupyter."""
    words = (_read(pid, "environ") or "").split("\0")
    names = [word.partition("=")[2] for word in words if word.startswith("JPY_SESSION_NAME=")]
    return names[0][:LONGEST_TEXT] if names and names[0] else None


def _maps(pid: int, name: str) -> bool | None:
    """Tell whether a library is mapped in a process; None if that cannot be seen, e.g. of a zombie."""
    text = _read(pid, "maps")
    return name in text if text else None


def _pipes(pid: int) -> tuple[set[str], set[str]] | None:
    """Return the pipes that a process reads and those that it writes; None if it does not let us see them."""
    reads: set[str] = set()
    writes: set[str] = set()
    try:
        fds = [fd for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) >= STANDARD]
    except GONE:
        return reads, writes
    except PermissionError:
        return None
    for fd in fds:
        with contextlib.suppress(*GONE, PermissionError):  # closed meanwhile
            link, mode = os.readlink(f"/proc/{pid}/fd/{fd}"), os.lstat(f"/proc/{pid}/fd/{fd}").st_mode
            if link.startswith("pipe:"):
                reads |= {link} if mode & stat.S_IRUSR else set()
                writes |= {link} if mode & stat.S_IWUSR else set()
    return reads, writes
