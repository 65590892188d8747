"""Patch torch when it is imported, and leave it as it was: `instrument()` and `uninstrument()`.

What needs torch is imported with it, and not in the notebook's first cell.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import warn_limited
from ..late_import import when_imported
from ..registry import registry
from ..seam import shield
from .compiling import RULES, leave_out

if TYPE_CHECKING:
    from .patches import Patch

TORCH = "torch.utils.data.dataloader"
TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
WAITING = f"{__package__}.waiting"
"""The module whose functions wait for batches in torch's place."""


class Adapter:
    """The instrumentation of this process. There is one, `adapter`."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._waiting_imports: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self.is_active = False

    def instrument(self) -> None:
        """See every DataLoader from now on; torch is not imported for it."""
        if self.is_active:
            return
        self.is_active = True
        for name in (TORCH, TORCHDATA):
            self._waiting_imports.append(when_imported(name, self._patch_module))
        self._waiting_imports.append(when_imported(RULES, self._leave_out))

    def uninstrument(self) -> None:
        """Leave torch as it was; live loaders go on working, in torch's own hands."""
        self.is_active = False
        while self._waiting_imports:
            self._waiting_imports.pop()()
        for record in registry.all():
            with shield(f"{record.words()} is not handed back to torch"):
                record.hand_back()
        while self._patches:
            self._patches.pop().undo()
        while self._undo:
            self._undo.pop()()
        registry.handed_back.clear()
        registry.reaper.stop()

    def _leave_out(self, rules: ModuleType) -> None:
        with shield("torch.compile takes longer for loops over loaders"):
            self._undo.append(leave_out(rules))

    def _patch_module(self, module: ModuleType) -> None:
        """Patch the iterator classes of a module that has just been imported; the import succeeds in any case."""
        try:
            from .patches import adopt, patch, problem_with

            problem = problem_with(module)
            if problem is None:
                self._patches += patch(module)
                if module.__name__ == TORCH:
                    registry.reaper.start()
                adopt(module)
        except Exception as error:  # noqa: BLE001 - as above
            problem = f"{type(error).__name__}: {error}"
        if problem:
            warn_limited(f"{problem}; DataLoaders work, but are not guarded")


def is_loader_frame(frame: Any) -> bool:
    """Tell whether this frame runs inside of a wait for data."""
    while frame is not None:
        if frame.f_code.co_name in ("_next_data", "_try_get_data") and frame.f_globals.get("__name__") == WAITING:
            return True
        frame = frame.f_back
    return False


adapter = Adapter()
