"""The live widget of all ranks, on core ipywidgets: it draws their state, and hands clicks on."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from ..model import ClusterState
from . import ranks, text
from .widget import STYLE, button, close, hear_at_once

ALL: tuple[str, int | None] = ("all ranks", None)
_LONGEST_PANE = 2000


class RanksView(widgets.VBox):  # type: ignore[misc]
    """Draws all ranks: a table with cards, a row of buttons, and a pane for longer texts."""

    def __init__(self, acts: dict[str, tuple[str, Callable[[int | None], str]]]) -> None:
        """Have a button for each act, which is given the chosen engine, or None for all, and returns a text to show.

        Processes that the notebook launched are drawn, but cannot be chosen.
        """
        self._board, self._pane = widgets.HTML(), widgets.HTML()
        self._engine = widgets.Dropdown(options=[ALL], layout=widgets.Layout(width="auto"))
        buttons = [button(name, tooltip, self._actor(act)) for name, (tooltip, act) in acts.items()]
        self._row = row = widgets.HBox([self._engine, *buttons], layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([widgets.HTML(STYLE), self._board, row, self._pane])
        self.add_class("lgw")
        self._last: ClusterState | None = None
        hear_at_once(self._engine)
        hear_at_once(self)

    def _actor(self, act: Callable[[int | None], str]) -> Callable[[], None]:
        return lambda: self.show_text(act(self._engine.value))

    def draw(self, state: ClusterState) -> None:
        """Show all ranks; nothing is sent if nothing has changed."""
        self._last = state
        self._board.value = ranks.drawing(state)
        chosen_from = [rank for rank in state.ranks if rank.status == "live" and rank.engine is not None]
        options = [ALL, *((text.clip(rank.name), rank.engine) for rank in chosen_from)]
        self._row.layout.display = "" if chosen_from else "none"
        if list(self._engine.options) != options:
            chosen = self._engine.value
            with self._engine.hold_sync():
                self._engine.options = options
                self._engine.value = chosen if chosen in [number for _, number in options] else None

    def show_text(self, shown: str) -> None:
        """Show a longer text in the pane; it stays until the next one."""
        lines = "\n".join(text.clean(line) for line in shown.splitlines()[:_LONGEST_PANE])
        self._pane.value = f"<pre>{escape(lines)}</pre>" if lines else ""

    def close_all(self) -> None:
        """Close it, so that no model is left in the kernel or in the notebook."""
        close(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Give front ends without widgets, and notebooks that are opened later, a table instead."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle and self._last is not None:
            bundle["text/plain"] = ranks.table(self._last)
        return bundle
