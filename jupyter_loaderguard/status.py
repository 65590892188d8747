"""The live status: the widget with its buttons wired, and the thread that refreshes it."""

from __future__ import annotations

import platform
import sys
import threading
from typing import Any, ClassVar

from .errors import LoaderGuardError
from .guarding import clean, stacks
from .meter import Meter
from .registry import registry
from .views import text
from .views.widget import StatusView

IDLE_LOOKS = 3
"""How often to look again when nothing is alive any more, before the thread leaves."""
JOIN_SECONDS = 2.0
"""A look takes milliseconds; a thread that is late leaves by itself."""
WATCHED_MODULES = ("torch", "IPython", "ipykernel", "ipywidgets", "psutil", "numpy", "jupyter_loaderguard")


class StatusWidget(StatusView):
    """Shows every loader and worker of this kernel, live; `display` it, or leave it as a cell's last line.

    There is one in a kernel: each call returns it, and each display is a view of it. So nothing piles up
    when a cell is run again.

    >>> StatusWidget() is StatusWidget()
    True
    """

    _one: ClassVar[StatusWidget | None] = None

    def __new__(cls) -> StatusWidget:
        """Return the one that there is; a closed one is replaced."""
        one = StatusWidget._one
        if one is None or one.comm is None:
            StatusWidget._one = one = super().__new__(cls)
        return one

    def __init__(self) -> None:
        if not self.is_built:
            super().__init__(_stop, {"Stacks": _stacks, "Diagnosis": diagnosis}, refresher.wake)
        refresher.show(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Be displayed, as a cell's last line: it is drawn from now on."""
        if not self._expected:
            self.expect_view("a cell's last line")
            refresher.wake()
        return super()._repr_mimebundle_(**kwargs)


class Refresher:
    """Draws the widget again and again, from a thread. There is one, `refresher`.

    The thread lives while something is alive and somebody looks; the next loader starts it again.
    """

    def __init__(self) -> None:
        self._view: StatusView | None = None
        self._meter = Meter()
        self._drawing = threading.Lock()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def show(self, view: StatusView) -> None:
        """Draw a widget now, and from now on."""
        self._view = view
        view.show_text("")
        self._draw(view)
        registry.on_birth = self.wake
        self.wake()

    def stop(self) -> None:
        """Draw no longer; what is displayed stays as it is."""
        registry.on_birth = lambda: None
        view, self._view = self._view, None
        self.rest()
        if view is not None:
            view.close_all()

    def rest(self) -> None:
        """End the thread, unless somebody still looks."""
        thread, view = self._thread, self._view
        if thread is not None and (view is None or not view.is_looked_at):
            self._stopped.set()
            thread.join(JOIN_SECONDS)

    def wake(self) -> None:
        """Have the thread running, if there is something to draw."""
        with self._lock:
            if self._thread is None and self._view is not None and self._view.is_looked_at:
                self._stopped.clear()
                self._thread = threading.Thread(target=self._run, name="loaderguard-status", daemon=True)
                self._thread.start()

    def _draw(self, view: StatusView) -> None:
        with self._drawing:
            view.draw(self._meter.look(registry.refresh_seconds))

    def _run(self) -> None:
        looks_left = IDLE_LOOKS
        try:
            while not self._stopped.wait(registry.refresh_seconds):
                view = self._view
                if view is not None and view.is_looked_at:
                    self._draw(view)
                    looks_left = IDLE_LOOKS if registry.records else looks_left - 1
                else:
                    looks_left -= 1
                if looks_left <= 0 and self._may_leave():
                    return
        finally:
            if self._thread is threading.current_thread():
                self._thread = None

    def _may_leave(self) -> bool:
        """Announce that the thread leaves, unless a loader was born meanwhile: the next one starts it again."""
        with self._lock:
            view = self._view
            if view is not None and view.is_looked_at and registry.records:
                return False
            self._thread = None
            return True


refresher = Refresher()


def _stop(loader_id: int | None) -> str:
    """Stop a loader, or all, and say what became of the workers."""
    try:
        return text.stop(clean(None if loader_id is None else f"#{loader_id}", "a button of the status widget"))
    except LoaderGuardError as error:
        return f"loaderguard: {error}"


def _stacks() -> str:
    return text.stacks(stacks())


def diagnosis() -> str:
    """Return a plain text to paste into a bug report: versions, machine, loaders, events and stacks."""
    found: list[tuple[str, Any]] = [(name, sys.modules.get(name)) for name in WATCHED_MODULES]
    versions = ", ".join(f"{name} {getattr(one, '__version__', '?')}" for name, one in found if one is not None)
    snapshot = registry.snapshot()
    parts = [
        f"Python {platform.python_version()} on {platform.platform()}\n{versions}",
        text.status(snapshot),
        "\n".join(text.event(event) for event in snapshot.events),
        text.stacks(stacks()),
    ]
    return "\n\n".join(part for part in parts if part)
