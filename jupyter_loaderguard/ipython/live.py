"""The live widget in the notebook: shown above a guarded cell's output, and replaced by what stays at its end."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from ..model import Snapshot


def can_show(shell: InteractiveShell) -> bool:
    """Tell whether widgets can be shown here: not in a terminal, and not without ipywidgets."""
    return getattr(shell, "kernel", None) is not None and importlib.util.find_spec("ipywidgets") is not None


class LiveDisplay:
    """Views of the widget that are shown, and settled, together."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._publisher = shell.display_pub
        self._display_id = uuid.uuid4().hex
        self._widget: Any = None

    def show(self) -> None:
        """Show the widget here."""
        from ..status import StatusWidget, refresher

        self._widget = StatusWidget()
        self._widget.expect_view(self._display_id)
        refresher.wake()
        display(self._widget, display_id=self._display_id)

    def settle(self, snapshot: Snapshot) -> None:
        """Put a static snapshot in its place; a saved or exported notebook shows that."""
        from ..status import refresher
        from ..views import board, text

        self._widget.forget_view(self._display_id)
        refresher.rest()
        bundle = {"text/plain": text.settled(snapshot), "text/html": board.static(snapshot)}
        transient: dict[str, Any] = {"display_id": self._display_id}
        self._publisher.publish(bundle, {}, transient=transient, update=True)


def close_widget() -> None:
    """End the widget and its thread, if there ever was one."""
    status = sys.modules.get("jupyter_loaderguard.status")
    if status is not None:
        status.refresher.stop()


def close_clusters() -> None:
    """Follow no cluster any longer, and report to none, if there ever was one."""
    for name, undo in (("cluster", "close_all"), ("cluster.engine", "detach")):
        module = sys.modules.get(f"jupyter_loaderguard.{name}")
        if module is not None:
            getattr(module, undo)()
