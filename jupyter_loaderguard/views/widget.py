"""The live status widget, on core ipywidgets: it draws snapshots, and hands clicks on."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from ..model import Snapshot
from . import board, text

# a pressed toggle stays pressed until the kernel has acted; if it does not even begin to for a second, this says why
STYLE = f"""<style>
{board.STYLE}
.lgw .widget-toggle-button{{width:auto;padding:0 10px}}
.lgw .widget-toggle-button.mod-active:not(.lgw-acting)::after{{content:" · queued until the cell ends";
display:inline-block;max-width:0;overflow:hidden;white-space:pre;vertical-align:bottom;
animation:lgw-queued 0s 1s forwards}}
@keyframes lgw-queued{{to{{max-width:20em}}}}
.lgw pre{{font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,12px);line-height:1.35;
max-height:24em;overflow:auto;margin:4px 0;white-space:pre;color:var(--jp-ui-font-color1,inherit);background:none}}
</style>"""
_NOBODY: tuple[str, int | None] = ("no loader", 0)
_WARNING = '<div role="status" aria-live="polite" class="lgb"><span class="stalled">{}</span></div>'
_LONGEST_PANE = 2000


class StatusView(widgets.VBox):  # type: ignore[misc]
    """Draws snapshots: a board, a row of buttons, and a pane for longer texts."""

    is_built = False

    def __init__(
        self, stop: Callable[[int | None], str], texts: dict[str, Callable[[], str]], on_view: Callable[[], None]
    ) -> None:
        """Have buttons that `stop` a loader, or all, and that show what `texts` give; tell `on_view` of new views."""
        self._stop, self._on_view = stop, on_view
        self._board, self._warning, self._pane = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._loader = widgets.Dropdown(options=[_NOBODY], layout=widgets.Layout(width="auto"))
        self._chosen: int | None = None
        """What the list shows as chosen; while its options change, the list itself points to the first of them."""
        self._is_changing = False
        self._loader.observe(self._note_choice, "value")
        self._is_folded = True
        self._named: list[tuple[str, int]] = []
        self._fold = button("All workers", "Show every worker, or sum up those that are well", self._turn_fold)
        buttons = [
            self._loader,
            button("Stop loader", "Stop its workers; a loop over it ends with an error", self._stop_one),
            button("Stop all", "Stop all workers of this kernel", self._stop_all),
            *(button(name, f"Show {name.lower()} below", self._shower(draw)) for name, draw in texts.items()),
            self._fold,
        ]
        row = widgets.HBox(buttons, layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([widgets.HTML(STYLE), self._board, self._warning, row, self._pane])
        self.add_class("lgw")
        self._last: Snapshot | None = None
        self._view_count = 0  # from now on the front end counts its views of this widget
        self._expected: set[str] = set()
        self.observe(self._note_view, "_view_count")
        hear_at_once(self._loader)
        hear_at_once(self)
        self.is_built = True

    def _note_view(self, change: Any) -> None:
        if change["new"]:
            self._on_view()
        else:
            self._expected.clear()

    def expect_view(self, display: str) -> None:
        """Take it as seen until that display is taken away, or the front end tells that there is none."""
        self._expected.add(display)

    def forget_view(self, display: str) -> None:
        """Note that something else has taken the place of that display."""
        self._expected.discard(display)

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody looks: also if the front end has not told, as it cannot while a cell runs."""
        return self.comm is not None and (bool(self._view_count) or bool(self._expected))

    def draw(self, snapshot: Snapshot) -> None:
        """Show a snapshot; nothing is sent if nothing has changed."""
        self._last = snapshot
        self._board.value = board.board(snapshot, self._is_folded)
        named = [(loader.name, loader.loader_id) for loader in snapshot.loaders if loader.workers]
        if named != self._named:
            self._choose_among(named)
        is_long = any(len(loader.workers) > board.FOLD_ABOVE for loader in snapshot.loaders)
        self._fold.layout.display = None if is_long else "none"
        warning = board.warning(snapshot)
        self._warning.value = _WARNING.format(escape(text.clean(warning.text))) if warning else ""

    def _choose_among(self, named: list[tuple[str, int]]) -> None:
        """Offer these loaders; the chosen one stays chosen, also in its next epoch, and never becomes another."""
        name = next((name for name, number in self._named if number == self._chosen), None)
        same = [number for one, number in named if one == name]
        first = [number for _, number in named] if not self._named or len(named) == 1 else []
        known = {number for _, number in named}
        chosen = next((number for number in (self._chosen, *same, *first) if number in known), None)
        self._named = named
        names = [one for one, _ in named]
        labels = [(text.clip(one) + (f" #{number}" if names.count(one) > 1 else ""), number) for one, number in named]
        self._is_changing = True
        try:
            with self._loader.hold_sync():
                self._loader.options = labels or [_NOBODY]
                self._loader.value = chosen if named else _NOBODY[1]
        finally:
            self._is_changing = False
        self._chosen = chosen

    def _note_choice(self, change: Any) -> None:
        if not self._is_changing:
            self._chosen = change["new"]

    def show_text(self, shown: str) -> None:
        """Show a longer text in the pane; it stays until the next one."""
        lines = "\n".join(text.clean(line) for line in shown.splitlines()[:_LONGEST_PANE])
        self._pane.value = f"<pre>{escape(lines)}</pre>" if lines else ""

    def _stop_one(self) -> None:
        if not self._named:
            self.show_text("there is no loader with workers")
        elif self._chosen is None:
            self.show_text("choose a loader first: the one that was chosen is gone")
        else:
            self.show_text(self._stop(self._chosen))

    def _stop_all(self) -> None:
        self.show_text(self._stop(None))

    def _shower(self, draw: Callable[[], str]) -> Callable[[], None]:
        return lambda: self.show_text(draw())

    def _turn_fold(self) -> None:
        self._is_folded = not self._is_folded
        self._fold.description = "All workers" if self._is_folded else "Fewer workers"
        if self._last is not None:
            self.draw(self._last)

    def close_all(self) -> None:
        """Close it, so that no model is left in the kernel or in the notebook."""
        close(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Give front ends without widgets, and notebooks that are opened later, a table instead."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle and self._last is not None:
            bundle["text/plain"] = text.status(self._last)
        return bundle


def close(widget: Any) -> None:
    """Close a widget with all that it is made of."""
    for part in getattr(widget, "children", ()):
        close(part)
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if part is not None:
            part.close()
    widget.close()


def button(name: str, tooltip: str, act: Callable[[], None]) -> Any:
    """Return a button that is pressed until its act is done."""
    toggle = widgets.ToggleButton(description=name, tooltip=tooltip)
    hear_at_once(toggle)

    def on_press(change: Any) -> None:
        if change["new"]:
            toggle.add_class("lgw-acting")
            try:
                act()
            finally:
                toggle.value = False
                toggle.remove_class("lgw-acting")

    toggle.observe(on_press, "value")
    return toggle


def hear_at_once(widget: Any) -> None:
    """Have clicks on a widget handled while a cell runs.

    JupyterLab sends them to a subshell. ipykernel 7.4 takes them back to the shell that last wrote to the
    widget, which is busy with the cell (ipykernel/comm/comm.py, `_reply_subshell_for`); 7.0 to 7.3 do not.
    """
    comm: Any = getattr(widget, "comm", None)
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default
