"""Do something when a module is imported, now if it already is, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from .seam import rim, shield


class _LateImport(importlib.abc.MetaPathFinder):
    """Waits on `sys.meta_path` for one module and is gone once that has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then
        self._is_asking = False

    @rim
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self._is_asking:
            return None
        self._is_asking = True  # ask the other finders, not ourselves
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        with shield("DataLoaders work, but are not guarded"):
            if spec is not None and spec.loader is not None:
                spec.loader = _TellingLoader(spec.loader, self)
        return spec

    def forget(self) -> None:
        """Stop waiting."""
        if sys.meta_path is not None and self in sys.meta_path:  # it is None when Python ends
            sys.meta_path.remove(self)


class _TellingLoader(importlib.abc.Loader):
    """Loads by the real loader, leaves no trace of itself on the module, and tells."""

    def __init__(self, loader: importlib.abc.Loader, waiter: _LateImport) -> None:
        self._loader = loader
        self._waiter = waiter

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._waiter in sys.meta_path:  # else: unloaded while the import ran
            self._waiter.forget()
            self._waiter.then(module)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `then` with the module, now or at the end of its import; return how to call it off."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        then(module)
        return lambda: None
    waiter = _LateImport(name, then)
    sys.meta_path.insert(0, waiter)
    return waiter.forget
