"""Where the output of a cell goes: held from its start, so that another thread can show something in it."""

from __future__ import annotations

import os
import sys

from IPython.core.interactiveshell import InteractiveShell


class Outlet:
    """The place of one cell's output; in a terminal, standard error.

    The display publisher itself is not used: it answers to the message of the thread that calls it, and
    runs that thread's hooks (Output widgets), which are not the cell's.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._publisher = shell.display_pub
        self._parent = getattr(self._publisher, "parent_header", None)
        self._owner = os.getpid()
        self._shown: set[str] = set()

    def show(self, bundle: dict[str, str], key: str) -> None:
        """Show something; what is shown again under the same key takes the place of the earlier."""
        session = getattr(self._publisher, "session", None)
        if session is None or self._parent is None or os.getpid() != self._owner:
            print(bundle["text/plain"], file=sys.stderr, flush=True)  # noqa: T201 - a terminal, or a fork of the kernel
            return
        kind = "update_display_data" if key in self._shown else "display_data"
        self._shown.add(key)
        content = {"data": bundle, "metadata": {}, "transient": {"display_id": key}}
        session.send(self._publisher.pub_socket, kind, content, parent=self._parent, ident=self._publisher.topic)
