"""Samples that raise, kill or hang are left out: which ones, and how they are found.

NOTE [ Bisection ]
Mostly the slot says which sample a worker was on. It does not in `collate_fn`, nor in a `__getitems__` that does
not go through its keys one by one. Then the task is tried with half of its keys, and so on: a Probe. What is found is
tried alone before it is blamed. Results of such trials are thrown away, and the rest of the batch is loaded anew.
"""

from __future__ import annotations

import time
from typing import Any

from ..errors import add_note, traceback_of
from ..interrupts import WaitBroken
from ..quarantine import SkippedSample
from ..registry import RETRIED, Record, registry
from ..samples import error_text, key_text
from ..worker.slot import Progress
from .lengths import length_of
from .progress import identify
from .replacing import send, why_not


class Probe:
    """The search for a sample of a task. See NOTE [ Bisection ]."""

    def __init__(self, keys: list[Any], reason: str, error: Any, guess: int | None = None) -> None:
        """Search among `keys`; begin with the one at the place `guess`, if there is one."""
        self.suspects = keys
        self.reason = reason
        self.error = error
        """An error of the worker's, to be delivered if nothing is found; or a text."""
        self.is_sure = False
        self._choose()
        if guess is not None:
            self.trial = [keys[guess]]

    def as_error(self) -> Any:
        """Return what torch would get for the whole batch, if it were not searched."""
        from torch._utils import ExceptionWrapper

        if isinstance(self.error, ExceptionWrapper):
            return self.error
        error = RuntimeError(f"a DataLoader worker {self.error}")
        return ExceptionWrapper((RuntimeError, error, None), where="in DataLoader worker process")

    def _choose(self) -> None:
        self.trial = self.suspects[: max(1, len(self.suspects) // 2)]

    def fail(self) -> None:
        """Note that what was tried did it again."""
        self.is_sure = len(self.trial) == 1
        self.suspects = self.trial
        self._choose()

    def pass_(self) -> bool:
        """Note that what was tried is well; return False if nobody is left."""
        self.suspects = [key for key in self.suspects if not any(key is one for one in self.trial)]
        self._choose()
        return bool(self.suspects)


# -- in workers ---------------------------------------------------------------------------------------


def mend_raised(iterator: Any, record: Record, task: int, error: Any) -> Any:
    """Leave out the sample that raised, and have the rest loaded; return the error if that cannot be."""
    allowance, stage = registry.allowance_of(record), getattr(error, "stage", None)
    if not allowance.skip or stage != "sample" or record.manner.is_iterable or why_not(iterator, record) is not None:
        return task, error
    keys, place = record.sent[task], error.position
    if iterator._auto_collation and type(keys) not in (list, tuple):
        return task, error
    is_known = not iterator._auto_collation or (place is not None and not record.manner.asks_whole_batches)
    if is_known and is_left_out(iterator, record, keys[place] if iterator._auto_collation else keys):
        send(iterator, record, task)  # by another batch or loader, meanwhile
        return None
    if not allowance.may_skip():
        error.note = "\n".join(filter(None, (error.note, allowance.history())))
        return task, error
    if is_known:
        key = keys[place] if iterator._auto_collation else keys
        leave_out(iterator, record, key, iterator._task_info[task][0], "raised", error.summary)
    else:
        search(record, task, Probe(list(keys), "raised", error, place))
    send(iterator, record, task)
    return None


def search(record: Record, task: int, probe: Probe) -> None:
    record.probes[task] = probe
    record.has_own = True


def step(iterator: Any, record: Record, task: int, data: Any) -> Any:
    """Go on with the search for a sample: what was tried has come back."""
    probe: Probe = record.probes[task]
    if not registry.allowance_of(record).may_skip():  # meanwhile others were, or the run is over
        return _end_search(iterator, record, task, probe)
    if probe.reason == "raised" and getattr(data, "stage", None) == "sample":
        probe.error = data
        probe.fail()
    elif not probe.pass_():
        return _end_search(iterator, record, task, probe)
    return _go_on(iterator, record, task, probe)


def _go_on(iterator: Any, record: Record, task: int, probe: Probe) -> Any:
    """Blame what is found, or try the next half."""
    if probe.is_sure:
        del record.probes[task]
        error = getattr(probe.error, "summary", probe.error)
        leave_out(iterator, record, probe.trial[0], iterator._task_info[task][0], probe.reason, error)
    send(iterator, record, task)
    return None


def _end_search(iterator: Any, record: Record, task: int, probe: Probe) -> Any:
    """Nobody did it alone: deliver the error, or try the whole batch once more."""
    del record.probes[task]
    if probe.reason == "raised":
        return task, probe.error
    record.searched.add(task)
    send(iterator, record, task)
    return None


# -- without workers ----------------------------------------------------------------------------------


def leave_out_here(iterator: Any, record: Record, error: BaseException) -> bool:
    """Leave out the sample at which the kernel's own loading failed or hung; return whether that can be."""
    allowance, slot = registry.allowance_of(record), record.slots[0] if record.slots else None
    is_hung = record.is_hung and record.verdict is not None
    if (
        slot is None
        or record.manner.is_iterable
        or not allowance.skip
        or (isinstance(error, WaitBroken) and not is_hung)
    ):
        return False
    keys = record.sent.get(slot.read().task)
    found = _find_here(iterator, record, slot.read(), keys, error, is_hung) if keys is not None else None
    if found is None or not (allowance.may_skip() or is_left_out(iterator, record, found[0])):
        if allowance.history() and isinstance(error, Exception):
            add_note(error, allowance.history())
        return False
    words = error_text(error)[:300]
    if is_hung:
        words = f"brought nothing for {registry.stall_rule(record)[0]:g} s"
        since, record.waiting_since = record.waiting_since or 0.0, None
        registry.take_verdict(record)
        record.end_stall(since, RETRIED)
        record.waiting_since = time.perf_counter()
    leave_out(iterator, record, found[0], None, "hung" if is_hung else "raised", words)
    record.again = record.left_out.without(keys, iterator._auto_collation) if record.left_out is not None else keys
    return True


def _find_here(
    iterator: Any, record: Record, progress: Progress, keys: Any, error: BaseException, is_hung: bool
) -> tuple[Any] | None:
    """Return the sample at which the kernel's own loading failed or hung, if it can be known."""
    from .failures import stage_of

    stage, place = stage_of(progress, traceback_of(error))
    if stage != "sample" and not is_hung:
        return None
    if not iterator._auto_collation:
        return (keys,)
    if type(keys) not in (list, tuple):
        return None
    if record.manner.asks_whole_batches:
        return None if is_hung else _search_here(iterator._dataset, list(keys))
    return None if place is None else (keys[place],)


def _search_here(dataset: Any, keys: list[Any]) -> tuple[Any] | None:
    """Search among the keys of a dataset that takes whole batches for one that raises alone. See NOTE [ Bisection ]."""
    probe = Probe(keys, "raised", None)
    while not probe.is_sure:
        try:
            dataset.__getitems__(list(probe.trial))
        except Exception:  # noqa: BLE001 - that is the question
            probe.fail()
        else:
            if not probe.pass_():
                return None
    return (probe.trial[0],)


# -- what is left out ---------------------------------------------------------------------------------


def leave_out(iterator: Any, record: Record, key: Any, worker: int | None, reason: str, error: str) -> None:
    allowance, dataset = registry.allowance_of(record), iterator._dataset
    name, length = _identity_of(dataset, record), length_of(dataset)
    sample = SkippedSample(key, worker, reason, error, key_text(key), registry.name(record), name, length)
    if not is_left_out(iterator, record, key):  # it may be in several batches at once
        allowance.leave_out(dataset, sample)
        registry.note_event(sample.sentence(), is_warning=True)
        registry.tell_mended(record, sample.sentence())
    take_up(dataset, record)


def is_left_out(iterator: Any, record: Record, key: Any) -> bool:
    """Tell whether a sample is left out already; this loader may not have known."""
    take_up(iterator._dataset, record)
    return record.left_out is not None and key in record.left_out


def take_up(dataset: Any, record: Record) -> None:
    """Note which samples of a loader are not to be touched."""
    allowance = registry.allowance_of(record)
    if record.left_out is not None or allowance.is_open:
        name, length = (_identity_of(dataset, record), length_of(dataset)) if allowance.known else ("", None)
        record.left_out, count = allowance.left_out_of(dataset, name, length)
        if count:
            were = "1 sample was" if count == 1 else f"{count:,} samples were"
            allowance.remarks[f"{were} not touched in {record.dataset}, as the quarantine says"] = None


def _identity_of(dataset: Any, record: Record) -> str:
    record.identity = record.identity or identify(dataset)
    return record.identity
