"""How a loader's objects travel to workers that are not forked."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard.worker import by_value
from tests.programs.datasets import Quick


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: a worker cannot import `__main__`."""
    monkeypatch.setattr(by_value, "can_import_main", lambda: False)


SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset
import jupyter_loaderguard as lg

class Sample:
    def __init__(self, value): self.value = value

class Own(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return Sample(index)

def collate(samples): return samples

if __name__ == "__main__":
    with lg.guard():
        loader = DataLoader(Own(), batch_size=2, num_workers=1, collate_fn=collate, multiprocessing_context="spawn")
        print([[type(one) is Sample and one.value for one in batch] for batch in loader])
"""


def test_a_script_goes_the_ordinary_way(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "[[0, 1], [2, 3]]\n", done.stderr


def test_what_pickle_handles_goes_the_ordinary_way(notebook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value, "_pack_by_value", lambda *given: pytest.fail("by value"))
    data = by_value.pack({"dataset": Quick(3), "collate_fn": None, "init_fn": torch.is_tensor})
    assert by_value.unpack(data)["dataset"].length == 3


def test_what_pickle_cannot_send_goes_by_value(notebook: None) -> None:
    step = 3
    assert by_value.unpack(by_value.pack(lambda value: value + step))(4) == 7


def test_two_objects_that_share_something_still_do(notebook: None) -> None:
    table = [1, 2]
    first, second = by_value.unpack(by_value.pack({"dataset": lambda: table, "collate_fn": lambda: table})).values()
    assert first() is second()


def test_a_text_that_looks_like_a_name_does_no_harm(notebook: None) -> None:
    assert by_value.unpack(by_value.pack(["__main__"])) == ["__main__"]


def test_an_open_file_is_refused_and_not_read(notebook: None) -> None:
    with open(__file__) as file, pytest.raises(TypeError):
        by_value.pack({"dataset": lambda: file})


def test_numbers_and_texts_are_not_wrapped() -> None:
    for keys in ([1, 2], ["a"], 3, "b"):
        assert by_value.carry(keys) is keys
    carried = by_value.carry([("a", 1)])
    assert pickle.loads(pickle.dumps(carried)) == [("a", 1)]


def test_the_path_to_what_cannot_travel(notebook: None) -> None:
    class Reader:
        def __init__(self) -> None:
            self.parts = {"log": [io.StringIO("travels"), threading.Lock()]}

    said = by_value.explain_refusal({"dataset": Reader(), "collate_fn": None})
    assert "dataset.parts['log'][1] is a _thread.lock" in said


class HasShared(Quick):
    """Tells whether its table arrived in shared memory."""

    table = torch.zeros(1000)

    def __init__(self) -> None:
        super().__init__(2)
        self.own = torch.zeros(1000)

    def __getitem__(self, index: int) -> bool:
        return self.own.is_shared()


def test_tensors_still_travel_in_shared_memory(notebook: None) -> None:
    dataset = HasShared()
    dataset.transform = lambda value: value  # type: ignore[attr-defined] # so that it goes by value
    with lg.guard():
        loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
        assert list(loader) == [True, True]


# -- bulk -------------------------------------------------------------------------------------------


class Large:
    """Holds large things, some of them twice."""

    def __init__(self) -> None:
        self.array = numpy.arange(100_000)
        self.again = self.array
        self.named = numpy.array([Quick, len] * 500, dtype=object)
        self.blobs = [bytes([number]) * 5000 for number in range(100)]
        self.numbers, self.pairs = list(range(10_000)), {number: str(number) for number in range(1000)}
        self.kinds = [Quick] * 100
        self.text = "__main__" * 1000
        self.deep = [[1, [2.0] * 100]] * 100


@pytest.mark.parametrize("is_by_value", [True, False])
def test_what_is_large_is_left_to_multiprocessing(notebook: None, is_by_value: bool) -> None:
    held, bulk = Large(), list[Any]()
    function = (lambda: held) if is_by_value else None
    data = by_value.pack({"dataset": held, "collate_fn": function}, is_by_value, bulk)
    assert len(data) < 20_000, "what is packed would be there twice"
    assert any(one is held.array for one in bulk)
    packed = by_value.PackedParcel(*pickle.loads(pickle.dumps((data, bulk))))
    back = packed.open()["dataset"]
    assert (back.array == held.array).all()
    assert back.again is back.array
    assert list(back.named) == list(held.named)
    assert back.deep[0] is back.deep[99]
    for name in ("blobs", "numbers", "pairs", "kinds", "text", "deep"):
        assert getattr(back, name) == getattr(held, name)


def test_a_name_in_bulk_is_no_name_of_the_notebook(notebook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value, "_pack_by_value", lambda *given: pytest.fail("by value"))
    bulk: list[Any] = []
    assert by_value.unpack(by_value.pack({"dataset": ["__main__"] * 100}, bulk=bulk), bulk) == {
        "dataset": ["__main__"] * 100
    }


def test_the_users_objects_are_pickled_once(notebook: None) -> None:
    counted: list[int] = []

    class Counted(Quick):
        def __reduce__(self) -> Any:
            counted.append(1)
            return Quick, (3,)

    by_value.pack({"dataset": Counted(3)}, bulk=[])
    assert counted == [1]
