"""The reaper: a process of its own that outlives the kernel and ends the kernel's workers.

`main()` runs outside the kernel, in its own session; `Reaper` is the kernel's end of the pipe.

NOTE [ Outliving the kernel ]
Seconds until stuck workers were gone after their kernel's SIGKILL, by `python -m benchmarks.outlive`:
    way                                   Python loop   C call with the GIL   forkserver
    nothing                                  never             never            never
    PR_SET_PDEATHSIG in the worker            0.02              0.02            never
    thread in the worker on its parent        0.02             never             0.04
    this process                              0.04              0.02             0.05
The first is tied to the thread that forked and takes no descendants along; the second needs the
GIL. So a third party watches. It waits on a pidfd of the kernel, because forked workers inherit
the write end of its pipe: end-of-file there would not tell of the kernel's death.

NOTE [ Nobody's child ]
The reaper forks once and its first half exits at once, so that it is not a child of the kernel:
user code that waits for all its children (`os.wait()` until ECHILD) must not wait for us.

NOTE [ A start that takes long ]
A debugger may hold a child process back, a disk may be slow, `sys.executable` a script that does something else. So
its answer is awaited for ANSWER_SECONDS, once; then loaders start without it, one line says so, and it is used from
the moment at which it answers: what it has missed stands in its pipe. Debuggers attach to children by changing the
command line of what looks like Python (pydevd, behind JupyterLab's debugger, in `subprocess` and in `os`), and then
hold it until somebody attaches to it. A shell does not look like Python; it becomes Python by `exec`.

The lines on the pipe, each far below PIPE_BUF and so never torn:
    + PID MARK     a worker was born; MARK is its start time
    - PID          it was stopped and reaped by the kernel
    s NAME         a named semaphore exists (spawn and forkserver)
    u NAME         it was unlinked
    q              leave, the guard was unloaded
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

if __name__ == "__main__":  # started by path under -I: make our own package importable, and nothing else
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from jupyter_loaderguard.processes import KILL, Handle, reap_for_good, start_mark

IS_SUPPORTED = hasattr(os, "fork")
"""Not on Windows: there a pipe cannot be waited for together with a process."""
BURST_SECONDS = 0.25
POLL_SECONDS = 0.2
"""How often to look at the kernel where it cannot be waited for."""
ANSWER_SECONDS = 2.0
MOST_FAILURES = 3
"""How often to start what ends without an answer."""
SHELL = "/bin/sh"


class Reaper:
    """The kernel's end: tells the reaper who was born, and starts it again if someone killed it."""

    def __init__(self) -> None:
        self._starting: subprocess.Popen[bytes] | None = None
        """Its first half, until it has ended. See NOTE [ Nobody's child ]."""
        self._answer = b""
        self._patient_until = 0.0
        self._failures = 0
        self._has_complained = False
        self._handle: Handle | None = None
        self._pipe: int | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        """Held while it is started or stopped; never by what the collector may call."""
        self._births: dict[int, str] = {}
        self._semaphores: set[str] = set()

    @property
    def pid(self) -> int | None:
        """The pid of the running reaper."""
        with self._own_lock():
            self._settle()
            return self._handle.pid if self._handle else None

    def identity(self) -> tuple[int, str] | None:
        """Return pid and start time of the running reaper, if they are known by now."""
        handle = self._handle
        return (handle.pid, handle.mark) if handle is not None and handle.mark is not None else None

    def start(self) -> None:
        """Start it without waiting for it, unless it runs; if it cannot be started, `ensure` says so."""
        with self._own_lock(), contextlib.suppress(OSError):
            if self._starting is None and (self._handle is None or not self._handle.is_alive()):
                self._start()
                threading.Thread(
                    target=_reap_soon, args=(self._starting,), name="loaderguard-reaper-start", daemon=True
                ).start()

    def _own_lock(self) -> threading.Lock:
        """Return the lock; a fresh one in a fork of the kernel, whose reaper is not ours."""
        if self._owner != os.getpid():
            self._owner, self._lock = os.getpid(), threading.Lock()
            self._forget()
        return self._lock

    def _start(self) -> None:
        mark = start_mark(os.getpid())
        if not IS_SUPPORTED or mark is None:  # it could not tell this process from another
            return
        if not sys.executable:
            raise FileNotFoundError("where Python's program is, is not known here: sys.executable is empty")
        into, self._pipe = os.pipe()
        try:
            os.set_blocking(self._pipe, False)
            self._starting = self._launch(into, mark)
        except BaseException:
            self._forget_pipe()
            raise
        finally:
            os.close(into)
        self._answer, self._patient_until = b"", time.monotonic() + (0 if self._failures else ANSWER_SECONDS)
        self._say(*self._known())

    def _launch(self, pipe: int, mark: str) -> subprocess.Popen[bytes]:
        """Start it so that no debugger takes it for one more program to debug. See NOTE [ A start that takes long ]."""
        command = [sys.executable, "-I", os.path.abspath(__file__), str(os.getpid()), mark]
        if os.access(SHELL, os.X_OK):
            command = [SHELL, "-c", 'exec "$@"', "loaderguard", *command]
        return subprocess.Popen(
            command,
            stdin=pipe,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=os.path.abspath(os.sep),
            start_new_session=True,
        )

    def _known(self) -> list[str]:
        births, semaphores = list(self._births.items()), list(self._semaphores)
        return [f"+ {pid} {mark}" for pid, mark in births] + [f"s {name}" for name in semaphores]

    def _settle(self) -> None:
        """Take the pid that the second half prints, and reap the first. See NOTE [ Nobody's child ]."""
        process = self._starting
        if process is None or process.stdout is None:
            return
        if self._handle is None and not process.stdout.closed:
            self._listen(process.stdout.fileno())
            pid = next((int(line) for line in self._answer.split(b"\n")[:-1] if line.isdigit()), None)
            if pid is not None:
                self._handle, self._failures, self._has_complained = Handle(pid), 0, False
            if pid is None and process.poll() is None:
                return  # it may still answer
            process.stdout.close()
            self._failures += pid is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, self._patient_until - time.monotonic()))
            self._starting = None

    def _listen(self, fd: int) -> None:
        """Read until there is a pid; whoever is started in its place may print something else, or nothing."""
        while not any(line.isdigit() for line in self._answer.split(b"\n")[:-1]):
            patience = self._patient_until - time.monotonic()
            if not _is_readable(fd, max(0.0, patience)) or not (data := os.read(fd, 4096)):
                return
            self._answer = self._answer[-4096:] + data
            if patience <= 0:  # one that prints for ever is not read for ever
                return

    def ensure(self, is_scarce: bool = False) -> str | None:
        """Have it running before the next worker is born; say in a line if it had to be started again, or cannot be.

        If descriptors are so scarce that the loader needs each of them, it is done without.
        """
        with self._own_lock():
            return self._do_without() if is_scarce else self._ensure()

    def _ensure(self) -> str | None:
        self._settle()
        if self._handle is not None and self._handle.is_alive() and self._pipe is not None:
            return None
        if self._starting is not None and self._handle is None:
            return self._complain(f"has not answered for {ANSWER_SECONDS:.0f} s; until it does,")
        lost, self._handle = self._handle, None
        if lost is not None and self._pipe is None:  # it cannot be told anything: its successor is told all
            lost.send(KILL)
            lost = None
        self._forget_pipe()
        if self._failures >= MOST_FAILURES:
            return self._complain("ends without an answer;")
        try:
            self._start()
        except (OSError, ValueError) as error:
            return self._complain(f"cannot be started ({error});")
        self._settle()
        if self._handle is None:
            return self._complain("has not answered;") if IS_SUPPORTED else None
        if lost is None:
            return None
        return f"loaderguard: the reaper (pid {lost.pid}) was gone; started again as pid {self._handle.pid}."

    def _complain(self, what: str) -> str | None:
        """Say once what is wrong with it."""
        is_new, self._has_complained = not self._has_complained, True
        return f"loaderguard: the reaper {what} workers may outlive a killed kernel." if is_new else None

    def _do_without(self) -> str | None:
        """Give its descriptors back; it goes on to watch over what it knows."""
        self._settle()
        self._forget_pipe()
        if self._handle is not None:
            self._handle.close()
        else:
            self._end_first_half()
            self._starting = None
        return self._complain("is done without, as too few descriptors are left (ulimit -n);")

    def stop(self) -> None:
        """Let it leave."""
        with self._own_lock():
            self._patient_until = 0.0
            self._settle()
            if not self._say("q") and self._handle is not None:
                self._handle.send(KILL)  # it is stopped, or has not read for long: it cannot be told
            self._end_first_half()
            self._failures, self._has_complained = 0, False
            self._forget()

    def _end_first_half(self) -> None:
        """End what has not answered, a child of ours that nobody has reaped, and what that has started."""
        process = self._starting
        if process is not None and process.poll() is None:
            reap_for_good([Handle(process.pid)])
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ANSWER_SECONDS)
        if process is not None and process.stdout is not None:
            process.stdout.close()

    def _forget(self) -> None:
        self._forget_pipe()
        self._starting = self._handle = None
        self._births.clear()
        self._semaphores.clear()

    def _forget_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)

    def born(self, handle: Handle) -> None:
        """Put a worker under its protection."""
        if handle.mark is not None:
            self._births[handle.pid] = handle.mark
            self._say(f"+ {handle.pid} {handle.mark}")

    def born_here(self) -> None:
        """Put this process, a fork of the kernel, under the protection of the kernel's reaper."""
        self._say(f"+ {os.getpid()} {start_mark(os.getpid())}")

    def gone(self, handles: Iterable[Handle]) -> None:
        """Take workers that have been reaped out of its protection."""
        known = [handle.pid for handle in handles if self._births.pop(handle.pid, None)]
        self._say(*(f"- {pid}" for pid in known))

    def semaphores_made(self, names: Iterable[str]) -> None:
        """Have these unlinked if the kernel and Python's resource tracker die together."""
        fresh = set(names)
        if fresh:
            gone = {name for name in self._semaphores if not os.path.exists(semaphore_path(name))}
            self._semaphores = self._semaphores - gone | fresh
            self._say(*(f"u {name}" for name in gone), *(f"s {name}" for name in fresh))

    def _say(self, *lines: str) -> bool:
        """Write lines; what a dead or stopped reaper misses is told again to its successor by `ensure`."""
        if self._pipe is None:
            return False
        for line in lines:
            try:
                os.write(self._pipe, f"{line}\n".encode("ascii"))
            except OSError:  # closed, or full because it is stopped
                return False
        return True


def _reap_soon(first_half: subprocess.Popen[bytes] | None) -> None:
    """Reap what ends in a moment, before user code finds a child that is not its own. See NOTE [ Nobody's child ]."""
    if first_half is not None:
        first_half.wait()  # one that hangs ends at the latest with the guard


def _is_readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor can be read (poll: select stops at descriptor 1023)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def main(kernel_pid: int, kernel_mark: str) -> None:
    """Watch the kernel until it dies, then end the workers that it had."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _leave_home()
    kernel = Handle(kernel_pid, kernel_mark)
    orphans = _Orphans()
    while kernel.is_alive() and not orphans.is_dismissed:
        orphans.listen(kernel, POLL_SECONDS)
    if not orphans.is_dismissed:
        orphans.reap()


def _leave_home() -> None:
    """Become nobody's child and say our pid. See NOTE [ Nobody's child ]."""
    if hasattr(os, "fork") and os.fork():
        os._exit(0)
    os.write(1, b"%d\n" % os.getpid())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


class _Orphans:
    """What the kernel told, as the reaper knows it."""

    def __init__(self) -> None:
        self.is_dismissed = False
        self._workers: dict[int, Handle] = {}
        self._semaphores: set[str] = set()
        self._rest = b""
        self._is_open = True

    def listen(self, kernel: Handle, seconds: float) -> None:
        """Wait for a line or for the kernel's end, and take in what came."""
        pidfd = kernel.fileno()
        watched = [] if pidfd is None else [pidfd]
        timeout = None if watched else seconds
        if self._is_open:
            watched.append(0)
        if not watched:
            time.sleep(seconds)
            return
        readable, _, _ = select.select(watched, [], [], timeout)
        if 0 in readable:
            # let a burst of births pass: the workers need the CPUs more; the kernel's end is not missed
            if watched[0] != 0 and select.select(watched[:1], [], [], BURST_SECONDS)[0]:
                return
            self.take_in()

    def take_in(self) -> None:
        """Read what is there; never more than one read's worth, so that it cannot block."""
        data = os.read(0, 65536)
        self._is_open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._obey(line.decode("ascii", "replace").split())

    def _obey(self, words: list[str]) -> None:
        match words:
            case ["+", pid, mark] if pid.isdigit():
                self._workers[int(pid)] = Handle(int(pid), mark)
            case ["-", pid] if pid.isdigit():
                self._workers.pop(int(pid), None)
            case ["s", name]:
                self._semaphores.add(name)
            case ["u", name]:
                self._semaphores.discard(name)
            case ["q"]:
                self.is_dismissed = True

    def reap(self) -> None:
        """End every worker with its descendants, then remove what nobody else will remove."""
        while self._is_open and select.select([0], [], [], 0)[0]:
            self.take_in()
        if self.is_dismissed:
            return  # it had let us go before it ended
        reap_for_good([handle for handle in self._workers.values() if handle.is_alive()])
        if self._semaphores:
            time.sleep(0.3)  # Python's own resource tracker, if it lives, does it within this time
            unlink_semaphores(self._semaphores)


def semaphore_path(name: str) -> str:
    """Return where Linux shows a named semaphore."""
    return f"/dev/shm/sem.{name.lstrip('/')}"


def unlink_semaphores(names: Iterable[str]) -> None:
    """Remove named semaphores, if they are still there."""
    from _multiprocessing import sem_unlink

    for name in names:
        with contextlib.suppress(FileNotFoundError):
            sem_unlink(name)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
