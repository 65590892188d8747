"""Inside a worker: torch's loop gets observed queues, and its failures name the sample."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from types import FrameType
from typing import Any

from torch.utils.data._utils.worker import _IterableDatasetStopIteration
from torch.utils.data.dataloader import _DatasetKind

from ..registry import registry
from ..worker.agent import lock_table, rename_process
from ..worker.observed import ObservedTasks, UnsentBatches
from ..worker.slot import CAPS, LOCKS, Slot
from ..worker.threads import Caps, Pool, find_pools
from . import failures
from .streams import Stated

HOLDER = "dataset_holder"
"""Since torch 2.14 its loop takes the dataset in a list, and empties the list."""


def name_arguments(loop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of torch's worker loop by their names, and the dataset by its own in any case."""
    named = {**dict(zip(argument_names(loop), args, strict=False)), **kwargs}
    if HOLDER in named:
        named.setdefault("dataset", named[HOLDER][0])
    return named


def argument_names(loop: Any) -> tuple[str, ...]:
    """Return the names of what torch's worker loop takes."""
    code = inspect.unwrap(loop).__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names


def fitted(loop: Any) -> Any:
    """Return torch's worker loop so that it can be called with the dataset itself."""
    return HoldingLoop(loop) if HOLDER in argument_names(loop) else loop


class HoldingLoop:
    """A loop that takes the dataset in a list, called with the dataset itself."""

    def __init__(self, loop: Any) -> None:
        self.__wrapped__ = loop
        self.__module__ = loop.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        named = name_arguments(self, args, kwargs)
        named.setdefault(HOLDER, [named.pop("dataset")])
        named.pop("dataset", None)
        del args, kwargs
        self.__wrapped__(**named)


def find_lock_table(named: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the locks that can be reached from a loader's own objects."""
    return lock_table(dataset=named["dataset"], collate_fn=named["collate_fn"], worker_init_fn=named["init_fn"])


class Stream:
    """A stream that can be resumed: its state goes along with each batch, and into the worker that takes it over."""

    def __init__(self, loader_id: int, state: bytes | None) -> None:
        self._loader_id = loader_id
        self._state = state

    def attach(self, named: dict[str, Any]) -> None:
        """Have the dataset take up the state after worker_init_fn, and each batch carry it."""
        dataset, init_fn, state = named["dataset"], named["init_fn"], self._state

        def resume(worker_id: int) -> None:
            if init_fn is not None:
                init_fn(worker_id)
            if state is not None:
                dataset.load_state_dict(pickle.loads(state))

        named["init_fn"] = resume
        named["data_queue"] = _StatedResults(named["data_queue"], dataset, self._loader_id)


class _StatedResults:
    """The queue of results, with the stream's state beside each batch."""

    def __init__(self, queue: Any, dataset: Any, loader_id: int) -> None:
        self._queue = queue
        self._dataset = dataset
        self._loader_id = loader_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, item: Any) -> None:
        task, data = item
        if type(task) is int and not isinstance(data, (failures.NotedError, _IterableDatasetStopIteration)):
            is_last = _has_ended(sys._getframe(1))
            item = task, Stated(data, self._loader_id, task, self._state(), is_last)
        self._queue.put(item)

    def _state(self) -> bytes | None:
        """Return the state of this moment: the queue's thread sends it later, when the stream has moved on."""
        try:
            return pickle.dumps(self._dataset.state_dict())
        except Exception:  # noqa: BLE001 - the user's: the batch arrives all the same, and retry is refused
            return None


def _has_ended(frame: FrameType) -> bool:
    """Tell by the fetcher of torch's loop whether the stream has no more samples, as after a batch that is not full."""
    return bool(getattr(frame.f_locals.get("fetcher"), "ended", False))


def prepare(
    loop: Any,
    slot: Slot,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    worker_threads: int,
    pools: list[Pool] | None,
    stream: Stream | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of torch's worker loop with our notes in them; a forked one knows its `pools` of threads."""
    registry.is_guarding = False  # of the kernel's guard, nothing but the agent runs here
    named = name_arguments(loop, args, kwargs)
    dataset, worker_id, is_batched = named["dataset"], named["worker_id"], bool(named["auto_collation"])
    manner = failures.manner_of(dataset, is_batched, named["dataset_kind"] == _DatasetKind.Iterable)
    if slot.read_text(LOCKS) is None:  # under fork the kernel has looked: the locks lie at the same places there
        slot.write_text(LOCKS, find_lock_table(named))
    failures.install(loop, failures.Site(slot, worker_id, os.getpid(), dataset, manner))
    is_stateful = loop.__module__.startswith("torchdata.")
    rename = functools.partial(rename_process, worker_id)
    named["index_queue"] = ObservedTasks(named["index_queue"], slot, manner, is_stateful, rename)
    if worker_threads:
        caps = Caps(worker_threads, functools.partial(slot.write_text, CAPS))
        known = find_pools() if pools is None else pools
        named["index_queue"].after_first = functools.partial(caps.cap_pools, known)
    UnsentBatches(named["data_queue"], slot, is_stateful)
    if stream is not None:
        stream.attach(named)
    return (), named
