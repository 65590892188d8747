"""Other processes: who they are, what they started, how they are, and how they are ended.

The only room that signals another process. It runs in the kernel and in the reaper; psutil is
imported where Linux's own files do not answer, so that the reaper stays small.

NOTE [ Identity ]
A pid can be reused. A Handle is made when the process is born, holds a pidfd where the system
has them, and signals through it: then the signal reaches that process or nobody. Elsewhere the
start time is compared at the moment of the signal. No process is ever looked up by its name.

NOTE [ Whose /proc ]
A container may show the /proc of another namespace (`unshare --pid` without `--mount-proc`): there a pid is another
process than the one that a signal to this pid reaches. Then nothing is read there of other processes: what was held
by a pidfd at its birth can be ended, descendants and orphans are not looked for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable

LINUX = sys.platform.startswith("linux")
KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
STOP: int | None = getattr(signal, "SIGSTOP", None)
TERM_SECONDS = 0.3
"""Between SIGTERM and SIGKILL. torch's SIGTERM handler is in C and needs 0.03 s even with the GIL held."""
KILL_SECONDS = 2.0
"""How long to wait for SIGKILL to take effect; a process in state D may take for ever."""

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_SIGNAL_LINES = ("SigPnd:", "ShdPnd:", "SigBlk:")
_STATES = {"R": "running", "S": "sleeping", "D": "blocked", "T": "stopped", "t": "stopped", "I": "sleeping"}


def has_own_proc() -> bool:
    """Tell whether /proc means by a pid what signals mean by it. See NOTE [ Whose /proc ]."""
    return not LINUX or _is_own_proc(os.getpid())


@functools.lru_cache(maxsize=1)
def _is_own_proc(pid: int) -> bool:
    try:
        with open("/proc/self/status", "rb") as file:
            numbers = [line.split()[1:] for line in file if line.startswith(b"NSpid:")]
        return os.readlink("/proc/self") == str(pid) and all(len(found) == 1 for found in numbers)
    except FileNotFoundError:  # there is no /proc, or this process is not in it
        return False


def start_mark(pid: int) -> str | None:
    """Return the start time of a process as an exact text, or None if there is no such process."""
    if LINUX:
        fields = stat_of(pid)
        return fields[19] if fields else None
    import psutil

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_alive(pid: int, mark: str) -> bool:
    """Tell whether the process with this start mark runs; to look at it only, a Handle is for more."""
    if LINUX:
        fields = stat_of(pid)
        return fields is not None and fields[19] == mark and fields[0] in _STATES
    return start_mark(pid) == mark and _state_by_psutil(pid) != "dead"


def is_gone(pid: int, mark: str) -> bool:
    """Tell whether the process with this start mark has certainly ended; what cannot be read may be alive."""
    if not LINUX:
        return not is_alive(pid, mark)
    try:
        fields = _read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no descriptor left, or no right to look
        return _is_ended_child(pid) is True
    return fields[19] != mark or fields[0] not in _STATES


def _is_ended_child(pid: int) -> bool | None:
    """Tell whether a child of this process has ended, without a descriptor, and without taking its exit status.

    None if it is no child of ours: the pid of one that nobody has reaped is not used again.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except (AttributeError, OSError):  # not on this system; or not a child
        return None


def state_of(pid: int) -> str:
    """Say in a word what the system thinks of a process."""
    if LINUX:
        fields = stat_of(pid)
        return _STATES.get(fields[0], "dead") if fields else "dead"
    return _state_by_psutil(pid)


def lineage_of(pid: int) -> tuple[int, int, int] | None:
    """Return the parent, the process group and the session of a process (Linux)."""
    fields = stat_of(pid)
    return (int(fields[1]), int(fields[2]), int(fields[3])) if fields else None


def start_time(pid: int) -> float:
    """Return when a process started, in seconds since the epoch; now, if there is no such process."""
    if LINUX:
        fields = stat_of(pid)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0
        return time.time() - age
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return time.time()


def stat_of(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from `state` on; None for a process that is not there."""
    try:
        return _read_stat(pid)
    except OSError:  # gone, between or during the two calls
        return None


def _read_stat(pid: int) -> list[str]:
    if not has_own_proc():
        raise OSError(errno.EXDEV, "/proc is of another namespace of pids")
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    return text[text.rindex(b")") + 2 :].decode("ascii").split()


class Handle:
    """One process, recorded at its birth. See NOTE [ Identity ]."""

    __slots__ = ("_pidfd", "mark", "pid")

    def __init__(self, pid: int, mark: str | None = None) -> None:
        """Take hold of `pid`; with a `mark` only if the process also has that start time."""
        self._pidfd: int | None = None
        if pid <= 0 or pid == os.getpid():
            raise ValueError(f"pid {pid} is not another process")
        self.pid = pid
        self._pidfd = _open_pidfd(pid)
        self.mark = start_mark(pid)
        if mark is not None and mark != self.mark:
            self.close()
            self.mark = None

    def is_alive(self) -> bool:
        """Tell whether it still runs; a zombie does not."""
        if self._pidfd is not None:
            return not _is_readable(self._pidfd)
        return self.mark is not None and not is_gone(self.pid, self.mark)

    def _is_itself(self) -> bool:
        """Tell whether its pid is certainly its own; where no file can be opened, whether it is a child of ours."""
        return self._pidfd is not None or start_mark(self.pid) == self.mark or _is_ended_child(self.pid) is False

    def send(self, signum: int) -> bool:
        """Signal this very process; False if it is gone or belongs to somebody else."""
        if not self.is_alive() or not self._is_itself() or _is_foreign(self.pid):
            return False
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signum)
            else:
                os.kill(self.pid, signum)
        except OSError:  # it ended in this very moment
            return False
        return True

    def state(self) -> str:
        """Say in a word what the system thinks of it."""
        if LINUX:
            fields = stat_of(self.pid)
            if fields is None or fields[19] != self.mark:
                return "dead"
            return _STATES.get(fields[0], "dead")
        return _state_by_psutil(self.pid)

    def fileno(self) -> int | None:
        """Return what becomes readable when it ends, where the system has that."""
        return self._pidfd

    def close(self) -> None:
        """Give the pidfd back; the process is not touched."""
        fd, self._pidfd = getattr(self, "_pidfd", None), None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        fd = getattr(self, "_pidfd", None)
        if fd is not None:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<Handle pid={self.pid} started={self.mark}>"


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, before 5.3, a sandbox that forbids it, or gone
        return None


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _is_foreign(pid: int) -> bool:
    """Tell whether the process belongs to another user: those are refused, also as root."""
    if not LINUX:
        return False  # there the system itself refuses, unless we are root
    uid = owner_of(pid)
    return uid is not None and uid not in (os.getuid(), os.geteuid())


def owner_of(pid: int) -> int | None:
    """Return the user whose process it is (Linux); None if it is gone."""
    found = status_of(pid).get("Uid")
    return int(found.split()[0]) if found else None


def status_of(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by their names; none if it is gone, or if this is not Linux."""
    try:
        lines = read(f"/proc/{pid}/status").splitlines() if has_own_proc() else []
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def handles_signal(pid: int, signum: int) -> bool:
    """Tell whether a process has a handler for a signal (Linux)."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) & 1 << (signum - 1))


def _state_by_psutil(pid: int) -> str:
    import psutil

    words = {
        psutil.STATUS_RUNNING: "running",
        psutil.STATUS_DISK_SLEEP: "blocked",
        psutil.STATUS_STOPPED: "stopped",
        psutil.STATUS_TRACING_STOP: "stopped",
        psutil.STATUS_ZOMBIE: "dead",
        psutil.STATUS_DEAD: "dead",
    }
    try:
        return words.get(psutil.Process(pid).status(), "sleeping")
    except psutil.Error:
        return "dead"


def descendants(handles: Iterable[Handle]) -> list[Handle]:
    """Return what these processes started, and what that started; taken before anything is signalled."""
    found: dict[int, Handle] = {}
    pending = [handle.pid for handle in handles if handle.is_alive()]
    while pending:
        parent = pending.pop()
        for pid in children_of(parent):
            if pid not in found and not _is_shm_manager(pid):
                handle = Handle(pid)
                if LINUX and (lineage_of(pid) or (0,))[0] != parent:  # the pid was reused before it was held
                    continue
                found[pid] = handle
                pending.append(pid)
    return list(found.values())


def _is_shm_manager(pid: int) -> bool:
    """Tell whether a process is torch's manager of shared-memory files (sharing strategy file_system).

    A worker starts it, but the kernel talks to it as well, and is aborted by torch if it is gone. It leaves by itself,
    with its files, when the last process that talks to it has left.
    """
    return _readlink(f"/proc/{pid}/exe").endswith("/torch/bin/torch_shm_manager")


def children_of(pid: int) -> list[int]:
    """Return the pids of the direct children; none where /proc is another's. See NOTE [ Whose /proc ]."""
    if not has_own_proc():
        return []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        texts = [read(f"/proc/{pid}/task/{task}/children") for task in tasks]
    except FileNotFoundError:  # not Linux, or a Linux without this file, or the process is gone
        return _children_by_psutil(pid)
    except OSError as error:
        if error.errno not in NO_DESCRIPTOR:
            raise
        return []  # nothing can be read any more; the process itself can still be ended
    return [int(child) for text in texts for child in text.split()]


def name_of(pid: int) -> str:
    """Return the short name of a process."""
    if LINUX:
        try:
            return read(f"/proc/{pid}/comm").strip()
        except OSError:
            return "?"
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "?"


def _children_by_psutil(pid: int) -> list[int]:
    if LINUX and not os.path.exists(f"/proc/{pid}"):
        return []
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def read(path: str) -> str:
    """Return the text of one of the system's files."""
    with open(path, errors="replace") as file:  # a process can call itself anything
        return file.read()


def held_shm_files(pid: int) -> list[str]:
    """Return torch's shared-memory files that this process made and that still have a name.

    torch unlinks a file right after it made it; a process that is ended in between leaves it behind.
    """
    prefix = f"/dev/shm/torch_{pid}_"
    try:
        fds = os.listdir(f"/proc/{pid}/fd") if has_own_proc() else []
        links = [_readlink(f"/proc/{pid}/fd/{fd}") for fd in fds]
    except OSError:  # not Linux, or the process is gone
        return []
    return [link for link in links if link.startswith(prefix) and not link.endswith(" (deleted)")]


def _readlink(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def unlink(paths: Iterable[str]) -> None:
    """Remove files, if they are still there."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def wait(handles: Iterable[Handle], seconds: float, hurry: Callable[[], bool] = lambda: False) -> list[Handle]:
    """Wait until all have ended, time is up, or `hurry` says so; return those still alive."""
    deadline = time.monotonic() + seconds
    alive = [handle for handle in handles if handle.is_alive()]
    while alive and not hurry():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        _pause(alive, min(remaining, 0.05))
        alive = [handle for handle in alive if handle.is_alive()]
    return alive


def _pause(handles: list[Handle], seconds: float) -> None:
    """Sleep until one of them ends, where that can be waited for."""
    fds = [fd for fd in (handle.fileno() for handle in handles) if fd is not None]
    if len(fds) < len(handles):
        time.sleep(min(seconds, 0.01))
        return
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    poll.poll(seconds * 1000)


def stop(
    handles: list[Handle],
    grace_seconds: float,
    hurry: Callable[[], bool] = lambda: False,
    family: list[Handle] | None = None,
) -> tuple[dict[int, str], int]:
    """End these processes and their descendants, in parallel and within one deadline.

    They have `grace_seconds` to leave by themselves, then get SIGTERM, then SIGKILL; `hurry` cuts
    the waiting short. `family` are descendants that were found earlier, before the processes were asked
    to leave. Returns how each one ended, by pid, and how many descendants there were.
    """
    how = {handle.pid: "dead" for handle in handles}
    alive = [handle for handle in handles if handle.is_alive()]
    family = _grown(family or [], alive)
    how.update({handle.pid: "left" for handle in alive})
    alive = wait(alive, grace_seconds, hurry)
    files: list[str] = []
    for signum, patience in ((signal.SIGTERM, TERM_SECONDS), (KILL, KILL_SECONDS)):
        family = _grown(family, alive)
        targets = alive + [handle for handle in family if handle.is_alive()]
        files += [path for handle in targets for path in held_shm_files(handle.pid)]
        for handle in targets:
            handle.send(signum)
        how.update({handle.pid: signal.Signals(signum).name for handle in alive})
        remaining = wait(targets, patience, hurry if signum != KILL else lambda: False)
        alive = [handle for handle in alive if handle in remaining]
    unlink(files)
    how.update({handle.pid: "unkillable" for handle in alive})
    for handle in family:
        handle.close()
    return how, len(family)


def _grown(family: list[Handle], alive: list[Handle]) -> list[Handle]:
    """Add the descendants that were born since the last look."""
    known = {handle.pid for handle in family}
    roots = alive + [handle for handle in family if handle.is_alive()]
    return family + [handle for handle in descendants(roots) if handle.pid not in known]


def reap_for_good(handles: list[Handle]) -> list[Handle]:
    """End processes whose kernel is dead, at once; return them and all their descendants.

    They are stopped (SIGSTOP) first, so that none can start another one while the tree is read.
    """
    doomed: dict[int, Handle] = {}
    files: list[str] = []
    fresh = handles
    try:
        while fresh:
            doomed.update({handle.pid: handle for handle in fresh})  # first: an interrupt may come at any moment
            for handle in fresh:
                if STOP is not None:
                    handle.send(STOP)
            fresh = [handle for handle in descendants(fresh) if handle.pid not in doomed]
        files = [path for pid in doomed for path in held_shm_files(pid)]
    finally:  # whatever the look at them met: nobody is left stopped
        for handle in doomed.values():
            handle.send(KILL)
    wait(doomed.values(), KILL_SECONDS)
    unlink(files)
    return list(doomed.values())


def has_signal_under_way(pid: int, signum: int) -> bool:
    """Tell whether a signal waits for a process or is being handled by its main thread (Linux)."""
    bit = 1 << (signum - 1)
    try:
        lines = read(f"/proc/{pid}/status").splitlines()
    except OSError:  # gone
        return False
    masks = [line.split()[1] for line in lines if line.startswith(_SIGNAL_LINES)]
    return any(int(mask, 16) & bit for mask in masks)


def socket_ends(pid: int, fd: int) -> tuple[object, object] | None:
    """Return the addresses of a process's socket, its own and the other side's."""
    import psutil

    try:
        process = psutil.Process(pid)
        connections = (getattr(process, "net_connections", None) or process.connections)("all")  # psutil < 6
    except psutil.Error:
        return None
    return next(((one.laddr, one.raddr) for one in connections if one.fd == fd), None)
