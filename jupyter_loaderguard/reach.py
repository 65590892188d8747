"""What can be reached from an object through its attributes, containers and closures, without running code of it."""

from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Callable
from types import FrameType, FunctionType, ModuleType
from typing import Any

DEEPEST, MOST, WIDEST = 4, 2000, 64
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type, ModuleType)


def visit(roots: dict[str, Any], note: Callable[[str, Any], bool]) -> None:
    """Show each object that can be reached to `note`, with its path, e.g. dataset.reader.file.

    Those at which `note` returns True are not looked into. Nearer ones come first.
    """
    seen: set[int] = set()
    pending = deque((name, thing, 0) for name, thing in roots.items())
    while pending and len(seen) < MOST:
        path, thing, depth = pending.popleft()
        if id(thing) in seen or issubclass(type(thing), _PLAIN):
            continue
        seen.add(id(thing))
        if not note(path, thing) and depth < DEEPEST:
            pending.extend((inner, part, depth + 1) for inner, part in _parts(path, thing))


def leads_to(roots: dict[str, Any], target: Any) -> bool:
    """Tell whether an object can be reached from others, also through what is half way through an iteration."""
    found: list[bool] = []

    def note(path: str, thing: Any) -> bool:
        if thing is target or (hasattr(type(thing), "__next__") and _is_under_way_with(thing, target)):
            found.append(True)
        return bool(found)

    visit(roots, note)
    return bool(found)


def _is_under_way_with(thing: Any, target: Any) -> bool:
    """Tell whether a generator, or one of Python's own iterators, goes on with an object when it is asked for more."""
    parts = gc.get_referents(thing)
    parts += [inner for part in parts if type(part) is FrameType for inner in gc.get_referents(part)]  # before 3.11
    return any(part is target for part in parts)


def _parts(path: str, thing: Any) -> list[tuple[str, Any]]:
    if type(thing) is dict:
        some = itertools.islice(thing.items(), WIDEST)
        return [(f"{path}[{key!r}]", part) for key, part in some if type(key) in (str, int)]
    if type(thing) in (list, tuple):
        return [(f"{path}[{number}]", part) for number, part in enumerate(thing[:WIDEST])]
    if type(thing) is FunctionType:
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False)
        used = [(name, thing.__globals__.get(name)) for name in thing.__code__.co_names]
        held = [(name, cell_content(cell)) for name, cell in cells]
        return [(name, part) for name, part in used if not callable(part)] + held
    attributes = attributes_of(thing)
    getter = [(path, getattr(type(thing), name, None)) for name in ("__getitem__", "__iter__", "__getitems__")]
    methods = [(where, method) for where, method in getter if type(method) is FunctionType]
    return [(f"{path}.{name}", part) for name, part in itertools.islice(attributes.items(), WIDEST)] + methods


def cell_content(cell: Any) -> Any:
    """Return what a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has, without running code of its class."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}
