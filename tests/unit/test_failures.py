"""Errors of datasets whose classes are of another mind: they arrive as in plain torch, and the worker goes on."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard.traces import name_cells


class NoText(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("asked for its text")

    __repr__ = __str__


class NoReduce(ValueError):
    def __reduce__(self) -> Any:
        raise RuntimeError("asked to be pickled")

    __reduce_ex__ = None  # type: ignore[assignment]


class NoDict(ValueError):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("asked for its attributes")


class Slotted(ValueError):
    __slots__ = ("path",)


class NoNotes(ValueError):
    def add_note(self, note: str) -> None:
        raise RuntimeError("asked to take a note")


class OddNotes(ValueError):
    @property
    def __notes__(self) -> Any:
        raise RuntimeError("asked for its notes")


class NoSize:
    def __sizeof__(self) -> int:
        raise RuntimeError("asked for its size")


class Heavy(ValueError):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.part = NoSize()


class Exits(ValueError):
    def __str__(self) -> str:
        sys.exit(3)


class Two(ValueError):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first, second)


class Rude(ValueError):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


KINDS = [NoText, NoReduce, NoDict, Slotted, NoNotes, Heavy, Exits]


class Fails(list):
    def __init__(self, make: Any) -> None:
        super().__init__(range(8))
        self.make = make

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.make()
        return index


def caught_from(make: Any, workers: int) -> type[BaseException] | None:
    iterator = iter(DataLoader(Fails(make), num_workers=workers))
    try:
        for _ in iterator:
            pass
    except BaseException as error:
        return type(error)
    finally:
        getattr(iterator, "_shutdown_workers", lambda: None)()  # plain torch leaves them to the collector
    return None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_type_whatever_its_class_does(kind: type[Exception], workers: int) -> None:
    def make() -> Exception:
        return kind("mine")

    plain = caught_from(make, workers)
    with lg.guard():
        assert caught_from(make, workers) is plain is kind


@pytest.mark.parametrize("kind", [OddNotes, Rude])
def test_what_torch_itself_cannot_write_down_is_an_error_all_the_same(kind: type[Exception]) -> None:
    """Plain torch's worker dies of it, and may take its kernel along."""
    with lg.guard():
        assert caught_from(lambda: kind("mine"), 0) is kind
        # of the worker's death, or of a batch before it, which had not been handed over
        assert caught_from(lambda: kind("mine"), 1) in (RuntimeError, FileNotFoundError, ConnectionResetError)


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_that_want_more_and_groups(workers: int) -> None:
    group: Any = getattr(builtins, "ExceptionGroup", Two)  # since Python 3.11
    for make in (
        lambda: Two(1, 2),
        lambda: group("mine", [ValueError(1)]),
        lambda: UnicodeDecodeError("a", b"", 0, 1, "x"),
    ):
        plain = caught_from(make, workers)
        with lg.guard():
            assert caught_from(make, workers) in (plain, type(make())), "its own type is better"


def test_cells_are_named_in_texts_of_workers() -> None:
    def place_of(file: str) -> str:
        return "Cell In[2]" if file == "/tmp/ipykernel_1/403.py" else file

    text = 'File "/tmp/ipykernel_1/403.py", line 11, in f\nat (/tmp/ipykernel_1/403.py:12), not /lib/x.py:13 at 10:30'
    assert name_cells(text, place_of) == "Cell In[2], line 11, in f\nat (Cell In[2]:12), not /lib/x.py:13 at 10:30"
