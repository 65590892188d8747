"""An epoch goes on: workers that died or hung are replaced, samples that raise, kill or hang are left out.

It decides with the run's Allowance, see NOTE [ Whose fault ]; replacing.py does the work. All of it happens inside of a
wait for data, between two messages of the workers, so that torch's own counters are right at every moment.

NOTE [ Bisection ]
Mostly the slot says which sample a worker was on. It does not in `collate_fn`, nor in a `__getitems__` that does
not go through its keys one by one. Then the task is tried with half of its keys, and so on: a Probe. What is found is
tried alone before it is blamed. Results of such trials are thrown away, and the rest of the batch is loaded anew.
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
from ..quarantine import SkippedSample
from ..registry import RETRIED, Record, registry
from ..samples import key_text
from ..worker.slot import LOADING, Progress
from .deaths import WorkersFailed, describe, give_up
from .ending import detach
from .progress import identify
from .recipe import RECIPE, CannotTravel
from .replacing import replace_workers, send

Attempt = Callable[[Any, Record, float], tuple[bool, Any]]
EXACT = (
    "batches, their order and their samples are those of an undisturbed run, but for samples that were left out; what "
    "a dataset draws at random in its workers was drawn anew for the batches that were produced again"
)
UNORDERED = EXACT.replace("batches, their order and their samples", "batches and their samples, in any order,")
RESUMED = "streams were resumed by load_state_dict() of their dataset, and are as exact as that is"


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


# -- workers ----------------------------------------------------------------------------------------


def get_mended(iterator: Any, record: Record, attempt: Attempt, timeout: float) -> tuple[bool, Any]:
    """Get the next message of the workers; mend what is wrong meanwhile, as long as that is allowed."""
    __tracebackhide__ = True
    while True:
        if record.arrived:
            return True, record.arrived.popleft()
        failed, success, item = None, False, None
        try:
            success, item = attempt(iterator, record, timeout)
        except WorkersFailed as found:
            failed = found
        except WaitBroken:  # ends a wait in which the thread does not look for the verdict
            if not record.is_hung or record.verdict is None:
                raise
            failed = WorkersFailed(sorted(record.late_workers), is_hung=True)
        if failed is not None:
            _mend_failed(iterator, record, failed)
            continue
        if not success:
            return False, None
        item = _look_at(iterator, record, item)
        if item is not None:
            return True, item


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
        _note_state(iterator, record, task)
    if task in record.probes:
        return _step(iterator, record, task, data)
    from torch._utils import ExceptionWrapper

    if isinstance(data, ExceptionWrapper):
        return _mend_raised(iterator, record, task, data)
    if record.has_suspects:
        record.has_suspects = registry.allowance_of(record).forgive(record.loader_id, task, record.sent.get(task))
    return item


class Stated:
    """A batch of a stream on its way from a worker, with the state of the stream after it.

    It arrives as the batch itself, whoever receives it: its state is taken off when it is unpickled. After the last
    batch, if that is not a full one, the stream has ended: its state is then often that of a new beginning.
    """

    def __init__(self, data: Any, loader_id: int, task: int, state: bytes | None, is_last: bool) -> None:
        self._parts = data, loader_id, task, state, is_last

    def __reduce__(self) -> tuple[Any, ...]:
        return deliver, self._parts


def deliver(data: Any, loader_id: int, task: int, state: bytes | None, is_last: bool) -> Any:
    """Keep the state of a stream, and return the batch."""
    record = registry.records.get(loader_id)
    if record is not None:
        record.states[task] = state
        if is_last:
            record.ended_tasks.add(task)
    return data


def _note_state(iterator: Any, record: Record, task: int) -> None:
    """Note that torch gets a batch of a stream: from now on its state counts, and the one before it does not."""
    worker = iterator._task_info[task][0]
    record.states.pop(record.last_tasks.get(worker, -1), None)
    record.last_tasks[worker] = task
    if task in record.states and record.states[task] is None:
        record.keeps_state = False
        why = f"state_dict() of {record.dataset} fails, or what it returns cannot be pickled"
        registry.allowance_of(record).remarks[f"retry does not hold for {registry.name(record)}: {why}"] = None


def _mend_raised(iterator: Any, record: Record, task: int, error: Any) -> Any:
    """Leave out the sample that raised, and have the rest loaded; return the error if that cannot be."""
    allowance, stage = registry.allowance_of(record), getattr(error, "stage", None)
    if not allowance.skip or stage != "sample" or record.manner.is_iterable or why_not(iterator, record) is not None:
        return task, error
    keys, place = record.sent[task], error.position
    if iterator._auto_collation and type(keys) not in (list, tuple):
        return task, error
    is_known = not iterator._auto_collation or (place is not None and not record.manner.asks_whole_batches)
    if is_known and _is_left_out(iterator, record, keys[place] if iterator._auto_collation else keys):
        send(iterator, record, task)  # by another batch or loader, meanwhile
        return None
    if not allowance.may_skip():
        error.note = "\n".join(filter(None, (error.note, allowance.history())))
        return task, error
    if is_known:
        key = keys[place] if iterator._auto_collation else keys
        _leave_out(iterator, record, key, iterator._task_info[task][0], "raised", error.summary)
    else:
        _search(record, task, Probe(list(keys), "raised", error, place))
    send(iterator, record, task)
    return None


def _search(record: Record, task: int, probe: Probe) -> None:
    record.probes[task] = probe
    record.has_own = True


def _is_left_out(iterator: Any, record: Record, key: Any) -> bool:
    """Tell whether a sample is left out already; this loader may not have known."""
    take_up(iterator._dataset, record)
    return record.left_out is not None and key in record.left_out


def _step(iterator: Any, record: Record, task: int, data: Any) -> Any:
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
        _leave_out(iterator, record, probe.trial[0], iterator._task_info[task][0], probe.reason, error)
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


def _leave_out(iterator: Any, record: Record, key: Any, worker: int | None, reason: str, error: str) -> None:
    allowance, dataset = registry.allowance_of(record), iterator._dataset
    name, length = _identity_of(dataset, record), record.lengths[0]
    sample = SkippedSample(key, worker, reason, error, key_text(key), registry.name(record), name, length)
    if not _is_left_out(iterator, record, key):  # it may be in several batches at once
        allowance.leave_out(dataset, sample)
        registry.note_event(sample.sentence(), is_warning=True)
        registry.tell_mended(record, sample.sentence())
    take_up(dataset, record)


# -- workers that died or hung ------------------------------------------------------------------------


def why_not(iterator: Any, record: Record) -> str | None:
    """Say why the workers of this loader cannot be replaced, nor its samples left out; None if they can."""
    if RECIPE not in vars(iterator):
        return "its workers were started before the guard"
    if type(iterator).__module__.startswith("torchdata."):
        return "torchdata's StatefulDataLoader keeps the state of its workers itself: resume from its state_dict()"
    if any(task not in record.sent for task, info in list(iterator._task_info.items()) if len(info) == 1):
        return "its batches were asked for before the guard"
    if record.manner.is_iterable and not record.keeps_state:
        has_state = all(hasattr(iterator._dataset, name) for name in ("state_dict", "load_state_dict"))
        what = (
            "was started without retry"
            if has_state
            else "is an iterable dataset without state_dict() and load_state_dict()"
        )
        return (
            f"{record.dataset} {what}: which samples of its stream had been delivered cannot be known by a new worker"
        )
    return None


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
    count = 0
    try:
        count = replace_workers(iterator, record, failed.numbers if failed.is_hung else [], hurry)
    except (Exception, CannotTravel) as raised:  # noqa: BLE001 - raised as what became of the workers
        error = raised.error if isinstance(raised, CannotTravel) else raised
        if record.stopped_by is None:
            found = give_up(iterator, record, failure)
            add_note(found, f"loaderguard: its workers could not be replaced ({type(error).__name__}: {error}).")
            raise found from error
    finally:
        record.replacement = None
        work[1].set()
    if record.stopped_by is not None:  # by another thread, which goes on now
        raise give_up(iterator, record, failure)
    return count


def _final(
    iterator: Any, record: Record, verdict: LoaderStalled | None, failure: Failure, refusal: str | None
) -> Exception:
    """Return what the loop gets: the death of a worker or a stall, and why it was not mended."""
    error: Exception
    if verdict is not None:
        record.is_broken = True
        detach(iterator, record)
        error = verdict
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
                _leave_out(iterator, record, probe.trial[0], suspect.worker_id, probe.reason, str(probe.error))
    return searched


def _blame(iterator: Any, record: Record, suspect: Suspect, reason: str, error: str) -> bool:
    """Leave a sample out, or begin to search for it; return whether that can be."""
    if suspect.is_exact:
        if not registry.allowance_of(record).may_skip():
            return False
        _leave_out(iterator, record, suspect.key, suspect.worker_id, reason, error)
        return True
    if type(suspect.key) not in (list, tuple) or suspect.task in record.searched:
        return False
    _search(record, suspect.task, Probe(list(suspect.key), reason, error, suspect.guess))
    return True


# -- without workers --------------------------------------------------------------------------------


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
    if found is None or not (allowance.may_skip() or _is_left_out(iterator, record, found[0])):
        if allowance.history() and isinstance(error, Exception):
            add_note(error, allowance.history())
        return False
    words = f"{type(error).__name__}: {error}"[:300]
    if is_hung:
        words = f"brought nothing for {registry.stall_rule(record)[0]:g} s"
        since, record.waiting_since = record.waiting_since or 0.0, None
        registry.take_verdict(record)
        record.end_stall(since, RETRIED)
        record.waiting_since = time.perf_counter()
    _leave_out(iterator, record, found[0], None, "hung" if is_hung else "raised", words)
    record.again = record.left_out.without(keys, iterator._auto_collation) if record.left_out is not None else keys
    return True


def _find_here(
    iterator: Any, record: Record, progress: Progress, keys: Any, error: BaseException, is_hung: bool
) -> tuple[Any] | None:
    """Return the sample at which the kernel's own loading failed or hung, if it can be known."""
    from .failures import stage_of

    stage, place = stage_of(progress, error.__traceback__)
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


def take_up(dataset: Any, record: Record) -> None:
    """Note which samples of a loader are not to be touched."""
    allowance = registry.allowance_of(record)
    if record.left_out is not None or allowance.is_open:
        name = _identity_of(dataset, record) if allowance.known else ""
        record.left_out, count = allowance.left_out_of(dataset, name, record.lengths[0])
        if count:
            were = "1 sample was" if count == 1 else f"{count:,} samples were"
            allowance.remarks[f"{were} not touched in {record.dataset}, as the quarantine says"] = None


def _identity_of(dataset: Any, record: Record) -> str:
    record.identity = record.identity or identify(dataset)
    return record.identity
