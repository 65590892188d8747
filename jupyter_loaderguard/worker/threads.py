"""Native thread pools inside a worker: capped, as it is one of many. The kernel's own pools are untouched.

torch caps its own pool in every worker (`torch.set_num_threads(1)`); OpenCV, OpenBLAS, MKL, OpenMP and
tokenizers know nothing of the other workers, and take a thread for each CPU in each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from ..late_import import when_imported

VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""What libraries read when they are loaded: those that a worker loads later."""
_NAMES = (("OpenBLAS", r"openblas"), ("MKL", r"mkl_rt"), ("OpenMP", r"lib(gomp|iomp5|omp)[-.]"))
_set_here: set[str] = set()
"""The variables that were not the user's."""
Note = Callable[[dict[str, list[int]]], object]


@dataclass(frozen=True)
class Pool:
    """A pool of threads of a library that is loaded."""

    name: str
    size: Callable[[], int]
    resize: Callable[[int], object]
    first: int
    """Its size when it was found."""


def limit_environment(threads: int) -> None:
    """Tell libraries that are loaded from now on; what the user has set stays."""
    for variable in VARIABLES:
        if variable not in os.environ:
            os.environ[variable] = str(threads)
            _set_here.add(variable)
    limit_tokenizers(threads)


def limit_tokenizers(threads: int) -> None:
    """Tell tokenizers, which looks when it is used."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false" if threads == 1 else "true")


class Caps:
    """Caps pools in this worker; `note` gets what was changed, from and to how many threads."""

    def __init__(self, threads: int, note: Note) -> None:
        self._threads = threads
        self._note = note
        self._changed: dict[str, list[int]] = {}
        self._modules = len(sys.modules)
        when_imported("cv2", self._cap_opencv)
        if "tokenizers" in sys.modules:
            limit_tokenizers(threads)

    def _cap_opencv(self, module: ModuleType) -> None:
        before = module.getNumThreads()
        if before > self._threads:
            module.setNumThreads(0 if self._threads == 1 else self._threads)  # 0: in the calling thread
            self._tell("OpenCV", before, module.getNumThreads())

    def cap_pools(self, pools: list[Pool] | None) -> None:
        """Cap these pools, or all that are loaded; to be called after some work.

        A fork has no threads but its own. The libraries start theirs again when they are first used, and
        also when they are asked to have fewer, which takes milliseconds. The environment takes a fork a
        quarter of one: it has to get pages of its own for it.
        """
        limit_environment(self._threads)
        if _native_threads() > 0:
            is_known = pools is not None and len(sys.modules) == self._modules
            first = {pool.name: pool.first for pool in pools or ()}
            for pool in pools if pools is not None and is_known else find_pools():
                before = pool.size()
                is_changed = before != first.get(pool.name, before)
                if before > self._threads and not is_changed and not _is_users(pool.name):
                    pool.resize(self._threads)
                    self._tell(pool.name, before, pool.size())

    def _tell(self, name: str, before: int, now: int) -> None:
        self._changed[name] = [before, now]
        self._note(self._changed)


def _is_users(name: str) -> bool:
    """Tell whether the user has said how large a pool is to be."""
    variables = {"OMP_NUM_THREADS", f"{name.upper()}_NUM_THREADS"}
    return any(variable in os.environ and variable not in _set_here for variable in variables)


def _native_threads() -> int:
    """Return how many threads of this process Python did not start, where the system tells."""
    try:
        return len(os.listdir("/proc/self/task")) - threading.active_count()
    except OSError:
        return 1


def find_pools() -> list[Pool]:
    """Return the pools of the libraries in this process, and in those that are forked from it; but torch's own."""
    key = len(sys.modules)
    if key not in _found:
        _found.clear()
        _found[key] = list(_look_for_pools())
    return _found[key]


_found: dict[int, list[Pool]] = {}


def _look_for_pools() -> Iterator[Pool]:
    for path in _loaded_libraries():
        for name, pattern in _NAMES:
            if re.search(pattern, os.path.basename(path)) and "/torch/lib/" not in path:
                with contextlib.suppress(OSError, AttributeError):  # not what its name says
                    size, resize = _functions(name, ctypes.CDLL(path))
                    yield Pool(name, size, resize, size())


def _functions(name: str, library: ctypes.CDLL) -> tuple[Callable[[], int], Callable[[int], object]]:
    if name == "MKL":
        return library.MKL_Get_Max_Threads, library.MKL_Set_Num_Threads
    if name == "OpenMP":
        return library.omp_get_max_threads, library.omp_set_num_threads
    for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
        size = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
        if size is not None:
            return size, getattr(library, f"{prefix}openblas_set_num_threads{suffix}")
    raise AttributeError("openblas_get_num_threads")


def _loaded_libraries() -> list[str]:
    """Return the paths of shared libraries in this process, where the system tells them."""
    try:
        with open("/proc/self/maps") as file:
            return sorted({line.split(maxsplit=5)[5].rstrip("\n") for line in file if ".so" in line})
    except (OSError, IndexError):
        return []
