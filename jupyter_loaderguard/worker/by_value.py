"""How a loader's own objects travel to a worker that is not forked: by value where a name would lead nowhere.

Packed in the kernel, opened in the worker.

NOTE [ By value ]
Pickle sends a class or a function as a name, `__main__.Images`. A worker that is spawned has no notebook,
and so no `__main__.Images`. What pickle cannot send, or what it would send under a name of the notebook,
goes through cloudpickle instead, which sends the code itself. Tensors and locks still go torch's and
multiprocessing's own ways. What was sent by value gets its name in the worker's `__main__`, so that
results go back under their names, as ever, and arrive as the notebook's own classes.

NOTE [ Bulk ]
What is packed here is pickled once more, as part of the process that starts: as bytes it would be there twice, in the
kernel and in the worker, and a dataset may be most of the memory. So what is large and has no name in it (bytes,
arrays, lists of numbers) is left out, to be pickled by multiprocessing itself, straight into the worker's pipe; in its
place stands its number. Tensors are not large here: torch sends their memory by its handle.
"""

from __future__ import annotations

import array
import contextlib
import functools
import io
import pickle
import sys
import traceback
import typing
from multiprocessing import spawn
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, MethodType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from .. import queues
from ..errors import add_note
from ..interrupts import let_through
from ..reach import attributes_of, cell_content

_MAIN = b"__main__"
_MOST_TRIES = 400
_LONGEST_TRACEBACK = 6000
_ADVICE = (
    (("TextIOWrapper", "BufferedReader", "BufferedWriter", "BufferedRandom", "FileIO"), "open it in the worker"),
    (("lock", "RLock", "Condition", "Event"), "make it in the worker, or use one of multiprocessing's"),
    (("generator", "coroutine", "async_generator"), "make it in the worker: in __iter__ or __getitem__"),
    (("File", "Dataset", "Group", "Connection", "Cursor", "socket", "SSLSocket"), "open it in the worker"),
)


class Parcel:
    """The user's part of what a worker gets: packed when a process is about to start."""

    def __init__(self, parts: dict[str, Any], is_by_value: bool) -> None:
        self._parts = parts
        self._is_by_value = is_by_value

    def __reduce__(self) -> tuple[Any, ...]:
        bulk: list[Any] = []
        try:
            with let_through():
                return PackedParcel, (pack(self._parts, self._is_by_value, bulk), bulk)
        except Exception as error:
            if self._is_by_value:
                with contextlib.suppress(Exception):  # the error itself must arrive, whatever the user's objects do
                    add_note(error, explain_refusal(self._parts))
            raise


class PackedParcel:
    """The same on its way, and in the worker."""

    def __init__(self, data: bytes, bulk: list[Any]) -> None:
        self._data = data
        self._bulk = bulk

    def open(self) -> dict[str, Any]:
        """Return what was packed."""
        (data, bulk), self._data, self._bulk = (self._data, self._bulk), b"", []  # the worker keeps nothing twice
        parts: dict[str, Any] = unpack(data, bulk)
        return parts


def pack(thing: Any, is_by_value: bool = True, bulk: list[Any] | None = None) -> bytes:
    """Pickle something for a worker: the ordinary way if its names can be found there, else by value.

    What is large goes into `bulk`, if there is such a list. See NOTE [ Bulk ].
    """
    if not is_by_value or can_import_main():
        return _pack_plainly(thing, bulk)
    passed = queues.passed_descriptors()
    before = list(passed)
    plain = None if _is_of_notebook(thing) else _try_plainly(thing, bulk)
    if plain is not None and _MAIN not in plain:
        return plain
    after, passed[:] = list(passed), before  # the same ones again would be refused
    plain_bulk = _emptied(bulk)
    try:
        return _pack_by_value(thing, bulk)
    except Exception:
        if plain is None:
            raise
        passed[:] = after
        _emptied(bulk)
        if bulk is not None:
            bulk += plain_bulk
        return plain  # the name stood in some text, then


def _emptied(bulk: list[Any] | None) -> list[Any]:
    """Empty a list, and return what was in it."""
    held = list(bulk or ())
    if bulk is not None:
        bulk.clear()
    return held


def _try_plainly(thing: Any, bulk: list[Any] | None) -> bytes | None:
    try:
        return _pack_plainly(thing, bulk)
    except Exception:  # noqa: BLE001 - by value, then; what cannot travel at all fails there too
        return None


def _pack_plainly(thing: Any, bulk: list[Any] | None) -> bytes:
    file = io.BytesIO()
    _PlainPickler(file, bulk).dump((thing, {}))
    return file.getvalue()


def unpack(data: bytes, bulk: list[Any] | None = None) -> Any:
    """Return what was packed, and give what was sent by value its names."""
    thing, names = _Unpickler(io.BytesIO(data), bulk).load()
    main = sys.modules["__main__"]
    for name, value in names.items():
        there = getattr(main, name, None)
        if there is None or getattr(there, "__module__", "").startswith("multiprocessing"):  # its own `main`
            setattr(main, name, value)
        _name_parts(value)
    return thing


def _name_parts(holder: Any) -> None:
    """Give the classes within a class their full names: cloudpickle leaves them out, and results go back under them."""
    for name, part in list(vars(holder).items()) if isinstance(holder, type) else ():
        if isinstance(part, type) and part.__module__ == "__main__" and part.__qualname__ == name:
            part.__qualname__ = f"{holder.__qualname__}.{name}"
            _name_parts(part)


def can_import_main() -> bool:
    """Tell whether a worker finds what is defined in `__main__`: a script's it does, a notebook's not."""
    prepared = spawn.get_preparation_data("worker")
    return "init_main_from_name" in prepared or "init_main_from_path" in prepared


def _is_of_notebook(thing: Any) -> bool:
    parts = thing.values() if type(thing) is dict else (thing,)
    return any("__main__" in (type(part).__module__, getattr(part, "__module__", None)) for part in parts)


_SMALLEST_BYTES = 512
_SMALLEST_COUNT = 64
_NAMELESS = {int, float, complex, bool, str, bytes, bytearray, type(None)}


def _is_bulk(thing: Any) -> bool:
    """Tell whether something is large, and certainly nothing in it has a name. See NOTE [ Bulk ]."""
    kind = type(thing)
    if kind in (bytes, str, bytearray):
        return len(thing) >= _SMALLEST_BYTES
    if kind in (list, tuple, set, frozenset):
        return len(thing) >= _SMALLEST_COUNT and _NAMELESS.issuperset(map(type, thing))
    if kind is dict:
        is_long = len(thing) >= _SMALLEST_COUNT
        return is_long and _NAMELESS.issuperset(map(type, thing)) and _NAMELESS.issuperset(map(type, thing.values()))
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
        return not thing.dtype.hasobject and thing.nbytes >= _SMALLEST_BYTES
    return kind is array.array and len(thing) * thing.itemsize >= _SMALLEST_BYTES


class _LeavesBulkOut:
    """A pickler that puts what is large into a list, where its number stands for it."""

    bulk: list[Any] | None

    def persistent_id(self, obj: Any) -> int | None:
        if self.bulk is None or type(obj) in _SMALL or not _is_bulk(obj):
            return None
        self.bulk.append(obj)  # the same thing twice is the same thing in the worker, too
        return len(self.bulk) - 1


_SMALL = _NAMELESS - {str, bytes, bytearray}
"""Most of what there is."""


class _PlainPickler(_LeavesBulkOut, ForkingPickler):
    """Sends everything as multiprocessing does."""

    def __init__(self, file: Any, bulk: list[Any] | None) -> None:
        self.bulk = bulk
        super().__init__(file)


class _Unpickler(pickle.Unpickler):
    """Takes what was left out from where it is."""

    def __init__(self, file: Any, bulk: list[Any] | None) -> None:
        self._bulk = bulk or []
        super().__init__(file)

    def persistent_load(self, pid: Any) -> Any:
        return self._bulk[pid]


class _ByValuePickler(_LeavesBulkOut, cloudpickle.Pickler):  # type: ignore[misc]
    """Sends classes and functions of the notebook as code, and all else as multiprocessing does."""

    def __init__(self, file: Any, names: dict[str, Any], bulk: list[Any] | None) -> None:
        own = ForkingPickler(io.BytesIO()).dispatch_table
        self.dispatch_table = {**cloudpickle.Pickler.dispatch_table, **own}
        del self.dispatch_table[io.TextIOWrapper]  # cloudpickle would read the file and send what is in it
        self._names = names
        self.bulk = bulk
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)  # reads the table

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is functools.cached_property:  # before Python 3.12 it holds a lock
            return _make_cached_property, (obj.func, obj.attrname)
        if kind in (_CACHE, typing.NewType) and obj.__module__ == "__main__":  # these say a name themselves
            return _reduce_cache(obj) if kind is _CACHE else (typing.NewType, (obj.__name__, obj.__supertype__))
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and getattr(obj, "__module__", None) == "__main__":
            self._note_name(obj)
        return reduced

    def _note_name(self, obj: Any) -> None:
        """Note under which name of the notebook something is found, or what it is part of."""
        first, *rest = obj.__qualname__.split(".")
        found = holder = vars(sys.modules["__main__"]).get(first)
        for name in rest:
            found = getattr(found, name, None)
        if found is obj:
            self._names[first] = holder


_CACHE = type(functools.lru_cache(lambda: None))


def _reduce_cache(cache: Any) -> tuple[Any, ...]:
    """Send a cached function in two steps, as it may well call itself."""
    parameters = cache.cache_parameters()
    return _make_cache, (parameters["maxsize"], parameters["typed"]), cache.__wrapped__, None, None, _fill_cache


def _make_cache(maxsize: int | None, typed: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return vars(call)["wrapped"](*args, **kwargs)

    return functools.lru_cache(maxsize, typed)(call)


def _fill_cache(cache: Any, wrapped: Any) -> None:
    vars(cache.__wrapped__)["wrapped"] = wrapped
    functools.update_wrapper(cache, wrapped)


def _make_cached_property(function: Any, name: str | None) -> Any:
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def _pack_by_value(thing: Any, bulk: list[Any] | None = None) -> bytes:
    file, names = io.BytesIO(), dict[str, Any]()
    # the names are filled while the first part is pickled, and are pickled after it
    _ByValuePickler(file, names, bulk).dump((thing, names))
    return file.getvalue()


# -- keys -------------------------------------------------------------------------------------------


class Keys:
    """The keys of a batch that are more than numbers and texts, on their way to a worker."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (pack(self._keys),)


def carry(keys: Any) -> Any:
    """Return the keys of a batch so that they can travel."""
    plain = (int, str)
    if type(keys) in plain or (type(keys) is list and all(type(key) in plain for key in keys)):
        return keys
    return Keys(keys)


# -- what cannot travel -----------------------------------------------------------------------------


def explain_refusal(parts: dict[str, Any]) -> str:
    """Say which part cannot travel, and what to do about it."""
    tries = [_MOST_TRIES]
    for name, part in parts.items():
        found = _find(name, part, tries, set())
        if found is not None:
            path, thing = found
            kind = type(thing).__name__
            advice = next((advice for kinds, advice in _ADVICE if kind in kinds), "make it in the worker")
            return (
                f"loaderguard: {path} is a {type(thing).__module__}.{kind}, which cannot travel to a worker process "
                f"(start method spawn or forkserver); no worker was started.\n"
                f"→ {advice}: at its first use there, or in worker_init_fn; and leave it out in __getstate__."
            )
    return "loaderguard: something in the dataset, collate_fn or worker_init_fn cannot travel to a worker process."


def _find(path: str, thing: Any, tries: list[int], seen: set[int]) -> tuple[str, Any] | None:
    """Return the innermost part that cannot be packed."""
    if id(thing) in seen or tries[0] <= 0:
        return None
    seen.add(id(thing))
    tries[0] -= 1
    if _can_travel(thing):
        return None
    for inner, part in _parts(path, thing):
        if isinstance(thing, FunctionType) and isinstance(part, type) and id(part) in seen:
            return None  # a method, which cannot travel because its class cannot
        found = _find(inner, part, tries, seen)
        if found is not None:
            return found
    return path, thing


def _can_travel(thing: Any) -> bool:
    try:
        pack(thing)
    except Exception:  # noqa: BLE001 - that is the question
        return False
    return True


def _parts(path: str, thing: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, by the path on which user code reaches it."""
    if isinstance(thing, dict):
        return [(f"{path}[{key!r}]", part) for key, part in list(thing.items())]
    if isinstance(thing, (list, tuple, set)):
        return [(f"{path}[{number}]", part) for number, part in enumerate(thing)]
    if isinstance(thing, functools.partial):
        return [(f"{path}.func", thing.func), (f"{path}.args", thing.args), (f"{path}.keywords", thing.keywords)]
    if isinstance(thing, MethodType):
        return [(f"{path}.__self__", thing.__self__)]
    if isinstance(thing, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False)
        used = [(name, thing.__globals__[name]) for name in thing.__code__.co_names if name in thing.__globals__]
        return [*((name, cell_content(cell)) for name, cell in cells), *used]
    inside = [(f"{path}.{name}", part) for name, part in attributes_of(thing).items()]
    if isinstance(thing, type):
        held = [(f"{path}.{name}", _function_of(part)) for name, part in vars(thing).items()]
        return sorted(held, key=lambda item: isinstance(item[1], FunctionType))
    return [*inside, (type(thing).__name__, type(thing))] if type(thing).__module__ == "__main__" else inside


def _function_of(member: Any) -> Any:
    """Return what a member of a class is made of."""
    for name in ("fget", "func", "__func__", "__wrapped__"):
        function = getattr(member, name, None)
        if isinstance(function, FunctionType):
            return function
    return member


def describe_failure(error: BaseException) -> str:
    """Return the traceback of a worker that could not start, cut to what fits."""
    return "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
