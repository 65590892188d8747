"""What is open in a loader's objects: what a run would move, and can be put back; what it would empty, and cannot."""

from __future__ import annotations

import io
import os
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from ..reach import visit

_FILES = (io.FileIO, io.BufferedReader, io.BufferedRandom, io.TextIOWrapper)


@dataclass(frozen=True)
class OpenHandle:
    """Something open that a fork shares."""

    path: str
    what: str
    fd: int | None = None
    """Of a file whose position is watched."""
    position: int = 0
    file: str = ""
    """Of a library that reads the file in its own way."""
    is_reopened: bool = False
    """Whether its owner asks for the process that it is in."""
    fix: str = "Open it in the worker: set it to None in __init__, and open it at the first use in __getitem__."


def find_open(roots: dict[str, Any]) -> tuple[list[OpenHandle], list[tuple[str, str]]]:
    """Return what is open, and the path and kind of what a run would empty."""
    handles: list[OpenHandle] = []
    emptied: list[tuple[str, str]] = []

    owners: dict[str, type] = {}

    def note(path: str, thing: Any) -> bool:
        owners.setdefault(path, type(thing))
        handle = next((found for look in _LOOKS if (found := look(path, thing)) is not None), None)
        if handle is not None:
            owner = owners.get(path.rpartition(".")[0])
            handles.append(replace(handle, is_reopened=owner is not None and _asks_for_process(owner)))
        what = _emptied(thing)
        if what is not None:
            emptied.append((path, what))
        return handle is not None or what is not None or issubclass(type(thing), _FILES)

    visit(roots, note)
    return handles, emptied


def put_back(handles: list[OpenHandle]) -> dict[int, int]:
    """Put back the positions of files that have moved, and return where those were, by descriptor."""
    moved = {}
    for handle in handles:
        position = position_of(handle.fd) if handle.fd is not None else None
        if handle.fd is not None and position is not None and position != handle.position:
            moved[handle.fd] = position
            os.lseek(handle.fd, handle.position, os.SEEK_SET)
    return moved


def _asks_for_process(owner: type) -> bool:
    """Tell whether methods of a class call os.getpid, as those do that open a file anew in each process.

    HDF5 shares one descriptor among all openings of a file in a process, so that descriptors do not show it.
    """
    functions = [part for kind in owner.__mro__ for part in vars(kind).values() if isinstance(part, FunctionType)]
    return any("getpid" in function.__code__.co_names for function in functions)


def _emptied(thing: Any) -> str | None:
    """Say what it is, if a process that reads from it takes something away from all others."""
    kind = type(thing)
    queues, connection = sys.modules.get("multiprocessing.queues"), sys.modules.get("multiprocessing.connection")
    if queues is not None and issubclass(kind, (queues.Queue, queues.SimpleQueue)):
        return "a multiprocessing queue"
    if connection is not None and issubclass(kind, connection._ConnectionBase):
        return None if thing.closed or not thing.readable else "a connection of multiprocessing"
    if issubclass(kind, socket.socket):
        return "a connected socket" if _of_socket("", thing) is not None else None
    return "a pipe" if issubclass(kind, _FILES) and _is_pipe(thing) else None


def _is_pipe(thing: Any) -> bool:
    kind = next(kind for kind in _FILES if issubclass(type(thing), kind))
    try:
        fd = kind.fileno(thing)
        return bool(fd > 2 and stat.S_ISFIFO(os.fstat(fd).st_mode) and kind.readable(thing))
    except (OSError, ValueError, AttributeError):  # closed, detached, or not a real one
        return False


def _of_file(path: str, thing: Any) -> OpenHandle | None:
    kind = next((kind for kind in _FILES if issubclass(type(thing), kind)), None)
    fd = _descriptor(kind, thing) if kind is not None else None
    if fd is None or fd <= 2:
        return None
    position = position_of(fd)
    if position is None:
        return None
    return OpenHandle(path, f"the file {_name(fd)}, open on descriptor {fd}", fd, position)


def _descriptor(kind: Any, thing: Any) -> int | None:
    """Return the descriptor of an open file that can be read, by Python's own methods."""
    try:
        fd = kind.fileno(thing)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        import fcntl

        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError, AttributeError, ImportError):  # closed, detached, or not a real one
        return None
    return int(fd) if access != os.O_WRONLY else None


def position_of(fd: int) -> int | None:
    """Return where in a file its descriptor is."""
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return None


def _name(fd: int) -> str:
    return link_target(f"/proc/self/fd/{fd}")


def link_target(link: str) -> str:
    """Return where a link of the system points to; "?" if it is gone: descriptors come and go with every batch."""
    try:
        return os.readlink(link)
    except OSError:
        return "?"


def _of_socket(path: str, thing: Any) -> OpenHandle | None:
    if not issubclass(type(thing), socket.socket):
        return None
    try:
        fd, peer = socket.socket.fileno(thing), socket.socket.getpeername(thing)
    except OSError:  # not connected
        return None
    to = f" to {peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) >= 2 else f" to {peer}" if peer else ""
    fix = "Connect in the worker, at the first use or in worker_init_fn: bytes for one worker reach another."
    return OpenHandle(path, f"a socket, connected{to}, on descriptor {fd}", fix=fix)


def _of_h5py(path: str, thing: Any) -> OpenHandle | None:
    h5py = sys.modules.get("h5py")
    if h5py is None or not issubclass(type(thing), (h5py.Group, h5py.Dataset)):
        return None
    if not thing.id.valid or thing.file.driver == "core":
        return None
    name = os.path.realpath(os.fsdecode(thing.file.filename))
    fds = [fd for fd in os.listdir("/proc/self/fd") if _name(int(fd)) == name] if os.path.isdir("/proc/self/fd") else []
    where = f" on descriptor {fds[0]}" if fds else ""
    role = "" if issubclass(type(thing), h5py.File) else "a part of "
    return OpenHandle(path, f"{role}the HDF5 file {name}, open{where}", file=name, fix=_H5PY_FIX)


_H5PY_FIX = "Open it in the worker: self.file = None in __init__, and h5py.File(path) at the first use in __getitem__."


def _of_sqlite(path: str, thing: Any) -> OpenHandle | None:
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is None or not issubclass(type(thing), (sqlite3.Connection, sqlite3.Cursor)):
        return None
    connection = thing.connection if issubclass(type(thing), sqlite3.Cursor) else thing
    try:
        rows = sqlite3.Cursor(connection).execute("PRAGMA database_list").fetchall()
    except sqlite3.Error:  # closed, or of another thread, which a worker's is then, too
        return None
    names = [row[2] for row in rows if row[2]]
    if not names:  # in memory: each worker has its own
        return None
    fix = "Connect in the worker, at the first use or in worker_init_fn: SQLite forbids a connection across a fork."
    return OpenHandle(path, f"a connection to the database {names[0]}", file=os.path.realpath(names[0]), fix=fix)


_LOOKS: tuple[Callable[[str, Any], OpenHandle | None], ...] = (_of_file, _of_socket, _of_h5py, _of_sqlite)
