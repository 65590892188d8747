"""Errors of the user's code in a loader: they keep their type, and a note names worker and sample."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data.dataset import Subset

from ..errors import add_note
from ..registry import registry
from ..samples import Manner, error_text, locate, span
from ..seam import rim, shield
from ..traces import name_cells
from ..worker.observed import bytes_of
from ..worker.slot import LOADING, STARTING, Progress, Slot


@dataclass(frozen=True)
class Site:
    """Where samples are loaded: in a worker, or in the kernel itself."""

    slot: Slot
    worker_id: int | None
    pid: int
    dataset: Any
    manner: Manner


_here: list[Site] = []
_LARGEST_ATTRIBUTE = 10_000
"""A JSONDecodeError holds the whole document; that need not travel."""
_LONGEST_SUMMARY = 300


def install(loop: Callable[..., None], site: Site) -> None:
    """Have torch's worker loop wrap errors in our way; in this worker process only."""
    _here[:] = [site]
    getattr(inspect.unwrap(loop), "__globals__", {})["ExceptionWrapper"] = NotedError


class NotedError(ExceptionWrapper):  # type: ignore[misc]
    """An error on its way from a worker to the kernel, with a note of where it happened."""

    @rim
    def __init__(self, exc_info: Any = None, where: str = "in background") -> None:
        super().__init__(exc_info, where)
        self.note = ""
        self.stage = "other"
        self.position: int | None = None
        self.summary = str(getattr(self.exc_type, "__name__", self.exc_type))
        self.attributes: dict[str, bytes] = {}
        self.batch_bytes = 0
        error_type, error, traceback = exc_info or sys.exc_info()
        # what we add runs code of the user's error and samples: none of it may keep torch's part from arriving
        for add in (self._note_place, self._note_words, self._note_attributes, self._note_type):
            with contextlib.suppress(BaseException):
                add(error_type, error, traceback)

    def _note_place(self, error_type: Any, error: Any, traceback: TracebackType | None) -> None:
        self.stage, self.position = stage_of(_here[0].slot.read(), traceback)
        self.note = describe(_here[0], traceback)

    def _note_words(self, error_type: Any, error: Any, traceback: TracebackType | None) -> None:
        words = error_text(error)
        self.summary = words[:_LONGEST_SUMMARY]
        self.batch_bytes = _bytes_of_samples(traceback) if "No space left on device" in words else 0

    def _note_attributes(self, error_type: Any, error: Any, traceback: TracebackType | None) -> None:
        self.attributes = {name: data for name, one in vars(error).items() if (data := _pickled_if_small(one))}

    def _note_type(self, error_type: Any, error: Any, traceback: TracebackType | None) -> None:
        if _pickled(error_type) is None:  # it would be dropped on its way, and the loop wait for ever
            name = getattr(error_type, "__qualname__", error_type)
            self.note += f"\nIts type, {name}, cannot be sent to the kernel, so this is a RuntimeError."
            self.exc_type = RuntimeError

    @rim
    def reraise(self) -> None:
        """Raise it in the kernel."""
        __tracebackhide__ = True
        try:
            super().reraise()
        except Exception as error:  # noqa: BLE001 - the user's own
            caught = error
        with shield("an error is not explained"):
            caught = self._in_its_own_type(caught)
            self._add_to(caught)
        raise caught from None

    def _add_to(self, caught: Exception) -> None:
        """Add to an error what was noted of it in the worker."""
        note = self.note
        if self.exc_msg not in error_text(caught):  # its type writes its message itself, and leaves torch's out
            note += f"\nIn the worker:\n{self.exc_msg}"
        if note:
            add_note(caught, name_cells(note, registry.place_of).lstrip("\n"))
        if self.batch_bytes:
            vars(caught)["loaderguard_batch_bytes"] = self.batch_bytes

    def _in_its_own_type(self, error: Exception) -> Exception:
        """Return it in the type it had: torch gives that up if the type wants other arguments than a message."""
        if type(error) is self.exc_type or type(error) is not RuntimeError:
            return error
        try:
            own: Exception = self.exc_type.__new__(self.exc_type, *error.args)
            own.args = error.args
            vars(own).update({name: pickle.loads(data) for name, data in self.attributes.items()})
            str(own)
        except Exception:  # noqa: BLE001 - the user's class has its own mind: torch's way, then
            return error
        return own


def _pickled(thing: Any) -> bytes | None:
    try:
        return pickle.dumps(thing)
    except Exception:  # noqa: BLE001 - whatever the user's object raises: it cannot travel
        return None


def _pickled_if_small(thing: Any) -> bytes | None:
    """Return it pickled; None if it is large, which is found out before all of it is, or cannot travel."""
    file = _SmallFile()
    try:
        _SmallPickler(file).dump(thing)
    except Exception:  # noqa: BLE001 - whatever the user's object raises: it stays where it is
        return None
    return file.getvalue()


class _SmallFile(io.BytesIO):
    """A file that is soon full."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _LARGEST_ATTRIBUTE:
            raise OSError("that is too much")
        return super().write(data)


class _SmallPickler(pickle.Pickler):
    """Refuses arrays and tensors that are large: they make one piece of themselves before they write."""

    def reducer_override(self, obj: Any) -> Any:
        if (
            str(type(obj).__module__).partition(".")[0] in ("torch", "numpy")
            and getattr(obj, "nbytes", 0) > _LARGEST_ATTRIBUTE
        ):
            raise OSError("that is too much")
        return NotImplemented


def stage_of(progress: Progress, traceback: TracebackType | None) -> tuple[str, int | None]:
    """Say whether an error is of a sample, of collate_fn or of something else; and at which place in the batch."""
    fetch = _fetch_frame(traceback)
    if progress.phase != LOADING or fetch is None:
        return "other", None
    if "data" in fetch.f_locals:
        return "collate", None
    return "sample", progress.position if 0 <= progress.position < progress.keys else None


def describe(site: Site, traceback: TracebackType | None) -> str:
    """Say where an error happened; for samples that are None, also that they are."""
    progress = site.slot.read()
    who = "loaderguard:" if site.worker_id is None else f"loaderguard: worker {site.worker_id} (pid {site.pid}),"
    if progress.phase == STARTING:
        return f"{who} while it started: in worker_init_fn, or in the dataset's __iter__ before its first sample."
    if progress.phase != LOADING:
        return f"{who} between two batches."
    fetch = _fetch_frame(traceback)
    keys = fetch.f_locals.get("possibly_batched_index") if fetch is not None else None
    position = _place_asked_for(site, traceback, keys) if site.manner.shows_keys else progress.position
    _, words = locate(position, progress.in_epoch, progress.keys, keys, site.manner)
    return f"{who} batch {progress.task}, {words.removeprefix('on ')}.{_explain_none(site, fetch, keys)}"


def _place_asked_for(site: Site, traceback: TracebackType | None, keys: Any) -> int:
    """Return which of a batch's keys the dataset's `__getitems__` had handed to its own `__getitem__`; -1 if none."""
    while traceback is not None and type(keys) is list:
        code, seen = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        names = code.co_varnames[: code.co_argcount]
        if code.co_name == "__getitem__" and len(names) > 1 and seen.get(names[0]) is site.dataset:
            asked = [place for place, key in enumerate(keys) if key is seen.get(names[1])]
            return asked[0] if len(asked) == 1 else -1
        traceback = traceback.tb_next
    return -1


def _bytes_of_samples(traceback: TracebackType | None) -> int:
    """Return the size of the samples of which a batch could not be made."""
    fetch = _fetch_frame(traceback)
    return bytes_of(fetch.f_locals.get("data")) or 0 if fetch is not None else 0


def _fetch_frame(traceback: TracebackType | None) -> FrameType | None:
    """Return the frame of torch's fetcher: it holds the samples that had been loaded."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "fetch" and "possibly_batched_index" in frame.f_locals:
            return frame
        traceback = traceback.tb_next
    return None


def _explain_none(site: Site, fetch: FrameType | None, keys: Any) -> str:
    """Say which samples are None: collate_fn's own message does not."""
    data = fetch.f_locals.get("data") if fetch is not None else None
    if not isinstance(data, list) or not isinstance(keys, list) or len(data) != len(keys):
        return ""
    empty = [key for key, sample in zip(list.copy(keys), data, strict=True) if sample is None]
    if not empty:
        return ""
    dataset = _users_dataset(site.dataset)
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    place = f" ({registry.place_of(code.co_filename)}:{code.co_firstlineno})" if code else ""
    which = f"sample {span(empty)}" if len(empty) == 1 else f"samples {span(empty)}"
    return (
        f"\n{type(dataset).__qualname__}.__getitem__{place} returned None for {which}: "
        "it reaches its end without a return, or an except in it swallows an error."
    )


def _users_dataset(dataset: Any) -> Any:
    """Return what a Subset of torch's (random_split makes them) takes its samples from."""
    while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def manner_of(dataset: Any, is_batched: bool, is_iterable: bool, is_elsewhere: bool = False) -> Manner:
    """Tell how torch asks this dataset for samples.

    It may iterate over one that is no IterableDataset, as fastai's. A Subset of torch's own goes through keys itself.
    If torch asks `is_elsewhere`, in workers, no code of the dataset's is run here.
    """
    asks_whole_batches = not is_iterable and _takes_batches(type(dataset) if is_elsewhere else dataset)
    shows_keys = asks_whole_batches and type(dataset) is not Subset
    return _manner(bool(is_batched), is_iterable, asks_whole_batches, shows_keys)


_manner = functools.cache(Manner)
"""There are few, and one is asked for at each `iter()`."""


def _takes_batches(dataset: Any) -> bool:
    """Tell whether torch hands this dataset whole batches of keys; if that cannot be told, it may."""
    try:
        return bool(getattr(dataset, "__getitems__", None))
    except Exception:  # noqa: BLE001 - the user's own __getattr__
        return True
