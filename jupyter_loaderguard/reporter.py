"""What a rank tells of itself: runs in each process of a distributed job, in a thread of its own.

A report is JSON: the snapshot of the live status, the stalls that last, and whether the main thread is in a
call of torch.distributed, in which it waits for the other ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any

from . import frames
from .meter import Meter
from .model import RankState, Snapshot, Stall, stall_from
from .registry import Record, registry
from .torch_adapter.job import distributed_rank, job
from .watch import watchdog

IDLE_SECONDS = 5.0
"""How often a rank without loaders tells that it is there."""
_COLLECTIVE_ROOMS = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
    "torch.nn.parallel.distributed",
)
_BACKWARD_ROOMS = ("torch.autograd", "torch._tensor")
_PASSED_ROOMS = (
    *_BACKWARD_ROOMS,
    "torch.distributed.c10d_logger",
    "torch.distributed.utils",
    "torch._ops",
    "torch.utils",
)
"""What may stand between such a call and its waiting."""


class Reporter:
    """Looks at this process each second, and sends a report; at once when a batch does not come."""

    def __init__(self, send: Callable[[str], None], own_rank: Callable[[], int], is_busy: bool = False) -> None:
        self._send, self._own_rank, self._is_busy = send, own_rank, is_busy
        self.on_tick: Callable[[], None] = lambda: None
        self._meter = Meter()
        self._stalls: dict[str, Stall] = {}
        self._stall_count = 0
        self._collective: tuple[int, str, float] = (0, "", 0.0)
        self._shown_before = watchdog.show
        self._until = float("inf")
        self._wake, self._ended = threading.Event(), threading.Event()
        self._has_news = False
        self._told, self._told_calm = 0.0, (False, -1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, lease_seconds: float = float("inf")) -> None:
        """Report from now on, for so long, or until `stop`; called again, for so long from then on."""
        with self._lock:
            self._until = time.monotonic() + lease_seconds
            if watchdog.show != self._show:
                self._shown_before, watchdog.show = watchdog.show, self._show
            if self._thread is None or not self._thread.is_alive():
                self._ended.clear()
                self._thread = threading.Thread(target=self._run, name="loaderguard-reporter", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Report no longer."""
        self._ended.set()
        self._wake.set()
        if watchdog.show == self._show:
            watchdog.show = self._shown_before
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)

    def tell_now(self) -> None:
        """Send a report at once: something has changed."""
        self._has_news = True
        self._wake.set()

    def _run(self) -> None:
        while not self._ended.is_set() and time.monotonic() < self._until:
            _try(self._tell)
            self._pause(registry.refresh_seconds)

    def _tell(self) -> None:
        """Send a report, if there is something to tell."""
        now, calm = time.monotonic(), (self._is_idle(), self._rank())
        if self._has_news or not calm[0] or calm != self._told_calm or now - self._told >= IDLE_SECONDS:
            self._told, self._told_calm, self._has_news = now, calm, False
            self._send(self.report())

    def _is_idle(self) -> bool:
        return not (self._is_busy or registry.cells or registry.all() or self._stalls)

    def _pause(self, seconds: float) -> None:
        """Sleep until it is time to tell again, or there is something to tell at once."""
        until = time.monotonic() + seconds
        while not self._ended.is_set():
            _try(self.on_tick)
            left = until - time.monotonic()
            if left <= 0 or self._wake.wait(min(0.25, left)):
                break
        self._wake.clear()

    def report(self) -> str:
        """Look at this process, and write it as JSON."""
        seen = self._meter.look(registry.refresh_seconds)
        seen = replace(seen, loaders=tuple(replace(one, history=()) for one in seen.loaders), events=seen.events[-5:])
        collective, seconds = self._look_at_collective()
        found = {
            "rank": self._rank(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": job(),
            "is_busy": self._is_busy or bool(registry.cells),
            "collective": collective,
            "collective_seconds": seconds,
            "stall_count": self._stall_count,
            "stalls": [dataclasses.asdict(one) for one in list(self._stalls.values())],
            "snapshot": dataclasses.asdict(seen),
        }
        return json.dumps(found, default=str)  # a sample's key may be anything

    def _rank(self) -> int:
        found = distributed_rank()
        return self._own_rank() if found is None else found

    def _show(self, stall: Stall, record: Record, key: str) -> None:
        """Note a stall, tell of it, and show it here under the name of this rank."""
        is_over = stall.came_after_seconds is not None or stall.ended is not None
        if is_over:
            self._stalls.pop(key, None)
        else:
            self._stall_count += key not in self._stalls
            self._stalls[key] = stall
        self.tell_now()
        self._shown_before(on_rank(stall, f"rank {self._rank()} ({socket.gethostname()})"), record, key)

    def _look_at_collective(self) -> tuple[str, float]:
        """Return the collective call that the main thread is in, and for how long, as far as was seen."""
        call, name = _find_collective(frames.stack_of(threading.main_thread().ident)) if job() else (0, "")
        now = time.monotonic()
        if (call, name) != self._collective[:2]:
            self._collective = (call, name, now)
        return name, (now - self._collective[2] if name else 0.0)


def _try(act: Callable[[], None]) -> None:
    """Do something each time, also if it fails once: the thread goes on."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - of the user's objects, or of a connection that ends
        registry.note_event(f"this rank could not be looked at ({type(error).__name__}: {error})")


def on_rank(stall: Stall, name: str) -> Stall:
    """Have a stall say on which rank its loader is."""
    return replace(stall, loader=f"{stall.loader} on {name}")


def _find_collective(stack: Iterable[FrameType]) -> tuple[int, str]:
    """Return the call of torch.distributed that a stack ends in, or of backward(), in which DDP reduces gradients.

    What calls the user's code, as launchers and the forward() of a wrapped module, waits for nobody while that runs.
    """
    found = (0, "")
    for frame in stack:
        room, name = str(frame.f_globals.get("__name__") or ""), frame.f_code.co_name
        if room in _COLLECTIVE_ROOMS:
            found = (id(frame), "DistributedDataParallel" if "parallel" in room else f"{name}()")
        elif name == "backward" and room.startswith(_BACKWARD_ROOMS):
            found = (id(frame), "backward()")
        elif not room.startswith(_PASSED_ROOMS):
            break
    return found


def state_from(report: str, heard: float, engine: int | None = None) -> RankState:
    """Read a report that came as JSON."""
    data: dict[str, Any] = json.loads(report)
    snapshot = Snapshot.from_dict(data.pop("snapshot"))
    stalls = tuple(stall_from(one) for one in data.pop("stalls"))
    return RankState(status="live", heard=heard, engine=engine, snapshot=snapshot, stalls=stalls, **data)
