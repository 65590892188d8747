"""B9, C1: an error of the user's keeps its type and its traceback, and a note says which worker and which sample."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .driver import Kernel, Reply, wait_until

SETUP = """
from tests.programs import failures
import multiprocessing
multiprocessing.set_forkserver_preload(['torch', 'tests.programs.failures'])
"""


@pytest.fixture(scope="module")
def _kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.ok(SETUP)
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(_kernel: Kernel) -> Iterator[Kernel]:
    yield _kernel
    wait_until(lambda: not _kernel.children(), what=f"the end of {_kernel.children()}")


def plain(reply: Reply) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", reply.traceback)


def note(reply: Reply) -> str:
    (line,) = re.findall(r"^loaderguard: .*$", plain(reply), re.M)
    return re.sub(r"pid \d+", "pid N", line)


CASES = {
    "getitem": ("failures.Raises()", "batch_size=4", "ValueError", "worker 1 (pid N), batch 1, sample 5."),
    "unbatched": ("failures.Raises()", "batch_size=None", "ValueError", "worker 1 (pid N), batch 5, sample 5."),
    "key": ("failures.Raises(KeyError)", "batch_size=4", "KeyError", "worker 1 (pid N), batch 1, sample 5."),
    "collate": (
        "failures.Raises(at=None)",
        "batch_size=4, collate_fn=failures.broken_collate",
        "ZeroDivisionError",
        "worker 1 (pid N), batch 1, in collate_fn of samples 4, 5, 6, 7.",
    ),
    "getitems": ("failures.RaisesWhole()", "batch_size=4", "ValueError", "worker 1 (pid N), batch 1, sample 5."),
    "iterable": (
        "failures.RaisesInStream()",
        "batch_size=2",
        "ValueError",
        "worker 0 (pid N), batch 4, sample 5 of its stream.",
    ),
    "init": (
        "failures.Raises(at=None)",
        "worker_init_fn=failures.broken_init",
        "LookupError",
        "worker 0 (pid N), while it started: in worker_init_fn, or in the dataset's __iter__ before its first sample.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_c1_the_note_names_worker_and_sample(kernel: Kernel, method: str, case: str) -> None:
    dataset, options, kind, said = CASES[case]
    reply = kernel.run(
        f"for batch in DataLoader({dataset}, num_workers=2, multiprocessing_context={method!r}, {options}): pass"
    )
    assert reply.ename == kind
    assert note(reply) == f"loaderguard: {said}"
    assert "failures.py" in reply.evalue, "torch's text with the worker's own traceback"


def test_c1_without_workers(kernel: Kernel) -> None:
    reply = kernel.run("for batch in DataLoader(failures.Raises(), batch_size=4): pass")
    assert (reply.ename, reply.evalue) == ("ValueError", "sample 5 is broken")
    assert note(reply) == "loaderguard: batch 1, sample 5."


@pytest.mark.parametrize("workers", [0, 2])
def test_c1_an_error_of_the_sampler(kernel: Kernel, workers: int) -> None:
    reply = kernel.run(
        f"for batch in DataLoader(Quick(), batch_sampler=failures.BrokenSampler(), num_workers={workers}): pass"
    )
    assert (reply.ename, reply.evalue) == ("OSError", "no more keys")
    assert note(reply) == "loaderguard: raised by the sampler, when it was asked for the samples of batch 3."


def test_c1_a_type_that_wants_more_than_a_message_is_kept(kernel: Kernel, method: str) -> None:
    reply = kernel.ok(
        "try:\n"
        f"    for batch in DataLoader(failures.Decodes(), num_workers=2, multiprocessing_context={method!r}): pass\n"
        "except failures.DecodeError as error:\n"
        "    caught = error\n"
        "(caught.path, caught.code, 'in __getitem__' in str(caught), caught.__notes__)"
    )
    path, code, has_traceback, notes = reply.value  # type: ignore[misc]
    assert (path, code, has_traceback) == ("5.jpg", 42, True)
    assert re.fullmatch(r"loaderguard: worker 1 \(pid \d+\), batch 5, sample 5\.", notes[0])
    kernel.ok("del caught")


def test_c1_stop_iteration_and_ends_get_no_note(kernel: Kernel) -> None:
    assert kernel.ok("len(list(DataLoader(Quick(8), num_workers=2)))").value == 8
    assert kernel.ok("sum(1 for batch in DataLoader(Stream(8), num_workers=2))").value == 12


@pytest.mark.parametrize("options", ["num_workers=2", "num_workers=2, multiprocessing_context='spawn'", ""])
def test_b9_none_is_explained(kernel: Kernel, options: str) -> None:
    reply = kernel.run(f"for batch in DataLoader(failures.ReturnsNone(), batch_size=4, {options}): pass")
    assert reply.ename in ("TypeError", "AttributeError")
    assert "in collate_fn of samples 4, 5, 6, 7." in note(reply)
    said = re.search(
        r"ReturnsNone\.__getitem__ \(\S*tests/programs/failures\.py:(\d+)\) returned None for sample 5: "
        r"it reaches its end without a return, or an except in it swallows an error\.",
        plain(reply),
    )
    assert said, plain(reply)


def test_b9_none_that_a_collate_fn_accepts_is_nobodys_business(kernel: Kernel) -> None:
    kernel.ok(
        "n = sum(len(batch) for batch in DataLoader(failures.ReturnsNone(), batch_size=4, num_workers=2, "
        "collate_fn=failures.as_list))"
    )
    assert kernel.ok("n").value == 64


def test_an_error_that_the_user_catches_and_goes_on(kernel: Kernel) -> None:
    """torch lets a loop go on after an error in a sample; so do we."""
    reply = kernel.ok(
        "it, seen, failed = iter(DataLoader(failures.Raises(), num_workers=2)), 0, 0\n"
        "while True:\n"
        "    try: next(it); seen += 1\n"
        "    except ValueError: failed += 1\n"
        "    except StopIteration: break\n"
        "(seen, failed)"
    )
    assert reply.value == (63, 1)
    kernel.ok("del it")


NONE = """
class Forgetful(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index != 5: return index
"""


@pytest.mark.parametrize(
    "options", ["num_workers=0", "num_workers=1", "num_workers=1, multiprocessing_context='spawn'"]
)
def test_a_note_names_a_cell_as_ipython_does(kernel: Kernel, options: str) -> None:
    kernel.ok(NONE)
    number = kernel.ok("len(In) - 2").value
    reply = kernel.run(f"list(DataLoader(Forgetful(), batch_size=4, {options}))")
    assert f"Forgetful.__getitem__ (Cell In[{number}]:3) returned None for sample 5" in plain(reply)


def test_an_error_that_cannot_be_shown_is_the_users_own(kernel: Kernel) -> None:
    kernel.ok(
        "class Mute(ValueError):\n    def __str__(self): raise RuntimeError('asked')\n"
        "class Hides(list):\n    def __getitem__(self, index): raise Mute()"
    )
    for workers in (0, 1):
        kernel.ok(
            f"try: list(DataLoader(Hides(range(4)), num_workers={workers}))\n"
            "except Mute as error: caught = error\nassert type(caught) is Mute"
        )
    assert kernel.workers() == []
