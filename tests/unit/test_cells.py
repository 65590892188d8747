"""Which loaders end with a cell: the table of the README, row by row."""

from __future__ import annotations

import threading

import pytest

from jupyter_loaderguard.ipython.cells import ERROR, INTERRUPT, OK, doomed
from jupyter_loaderguard.ipython.magics import guard_cell
from jupyter_loaderguard.registry import Cell, Record, registry

CELL = Cell(2, threading.get_ident())
EARLIER = Cell(1, threading.get_ident())


class Thing:
    """Stands for an iterator."""


def record(**traits: object) -> Record:
    settings = {
        "registry": registry, "loader_id": 1, "control": None, "iterator": Thing, "loader": Thing, "loader_type": "DataLoader",
        "dataset": "Quick", "is_persistent": False, "cell": CELL, "thread": CELL.thread, "work": frozenset(), "started": 0.0,
        "workers": [object()], "last_cell": CELL, "is_in_epoch": True,
    }  # fmt: skip
    return Record(**{**settings, **traits})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("traits", "bound", "error", "interrupt"),
    [
        ({}, False, True, True),
        ({}, True, False, True),
        ({"is_persistent": True}, False, False, True),
        ({"is_persistent": True, "is_broken": True}, False, True, True),
        ({"cell": EARLIER}, False, False, True),
        ({"cell": EARLIER, "is_broken": True}, False, True, True),
        ({"cell": EARLIER, "is_in_epoch": False}, False, False, False),
        ({"cell": EARLIER, "last_cell": EARLIER}, False, False, False),
        ({"cell": EARLIER, "last_cell": None, "is_persistent": True}, False, False, False),
        ({"cell": None, "last_cell": None}, False, False, False),
        ({"thread": threading.main_thread().ident + 1}, False, True, True),
        ({"workers": []}, False, False, False),
    ],
)  # fmt: skip
def test_the_table(traits: dict[str, object], bound: bool, error: bool, interrupt: bool) -> None:
    one = record(**traits)
    for outcome, expected in ((OK, False), (ERROR, error), (INTERRUPT, interrupt)):
        assert doomed([one], CELL, outcome, lambda _: bound) == ([one] if expected else []), outcome


def test_a_loader_that_another_live_thread_iterates_survives_an_error() -> None:
    release = threading.Event()

    def iterate() -> None:
        release.wait()

    thread = threading.Thread(target=iterate)
    thread.start()
    try:
        one = record(thread=thread.ident, work=frozenset([iterate.__code__]))
        assert doomed([one], CELL, ERROR, lambda _: False) == []
        assert doomed([one], CELL, INTERRUPT, lambda _: False) == [one]
        idle = record(thread=thread.ident, work=frozenset([record.__code__]))
        assert doomed([idle], CELL, ERROR, lambda _: False) == [idle], "the thread does something else by now"
    finally:
        release.set()
        thread.join()


BEGIN = "get_ipython().run_line_magic('guarded_loader', {!r})"


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("x = 1\n", ["x = 1\n"]),
        ("%%time\nx = 1\n", ["%%time\n", "x = 1\n"]),
        ("%%guarded_loaders\nx = 1\n", ["%%guarded_loaders\n", "x = 1\n"]),
        ("%%guarded_loader?\n", ["%%guarded_loader?\n"]),
        ("%%guarded_loader\nx = 1\n", [BEGIN.format("") + "\n", "x = 1\n"]),
        ("%%guarded_loader --grace 1 \n\nx\n", [BEGIN.format("--grace 1") + "\n", "\n", "x\n"]),
        (
            "%%guarded_loader\n\n%%time\nx\n",
            [BEGIN.format("") + "\n", "\n", "get_ipython().run_cell_magic('time', '', 'x\\n')\n"],
        ),
        (
            "%%guarded_loader\n# a remark\nfrom __future__ import annotations  # why\nx\n",
            ["\n", "# a remark\n", f"from __future__ import annotations; {BEGIN.format('')}\n", "x\n"],
        ),
    ],
)
def test_the_first_line_becomes_the_begin_of_the_guard_and_line_numbers_stay(cell: str, lines: list[str]) -> None:
    assert guard_cell(cell.splitlines(keepends=True)) == lines
