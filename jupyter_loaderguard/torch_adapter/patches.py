"""What of torch is replaced, and how live iterators change hands."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..processes import start_time
from ..registry import keeps, registry
from ..seam import RECORD, Inherited, shield
from .birth import lent_context, seeing_init, settle
from .ending import control, quick_del, quick_shutdown_workers
from .instrument import TORCH, TORCHDATA
from .progress import observing_next_index, remembering_next_index
from .recipe import RECIPE
from .waiting import (
    measuring_next_data,
    measuring_reset,
    timing_next,
    watching_try_get_data,
)

OLDEST_TORCH = (2, 6)
MULTI = {TORCH: "_MultiProcessingDataLoaderIter", TORCHDATA: "_StatefulMultiProcessingDataLoaderIter"}
SINGLE = {TORCH: "_SingleProcessDataLoaderIter", TORCHDATA: "_StatefulSingleProcessDataLoaderIter"}
OF_MULTI = {
    "__init__": seeing_init,
    "__next__": timing_next,
    "_next_data": measuring_next_data,
    "_next_index": remembering_next_index,
    "_reset": measuring_reset,
    "_try_get_data": watching_try_get_data,
    "_shutdown_workers": quick_shutdown_workers,
    "__del__": quick_del,
}
"""What makes the replacement of each method of an iterator with workers."""
OF_SINGLE = {"__init__": seeing_init, "__next__": measuring_next_data, "_next_index": observing_next_index}


class Patch:
    """One replaced class attribute; undoes exactly what it did."""

    def __init__(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name = owner, name
        self._is_own = name in vars(owner)
        self._original = vars(owner)[name] if self._is_own else Inherited(owner, name)
        self._replacement = make(self._original)
        setattr(owner, name, self._replacement)

    def undo(self) -> None:
        if vars(self._owner).get(self._name) is not self._replacement:
            return  # someone patched on top of us: they call us, and we call the original
        if self._is_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


def patch(module: ModuleType) -> list[Patch]:
    """Replace what makes iterators and their batches; return what undoes it."""
    multi, single = getattr(module, MULTI[module.__name__]), getattr(module, SINGLE[module.__name__])
    wanted: list[tuple[Any, str, Callable[[Any], Any]]] = [(multi, name, make) for name, make in OF_MULTI.items()]
    wanted += [(single, name, make) for name, make in OF_SINGLE.items()]
    if module.__name__ == TORCH:
        wanted.append((module.DataLoader, "multiprocessing_context", lent_context))
    patches: list[Patch] = []
    try:
        for owner, name, make in wanted:
            patches.append(Patch(owner, name, make))
    except BaseException:
        for one in reversed(patches):
            one.undo()
        raise
    return patches


def adopt(module: ModuleType) -> None:
    """Take over iterators that were alive before us, e.g. across `%reload_ext`."""
    if not multiprocessing.active_children():
        return
    multi, loader_type = getattr(module, MULTI[module.__name__]), module.DataLoader
    things = gc.get_objects()
    iterators = [thing for thing in things if multi in type(thing).__mro__]
    live = [one for one in iterators if not getattr(one, "_shutdown", True) and one._workers]
    loaders = [thing for thing in things if loader_type in type(thing).__mro__] if live else []
    for iterator in sorted(live, key=lambda one: start_time(one._workers[0].pid)):
        mine = [loader for loader in loaders if _is_of(loader, iterator)]
        record = registry.add(iterator, mine[0] if mine else None, control, is_adopted=True)
        vars(iterator)[RECORD] = record
        record.is_in_making = False
        with shield(record=record):
            if RECIPE in vars(iterator):
                vars(iterator)[RECIPE].context.serve(record)
            settle(iterator, record)


def _is_of(loader: Any, iterator: Any) -> bool:
    """Tell whether a loader has made this iterator, as far as it can be told afterwards."""
    return getattr(loader, "_iterator", None) is iterator or keeps(loader, iterator)


def problem_with(module: ModuleType) -> str | None:
    """Say what of torch is not as this adapter knows it, or None."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if version < OLDEST_TORCH:
        return f"needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, found {torch.__version__}"
    multi = getattr(module, MULTI[module.__name__], None)
    missing = [f"{MULTI[module.__name__]}.{name}" for name in OF_MULTI if not hasattr(multi, name)]
    if not hasattr(getattr(module, SINGLE[module.__name__], None), "_next_data"):
        missing.append(f"{SINGLE[module.__name__]}._next_data")
    if module.__name__ == TORCH and not isinstance(vars(module.DataLoader).get("multiprocessing_context"), property):
        missing.append("DataLoader.multiprocessing_context")
    if not missing:
        return None
    return f"{module.__name__.partition('.')[0]} {_version_of(module)} is unknown to it (no {', '.join(missing)})"


def _version_of(module: ModuleType) -> str:
    import importlib.metadata

    return importlib.metadata.version(module.__name__.partition(".")[0])
