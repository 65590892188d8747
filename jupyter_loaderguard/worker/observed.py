"""What torch's worker loop gets instead of its queues and index lists: the same things, with notes in the slot.

This runs for every batch and every sample, hence the plain style: no calls that can be saved.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from queue import Empty
from types import WrapperDescriptorType
from typing import Any

from ..queues import CAN_POLL, Inbox, is_plain, on_unsent
from ..samples import Manner, error_text
from ..seam import is_for_user, rim, say, shield
from ..usage import is_short_of_descriptors
from .slot import IDLE, IN_EPOCH, LOADING, PHASE, POSITION, SINCE, UNSENT, Slot

_LONGEST_TEXT = 600
_TOO_MANY = os.strerror(errno.EMFILE)
NEVER = float("inf")
UNSEEN = "what a worker does is not seen"


class ObservedKeys(list):  # type: ignore[type-arg] # a plain list, but that its elements are noted as somebody takes them
    """The keys of one batch."""

    __slots__ = ("slot",)
    slot: Slot

    @rim
    def __iter__(self) -> Iterator[Any]:
        slot, now = self.slot, time.monotonic
        numbers, clocks, slowest = slot.numbers, slot.clocks, slot.slowest
        position, last, began = 0, None, NEVER
        floor = slowest.floor
        for key in list.__iter__(self):
            numbers[POSITION] = position
            clocks[SINCE] = moment = now()
            if moment - began > floor:
                with shield("a slow sample is missing in the report"):
                    floor = slowest.note(last, began, moment, numbers[IN_EPOCH] + position - 1)
            last, began = key, moment
            yield key
            position += 1
        numbers[POSITION] = position
        clocks[SINCE] = moment = now()
        if moment - began > floor:
            with shield("a slow sample is missing in the report"):
                slowest.note(last, began, moment, numbers[IN_EPOCH] + position - 1)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list.copy(self),)


def key_observer(slot: Slot, is_batched: bool, shows_keys: bool = False) -> Callable[[int, Any], Any]:
    """Return a function that notes the beginning of a task, and returns its keys so that each one is noted.

    What comes into the hands of the user's code is what torch gives it, the very object: a key that is a whole batch,
    keys in a class of the user's, the list that `__getitems__` gets. Only what torch's fetcher goes through is ours.
    """
    begin = slot.begin

    def observe(task: int, keys: Any) -> Any:
        if type(keys) is list and is_batched:
            begin(task, len(keys))
            if shows_keys:
                return keys
            observed = ObservedKeys(keys)
            observed.slot = slot
            return observed
        if not is_batched:
            slot.single = (keys,)
        begin(task, count_keys(keys) if is_batched else 1)
        return keys

    return observe


def count_keys(keys: Any) -> int:
    """Return how many keys there are, where that can be told without running code of the user's; else 1."""
    kind = type(keys)
    try:
        found = next((vars(base)["__len__"] for base in kind.__mro__ if "__len__" in vars(base)), None)
        is_safe = type(found) is WrapperDescriptorType or kind.__module__ in ("torch", "numpy")
        return len(keys) if is_safe else 1
    except Exception:  # noqa: BLE001 - a tensor without dimensions; an unknown number is no error
        return 1


class ObservedTasks:
    """The queue that brings a worker its tasks. A question for the next one also means that the last one is done."""

    def __init__(
        self, queue: Any, slot: Slot, manner: Manner, is_stateful: bool, when_ready: Callable[[], None]
    ) -> None:
        """Observe `queue`; the tasks of a stateful loader have a snapshot's number beside the keys."""
        self._queue = queue
        self._slot = slot
        self._skips = manner.is_iterable and manner.is_batched
        """Whether a task of which no key was taken has been skipped: torch does so after the end of a stream."""
        self._when_ready: Callable[[], None] | None = when_ready
        self.after_first: Callable[[], None] | None = None
        """To be called once, when the first task is done."""
        self.get = self._getter(key_observer(slot, manner.is_batched, manner.shows_keys), is_stateful)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def _getter(self, observe: Callable[[int, Any], Any], is_stateful: bool) -> Callable[..., Any]:
        get_task = _quick_get(self._queue) if CAN_POLL and is_plain(self._queue) else self._queue.get

        @rim
        def get(timeout: float) -> Any:
            """Return the next task, and note it."""
            try:
                self._note_question()
            except Exception as error:  # not a Shield, which would be felt in every batch
                if is_for_user(error):
                    raise
                say(UNSEEN, error)
            task = get_task(timeout=timeout)
            try:
                return self._note_task(task, observe, is_stateful)
            except Exception as error:  # as above
                if is_for_user(error):
                    raise
                say(UNSEEN, error)
                return task

        return get

    def _note_question(self) -> None:
        """Note that the worker has done its last task, if it had one."""
        phase = self._slot.numbers[PHASE]
        if phase == LOADING:
            self._slot.end(self._skips)
            if self.after_first is not None:
                done, self.after_first = self.after_first, None
                done()
        elif phase != IDLE:
            self._begin()

    def _note_task(self, task: Any, observe: Callable[[int, Any], Any], is_stateful: bool) -> Any:
        """Note a task, and return it with observed keys."""
        if type(task) is not tuple or len(task) != 2 or type(task[0]) is not int:
            if task is not None:
                self._slot.begin_epoch()
            return task
        number, keys = task
        if is_stateful and type(keys) is tuple and len(keys) == 2:
            return number, (observe(number, keys[0]), keys[1])
        return number, observe(number, keys)

    def _begin(self) -> None:
        """Note that the worker's start, worker_init_fn included, is over; or the beginning of an epoch."""
        ready, self._when_ready = self._when_ready, None
        if ready is not None:
            ready()
            self._slot.get_ready()
        self._slot.rest()


def _quick_get(queue: Any) -> Callable[..., Any]:
    """Return what takes tasks from a queue whose only reader is this worker, so that it need not be locked."""
    inbox: Inbox | None = Inbox(queue)

    @rim
    def get(timeout: float) -> Any:
        nonlocal inbox
        if inbox is None:
            return queue.get(timeout=timeout)
        try:
            message = inbox.await_message(timeout)
        except (Empty, EOFError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - see NOTE [ Fail open ] in seam.py
            say("a worker takes its tasks in torch's own way", error)
            last, inbox = inbox, None  # nobody else can go on in the midst of a message
            return last.read(last.await_more) if last.has_begun else queue.get(timeout=timeout)
        return inbox.open(message)

    return get


class UnsentBatches:
    """Notes a batch that a worker cannot send, where Python only prints a traceback."""

    def __init__(self, queue: Any, slot: Slot, is_stateful: bool) -> None:
        self._slot = slot
        self._is_stateful = is_stateful
        on_unsent(queue, self._note_unsent)

    def _note_unsent(self, error: Exception, item: Any) -> None:
        is_first = self._slot.read_text(UNSENT) is None  # the loop waits for that one
        if is_first and type(item) is tuple and len(item) == 2 and type(item[0]) is int:
            data = item[1][0] if self._is_stateful and type(item[1]) is tuple else item[1]
            self._slot.write_text(UNSENT, describe_unsent(item[0], error, data))


def describe_unsent(task: int, error: Exception, data: Any) -> dict[str, Any]:
    """Say which batch could not be sent, why, which part of it is at fault, and how large it is."""
    words = error_text(error)
    is_full = "No space left on device" in words  # torch raises it as a RuntimeError
    is_short = _TOO_MANY in words or (isinstance(error, OSError) and is_short_of_descriptors())
    if is_short and _TOO_MANY not in words:  # Python then says "No usable temporary directory found"
        words = f"OSError: [Errno {errno.EMFILE}] {_TOO_MANY}, which came as {words}"
    path = None if is_full or is_short else find_unsendable(data)
    return {
        "task": task,
        "error": words[:_LONGEST_TEXT],
        "is_full": is_full,
        "is_short": is_short,
        "sizes": _sizes_along(data, path or []),
        "place": [step if isinstance(step, int) else repr(step)[:40] for step in path] if path is not None else None,
        "bytes": bytes_of(data),
    }


def _sizes_along(data: Any, path: list[Any]) -> list[int]:
    """Return how many parts there are at each step of a path: where it is the number of samples, it is a sample."""
    sizes = []
    for step in path:
        sizes.append(len(data) if isinstance(step, int) else 0)
        data = data[step]
    return sizes


def find_unsendable(data: Any, depth: int = 4) -> list[Any] | None:
    """Return the path to the first part that cannot be pickled; None if all of it can."""
    if _is_sendable(data):
        return None
    parts: Any = ()
    if isinstance(data, dict):
        parts = data.items()
    elif isinstance(data, (list, tuple)):
        parts = enumerate(data)
    for key, part in parts if depth else ():
        path = find_unsendable(part, depth - 1)
        if path is not None:
            return [key, *path]
    return []


def _is_sendable(data: Any) -> bool:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.dumps(data)
    except Exception:  # noqa: BLE001 - that is the question
        return False
    return True


def bytes_of(data: Any, most_parts: float = NEVER, depth: int = 4) -> int | None:
    """Return how many bytes of tensors and arrays there are in a batch; None if it has more parts than these.

    The batch is the user's, and may be of a class that can be gone through once: no code of such a class is run.
    """
    found, seen, level = 0, 0, [data]
    while level:
        seen += len(level)
        inner: list[Any] = []
        for part in level:
            base = next((kind for kind in (dict, list, tuple) if kind in type(part).__mro__), None) if depth else None
            if base is not None:
                if seen + len(inner) + base.__len__(part) > most_parts:
                    return None
                inner.extend(dict.values(part) if base is dict else base.__iter__(part))
            elif str(type(part).__module__).partition(".")[0] in ("torch", "numpy"):
                with contextlib.suppress(Exception):  # it has none, or does not tell, as sparse tensors
                    found += int(part.nbytes)
        level, depth = inner, depth - 1
    return found
