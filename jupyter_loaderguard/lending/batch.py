"""The tensors and arrays in a batch, and where in memory they lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..reach import visit

_DEEPEST, _WIDEST = 4, 4096


@dataclass(frozen=True)
class Extent:
    """A piece of this process's memory."""

    start: int
    stop: int
    storage: int
    """Bytes of the whole storage that it is a part of."""
    is_tensor: bool
    is_writable: bool
    is_shared: bool
    """Whether it is a tensor in shared memory."""

    def meets(self, other: Extent) -> bool:
        """Tell whether both have bytes in common."""
        return self.start < other.stop and other.start < self.stop


def tensors_in(batch: Any, path: str = "batch", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Go through the tensors and arrays of a batch, with their paths."""
    if is_tensor(batch) or is_array(batch):
        yield path, batch
    elif depth < _DEEPEST:
        for inner, part in _parts(batch, path):
            yield from tensors_in(part, inner, depth + 1)


def _parts(batch: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(batch, dict):
        return [(f"{path}[{key!r}]", part) for key, part in list(batch.items())[:_WIDEST]]
    if isinstance(batch, (list, tuple)):
        return [(f"{path}[{number}]", part) for number, part in enumerate(batch[:_WIDEST])]
    attributes = getattr(batch, "__dict__", {})
    return [(f"{path}.{name}", part) for name, part in list(attributes.items())[:_WIDEST]]


def tensors_reached(roots: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the tensors and arrays that these objects hold, with their paths."""
    found: list[tuple[str, Any]] = []

    def note(path: str, thing: Any) -> bool:
        if is_tensor(thing) or is_array(thing):
            found.append((path, thing))
            return True
        return False

    visit(roots, note)
    return found


def is_tensor(thing: Any) -> bool:
    """Tell whether it is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(thing), torch.Tensor)


def is_array(thing: Any) -> bool:
    """Tell whether it is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(thing), numpy.ndarray)


def extent_of(thing: Any) -> Extent | None:
    """Return where a tensor or array lies; None if it is empty, elsewhere than in memory, or does not tell."""
    try:
        return _tensor_extent(thing) if is_tensor(thing) else _array_extent(thing)
    except Exception:  # noqa: BLE001 - sparse, nested, quantised or of a subclass: those have several pieces or none
        return None


def _tensor_extent(tensor: Any) -> Extent | None:
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    storage, size = tensor.untyped_storage(), tensor.element_size()
    start = tensor.data_ptr()
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    stop = start + (reach + 1) * size
    return Extent(start, stop, storage.nbytes(), True, True, bool(tensor.is_shared()))


def _array_extent(array: Any) -> Extent | None:
    if not array.size or array.dtype.hasobject:
        return None
    start = array.__array_interface__["data"][0]
    reach = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    low, high = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    extent = (start + low, start + high + array.itemsize)
    return Extent(*extent, array.nbytes, False, bool(array.flags.writeable), False)


def count_storages(batch: Any) -> tuple[int, int]:
    """Return how many pieces of shared memory a batch's tensors take on their way, and how many bytes are theirs.

    Of a view only its own part counts: the rest is there once, and not once per batch.
    """
    storages: dict[int, int] = {}
    for _, thing in tensors_in(batch):
        extent = extent_of(thing) if is_tensor(thing) else None
        if extent is not None:
            key = thing.untyped_storage().data_ptr()
            storages[key] = min(extent.storage, storages.get(key, 0) + thing.nbytes)
    return len(storages), sum(storages.values())
