"""An epoch goes on: workers that died or hung are replaced, samples that raise, kill or hang are left out.

It decides with the run's Allowance, see NOTE [ Whose fault ]; replacing.py does the work. All of it happens inside of a
wait for data, between two messages of the workers, so that torch's own counters are right at every moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .. import interrupts
from ..allowance import Suspect
from ..errors import LoaderStalled, add_note
from ..interrupts import WaitBroken
from ..model import Failure, Retry
from ..registry import RETRIED, Record, registry
from ..seam import Call, for_user, let_go
from ..worker.slot import LOADING
from .deaths import WorkersFailed, describe, give_up
from .ending import detach
from .recipe import CannotTravel
from .replacing import replace_workers, why_not
from .skipping import Probe, leave_out, mend_raised, search, step, take_up
from .streams import note_state

Attempt = Callable[[Call, Any, Record, float], tuple[bool, Any]]
EXACT = (
    "batches, their order and their samples are those of an undisturbed run, but for samples that were left out; what "
    "a dataset draws at random in its workers was drawn anew for the batches that were produced again"
)
UNORDERED = EXACT.replace("batches, their order and their samples", "batches and their samples, in any order,")
RESUMED = "streams were resumed by load_state_dict() of their dataset, and are as exact as that is"


# -- workers ----------------------------------------------------------------------------------------


def get_mended(call: Call, iterator: Any, record: Record, attempt: Attempt, timeout: float) -> tuple[bool, Any]:
    """Get the next message of the workers; mend what is wrong meanwhile, as long as that is allowed."""
    __tracebackhide__ = True
    while True:
        if record.arrived:
            return True, record.arrived.popleft()
        failed, success = None, False
        item: Any = (None, None)
        try:
            success, item = attempt(call, iterator, record, timeout)
        except WorkersFailed as found:
            failed = found
        except WaitBroken:  # ends a wait in which the thread does not look for the verdict
            if not record.is_hung or record.verdict is None:
                raise
            failed = WorkersFailed(sorted(record.late_workers), is_hung=True)
        if failed is not None:
            call.reopen()
            _mend_failed(iterator, record, failed)
            continue
        if not success:
            return False, None
        probe = record.probes.get(item[0]) if type(item[0]) is int else None
        if probe is not None:  # half a batch, of which a sample is searched, is not for the user
            call.settle((True, (item[0], probe.as_error())))
        item = _look_at(iterator, record, item)
        if item is not None:
            return True, item
        call.reopen()


def _look_at(iterator: Any, record: Record, item: Any) -> Any:
    """Return a message of the workers if it is for torch; None if it was for us."""
    task, data = item
    if type(task) is not int:
        if record.resumed is not None:
            record.resumed += 1
        return item
    if task not in iterator._task_info:  # of an epoch that was broken off: torch throws it away
        return item
    if record.keeps_state:
        note_state(iterator, record, task)
    if task in record.probes:
        return step(iterator, record, task, data)
    from torch._utils import ExceptionWrapper

    if isinstance(data, ExceptionWrapper):
        return mend_raised(iterator, record, task, data)
    if record.has_suspects:
        record.has_suspects = registry.allowance_of(record).forgive(record.loader_id, task, record.sent.get(task))
    return item


# -- workers that died or hung ------------------------------------------------------------------------


def _mend_failed(iterator: Any, record: Record, failed: WorkersFailed) -> None:
    """Replace the workers, or raise what happened if that cannot be or is no longer allowed."""
    __tracebackhide__ = True
    since, record.waiting_since = record.waiting_since or time.perf_counter(), None  # nobody is to break into this
    verdict = registry.take_verdict(record) if record.verdict is not None else None
    try:
        _mend_or_raise(iterator, record, failed, verdict)
    except BaseException:
        record.waiting_since = since
        raise
    record.end_stall(since, RETRIED)
    record.waiting_since = time.perf_counter()


def _mend_or_raise(iterator: Any, record: Record, failed: WorkersFailed, verdict: LoaderStalled | None) -> None:
    __tracebackhide__ = True
    allowance = registry.allowance_of(record)
    late = f"brought nothing for {registry.stall_rule(record)[0]:g} s" if failed.is_hung else None
    failure = describe(iterator, record, failed.numbers, late)
    refusal = why_not(iterator, record)
    if record.stopped_by or failure.why is not None or refusal or not failed.numbers:
        raise _final(iterator, record, verdict if failed.is_hung else None, failure, refusal) from failed.cause
    suspects = [suspect for number in failed.numbers if (suspect := _suspect(iterator, record, number)) is not None]
    searched = _advance_probes(iterator, record, suspects)
    is_free, others = bool(searched), [one for one in suspects if one not in searched]
    for suspect in allowance.note_failures(others):
        fate = next(worker.fate for worker in failure.workers if worker.worker_id == suspect.worker_id)
        is_free |= _blame(iterator, record, suspect, "hung" if failed.is_hung else "killed", fate)
    record.has_suspects |= bool(others)
    if not is_free and not allowance.may_retry():
        is_free = bool(others) and allowance.take_second_look()
    if not is_free and not allowance.may_retry():
        raise _final(iterator, record, verdict if failed.is_hung else None, failure, None) from failed.cause
    since = time.perf_counter()
    with interrupts.held() as hurry:
        count = _replace(iterator, record, failed, failure, hurry)
        retry = Retry(registry.name(record), _words(failure), count, time.perf_counter() - since)
        registry.note_started(record)
        allowance.retried.append(retry)
        allowance.retries += not is_free
        allowance.remarks[RESUMED if record.manner.is_iterable else EXACT if iterator._in_order else UNORDERED] = None
        registry.note_event(retry.sentence(), is_warning=True)
        registry.tell_mended(record, retry.sentence())


def _words(failure: Failure) -> str:
    """Say of each worker what happened to it."""
    return "; ".join(", ".join(filter(None, (f"{one.name} {one.fate}", one.sample))) for one in failure.workers)


def _replace(iterator: Any, record: Record, failed: WorkersFailed, failure: Failure, hurry: Callable[[], bool]) -> int:
    __tracebackhide__ = True
    record.replacement = work = threading.get_ident(), threading.Event()
    count, record.is_in_making = 0, True
    try:
        count = replace_workers(iterator, record, failed.numbers if failed.is_hung else [], hurry)
    except (Exception, CannotTravel) as raised:  # noqa: BLE001 - raised as what became of the workers
        error = raised.error if isinstance(raised, CannotTravel) else raised
        if record.stopped_by is None:
            found = give_up(iterator, record, failure)
            add_note(found, f"loaderguard: its workers could not be replaced ({type(error).__name__}: {error}).")
            raise found from error
    finally:
        record.replacement, record.is_in_making = None, False
        work[1].set()
    if record.stopped_by is not None:  # by another thread, which goes on now
        raise give_up(iterator, record, failure)
    if record.mistake is not None:
        let_go(record, record.mistake)
    return count


def _final(
    iterator: Any, record: Record, verdict: LoaderStalled | None, failure: Failure, refusal: str | None
) -> Exception:
    """Return what the loop gets: the death of a worker or a stall, and why it was not mended."""
    error: Exception
    if verdict is not None:
        record.is_broken = True
        detach(iterator, record)
        error = for_user(verdict)
    else:
        error = give_up(iterator, record, failure)
    history = registry.allowance_of(record).history()
    if refusal is not None:
        add_note(error, f"loaderguard: retry is not possible here: {refusal}.")
    elif history:
        add_note(error, history)
    return error


def _suspect(iterator: Any, record: Record, number: int) -> Suspect | None:
    """Return what a worker was on, if it was on something that is still awaited."""
    slot = record.slots[number] if number < len(record.slots) else None
    progress = slot.read() if slot is not None else None
    if progress is None or progress.phase != LOADING or record.manner.is_iterable:
        return None
    task = progress.task
    if len(iterator._task_info.get(task, ())) != 1 or task not in record.sent:
        return None
    probe = record.probes.get(task)
    keys = probe.trial if probe is not None else record.sent[task]
    if not iterator._auto_collation:
        return Suspect(record.loader_id, number, task, keys, True)
    place = progress.position if type(keys) in (list, tuple) and 0 <= progress.position < len(keys) else None
    if place is not None and not record.manner.asks_whole_batches:
        return Suspect(record.loader_id, number, task, keys[place], True)
    return Suspect(record.loader_id, number, task, keys, False, place)


def _advance_probes(iterator: Any, record: Record, suspects: list[Suspect]) -> list[Suspect]:
    """A search goes on if the worker that had a trial died of it: return these."""
    searched = [suspect for suspect in suspects if suspect.task in record.probes]
    for suspect in searched:
        probe: Probe = record.probes[suspect.task]
        if suspect.is_exact:
            probe.trial = [suspect.key]
        probe.fail()
        if probe.is_sure:
            del record.probes[suspect.task]
            if registry.allowance_of(record).may_skip():
                leave_out(iterator, record, probe.trial[0], suspect.worker_id, probe.reason, str(probe.error))
    return searched


def _blame(iterator: Any, record: Record, suspect: Suspect, reason: str, error: str) -> bool:
    """Leave a sample out, or begin to search for it; return whether that can be."""
    if suspect.is_exact:
        if not registry.allowance_of(record).may_skip():
            return False
        leave_out(iterator, record, suspect.key, suspect.worker_id, reason, error)
        return True
    if type(suspect.key) not in (list, tuple) or suspect.task in record.searched:
        return False
    search(record, suspect.task, Probe(list(suspect.key), reason, error, suspect.guess))
    return True


# -- epochs -------------------------------------------------------------------------------------------


def begin_epoch(iterator: Any, record: Record) -> None:
    """Forget what was searched in an epoch that was broken off, and take up what is to be left out now."""
    record.probes.clear()
    record.searched.clear()
    record.arrived.clear()
    record.states.clear()
    record.ended_tasks.clear()
    record.last_tasks.clear()
    record.resume.clear()
    take_up(iterator._dataset, record)


def note_refusal(iterator: Any, record: Record) -> None:
    """Say at once, and in the report, if nothing can be mended for this loader."""
    allowance = registry.allowance_of(record)
    if not (allowance.retry or allowance.skip) or not record.workers:
        return
    refusal = why_not(iterator, record)
    if refusal is None and record.manner.is_iterable and allowance.skip:
        refusal = f"samples of {record.dataset}, an iterable dataset, cannot be left out: its stream decides what comes"
    if refusal is not None:
        line = f"retry and skip do not hold for {registry.name(record)}: {refusal}"
        if line not in allowance.remarks:
            allowance.remarks[line] = None
            registry.tell(f"loaderguard: {line}.")
