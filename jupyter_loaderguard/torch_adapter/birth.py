"""An iterator is made: it is recorded before it has workers, and each worker as it starts."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from .. import interrupts, queues, usage
from ..processes import Handle, start_mark, start_time
from ..reaper import semaphore_path
from ..registry import Record, registry
from ..samples import error_text
from ..seam import RECORD, Unknown, is_for_user, let_go, rim, say, shield
from ..worker.agent import WorkerEntry
from ..worker.slot import CAN_SHARE, LOCKS, Slot
from ..worker.threads import find_pools
from . import progress
from .ending import control, forget_pids
from .instrument import TORCH, TORCHDATA
from .lengths import lengths_of
from .mending import note_refusal
from .recipe import RECIPE, CannotTravel, Recipe
from .skipping import take_up

USERS = ("dataset", "collate_fn", "init_fn", "worker_state")
"""Arguments of a worker's loop that are the user's own; the last one is torchdata's."""
ATTRIBUTES = (
    "_data_queue",
    "_dataset",
    "_index_queues",
    "_index_sampler",
    "_shutdown",
    "_worker_pids_set",
    "_worker_result_queue",
    "_workers",
    "_workers_done_event",
    "_workers_status",
)


def seeing_init(original: Callable[..., None]) -> Callable[..., None]:
    @rim
    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            record = _begin(self, loader) if registry.is_guarding else None
        except Exception as error:  # not a Shield, which would be felt in each next(iter(loader))
            if is_for_user(error):
                raise
            say(f"this {type(loader).__name__} works, but is not guarded", error)
            record = None
        if record is None:
            return original(self, loader, *args, **kwargs)
        if args or kwargs:
            record.making = args, kwargs
        outer = getattr(progress.building, "record", None)
        progress.building.record = record
        try:
            original(self, loader, *args, **kwargs)
        except BaseException as error:
            with shield(f"{record.words()} is not cleared away"):
                registry.stop([record], "it could not be started")
            if isinstance(error, CannotTravel):
                raise error.error from None
            raise
        finally:
            progress.building.record, record.is_in_making = outer, False
        try:
            _end_making(self, record)
        except Exception as error:  # as above
            if is_for_user(error):
                raise
            let_go(record, error)
        return None

    return __init__


def _begin(iterator: Any, loader: Any) -> Record:
    """Record an iterator before it has workers."""
    num_workers = getattr(loader, "num_workers", 0)
    if num_workers:
        registry.prepare_birth(usage.free_descriptors(num_workers))
    record = registry.add(iterator, loader, control, has_workers=bool(num_workers))
    try:
        _prepare_mending(loader, record)
        vars(iterator)[RECORD] = record
    except BaseException:
        registry.remove(record)
        raise
    return record


def _prepare_mending(loader: Any, record: Record) -> None:
    """Note what has to be known before the first batch is asked for, if workers may be replaced or samples left out."""
    if not registry.may_mend(record):
        return
    allowance = registry.allowance_of(record)
    take_up(loader.dataset, record)
    is_resumable = all(callable(getattr(loader.dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    is_stateful = type(loader).__module__.startswith("torchdata.")
    record.keeps_state = bool(
        allowance.retry and is_resumable and progress.is_stream(loader.dataset) and not is_stateful
    )
    record.has_own = record.keeps_state


def _end_making(iterator: Any, record: Record) -> None:
    """Take over an iterator that torch has made; hand it back if anything was wrong on the way."""
    mistake, record.mistake = record.mistake, None
    if mistake is None:
        settle(iterator, record)
    else:
        let_go(record, mistake)


def settle(iterator: Any, record: Record) -> None:
    """Take over an iterator whose workers have just been started."""
    progress.learn_manner(iterator, record)
    processes = getattr(iterator, "_workers", None)
    if processes is None:
        record.take_slot()
        return
    missing = [name for name in ATTRIBUTES if not hasattr(iterator, name)]
    if missing:
        raise Unknown(f"{type(iterator).__name__} has no {', '.join(missing)}")
    meet_workers(record, processes)
    record.prefetch = getattr(iterator, "_prefetch_factor", None) or 2
    record.known_lengths = lengths_of(iterator)
    forget_pids(iterator)
    record.start_method = queues.start_method(processes[0])
    note_refusal(iterator, record)
    thread, recipe = getattr(iterator, "_pin_memory_thread", None), vars(iterator).get(RECIPE)
    if thread is not None and recipe is not None:
        recipe.pinning = getattr(thread, "_target", None), getattr(thread, "_args", ())
    registry.note_started(record)


def meet_workers(record: Record, found: Sequence[Any]) -> None:
    """Record the workers of an iterator that did not come through our context, as fastai's do not."""
    known = [worker.pid for worker in record.workers]
    if known == [process.pid for process in found]:
        return
    for process in found:
        if not _is_other_process(process):
            raise Unknown(f"its workers are {type(process).__name__} objects, not processes")
    # from here on they are known by their Process objects; what had been noted of some of them stays theirs
    slots = dict(zip(known, record.slots, strict=False))
    record.workers, record.births, record.processes = [], [], list(found)
    record.slots = [slots.get(process.pid) for process in found] if slots else []
    for number, process in enumerate(found):
        registry.add_worker(record, number, Handle(process.pid), start_time(process.pid))


def _is_other_process(process: Any) -> bool:
    """Tell a process from what only looks like one, as MONAI's thread workers, whose pid is a made-up number."""
    return isinstance(process, BaseProcess) and type(process.pid) is int and process.pid not in (0, os.getpid())


def lent_context(original: property) -> property:
    """Lend the iterator that is being built a context of ours, through which each worker is seen."""

    @rim
    def multiprocessing_context(self: Any) -> Any:
        context = original.fget(self) if original.fget else None
        record = getattr(progress.building, "record", None)
        if record is None or record.loader() is not self:
            return context
        with shield(record=record):
            import torch.multiprocessing

            if _is_asked_by_torch(sys._getframe(1)):
                return _SeeingContext(context or torch.multiprocessing, record)
        return context

    return property(multiprocessing_context, original.fset, original.fdel, original.__doc__)


def _is_asked_by_torch(frame: FrameType) -> bool:
    """Tell whether it is torch that makes an iterator: others may ask meanwhile, and would take ours for the user's."""
    return frame.f_code.co_name == "__init__" and frame.f_globals.get("__name__") in (TORCH, TORCHDATA)


class _SeeingContext:
    """A multiprocessing context whose processes are recorded as they start."""

    def __init__(self, context: Any, record: Record) -> None:
        self._context = context
        self._record = record
        self._kernel = (os.getpid(), start_mark(os.getpid()))
        self._lock_table: list[tuple[Any, ...]] | None = None
        self._is_frugal = usage.free_descriptors(getattr(record.loader(), "num_workers", 0)) < usage.SPARE_DESCRIPTORS
        """Whether descriptors are so few that the guard takes none for each worker."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def serve(self, record: Record) -> None:
        """See workers for another record of the same iterator, which was adopted."""
        self._record = record

    @rim
    def Queue(self, *args: Any, **kwargs: Any) -> Any:
        queue = self._context.Queue(*args, **kwargs)
        with shield(record=self._record):
            self._note_semaphores(queue)
            queues.on_unsent(queue, self._note_unsent)
        return queue

    def _note_unsent(self, error: Exception, item: Any) -> None:
        """Note that a task cannot be sent to its worker, e.g. because a key cannot be pickled."""
        if type(item) is tuple and len(item) == 2 and type(item[0]) is int:
            self._record.unsent[item[0]] = error_text(error)

    @rim
    def Event(self) -> Any:
        event = self._context.Event()
        with shield(record=self._record):
            self._note_semaphores(event)
        return event

    def _note_semaphores(self, holder: Any) -> None:
        """Record its named semaphores; fork unlinks them at once, spawn and forkserver do not."""
        if self._context.get_start_method(allow_none=True) != "fork":
            names = queues.semaphore_names(holder)
            registry.reaper.semaphores_made([name for name in names if os.path.exists(semaphore_path(name))])

    def _new_slot(self, number: int, method: str | None) -> Slot | None:
        """Return the slot of a worker; None if there can be none, and it works unobserved."""
        slot, problem = None, "too few descriptors are left, ulimit -n"
        try:
            if CAN_SHARE and not self._is_frugal:
                slot = Slot()
        except OSError as error:  # too many open files, no memory
            problem = str(error)
        if slot is None and method == "fork":
            slot = Slot.inherited()
        elif slot is None and CAN_SHARE and not number:
            say("workers cannot be observed", Unknown(problem))
        self._record.slots[number : number + 1] = [slot]
        return slot

    def _pack(self, named: dict[str, Any]) -> Any:
        """Take the user's objects out of the arguments of a worker's loop: they travel in a way of their own."""
        from ..worker.by_value import Parcel, carry

        users = {name: named.pop(name) for name in USERS if name in named}
        if registry.pickle_by_value:
            self._record.carry = carry
        return Parcel(users, registry.pickle_by_value)

    def _keep_recipe(self, loop: Any, named: dict[str, Any]) -> None:
        """Let the iterator remember how its workers start; not the record, which must not hold what is the user's."""
        iterator = self._record.iterator()
        if iterator is not None and RECIPE not in vars(iterator):
            vars(iterator)[RECIPE] = Recipe(self, loop, named)

    def _stream(self, number: int, inside: Any) -> Any:
        """Return what makes a stream resumable, with the state that this worker is to begin with."""
        record = self._record
        return inside.Stream(record.loader_id, record.resume.get(number)) if record.keeps_state else None

    @rim
    def Process(self, *args: Any, **kwargs: Any) -> Any:
        kind = self._context.Process
        if not isinstance(kind, type) or not issubclass(kind, BaseProcess):
            return kind(*args, **kwargs)  # whatever it makes, our agent is for processes; see `meet_workers`
        process = kind(*args, **kwargs)
        number = len(self._record.workers)
        with shield("workers cannot be observed"):  # a worker that is not observed is better than none
            number = self._observe(process, number)
        with shield(record=self._record):
            if type(getattr(process, "_target", None)) is not WorkerEntry:
                self._record.slots[number : number + 1] = [None]
            start = functools.partial(_start_worker, process, self._record, number, self._is_frugal)
            vars(process)["start"] = start
        return process

    def _observe(self, process: Any, number: int) -> int:
        """Have a process that has been made, and not started, run an agent before torch's loop; return its number."""
        from . import inside  # imports torch, which is there by now

        loop = process._target
        if loop is None:
            return number
        method = queues.start_method(self._context.Process)
        named = inside.name_arguments(loop, process._args, process._kwargs)
        number = int(named["worker_id"])
        if method == "fork" and self._lock_table is None:
            self._lock_table = inside.find_lock_table(named)
        self._keep_recipe(loop, {name: named[name] for name in inside.argument_names(loop) if name in named})
        stream = self._stream(number, inside)
        slot, parcel, args, kwargs = self._new_slot(number, method), None, process._args, process._kwargs
        if slot is not None and method == "fork":
            slot.write_text(LOCKS, self._lock_table)
        if method != "fork":
            _check_is_plain(type(process))
            named.pop(inside.HOLDER, None)
            parcel, args, kwargs = self._pack(named), (), named
        announce = registry.reaper.born_here
        threads = registry.worker_threads
        pools = find_pools() if threads and method == "fork" else None
        prepare = functools.partial(inside.prepare, worker_threads=threads, pools=pools, stream=stream)
        entry = WorkerEntry(inside.fitted(loop), self._kernel, announce, slot, prepare, parcel, threads)
        process._target, process._args, process._kwargs = entry, args, kwargs
        return number


def _check_is_plain(kind: type) -> None:
    """See that a class of processes does with target and arguments what Python's own do: ours are others by then."""
    own = [name for name in ("run", "start") if getattr(kind, name) is not getattr(BaseProcess, name)]
    if own:
        raise Unknown(f"{kind.__name__} has its own {own[0]}()")


@rim
def _start_worker(process: Any, record: Record, number: int, is_frugal: bool) -> None:
    """Start a worker so that no interrupt, in whichever thread it arrives, can come between birth and record."""
    __tracebackhide__ = True
    del process.start  # it is the instance's own; and the process may be pickled now
    with shield(record=record), interrupts.held(), interrupts.blocked_for_child(queues.start_method(process)):
        _start(process)
        record.processes.append(process)
        handle = Handle(process.pid)
        if is_frugal:
            handle.close()  # it is known by its start time, too
        registry.add_worker(record, number, handle)
    if process.pid is None:
        _start(process)


def _start(process: Any) -> None:
    __tracebackhide__ = True
    try:
        process.start()
    except Exception as error:  # noqa: BLE001 - the user's or the system's, not ours
        raise CannotTravel(error) from None
