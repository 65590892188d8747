"""The seam: the one place between the guard and what calls it: torch, IPython, the user's loop and the collector.

NOTE [ Fail open ]
A notebook that works without the guard works with it. Whatever torch, IPython or user code calls of ours comes through
here: `entry` for methods of torch's iterators, `shield` for a piece of our own work inside of theirs. They decide:
- An iterator that the guard does not know has no record: torch's own method runs, as if we were not there.
- What torch's own method answered or raised is theirs, and is what the caller gets in any case.
- What we raise for the user passes, if it was marked by `for_user`. RAISED lists the types; nothing else passes.
- What a signal handler of the user's raises while our code runs is theirs, too: they find their way out by it.
- Anything else that our code raises is our mistake. The iterator is handed back to torch for good (`let_go`), one line
  says so, and torch's own method does what ours did not.
Only `Exception` is caught: KeyboardInterrupt, SystemExit and the guard's own WaitBroken are no mistakes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Protocol, TypeVar

from .errors import LoaderGuardError, LoaderStalled, traceback_of, warn_limited

RECORD = "_loaderguard_record"
"""The attribute of an iterator that holds its record."""
RAISED = (LoaderStalled, LoaderGuardError, RuntimeError)
"""What the guard raises for the user: a stall that was to be raised, the use of an iterator that the guard has stopped,
and torch's own "DataLoader worker exited unexpectedly" in better words."""
INCOMPLETE = "the report of a guarded run is incomplete"
_MEANT = "loaderguard_is_meant"
_NONE_YET = object()
"""Torch has not answered."""
_PACKAGE = Path(__file__).parent

Error = TypeVar("Error", bound=Exception)
Function = TypeVar("Function", bound=Callable[..., Any])


class Unknown(Exception):
    """Tell, inside of the guard, that something is not known well enough to act; the message says what."""


class Guarded(Protocol):
    """What the seam needs of a record."""

    is_in_making: bool
    """Whether its workers are being started: it is handed back when that is done."""
    mistake: Exception | None
    """What was wrong meanwhile."""

    def hand_back(self) -> None:
        """Make torch responsible for the iterator, for good."""

    loader_type: str
    """The name of the loader's class."""


RIM: set[CodeType] = set()
"""The functions that theirs call first: nothing stands around them, so they do nothing but what is shielded."""


def rim(function: Function) -> Function:
    """Mark a function that torch, IPython or the system calls first."""
    RIM.add(function.__code__)
    return function


def for_user(error: Error) -> Error:
    """Mark an error of ours as one that the user is to get."""
    assert isinstance(error, RAISED)
    vars(error)[_MEANT] = True
    return error


def is_for_user(error: Exception) -> bool:
    """Tell whether an error is one that the user is to get: ours, or that of a signal handler which hit us."""
    return (type(error) in RAISED and _MEANT in vars(error)) or _is_of_handler(error)


def _is_of_handler(error: BaseException) -> bool:
    """Tell whether a handler of the user's for some signal has raised this, wherever we were: a time limit by SIGALRM.

    By its traceback: the handler's arguments are the signal and the frame that it interrupted, which comes before it.
    Neither the error nor the arguments are asked for anything: their classes may raise at any attribute.
    """
    trace = traceback_of(error)
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        arguments = _arguments(trace.tb_frame)
        if any(two is interrupted and type(one) is int for one, two in itertools.pairwise(arguments)):
            return True
    return False


def _arguments(frame: FrameType) -> list[Any]:
    """Return what the function of a frame was called with, by position."""
    code, values = frame.f_code, frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return arguments


# -- methods of torch's iterators ---------------------------------------------------------------------


class Call:
    """One call of a method of torch's, with what its own code answered; without `__init__`: each batch has three."""

    original: Callable[..., Any]
    """Torch's own method."""
    error: BaseException | None = None
    answer: Any = _NONE_YET
    fallback: Callable[..., Any] | None = None
    """What is to be called if ours fails before torch has answered, where that is not torch's own method."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's own method, and note what comes of it; what runs for every batch has this written out."""
        __tracebackhide__ = True
        try:
            answer = self.answer = self.original(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return answer

    def settle(self, answer: Any) -> None:
        """Note what torch's own code would return: it can be got once only."""
        self.answer, self.error = answer, None

    def reopen(self) -> None:
        """Note that what torch answered is not for the user, and another answer is to come."""
        self.answer, self.error, self.fallback = _NONE_YET, None, None

    def passes(self, error: BaseException) -> bool:
        """Tell whether an error that leaves our code is the caller's: torch's, the user's, or meant for the user."""
        is_theirs = error is self.error or not isinstance(error, Exception) or is_for_user(error)
        if is_theirs:
            self._forget()
        return is_theirs

    def conclude(self, *args: Any, **kwargs: Any) -> Any:
        """Return what torch has answered, or raise what it has raised, or call it."""
        __tracebackhide__ = True
        try:
            if self.error is not None:
                raise self.error
            if self.answer is not _NONE_YET:
                return self.answer
            return (self.fallback or self.original)(*args, **kwargs)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Let go of what came: an error would hold itself by its traceback, and with it the iterator."""
        self.answer = self.error = None


class Inherited:
    """A method that a class has of its base, whatever that is by then: others patch, too."""

    def __init__(self, owner: type, name: str) -> None:
        self.inherited, self.__name__ = getattr(owner, name), name
        self._super = functools.partial(super, owner)
        base = vars(owner.__mro__[1])
        self.owner = owner if name in base else None
        self.find = functools.partial(base.get, name)
        """For objects of this very class it returns what super() would find, and takes no call of Python's."""

    @rim
    def __call__(self, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return getattr(self._super(iterator), self.__name__)(*args, **kwargs)


def entry(ours: Callable[..., Any], needs: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make what replaces a method of torch's iterators: `ours(call, iterator, record, …)`, where `call` is torch's own.

    With `needs`, torch's own method runs alone as long as the record has nothing under that name.
    See NOTE [ Fail open ]. Four of these run for every batch, and each call in them is felt.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        base = original if isinstance(original, Inherited) else None
        owner, find = (base.owner, base.find) if base is not None else (None, None)
        ours_with = ours if _takes_more(ours) else _refuse

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # the user's traceback is about the user's code
            torchs = find() if find is not None and type(self) is owner else original
            if type(torchs) is not FunctionType:  # what is no function is not bound to the object that it is called for
                torchs = original
            record = self.__dict__.get(RECORD)
            if record is None or (needs is not None and not getattr(record, needs)):
                return torchs(self, *args, **kwargs)
            call = Call()
            call.original = torchs
            try:
                return ours_with(call, self, record, *args, **kwargs) if args or kwargs else ours(call, self, record)
            except BaseException as error:
                if call.passes(error):
                    raise
                let_go(record, error)
            return call.conclude(self, *args, **kwargs)

        _methods.add(method.__code__)
        return functools.wraps(original if base is None else base.inherited)(method)

    return make


def _takes_more(ours: Callable[..., Any]) -> bool:
    """Tell whether a replacement of ours takes arguments."""
    code = ours.__code__
    return code.co_argcount > 3 or bool(code.co_flags & inspect.CO_VARARGS)


def _refuse(call: Call, iterator: Any, record: Guarded, *args: Any, **kwargs: Any) -> Any:
    raise Unknown(f"{call.original.__name__} is called with arguments that torch does not have")


_methods: set[CodeType] = set()


def is_entry(method: Any) -> bool:
    """Tell whether a method is one that the guard has put in the place of torch's."""
    return getattr(method, "__code__", None) in _methods


def let_go(record: Guarded, error: BaseException) -> None:
    """Hand an iterator back to torch, and say so in a line; one whose workers are just being made, after that."""
    if record.is_in_making:
        record.mistake = record.mistake or Unknown(_reason(error))  # without the traceback, which holds the iterator
    else:
        hand_back([record], error)


def hand_back(records: Iterable[Guarded], error: BaseException) -> None:
    """Hand iterators back to torch for good, and say so in one line."""
    records = list(records)
    for record in records:
        try:
            record.hand_back()
        except Exception as second:  # noqa: BLE001 - the only thing left to do is to say it
            error = second
    kinds = " and this ".join(record.loader_type for record in records) or "DataLoader"
    say(f"this {kinds} works, but is not guarded", error)


# -- our own work inside of theirs -------------------------------------------------------------------


class Shield:
    """Keep a mistake of ours in a block from what is around it.

    With a record, its iterator is handed back to torch; without one, a line says `what` is not done.
    """

    __slots__ = ("_record", "_what")

    def __init__(self, what: str = "", record: Guarded | None = None) -> None:
        self._what, self._record = what, record

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or is_for_user(error):
            return False
        if self._record is not None:
            let_go(self._record, error)
        else:
            say(self._what, error)
        return True


shield = Shield


# -- words --------------------------------------------------------------------------------------------

_said: set[str] = set()


def say(what: str, error: BaseException) -> None:
    """Say in a line what is not guarded, and why; the same thing once."""
    line = f"{what} ({_reason(error)})"
    if line not in _said:
        _said.add(line)
        warn_limited(line)


def forget_said() -> None:
    """Say everything again, when the guard is turned on again."""
    _said.clear()


def _reason(error: BaseException) -> str:
    """Say what was wrong: what we do not know; or our mistake, with its place for a report."""
    if isinstance(error, Unknown):
        return str(error)
    try:
        words = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    except Exception:  # noqa: BLE001 - an error of the user's class, whose text raises
        words = type(error).__name__
    frames = traceback.extract_tb(traceback_of(error))
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    return f"{words}, in {own[-1].name} of {Path(own[-1].filename).name}" if own else words
