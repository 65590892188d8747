"""The engines of a client: attached as they come, heard of while they are busy, and kept as lost when they are gone."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import LoaderGuardError
from ..model import ClusterState, RankState
from ..reporter import state_from
from ..views import text
from . import wire

LEASE_SECONDS, RENEW_SECONDS = 60.0, 20.0
"""For how long an engine reports to a notebook that does not renew its wish."""
SILENT_SECONDS = 12.0
START_SECONDS, BUSY_SECONDS = 15.0, 2.0
"""How long an engine may take to load the guard; and to begin with it, if it is idle."""
MOST_LOST = 32
"""How many engines that are gone are kept in the table."""
BUSY = "busy, guarded after its cell"
MODULE = "jupyter_loaderguard.cluster.engine"


@dataclass
class Engine:
    """What is known of one engine."""

    number: int
    unique: str
    """Its number may be given again; this is not."""
    result: Any = None
    """Of the request that attached it."""
    has_begun: bool = False
    """Whether it has begun with that request."""
    is_due: bool = False
    """Whether it is to be attached once more."""
    state: RankState | None = None
    refusal: str = ""
    is_lost: bool = False
    told: set[int] = field(default_factory=set)
    """The late ranks that it was told of."""

    @property
    def is_silent(self) -> bool:
        """Whether it was not heard of for some time."""
        return self.state is not None and time.time() - self.state.heard > SILENT_SECONDS

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of it yet."""
        return self.state is None and not self.refusal and not self.is_lost

    def rank(self) -> RankState:
        """Return it as it was when it was last heard of."""
        status = self.refusal or ("starting" if self.has_begun else BUSY)
        state = self.state or RankState(self.number, "", 0, status, engine=self.number)
        if self.is_lost:
            return replace(state, status="lost", is_busy=False)
        return replace(state, status=self.refusal or "silent") if self.is_silent else state


class Engines:
    """All engines of a client."""

    def __init__(self, client: Any, on_news: Callable[[], None]) -> None:
        self._client, self._on_news = client, on_news
        self._engines: dict[str, Engine] = {}
        self._token = uuid.uuid4().hex
        """Tells the engines which client wants to hear of them."""
        self._renewed = time.monotonic()
        self._lock = threading.Lock()

    def look(self) -> None:
        """Attach engines that are new, note those that are gone, and renew the wish to hear of the others."""
        with self._lock:
            there = {} if wire.is_closed(self._client) else wire.engines(self._client)
            for one in self._engines.values():
                one.is_lost |= there.get(one.number) != one.unique
                if not one.is_lost and (one.is_due or (one.is_silent and one.result.done() and not one.refusal)):
                    one.is_due = False
                    self._attach(one)
                wire.keep(self._client, one.result)
            for number, unique in there.items():
                if unique not in self._engines:
                    with contextlib.suppress(IndexError):  # it is gone since we looked
                        one = Engine(number, unique)
                        self._attach(one)
                        self._engines[unique] = one
            lost = [one.unique for one in self._engines.values() if one.is_lost]
            for unique in lost[:-MOST_LOST]:
                del self._engines[unique]
        if time.monotonic() - self._renewed > RENEW_SECONDS:
            self._renewed = time.monotonic()
            wire.ask(self._client, self.numbers(), {"ask": "renew", "token": self._token}, 0)

    def _attach(self, engine: Engine) -> None:
        """Have an engine guarded, and report; if it is busy, when its cell has ended."""
        if engine.result is not None:
            wire.forget(self._client, engine.result)
        function = "attach" if engine.state is None else "attach_again"
        engine.result = self.call(engine.number, function, LEASE_SECONDS, self._token)
        wire.listen(engine.result, lambda: self._note_begun(engine), lambda report: self._hear(engine, report))
        engine.result.add_done_callback(lambda result: self._note_attached(engine, result))

    def call(self, number: int, function: str, *arguments: float | str) -> Any:
        """Call a function of `cluster.engine` on an engine, when that is idle; by name, so that nothing is pickled."""
        told = ", ".join(map(repr, arguments))
        return self._client[number].apply_async(eval, f"__import__({MODULE!r}, fromlist=['x']).{function}({told})")

    def _note_begun(self, engine: Engine) -> None:
        engine.has_begun = True

    def _note_attached(self, engine: Engine, result: Any) -> None:
        error = result.exception()
        if error is not None and not engine.is_lost:
            kind, why = wire.reason(error)
            engine.is_due = kind in ("KeyboardInterrupt", "TaskAborted")  # meant for something else
            engine.refusal = "" if engine.is_due else f"not guarded: {kind}: {why}"
        elif error is None:
            self._hear(engine, result.get())
        self._on_news()

    def _hear(self, engine: Engine, report: str) -> None:
        """Note a report; called by the client's own thread."""
        before = len(engine.state.stalls) if engine.state is not None else 0
        try:
            engine.state, engine.refusal = state_from(report, time.time(), engine.number), ""
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # of another version of ours
            engine.refusal = f"not understood: {type(error).__name__}: {error}"
            return
        if len(engine.state.stalls) != before:
            self._on_news()

    def await_start(self) -> None:
        """Wait until all engines that are not busy report."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < START_SECONDS and any(
            one.is_open and (one.has_begun or waited < BUSY_SECONDS) for one in list(self._engines.values())
        ):
            time.sleep(0.02)

    def ranks(self) -> list[RankState]:
        """Return all of them as they were when they were last heard of."""
        return [one.rank() for one in list(self._engines.values())]

    def tell_waiting(self, state: ClusterState) -> None:
        """Say to ranks that wait for another one why they do, once."""
        stalled = [rank for rank in state.ranks if rank.stalls and rank.status == "live"]
        stalls = {(rank.job, rank.rank): rank.stalls[0] for rank in stalled}
        waits = {rank.engine: rank for rank in state.ranks if rank.status == "live"}
        for one in self.live():
            rank = waits.get(one.number)
            why = stalls.get((rank.job, rank.waits_for)) if rank is not None and rank.waits_for is not None else None
            if rank is None or rank.waits_for is None or why is None:
                one.told.clear()
            elif rank.waits_for not in one.told:
                one.told.add(rank.waits_for)
                words = f"loaderguard: rank {rank.rank} waits in {rank.collective} for rank {rank.waits_for}"
                wire.ask(self._client, [one.number], {"ask": "tell", "text": f"{words}: {text.stall_line(why)}"}, 0)

    # -- choosing -------------------------------------------------------------------------------

    def live(self) -> list[Engine]:
        """Return those that report."""
        known = list(self._engines.values())
        return [one for one in known if not one.is_lost and one.state is not None and not one.refusal]

    def requests(self) -> set[str]:
        """Return the requests that attached them."""
        return {message for one in list(self._engines.values()) for message in one.result.msg_ids}

    def numbers(self, rank: int | None = None) -> list[int]:
        """Return the engines of all ranks or of one; if there is no such rank, say which there are."""
        live = {one.number: one.state.rank for one in self.live() if one.state is not None}
        found = [number for number, own in live.items() if rank is None or own == rank]
        if rank is not None and not found:
            known = ", ".join(map(str, sorted(live.values()))) or "none"
            raise LoaderGuardError(f"there is no rank {rank} on an engine here; there is {known}")
        return found

    def state_of(self, number: int) -> RankState:
        """Return the rank on an engine."""
        own = [one for one in list(self._engines.values()) if one.number == number]
        return own[-1].rank() if own else RankState(number, "", 0, "lost", engine=number)

    def close(self) -> None:
        """Hear of them no longer; they stay guarded."""
        if not wire.is_closed(self._client):
            wire.ask(self._client, self.numbers(), {"ask": "detach", "token": self._token}, 0)
            for one in self._engines.values():
                wire.forget(self._client, one.result)
