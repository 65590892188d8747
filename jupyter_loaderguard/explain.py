"""Cards after errors: what a loader's error means, the evidence for it, and what to do."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

from . import machine, usage
from .errors import LoaderStalled, traceback_of
from .model import Card, Failure
from .registry import Record, registry
from .views import text

_DEEPEST_CAUSE = 8
FULL_SHARE = 0.1
"""Less free than this is full, for a batch that did not fit."""
Rule = Callable[[BaseException, str], Card | None]


def explain_once(error: BaseException) -> Card | None:
    """Return a card, unless this error has had one: a cell may run other cells, which all fail with it."""
    if "loaderguard_explained" in vars(error):
        return None
    vars(error)["loaderguard_explained"] = True
    return card(error)


def card(error: BaseException) -> Card | None:
    """Return what there is to say about an error, or about what caused it; None if it is not a loader's."""
    for one in _causes(error):
        message = _message(one)
        for rule in _RULES:
            found = rule(one, message)
            if found is not None:
                return found
    return None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's class
        return ""


def _vars(error: BaseException) -> dict[str, Any]:
    """Return what was noted in an error; its class may have attributes of another mind."""
    try:
        return vars(error)
    except Exception:  # noqa: BLE001 - the user's class
        return {}


def _notes(error: BaseException) -> list[str]:
    notes = _vars(error).get("__notes__")
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _causes(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    for _ in range(_DEEPEST_CAUSE):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


# -- workers that died ------------------------------------------------------------------------------


def _dead_worker(error: BaseException, message: str) -> Card | None:
    failure: Failure | None = _vars(error).get("loaderguard_failure")
    if failure is None:
        return None
    first = failure.workers[0]
    facts = [", ".join(filter(None, (f"{one.name} {one.fate}", one.sample))) for one in failure.workers]
    advice = "what it said itself is in the terminal of the server; with num_workers=0 its error is shown here"
    if failure.why:
        advice = "the traceback above is the worker's own"
    if first.exit_code is not None and first.exit_code < 0:
        more, advice = _of_signal(-first.exit_code, failure)
        facts += more
    return Card(f"{failure.loader}: a worker died", tuple(facts), advice)


def _of_signal(number: int, failure: Failure) -> tuple[list[str], str]:
    """Return what is known about a death by this signal, and what to do."""
    if number == signal.SIGKILL and failure.oom_kills:
        ended = text.count(failure.oom_kills, "process", "processes")
        what = f"the system has ended {ended} of this container for lack of memory since the loader began"
        return [what, _memory()], "fewer workers, a smaller prefetch_factor or batch_size, or more memory"
    if number == signal.SIGKILL:
        what = f"the system has ended no process of this container for memory since the loader began; {_memory()}"
        return [what], "somebody sent SIGKILL: kill -9, a job scheduler; or the host, which says so in dmesg"
    if number == signal.SIGBUS:
        return [_shm()], _SHM_ADVICE
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return [], (
            "native code crashed, on that sample or before; take it alone in the kernel: dataset[index]. "
            "If it works there: multiprocessing_context='spawn' starts workers without the kernel's native state"
        )
    return [], "somebody sent that signal to the worker"


_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: (?P<name>[^.]+)\.")
_SIGNALS = {"Killed": signal.SIGKILL, "Bus error": getattr(signal, "SIGBUS", 7), "Segmentation fault": signal.SIGSEGV}


def _killed_worker(error: BaseException, message: str) -> Card | None:
    """Explain torch's own words for a dead worker."""
    found = _KILLED.search(message)
    number = _SIGNALS.get(found["name"]) if found else None
    if found is None or number is None:
        return None
    facts, advice = _of_signal(number, Failure("the loader", ()))
    return Card(f"worker (pid {found[1]}) was ended by {signal.Signals(number).name}", tuple(facts), advice)


# -- what ran out -----------------------------------------------------------------------------------

_SHM_ADVICE = (
    "fewer workers, a smaller prefetch_factor or batch_size; in a container: docker run --shm-size=8g, "
    "in Kubernetes an emptyDir of medium Memory at /dev/shm"
)


def _no_shared_memory(error: BaseException, message: str) -> Card | None:
    if "No space left on device" not in message or not _is_about_shm(error, message):
        return None
    facts = [_shm()]
    size = _vars(error).get("loaderguard_batch_bytes", 0)
    for record in _recent() if size else []:
        batches = len(record.workers) * record.prefetch
        facts.append(
            f"{registry.name(record)} needs {text.size(batches * size)}: {text.count(len(record.workers), 'worker')} × "
            f"{record.prefetch} batches ahead × {text.size(size)}"
        )
    return Card("/dev/shm is full: workers hand their batches over in it", tuple(facts), _SHM_ADVICE)


def _is_about_shm(error: BaseException, message: str) -> bool:
    """Tell whether it is /dev/shm that has no space left, and not a disk."""
    file = getattr(error, "filename", None) if isinstance(error, OSError) else None
    if file is not None:
        return str(file).startswith("/dev/shm")
    if "/torch_" in message or "shared memory" in message or "/dev/shm" in message:
        return True
    state = machine.look()
    free = (state.shm_bytes or 0) - (state.shm_used_bytes or 0)
    return _is_of_worker(error) and free < FULL_SHARE * (state.shm_bytes or 0)


def _is_of_worker(error: BaseException) -> bool:
    return any("loaderguard: worker" in note for note in _notes(error))


def _too_many_files(error: BaseException, message: str) -> Card | None:
    is_limit = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    is_said = "received 0 items of ancdata" in message or "Too many open files" in message
    if not (is_limit or is_said) or not (_is_of_worker(error) or _is_of_loader(error)):
        return None
    if _is_of_worker(error):
        return Card(
            "a worker has too many files open",
            (f"a process may have {usage.descriptor_limits()[0]:,} open (RLIMIT_NOFILE of the kernel)",),
            "close what __getitem__ opens: with open(...) as file; or a higher limit, ulimit -n",
        )
    kept = "each tensor from a worker holds a descriptor until it is freed: batches that you keep hold theirs"
    facts = [kept]
    used, limit = usage.descriptor_count(os.getpid()), usage.descriptor_limits()[0]
    if used is not None and limit:
        facts.insert(0, f"the kernel has {used:,} descriptors open, its limit is {limit:,}")
    return Card(
        "too many open files",
        tuple(facts),
        "keep copies (batch.clone()), not the batches themselves; or "
        "torch.multiprocessing.set_sharing_strategy('file_system') before the loader starts; or ulimit -n",
    )


def _no_memory(error: BaseException, message: str) -> Card | None:
    is_lack = isinstance(error, MemoryError) or "can't allocate memory" in message
    if not is_lack or not _is_of_worker(error):
        return None
    return Card(
        "a worker could not get the memory that it asked for",
        (_memory(), *_memory_limit()),
        "a smaller batch_size or fewer workers; ulimit -v shows whether the address space is limited",
    )


def _memory_limit() -> Iterator[str]:
    try:
        import resource
    except ImportError:  # Windows
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield f"a process may have {text.size(limit)} of address space (RLIMIT_AS of the kernel)"


# -- what was not to be -----------------------------------------------------------------------------


def _timeout(error: BaseException, message: str) -> Card | None:
    if "DataLoader timed out after" not in message:
        return None
    facts = [f"{registry.name(record)}: {words}" for record in _recent() for words in _awaited(record)]
    return Card(
        "the loader's own timeout has passed",
        tuple(facts),
        "a larger timeout=, or 0 for none: then the stall card says at which line the worker is",
    )


def _awaited(record: Record) -> Iterator[str]:
    """Say what the workers do that have to bring the batch."""
    iterator = record.iterator()
    batch, numbers = record.control.awaited(iterator) if iterator is not None and record.workers else (None, [])
    for number in numbers:
        slot = record.slots[number] if number < len(record.slots) else None
        if slot is not None:
            _, words = record.sample_of(slot.read())
            yield f"batch {batch} is to come from worker {number} (pid {record.workers[number].pid}), which is {words}"


_UNPICKLABLE = re.compile(r"[Cc]an't (pickle|get attribute)|cannot (pickle|be pickled)|[Uu]nable to pickle")


def _unpicklable(error: BaseException, message: str) -> Card | None:
    if not _UNPICKLABLE.search(message):
        return None
    notes = [note for note in _notes(error) if "cannot travel" in note]
    if notes:
        said, _, advice = notes[0].removeprefix("loaderguard: ").partition("\n→ ")
        return Card("something cannot travel to a worker process", (said,), advice)
    if not _is_of_loader(error):
        return None
    if isinstance(error, LoaderStalled):  # a batch on its way back
        advice = (
            "what __getitem__ and collate_fn return must be something that pickle can send: no lambdas, no open files"
        )
        return Card("a batch cannot travel from its worker to the kernel", (text.clean(message),), advice)
    return Card(
        "something cannot travel between the kernel and a worker",
        (text.clean(message),),
        "%config LoaderGuard.pickle_by_value = True sends classes and functions of the notebook; "
        "other objects are best made in the worker",
    )


def _broken_pipe(error: BaseException, message: str) -> Card | None:
    if not isinstance(error, (BrokenPipeError, ConnectionResetError, EOFError)) or not _is_of_loader(error):
        return None
    return Card(
        "the other end of a pipe to a worker is closed",
        ("the process at the other end has ended, or was ended while it started",),
        "%loaderguard status shows what is alive; what the worker itself said is in the terminal of the server",
    )


def _is_of_loader(error: BaseException) -> bool:
    """Tell whether an error came through a DataLoader."""
    traceback = traceback_of(error)
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if name.startswith(("torch.utils.data", "torchdata.", "jupyter_loaderguard.torch_adapter")):
            return True
        traceback = traceback.tb_next
    return False


def _foreign_child(error: BaseException, message: str) -> Card | None:
    if not isinstance(error, AssertionError) or "can only test a child process" not in message:
        return None
    return Card(
        "a worker, or another process, was asked for by a process that did not start it",
        ("the workers of an iterator are children of the process that called iter(); only that one can ask for them",),
        "call iter(loader) in the process that uses it",
    )


def _start_method(error: BaseException, message: str) -> Card | None:
    if "context has already been set" not in message:
        return None
    import multiprocessing

    method = multiprocessing.get_start_method(allow_none=True)
    return Card(
        "the start method of this kernel's processes is set already",
        (f"it is {method!r}; whatever starts the first process, sets it",),
        "DataLoader(..., multiprocessing_context='spawn') for one loader; "
        "multiprocessing.set_start_method('spawn', force=True) for all that come",
    )


def _cuda_in_fork(error: BaseException, message: str) -> Card | None:
    if "Cannot re-initialize CUDA in forked subprocess" not in message:
        return None
    return Card(
        "CUDA was used in the kernel before this worker was forked, and is used in the worker",
        ("a forked process cannot use CUDA once its parent has",),
        "return CPU tensors and move the batch in the loop; or DataLoader(..., multiprocessing_context='spawn')",
    )


_RULES: tuple[Rule, ...] = (
    _dead_worker,
    _killed_worker,
    _no_shared_memory,
    _too_many_files,
    _no_memory,
    _timeout,
    _cuda_in_fork,
    _foreign_child,
    _start_method,
    _unpicklable,
    _broken_pipe,
)


def _recent() -> list[Record]:
    """Return the loaders with workers, the one that was used last first."""
    return [record for record in reversed(registry.all()) if record.workers][:1]


def _shm() -> str:
    state = machine.look()
    if state.shm_bytes is None or state.shm_used_bytes is None:
        return "/dev/shm is not there"
    free = state.shm_bytes - state.shm_used_bytes
    return f"/dev/shm has {text.size(state.shm_bytes)}, of which {text.size(free)} are free now"


def _memory() -> str:
    state = machine.look()
    return f"{text.size(state.memory_available_bytes)} of {text.size(state.memory_bytes)} memory are free now"
