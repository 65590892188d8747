"""Runs on an engine: loads the extension there, reports to the notebook, and answers it while a cell runs."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import LoaderGuardError
from ..guarding import clean, stacks
from ..interrupts import interrupt
from ..registry import Record, registry
from ..reporter import Reporter
from ..views import html, text
from . import wire

SETTLE_SECONDS = 0.3
"""How long an interrupted cell has to end by itself, before its workers are stopped from here."""
END_SECONDS = 1.5
"""How long it may take after that."""
_desks: list[_Desk] = []
"""At most one."""


def attach(lease_seconds: float, token: str) -> str:
    """Guard this engine, and report to the client that asks for it; the lease has to be renewed."""
    shell = sys.modules["IPython"].get_ipython()
    shell.extension_manager.load_extension("jupyter_loaderguard")
    if not _desks:
        _desks.append(_Desk(shell))
    return _desks[0].join(token, wire.reporter_of(shell.kernel), lease_seconds)


def attach_again(lease_seconds: float, token: str) -> str:
    """Report again after a silence, as `%reload_ext` makes one; not where the guard has been unloaded."""
    if "jupyter_loaderguard" not in sys.modules["IPython"].get_ipython().extension_manager.loaded:
        raise LoaderGuardError("it was unloaded there")
    return attach(lease_seconds, token)


def detach() -> None:
    """Report to nobody any longer; the engine stays guarded."""
    while _desks:
        _desks.pop().close()


@dataclass
class _Listener:
    """A client that wants to hear of this engine."""

    send: Callable[[str], None]
    lease_seconds: float
    until: float = 0.0


class _Desk:
    """Reports to clients, and answers questions, each in a thread of its own: the control channel stays free."""

    def __init__(self, shell: Any) -> None:
        kernel = self._kernel = shell.kernel
        self._listeners: dict[str, _Listener] = {}
        self._reporter = Reporter(self._send, lambda: wire.engine_number(kernel))
        self._acts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "renew": self._renew,
            "detach": self._leave,
            "stacks": lambda question: {"stacks": {str(pid): one for pid, one in stacks().items()}},
            "clean": lambda question: {"report": dataclasses.asdict(clean(why="clean of all ranks"))},
            "doctor": _examine,
            "settle": _settle,
            "tell": _tell,
        }
        self._configured = [one for one in shell.configurables if type(one).__name__ == "LoaderGuard"]
        self._had_widget = [one.widget for one in self._configured]
        for one in self._configured:
            one.widget = False  # the notebook has one for all ranks
        wire.serve(kernel, self.answer)

    def close(self) -> None:
        """Report and answer no longer."""
        wire.serve_no_longer(self._kernel)
        for one, had_widget in zip(self._configured, self._had_widget, strict=True):
            one.widget = had_widget
        self._reporter.stop()

    def join(self, token: str, send: Callable[[str], None], lease_seconds: float) -> str:
        """Report to one more client, and return the first report."""
        self._listeners[token] = _Listener(send, lease_seconds)
        self._renew({"token": token})
        return self._reporter.report()

    def _send(self, report: str) -> None:
        for one in list(self._listeners.values()):
            if time.monotonic() < one.until:
                one.send(report)

    def answer(self, question: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        """Answer one question."""
        threading.Thread(target=self._act, args=(question, send), name="loaderguard-answer", daemon=True).start()

    def _act(self, question: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        try:
            send(self._acts[question["ask"]](question))
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            send({"error": str(error) if isinstance(error, LoaderGuardError) else f"{type(error).__name__}: {error}"})
        self._reporter.tell_now()

    def _renew(self, question: dict[str, Any]) -> dict[str, Any]:
        one = self._listeners[question["token"]]
        one.until = time.monotonic() + one.lease_seconds
        self._reporter.start(one.lease_seconds)
        return {}

    def _leave(self, question: dict[str, Any]) -> dict[str, Any]:
        self._listeners.pop(question["token"], None)
        if not self._listeners:
            detach()
        return {}


def _examine(question: dict[str, Any]) -> dict[str, Any]:
    return examine(None)


def examine_expression(expression: str) -> str:
    """Examine a loader by its name on this engine, in its main thread; return the findings as JSON."""
    shell = sys.modules["IPython"].get_ipython()
    try:
        return json.dumps(examine(shell.ev(expression)))
    except Exception as error:  # noqa: BLE001 - any error of the user's expression is told in a line
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def examine(loader: Any) -> dict[str, Any]:
    """Return what the doctor finds."""
    from ..doctor import examine as look  # seldom needed

    found = look(loader)
    about = {"subject": found.subject, "checked": found.checked, "ran": found.ran}
    return {"findings": [dataclasses.asdict(one) for one in found], **about}


def _settle(question: dict[str, Any]) -> dict[str, Any]:
    """Interrupt the running cell, stop what it iterates if it does not end by itself, and wait for its end.

    A cell that has been interrupted is not so again, unless it is asked for: it may be saving its work.
    """
    cells = list(registry.cells.values())
    workers = [worker for record in registry.all() if _is_in_running_cell(record) for worker in record.workers]
    if cells and (question.get("again") or not any(cell.is_interrupted or cell.has_interrupt() for cell in cells)):
        interrupt(threading.main_thread().ident)
    _await_end_of_cell(SETTLE_SECONDS)
    if registry.cells:
        registry.stop([record for record in registry.all() if _is_in_running_cell(record)], "its rank was interrupted")
        _await_end_of_cell(END_SECONDS)
    left = sum(worker.is_alive() for worker in workers)
    return {"was_busy": bool(cells), "is_busy": bool(registry.cells), "left": left}


def _await_end_of_cell(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while registry.cells and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_in_running_cell(record: Record) -> bool:
    cells = list(registry.cells.values())
    return bool(record.workers) and (record.cell in cells or (record.is_in_epoch and record.last_cell in cells))


def _tell(question: dict[str, Any]) -> dict[str, Any]:
    """Say something in the output of the running cell."""
    outlet = next((cell.outlet for cell in list(registry.cells.values()) if cell.outlet is not None), None)
    if outlet is not None:
        line = str(question["text"])
        outlet.show({"text/plain": text.clean(line), "text/html": html.line(line)}, uuid.uuid4().hex)
    return {"is_told": outlet is not None}
