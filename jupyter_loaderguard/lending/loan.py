"""A copy of a loader, with workers of its own: what it does leaves no trace in the user's objects.

NOTE [ What is copied ]
Samplers run in a fork of the kernel (keys.py), and the copy takes its keys from there; its own generator is copied. The
dataset is not: workers have their own, by fork or by pickle, and a loader without workers is run in a
fork as a whole (aside.py). The global random state is put back at the end.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import processes
from ..registry import LENT
from .keys import taken_aside
from .subject import Subject

GENTLE_PREFETCH = 2
"""What the copy loads ahead at most: it is to find out whether more would fill /dev/shm, not to fill it."""


@dataclass(frozen=True)
class Order:
    """Which samples come, and in which batches."""

    options: dict[str, Any]
    """Of a DataLoader."""
    remark: str = ""
    """What had to be different."""
    keys: Any = None
    """Keys, or EndlessKeys: where the samples' keys come from, if they come from a fork."""


@contextlib.contextmanager
def lend_order(subject: Subject, until: float, take: Callable[..., Any] = taken_aside) -> Iterator[Order]:
    """Return the order of a loader, without a change of its sampler, until a moment of the monotonic clock."""
    own = own_order(subject)
    sampler = own.options.get("batch_sampler", own.options.get("sampler"))
    if sampler is None:
        yield own
    elif not processes.LINUX or _uses_cuda(loader_generators(subject)):
        size = _batch_size(subject.loader)
        at_a_time = f", {size} at a time," if size is not None else ""
        remark = f"samples 0, 1, 2, …{at_a_time} because the sampler cannot run in a copy of this process"
        yield Order({"batch_size": size, "sampler": range(len(subject.dataset))}, remark)
    else:
        with take(sampler, until) as keys:
            yield Order({name: keys if part is sampler else part for name, part in own.options.items()}, "", keys)


def _batch_size(loader: Any) -> int | None:
    """Return how many samples a batch has, 1 if its sampler does not say; None if there are no batches."""
    if loader.batch_sampler is None:
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else 1


def own_order(subject: Subject) -> Order:
    """Return the order with the user's own sampler, for a process that is a copy itself."""
    loader = subject.loader
    if subject.is_iterable:
        return Order({"batch_size": loader.batch_size, "drop_last": loader.drop_last})
    if loader.batch_sampler is not None:
        return Order({"batch_sampler": loader.batch_sampler})
    return Order({"batch_size": None, "sampler": loader.sampler})


def loader_generators(subject: Subject) -> list[Any]:
    """Return the generators that the loader and its sampler draw from."""
    loader = subject.loader
    return [getattr(part, "generator", None) for part in (loader, loader.sampler, loader.batch_sampler)]


def _uses_cuda(generators: list[Any]) -> bool:
    torch = sys.modules["torch"]
    return any(isinstance(one, torch.Generator) and one.device.type != "cpu" for one in generators)


def lend(subject: Subject, workers: int, order: Order, prefetch: int | None = None, persistent: bool = False) -> Any:
    """Return a loader with the same settings; but for how far ahead it loads, and whether its workers persist."""
    loader, data = subject.loader, sys.modules["torch.utils.data"]
    options: dict[str, Any] = {
        "num_workers": workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout if workers else 0,
        "worker_init_fn": loader.worker_init_fn,
        "generator": _copy(loader.generator),
    }
    if not getattr(loader, "in_order", True):  # torch has it since 2.6
        options["in_order"] = False
    if workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
        options["prefetch_factor"] = prefetch or min(GENTLE_PREFETCH, subject.prefetch)
        options["persistent_workers"] = persistent
    with unwarned():
        twin = data.DataLoader(subject.dataset, **options, **order.options)
    vars(twin)[LENT] = True
    return twin


def _copy(generator: Any) -> Any:
    if generator is None:
        return None
    twin = sys.modules["torch"].Generator(device=generator.device)
    twin.set_state(generator.get_state())
    return twin


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Put the global random state back at the end."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    own, torchs = random.getstate(), torch.get_rng_state()
    cudas = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpys = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(own)
        torch.set_rng_state(torchs)
        if cudas is not None:
            torch.cuda.set_rng_state_all(cudas)
        if numpy:
            numpy.random.set_state(numpys)


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Keep torch's warnings about the settings of a copy to ourselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
