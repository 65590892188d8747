"""An iterator is made: it is recorded before it has workers, and each worker as it starts."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from typing import Any

from .. import interrupts, queues
from ..errors import warn_limited
from ..processes import Handle, start_mark
from ..reaper import semaphore_path
from ..registry import Record, registry
from ..worker.agent import WorkerEntry
from ..worker.slot import CAN_SHARE, LOCKS, Slot
from ..worker.threads import find_pools
from . import progress
from .ending import RECORD, control, forget_pids, length_of, measure
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
    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        record = _begin(self, loader) if registry.is_guarding else None
        if record is None:
            return original(self, loader, *args, **kwargs)
        outer = getattr(progress.building, "record", None)
        progress.building.record = record
        try:
            original(self, loader, *args, **kwargs)
        except CannotTravel as refused:
            registry.stop([record], "it could not be started")
            raise refused.error from None
        except BaseException:
            registry.stop([record], "it could not be started")
            raise
        finally:
            progress.building.record = outer
        _settle_or_let_go(self, record)
        return None

    return __init__


def _begin(iterator: Any, loader: Any) -> Record | None:
    try:
        if loader.num_workers:
            registry.prepare_birth()
        record = registry.add(iterator, loader, control)
        _prepare_mending(loader, record)
        return record
    except Exception as error:  # noqa: BLE001 - an unguarded loader is better than a broken one
        _warn_unguarded(error)
        return None


def _prepare_mending(loader: Any, record: Record) -> None:
    """Note what has to be known before the first batch is asked for, if workers may be replaced or samples left out."""
    allowance = registry.allowance_of(record)
    if not allowance.is_open:
        return
    record.lengths = (length_of(loader.dataset), None)
    take_up(loader.dataset, record)
    is_resumable = all(callable(getattr(loader.dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    is_stateful = type(loader).__module__.startswith("torchdata.")
    record.keeps_state = bool(
        allowance.retry and is_resumable and progress.is_stream(loader.dataset) and not is_stateful
    )
    record.has_own = record.keeps_state


def _settle_or_let_go(iterator: Any, record: Record) -> None:
    try:
        settle(iterator, record)
    except Exception as error:  # noqa: BLE001 - as above
        _warn_unguarded(error)
        registry.remove(record)


def settle(iterator: Any, record: Record) -> None:
    """Take over an iterator whose workers have just been started."""
    progress.learn_manner(iterator, record)
    record.lengths = measure(iterator)
    if record.workers:
        missing = [name for name in ATTRIBUTES if not hasattr(iterator, name)]
        if missing:
            raise AttributeError(f"{type(iterator).__name__} has no {', '.join(missing)}")
        forget_pids(iterator)
        record.start_method = queues.start_method(iterator._workers[0])
        note_refusal(iterator, record)
        thread, recipe = getattr(iterator, "_pin_memory_thread", None), vars(iterator).get(RECIPE)
        if thread is not None and recipe is not None:
            recipe.pinning = getattr(thread, "_target", None), getattr(thread, "_args", ())
    else:
        record.slots = [Slot.local()]
        registry.forget_with_iterator(record, iterator)
    vars(iterator)[RECORD] = record
    if record.workers:
        registry.note_started(record)


def _warn_unguarded(error: Exception) -> None:
    warn_limited(f"this DataLoader works, but is not guarded ({type(error).__name__}: {error})")


def lent_context(original: property) -> property:
    """Lend the iterator that is being built a context of ours, through which each worker is seen."""

    def multiprocessing_context(self: Any) -> Any:
        context = original.fget(self) if original.fget else None
        record = getattr(progress.building, "record", None)
        if record is None or record.loader() is not self:
            return context
        import torch.multiprocessing

        return _SeeingContext(context or torch.multiprocessing, record)

    return property(multiprocessing_context, original.fset, original.fdel, original.__doc__)


class _SeeingContext:
    """A multiprocessing context whose processes are recorded as they start."""

    def __init__(self, context: Any, record: Record) -> None:
        self._context = context
        self._record = record
        self._kernel = (os.getpid(), start_mark(os.getpid()))
        self._lock_table: list[tuple[Any, ...]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def serve(self, record: Record) -> None:
        """See workers for another record of the same iterator, which was adopted."""
        self._record = record

    def Queue(self, *args: Any, **kwargs: Any) -> Any:
        queue = self._seen(self._context.Queue(*args, **kwargs))
        queues.on_unsent(queue, self._note_unsent)
        return queue

    def _note_unsent(self, error: Exception, item: Any) -> None:
        """Note that a task cannot be sent to its worker, e.g. because a key cannot be pickled."""
        if type(item) is tuple and len(item) == 2 and type(item[0]) is int:
            self._record.unsent[item[0]] = f"{type(error).__name__}: {error}"

    def Event(self) -> Any:
        return self._seen(self._context.Event())

    def _seen(self, holder: Any) -> Any:
        """Record its named semaphores; fork unlinks them at once, spawn and forkserver do not."""
        if self._context.get_start_method(allow_none=True) == "fork":
            return holder
        names = queues.semaphore_names(holder)
        registry.reaper.semaphores_made([name for name in names if os.path.exists(semaphore_path(name))])
        return holder

    def _new_slot(self, number: int) -> Slot | None:
        """Return the slot of a worker; None if there can be none, and it works unobserved."""
        slot = None
        try:
            slot = Slot() if CAN_SHARE else None
        except OSError as error:  # too many open files, no memory
            warn_limited(f"workers cannot be observed ({error})")
        self._record.slots[number : number + 1] = [slot]
        return slot

    def _pack(self, named: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        """Take the user's objects out of the arguments of a worker's loop: they travel in a way of their own."""
        from ..worker.by_value import Parcel, carry

        users = {name: named.pop(name) for name in USERS if name in named}
        kwargs["kwargs"] = named
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

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        number = len(self._record.workers)
        try:
            number, arguments = self._observed(number, kwargs)
        except Exception as error:  # noqa: BLE001 - a worker that is not observed is better than none
            if not number:
                warn_limited(f"workers cannot be observed ({type(error).__name__}: {error})")
            arguments = kwargs
        process = self._context.Process(*args, **arguments)
        process.start = functools.partial(_start_worker, process, self._record, number)
        return process

    def _observed(self, number: int, kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the number of a worker, and what to start it with so that it has an agent."""
        from . import inside  # imports torch, which is there by now

        loop = kwargs.get("target")
        if loop is None:
            return number, kwargs
        kwargs = dict(kwargs)
        method = queues.start_method(self._context.Process)
        named = inside.name_arguments(loop, kwargs.get("args", ()), kwargs.get("kwargs", {}))
        number = named["worker_id"]
        if method == "fork" and self._lock_table is None:
            self._lock_table = inside.find_lock_table(named)
        self._keep_recipe(loop, {name: named[name] for name in inside.argument_names(loop) if name in named})
        stream = self._stream(number, inside)
        slot, parcel = self._new_slot(number), None
        if slot is not None and method == "fork":
            slot.write_text(LOCKS, self._lock_table)
        if method != "fork":
            kwargs.pop("args", None)
            named.pop(inside.HOLDER, None)
            parcel = self._pack(named, kwargs)
        announce = registry.reaper.born_here
        threads = registry.worker_threads
        pools = find_pools() if threads and method == "fork" else None
        prepare = functools.partial(inside.prepare, worker_threads=threads, pools=pools, stream=stream)
        entry = WorkerEntry(inside.fitted(loop), self._kernel, announce, slot, prepare, parcel, threads)
        return number, {**kwargs, "target": entry}


def _start_worker(process: Any, record: Record, number: int) -> None:
    """Start a worker so that no interrupt, in whichever thread it arrives, can come between birth and record."""
    __tracebackhide__ = True
    del process.start  # it is the instance's own; and the process may be pickled now
    with interrupts.held(), interrupts.blocked_for_child(queues.start_method(process)):
        try:
            process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise CannotTravel(error) from None
        record.processes.append(process)
        registry.add_worker(record, number, Handle(process.pid))
