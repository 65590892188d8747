"""A cluster as its user sees it: all ranks live in one widget or table, and questions to all of them or to one."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..errors import LoaderGuardError
from ..launched import launched
from ..model import ClusterState, Ending, Finding, Findings, StopReport
from ..registry import Cell, registry
from ..views import ranks as views
from ..views import text
from . import wire
from .engines import Engines
from .gather import gather

ANSWER_SECONDS, EXAMINE_SECONDS = 10.0, 60.0
REACTION_SECONDS, HUB_SECONDS = 3.0, 2.0
_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class _Answers(Generic[_T]):
    """What ranks answered, and a line for each one that did not."""

    found: dict[int | str, _T]
    names: dict[int | str, str]
    missing: list[str]

    def read(self, one: Callable[[_T], _U]) -> _Answers[_U]:
        """Read each of them."""
        return _Answers({key: one(answer) for key, answer in self.found.items()}, self.names, self.missing)


class Cluster:
    """All ranks in one place: leave it as a cell's last line to see them live, or print it for a table.

    `stacks`, `clean` and `doctor` ask all ranks, or one; they answer while their cells run::

        ranks = lg.cluster(client)
        ranks.stacks(1)
    """

    def __init__(self, client: Any = None) -> None:
        self.client = client
        self.is_closed = False
        self._wake, self._ended = threading.Event(), threading.Event()
        self._engines = Engines(client, self._wake.set) if client is not None else None
        self._view: Any = None
        self._is_hub_gone = False
        launched.on_report = self._wake.set
        if self._engines is not None:
            self._engines.look()
        registry.after_cell.append(self._on_cell_end)
        self._thread = threading.Thread(target=self._run, name="loaderguard-cluster", daemon=True)
        self._thread.start()
        if self._engines is not None:
            self._engines.await_start()

    def _run(self) -> None:
        while not self._ended.is_set() and not self._is_cut_off:
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the client may be closed at any moment; the next look says so
                registry.note_event(f"the cluster could not be looked at ({type(error).__name__}: {error})")
            self._wake.wait(registry.refresh_seconds)
            self._wake.clear()

        if not self._ended.is_set():
            with contextlib.suppress(Exception):
                self._look()  # all are lost

    @property
    def _is_cut_off(self) -> bool:
        return self.client is not None and wire.is_closed(self.client)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to follow: it was closed, or its client was."""
        return self.is_closed or self._is_cut_off

    def _look(self) -> None:
        engines = self._engines
        if engines is not None:
            engines.look()
        state = self.state()
        if engines is not None:
            engines.tell_waiting(state)
            silent = [one.status == "silent" for one in state.ranks if one.engine is not None and one.status != "lost"]
            self._is_hub_gone = bool(silent) and all(silent) and not wire.has_hub(self.client, HUB_SECONDS)
        if self._view is not None and self._view.comm is not None:
            self._view.draw(state)

    def close(self) -> None:
        """Follow the cluster no longer; its engines stay guarded."""
        if self.is_closed:
            return
        self.is_closed = True
        with contextlib.suppress(ValueError):
            registry.after_cell.remove(self._on_cell_end)
        self._ended.set()
        self._wake.set()
        self._thread.join(2.0)
        if self._engines is not None:
            self._engines.close()
        if self._view is not None:
            self._view.close_all()

    # -- looking --------------------------------------------------------------------------------

    def state(self) -> ClusterState:
        """Return all ranks as they were when they were last heard of."""
        found = self._engines.ranks() if self._engines is not None else []
        there = [one for one in found if one.status in ("live", "silent")]
        is_deaf = bool(there) and all(one.status == "silent" for one in there)
        note = "no engine is heard of: the controller is gone" if is_deaf and self._is_hub_gone else ""
        if self.is_closed:
            return gather([], "closed; lg.cluster() follows the ranks again")
        return gather([*found, *launched.states()], note)

    def __repr__(self) -> str:
        """Draw the table."""
        return views.table(self.state())

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Be displayed as the live widget; where there are no widgets, as a table."""
        view = self.widget()
        if view is not None:
            return view._repr_mimebundle_(**options)
        state = self.state()
        return {"text/plain": views.table(state), "text/html": views.static(state)}

    def widget(self) -> Any:
        """Return the live widget; None where there are no widgets."""
        if getattr(_shell(), "kernel", None) is None:
            return None
        try:
            from ..views.ranks_widget import RanksView
        except ImportError:
            return None
        if self._view is None or self._view.comm is None:
            self._view = RanksView(self._acts())
        self._view.draw(self.state())
        return self._view

    def _acts(self) -> dict[str, tuple[str, Callable[[int | None], str]]]:
        """Return what the buttons do with an engine, or with all: two jobs may have the same ranks."""
        stop = "Stop the rank's workers; a loop over them ends with an error"
        interrupt = "Interrupt what runs on the rank, and stop the workers that it used"
        return {
            "Stacks": (
                "Show where each worker of the rank is",
                _told(lambda engine: self._draw_stacks(self._stacks(self._at(engine)))),
            ),
            "Stop workers": (stop, _told(lambda engine: self._by_rank(self._clean(self._at(engine)), text.stop))),
            "Interrupt": (interrupt, _told(lambda engine: self._settle(self._at(engine), again=True))),
        }

    # -- asking ---------------------------------------------------------------------------------

    def stacks(self, rank: int | None = None) -> dict[int | str, dict[int, str]]:
        """Return the Python stack of each worker, as text by pid, for all ranks or one."""
        return self._said(self._stacks(self._numbers(rank)))

    def clean(self, rank: int | None = None) -> dict[int | str, StopReport]:
        """Stop all workers, of all ranks or of one, and tell how each one ended."""
        return self._said(self._clean(self._numbers(rank)))

    def doctor(self, rank: int | None = None, loader: str | None = None) -> dict[int | str, Findings]:
        """Return what is wrong with the machine of each rank; or with a loader: an expression, evaluated there.

        A loader is examined by a rank that is idle.
        """
        return self._said(self._doctor(self._numbers(rank), loader))

    def interrupt(self, rank: int | None = None) -> str:
        """Interrupt what runs on all ranks or on one, stop the workers that it used, and say what became of it."""
        return self._settle(self._numbers(rank), again=True)

    def stacks_text(self, rank: int | None = None) -> str:
        """Return the stacks as one text."""
        return self._draw_stacks(self._stacks(self._numbers(rank)))

    def clean_text(self, rank: int | None = None) -> str:
        """Stop workers, and say what became of them."""
        return self._by_rank(self._clean(self._numbers(rank)), text.stop)

    def doctor_text(self, rank: int | None = None, loader: str | None = None) -> str:
        """Return the findings as one text."""
        return self._by_rank(self._doctor(self._numbers(rank), loader), text.findings)

    def _stacks(self, numbers: list[int]) -> _Answers[dict[int, str]]:
        return self._ask(numbers, {"ask": "stacks"}).read(
            lambda found: {int(pid): one for pid, one in found["stacks"].items()}
        )

    def _clean(self, numbers: list[int]) -> _Answers[StopReport]:
        return self._ask(numbers, {"ask": "clean"}).read(lambda found: _stop_report(found["report"]))

    def _doctor(self, numbers: list[int], loader: str | None) -> _Answers[Findings]:
        return (self._ask(numbers, {"ask": "doctor"}) if loader is None else self._examine(numbers, loader)).read(
            _findings
        )

    def _said(self, answers: _Answers[_T]) -> dict[int | str, _T]:
        """Return the answers by rank, and say in a line each who gave none."""
        for line in answers.missing:
            print(f"loaderguard: {line}", file=sys.stderr)  # noqa: T201 - what is not in the answer
        return answers.found

    def _draw_stacks(self, answers: _Answers[dict[int, str]]) -> str:
        return self._by_rank(answers, lambda one: f"\n{text.stacks(one)}")

    def _by_rank(self, answers: _Answers[_T], draw: Callable[[_T], str]) -> str:
        lines = [f"{answers.names[key]}: {draw(one)}" for key, one in answers.found.items()]
        return "\n".join([*lines, *answers.missing]) or "no rank on an engine is live"

    def _numbers(self, rank: int | None) -> list[int]:
        return self._reached().numbers(rank)

    def _at(self, engine: int | None) -> list[int]:
        return self._numbers(None) if engine is None else [engine]

    def _ask(self, numbers: list[int], question: dict[str, Any]) -> _Answers[dict[str, Any]]:
        """Ask engines, and return the answers by rank."""
        return self._checked(numbers, wire.ask(self.client, numbers, question, ANSWER_SECONDS))

    def _reached(self) -> Engines:
        if self._engines is None or self.is_closed:
            raise LoaderGuardError("no engines are followed here; %loaderguard cluster CLIENT follows them")
        return self._engines

    def _examine(self, numbers: list[int], loader: str) -> _Answers[dict[str, Any]]:
        engines = self._reached()
        busy = [engines.state_of(number).name for number in numbers if engines.state_of(number).is_busy]
        if busy:
            raise LoaderGuardError(f"{busy[0]} runs a cell; a loader is examined when it is idle")
        results = {number: engines.call(number, "examine_expression", loader) for number in numbers}
        answers = {}
        for number, result in results.items():
            with contextlib.suppress(TimeoutError):
                answers[number] = json.loads(result.get(timeout=EXAMINE_SECONDS))
        return self._checked(numbers, answers)

    def _checked(self, numbers: list[int], answers: dict[int, dict[str, Any]]) -> _Answers[dict[str, Any]]:
        """Return the answers by rank, or by name if two jobs have the same rank; and who gave none, or a wrong one."""
        states = {number: self._reached().state_of(number) for number in numbers}
        good = {number: one for number, one in answers.items() if "error" not in one}
        wrong = [f"{states[number].name}: {one['error']}" for number, one in answers.items() if number not in good]
        missing = [*wrong, *(f"no answer from {states[number].name}" for number in numbers if number not in answers)]
        if missing and not good:
            raise LoaderGuardError("; ".join(missing))
        times = Counter(state.rank for state in states.values())
        keys = {number: one.rank if times[one.rank] == 1 else one.name for number, one in states.items()}
        names = {keys[number]: one.name for number, one in states.items()}
        return _Answers({keys[number]: answer for number, answer in good.items()}, names, missing)

    # -- interrupts -----------------------------------------------------------------------------

    def _on_cell_end(self, cell: Cell) -> None:
        """If a cell of the notebook was interrupted, interrupt what it runs on the engines, and clean up there."""
        if not cell.is_interrupted or self._engines is None or wire.is_closed(self.client):
            return
        guarded = self._engines.numbers()
        sent_to = wire.busy_since(self.client, cell.began, self._engines.requests(), HUB_SECONDS)
        busy = [number for number in sent_to if number in guarded]
        if busy:
            print(self._settle(busy), file=sys.stderr)  # noqa: T201 - what became of it

    def _settle(self, numbers: list[int], again: bool = False) -> str:
        """Interrupt ranks, those that have been only if asked `again`, and say what became of it.

        What they do not stop themselves is stopped.
        """
        answers = wire.ask(self.client, numbers, {"ask": "settle", "again": again}, REACTION_SECONDS)
        left = sum(answer.get("left", 0) for answer in answers.values())
        hit = [number for number, answer in answers.items() if answer.get("was_busy") or not again]
        lines = [f"interrupted {text.count(len(hit), 'rank')} · {text.count(left, 'worker')} left"]
        for number in numbers:
            state, answer = self._reached().state_of(number), answers.get(number)
            if answer is None:
                lines.append(f"{state.name} did not answer within {REACTION_SECONDS:g} s; its workers are not known")
            elif answer.get("is_busy"):
                where = f" in {state.collective}, which no interrupt ends" if state.collective else ""
                rest = f"has {text.count(answer['left'], 'worker')} left" if answer["left"] else "its workers are gone"
                lines.append(f"{state.name} goes on{where}; {rest}")
                lines.append("→ wait for the call to time out, or restart the engine")
        return "\n".join(f"loaderguard: {line}" for line in lines)


def _told(act: Callable[[int | None], str]) -> Callable[[int | None], str]:
    """Have a button say in a line what went wrong."""

    def try_it(engine: int | None) -> str:
        try:
            return act(engine)
        except LoaderGuardError as error:
            return f"loaderguard: {error}"

    return try_it


def _shell() -> Any:
    """Return the notebook's shell, if this is one; nothing is imported for it."""
    module: Any = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def _stop_report(data: dict[str, Any]) -> StopReport:
    return StopReport(**{**data, "endings": tuple(Ending(**one) for one in data["endings"])})


def _findings(data: dict[str, Any]) -> Findings:
    return Findings((Finding(**one) for one in data["findings"]), data["subject"], data["checked"], data["ran"])
