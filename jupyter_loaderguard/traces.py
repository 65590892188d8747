"""Python stacks: asked of workers by a signal, read from faulthandler's text, and the user's own frame in them."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType

from .errors import LoaderGuardError
from .model import Frame
from .processes import LINUX, Handle, handles_signal, has_signal_under_way, owner_of
from .worker.slot import LOADING, PHASES, Progress, Slot, borrow

PATIENCE_SECONDS = 0.4
QUIET_SECONDS = 0.05
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple({path + os.sep for path in (*_PATHS, *map(os.path.realpath, _PATHS))})
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def ask(workers: Iterable[tuple[Handle, Slot | None]]) -> dict[int, str]:
    """Return faulthandler's text for each worker that answers, all asked at once; "" for one that does not.

    Only a worker whose slot shows its own pid has prepared for the signal; to any other it would be fatal.
    """
    asked, answers = [], {}
    for handle, slot in workers:
        progress = slot.read() if slot is not None else None
        if slot is not None and progress is not None and progress.pid == handle.pid and progress.signum:
            slot.clear_stack()
            if handle.send(progress.signum):
                asked.append((handle, slot, progress.signum))
        answers[handle.pid] = ""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for handle, slot, signum in asked:
        answers[handle.pid] = _await_stack(handle, slot, signum, deadline)
    return answers


def ask_stranger(pid: int) -> str:
    """Return the stack of a worker of another process, as text, and what it is on; or say why there is none.

    It is signalled only if it is this user's, if its slot shows its own pid, and if it handles the signal.
    """
    if not LINUX:
        raise LoaderGuardError("this is for Linux only; in the notebook, %loaderguard stacks does it")
    handle = Handle(pid)
    if not handle.is_alive():
        raise LoaderGuardError(f"there is no process {pid}")
    if owner_of(pid) != os.geteuid():
        raise LoaderGuardError(f"pid {pid} belongs to another user, and is left alone")
    slot = borrow(pid)
    progress = slot.read() if slot is not None else None
    if slot is None or progress is None or not (progress.signum and handles_signal(pid, progress.signum)):
        raise LoaderGuardError(
            f"pid {pid} is not a worker that was started under guard, and cannot say where it is; "
            f"py-spy dump --pid {pid} may show it"
        )
    frames = parse(ask([(handle, slot)])[pid], short_place)
    if not frames:
        raise LoaderGuardError(f"pid {pid} did not answer: it is {handle.state()}")
    return f"worker (pid {pid}) · {_doing(progress)}\n{frames_text(frames[0])}"


def _doing(progress: Progress) -> str:
    """Say what a worker is on; which samples the keys of its batch mean is known to its kernel alone."""
    seconds = max(0.0, time.monotonic() - progress.since)
    if progress.phase != LOADING:
        return f"{dict(enumerate(PHASES)).get(progress.phase, 'unknown')} for {seconds:.1f} s"
    if progress.position >= progress.keys > 0:
        return f"batch {progress.task}, in collate_fn of {progress.keys} samples, for {seconds:.1f} s"
    return f"batch {progress.task}, sample {max(progress.position, 0) + 1} of {progress.keys}, for {seconds:.1f} s"


def _await_stack(handle: Handle, slot: Slot, signum: int, deadline: float) -> str:
    """Wait until the dump is complete: the signal is handled, or where that is not told, nothing more comes."""
    size, quiet_since = 0, time.monotonic()
    while time.monotonic() < deadline:
        now_size = slot.stack_bytes()
        if now_size != size:
            size, quiet_since = now_size, time.monotonic()
        elif size and _is_complete(handle, signum, quiet_since):
            break
        time.sleep(0.001)
    return slot.read_stack()


def _is_complete(handle: Handle, signum: int, quiet_since: float) -> bool:
    if LINUX:
        return not has_signal_under_way(handle.pid, signum)
    return time.monotonic() - quiet_since > QUIET_SECONDS


def parse(text: str, place_of: Callable[[str], str]) -> list[list[Frame]]:
    """Return the threads of faulthandler's text, the worker's main one first, each most recent call first."""
    threads: list[list[Frame]] = []
    heads: list[str] = []
    for line in text.splitlines():
        found = _FRAME.match(line)
        if found and threads:
            number = int(found["line"]) if found["line"].isdigit() else 0
            threads[-1].append(_frame(found["file"], number, found["function"], place_of))
        elif line.startswith(("Thread ", "Current thread ", "Stack ")):
            heads.append(line)
            threads.append([])
    threads = [_own_part(frames) for frames in threads]
    order = sorted(range(len(threads)), key=lambda n: (not _is_worker_loop(threads[n]), "Current" not in heads[n]))
    return [threads[number] for number in order if threads[number]]


def _own_part(frames: list[Frame]) -> list[Frame]:
    """Leave out what lies below torch's worker loop: under fork that is the kernel, at the moment of the fork."""
    ends = [number for number, frame in enumerate(frames) if frame.function == "_worker_loop"]
    return frames[: ends[0] + 1] if ends else frames


def _is_worker_loop(frames: list[Frame]) -> bool:
    return any(frame.function == "_worker_loop" for frame in frames)


def of_thread(stack: Iterable[FrameType], place_of: Callable[[str], str]) -> list[Frame]:
    """Return the frames of a thread of this process, most recent call first."""
    found = traceback.StackSummary.extract(((frame, frame.f_lineno) for frame in stack), lookup_lines=False)
    return [_frame(entry.filename, entry.lineno or 0, entry.name, place_of) for entry in found]


def _frame(file: str, line: int, function: str, place_of: Callable[[str], str]) -> Frame:
    code = linecache.getline(file, line).strip()
    return Frame(file=file, line=line, function=function, place=place_of(file), code=code, is_user=is_user_file(file))


def is_user_file(file: str) -> bool:
    """Tell whether code is the user's own: neither Python's, nor an installed package's, nor ours."""
    if file.startswith(("<", _PACKAGE)) or any(part in file for part in _LIBRARY_PARTS):
        return False
    return not file.startswith(_LIBRARIES)


def short_place(file: str) -> str:
    """Return a file as a person knows it: within its library, or below the working directory."""
    for part in _LIBRARY_PARTS:
        if part in file:
            return file.rpartition(part)[2]
    for root in _LIBRARIES:
        if file.startswith(root):
            return file[len(root) :]
    if file.startswith(_PACKAGE):
        return os.path.join("jupyter_loaderguard", os.path.relpath(file, _PACKAGE))
    here = os.getcwd() + os.sep
    return file[len(here) :] if file.startswith(here) else file


_PLACE = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)|(?P<path>[^\s"()]+):(?P<number>\d+)\b')


def name_cells(text: str, place_of: Callable[[str], str]) -> str:
    """Return a text from a worker, where a cell is a file like any other, with cells named as IPython names them."""

    def rename(found: re.Match[str]) -> str:
        file = found["file"] or found["path"]
        place = place_of(file)
        if place in (file, short_place(file)):
            return found[0]
        return f"{place}, line {found['line']}" if found["file"] else f"{place}:{found['number']}"

    return _PLACE.sub(rename, text)


def users_own(frames: list[Frame]) -> Frame | None:
    """Return the user's innermost frame; else the innermost one at all."""
    return next((frame for frame in frames if frame.is_user), frames[0] if frames else None)


def frames_text(frames: list[Frame]) -> str:
    """Write the calls of one thread, most recent first."""
    lines = []
    for frame in frames:
        lines.append(f"  {frame.place}:{frame.line} in {frame.function}")
        if frame.code:
            lines.append(f"      {frame.code}")
    return "\n".join(lines)
