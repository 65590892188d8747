"""The ledger: a small private file for each process under guard, so that others see its loaders and workers.

A kernel writes its own file and no other; `read` is for the command line, for `%loaderguard sweep` and for a
kernel that is just loading the guard. Nothing depends on it: without a ledger loaders are guarded as well.

NOTE [ A private directory ]
It lies in Jupyter's runtime directory, belongs to this user and is closed to all others. It is opened
once for each use, without following a link, and its owner is checked; everything in it is reached through that
descriptor, so that nobody can put another directory in its place meanwhile. Files are written beside and then
renamed, and read only if they are regular, ours and small. Whatever else lies there is left alone, with a line.

NOTE [ Whose pids ]
A home directory may be shared by many machines and containers, in which the same pid is another process. So
a file's name says where its kernel runs: by the system's boot and the namespace of its pids. With these, a pid
and its start time mean one process for ever. Files of other places are neither read nor, for a month, removed.

NOTE [ Off the path of the user's loop ]
The file is written by a thread that lives for a moment: a disk may be slow, and a file server may not answer
at all. Births and ends within that moment are one write. `threading` is not used to start it, because that waits
until the thread runs: up to 30 ms while the CPUs are busy with new workers. A fork writes nothing of the kernel's.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .entries import LONGEST_TEXT, KernelEntry, LoaderEntry, Unfit, as_mark, as_pid, parse
from .processes import LINUX, is_alive, is_gone, start_mark, start_time

IS_SUPPORTED = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Not on Windows, where a directory cannot be held open in this way."""
MOST_BYTES = 1 << 20
MOST_FILES = 500
DELAY_SECONDS = 0.05
"""How long to gather changes before they are written."""
PATIENCE_SECONDS = 1.0
"""How long to wait for the last write; a file server may not answer."""
KEPT_SECONDS = 30 * 86400
"""How long files of other machines are kept: whether their kernels live cannot be seen from here."""

# -- writing, in the kernel -----------------------------------------------------------------------


class Ledger:
    """The kernel's own file. See NOTE [ Off the path of the user's loop ]."""

    def __init__(self, loaders: Callable[[], list[LoaderEntry]], reaper: Callable[[], tuple[int, str] | None]) -> None:
        """Ask `loaders` and `reaper` for what to write, at the moment of writing and in another thread."""
        self._loaders = loaders
        self._reaper = reaper
        self._begin()

    def _begin(self) -> None:
        """Begin in this process, with nothing open."""
        self._owner = os.getpid()
        self._is_open = self._is_stale = self._is_written = self._is_writing = False
        self._hurry = threading.Event()
        self._lock = threading.Lock()
        """Held while a file is written; never by what the collector may call, and by nobody in a fork."""
        self._runtime = ""
        self.problem: str | None = None
        """Why the last write failed."""

    def open(self) -> None:
        """Begin to be seen by others; a fork that guards for itself has a file of its own."""
        if self._owner != os.getpid():
            self._begin()
        if IS_SUPPORTED:
            with contextlib.suppress(Exception):  # whatever keeps the directory from being known
                self._runtime = runtime_dir()  # here: no import goes on in a thread while a worker is forked
                self._hurry = threading.Event()
                self._is_open = True
                self.touch()

    def close(self) -> None:
        """Be seen no more: the file is removed, and the thread ends."""
        if self._is_open and self._owner == os.getpid():
            self._is_open = False
            self.touch()
            self._hurry.set()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while self._is_writing and time.monotonic() < deadline:
                time.sleep(0.001)

    def touch(self) -> None:
        """Have the file written, soon and in another thread.

        The collector may be what calls this, in the middle of any line, also of this class: so it takes no lock.
        """
        if self._owner != os.getpid() or not (self._is_open or self._is_written or self._is_writing):
            return
        self._is_stale = True
        if not self._is_writing:
            try:
                self._is_writing = True
                _thread.start_new_thread(self._write, ())
            except RuntimeError:  # no threads any more: Python ends, or the system has none left
                self._write()
            except BaseException:  # interrupted
                self._is_writing = False
                raise

    def _write(self) -> None:
        while self._is_stale:
            self._hurry.wait(DELAY_SECONDS)
            self._is_stale = False
            self._update()
        self._is_writing = False
        if self._is_stale:  # since the last look at it
            self.touch()

    def _update(self) -> None:
        """Bring the file up to date; a ledger that cannot be written is no reason to disturb anybody."""
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):  # a disk does not answer
            return
        try:
            self._put() if self._is_open else self._remove()
            self.problem = None
        except Exception as error:  # noqa: BLE001 - as above
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._lock.release()

    def _put(self) -> None:
        pid, mark = os.getpid(), start_mark(os.getpid())
        if mark is None:
            raise Unfit("/proc does not know this process")
        loaders = tuple(self._loaders())
        entry = KernelEntry(pid, mark, start_time(pid), notebook_name(), self._reaper(), loaders)
        with opened_folder(self._runtime, is_made=True) as folder:
            self._is_written = True
            write_file(folder, file_name(pid, mark), entry.to_json())

    def _remove(self) -> None:
        if self._is_written:
            with opened_folder(self._runtime) as folder, contextlib.suppress(FileNotFoundError):
                os.unlink(file_name(os.getpid(), start_mark(os.getpid()) or ""), dir_fd=folder)
            self._is_written = False


def notebook_name() -> str:
    """Return what a person knows this process by: the notebook, else the kernel's id, else the program."""
    program, *arguments = getattr(sys, "argv", None) or [""]
    program = os.path.basename(program)
    files = [os.path.basename(word) for word in arguments if word.endswith(".json") and "kernel" in program]
    kernel = f"kernel {files[0].removesuffix('.json').removeprefix('kernel-')}" if files else program
    return (os.environ.get("JPY_SESSION_NAME") or kernel or "python")[:LONGEST_TEXT]


def write_file(folder: int, name: str, text: bytes) -> None:
    """Put a file in its place at once, whole or not at all."""
    part = f"{name}.{os.urandom(4).hex()}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(part, flags, 0o600, dir_fd=folder)
    try:
        try:
            while text:
                text = text[os.write(fd, text) :]
        finally:
            os.close(fd)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


# -- the directory --------------------------------------------------------------------------------


def runtime_dir() -> str:
    """Return where Jupyter keeps what lives as long as its processes."""
    from jupyter_core.paths import jupyter_runtime_dir

    return str(jupyter_runtime_dir())


def folder_path(runtime: str) -> str:
    """Return the directory of this user's own; each user has one, also where several share a home."""
    return os.path.join(runtime, f"loaderguard-{os.geteuid()}")


@contextlib.contextmanager
def opened_folder(runtime: str, is_made: bool = False) -> Iterator[int]:
    """Open the directory, and make it if asked to. See NOTE [ A private directory ]."""
    path = folder_path(runtime)
    if is_made:
        os.makedirs(runtime, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _make_private(folder, path)
        yield folder
    finally:
        os.close(folder)


def _make_private(folder: int, path: str) -> None:
    if os.fstat(folder).st_uid != os.geteuid():
        raise Unfit(f"{path} belongs to another user")
    if os.fstat(folder).st_mode & 0o777 != 0o700:
        os.fchmod(folder, 0o700)
    if os.fstat(folder).st_mode & 0o077:
        raise Unfit(f"{path} cannot be closed to other users")


def file_name(pid: int, mark: str) -> str:
    """Return the name of the file of a process on this machine."""
    return f"{pid}-{mark}-{place()}.json"


def parse_name(name: str) -> tuple[int, str, str, bool]:
    """Return the process that a file is of, by pid, start time and place, and whether it is one half written."""
    stem, dot, rest = name.partition(".json")
    words = stem.split("-")
    is_part = rest.startswith(".") and rest.endswith(".part")
    if not dot or len(words) != 3 or not (rest == "" or is_part):
        raise Unfit("it is not a file of the guard's")
    return (
        as_pid(int(words[0]) if words[0].isascii() and words[0].isdigit() else None),
        as_mark(words[1]),
        words[2],
        is_part,
    )


@functools.cache
def place() -> str:
    """Return what tells this machine and its pids from others. See NOTE [ Whose pids ]."""
    if not LINUX:
        import platform
        import zlib

        return format(zlib.crc32(platform.node().encode()), "08x")
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip().replace("-", "")
    namespace = os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")
    return f"{boot[:20]}{int(namespace):x}"


# -- reading, by anybody of the same user ---------------------------------------------------------


def read() -> tuple[list[KernelEntry], list[str]]:
    """Return what kernels have written down, and a line for each file that is not used; clean up after dead ones."""
    if not IS_SUPPORTED:
        return [], []
    runtime = runtime_dir()
    try:
        with opened_folder(runtime) as folder:
            return _read_all(folder, folder_path(runtime))
    except FileNotFoundError:
        return [], []
    except (OSError, Unfit) as error:
        return [], [f"loaderguard: the ledger cannot be read ({error}); kernels under guard are not listed."]


def find_abandoned() -> list[KernelEntry]:
    """Return dead kernels that have left workers and no reaper that is about to end them."""
    entries, _ = read()
    return [
        entry
        for entry in entries
        if not entry.is_alive() and (entry.reaper is None or not is_alive(*entry.reaper)) and entry.workers()
    ]


def _read_all(folder: int, path: str) -> tuple[list[KernelEntry], list[str]]:
    entries: list[KernelEntry] = []
    notes: list[str] = []
    names = [name for name in sorted(os.listdir(folder)) if not name.startswith(".")]  # a file server's own
    for name in names[:MOST_FILES]:
        try:
            entry = _read_one(folder, name)
        except (OSError, Unfit) as error:
            why = error if isinstance(error, Unfit) else error.strerror
            notes.append(f"loaderguard: ignored {os.path.join(path, name)}: {why}.")
            continue
        if entry is not None:
            entries.append(entry)
    if len(names) > MOST_FILES:
        notes.append(f"loaderguard: {path} has {len(names):,} files; only the first {MOST_FILES} were read.")
    return entries, notes


def _read_one(folder: int, name: str) -> KernelEntry | None:
    """Return an entry; None if it is not for here, or of no use any more and has been removed."""
    pid, mark, where, is_part = parse_name(name)
    if where != place():
        _remove_if_old(folder, name)
        return None
    is_dead = is_gone(pid, mark)
    if is_part:
        if is_dead:
            _unlink(folder, name)
        return None
    try:
        entry = parse(_read_file(folder, name), pid, mark)
    except FileNotFoundError:  # its kernel has just ended
        return None
    except Unfit:
        if is_dead:  # nobody will ever mend it
            _unlink(folder, name)
        raise
    if entry.is_spent():
        _unlink(folder, name)
        return None
    return entry


def _read_file(folder: int, name: str) -> bytes:
    """Return the bytes of a small regular file of this user's own."""
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise Unfit("it is a symbolic link")
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Unfit("it is not a regular file")
        if status.st_uid != os.geteuid():
            raise Unfit("it belongs to another user")
        if status.st_size > MOST_BYTES:
            raise Unfit(f"it is too large ({status.st_size:,} bytes)")
        return _read_whole(fd, status.st_size)
    finally:
        os.close(fd)


def _read_whole(fd: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(fd, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _remove_if_old(folder: int, name: str) -> None:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > KEPT_SECONDS:
        _unlink(folder, name)


def _unlink(folder: int, name: str) -> None:
    """Remove a file if it can be; a link goes itself, not what it points to."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
