"""A loader as the doctor sees it before anything of it runs: its settings and its parts."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass
from typing import Any

from ..errors import LoaderGuardError


@dataclass(frozen=True)
class Subject:
    """The loader that is examined."""

    loader: Any
    dataset: Any
    workers: int
    method: str | None
    """How its workers start; None without workers."""
    prefetch: int
    is_persistent: bool
    is_iterable: bool

    @property
    def name(self) -> str:
        """What it is, in a few words."""
        workers = f"num_workers={self.workers}" + (f", {self.method}" if self.method else "")
        return f"{type(self.loader).__name__} of {type(self.dataset).__name__} ({workers})"

    @property
    def is_forked(self) -> bool:
        """Whether its workers inherit what the kernel has."""
        return self.workers > 0 and self.method == "fork"

    @property
    def roots(self) -> dict[str, Any]:
        """Return what runs in a worker, by the names that a user knows."""
        loader = self.loader
        return {"dataset": self.dataset, "collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}


def describe(loader: Any) -> Subject:
    """Return what there is to know about a loader; raise LoaderGuardError if it is none."""
    data = sys.modules.get("torch.utils.data")
    inner = getattr(loader, "base_dataloader", loader)  # of accelerate's wrappers
    if data is None or not isinstance(inner, data.DataLoader):
        raise LoaderGuardError(f"this {type(loader).__name__} is not a DataLoader")
    workers = int(inner.num_workers)
    return Subject(
        loader=inner,
        dataset=inner.dataset,
        workers=workers,
        method=_start_method(inner) if workers else None,
        prefetch=int(inner.prefetch_factor or 2) if workers else 0,
        is_persistent=bool(inner.persistent_workers),
        is_iterable=isinstance(inner.dataset, data.IterableDataset),
    )


def _start_method(loader: Any) -> str:
    context = loader.multiprocessing_context
    if context is not None:
        return str(context.get_start_method())
    # the first is the default; asking for the default itself would fix it
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
