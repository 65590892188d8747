"""Workers that start where pickle alone would fail: SCENARIOS part D, under spawn and forkserver."""

from __future__ import annotations

import pytest

from .driver import Kernel

DATASETS = """
import collections, dataclasses, enum, functools, io, random, sqlite3, threading
import h5py, numpy
from torch.utils.data import Dataset, IterableDataset, Sampler

SCALE = 3
TABLE = torch.arange(100)

def scaled(value):
    return value * SCALE

@dataclasses.dataclass
class Sample:
    value: int
    def doubled(self): return 2 * self.value

@dataclasses.dataclass
class Batch:
    values: list
    kind: str = "batch"

class Key:
    def __init__(self, number): self.number = number

class Kind(enum.Enum):
    EVEN = 0
    ODD = 1

class Base(Dataset):
    def __init__(self, transform=None): self.transform = transform or scaled
    def __len__(self): return 12

class Images(Base):
    def __getitem__(self, index):
        return self.transform(int(TABLE[index])) + int(numpy.sqrt(0))

class Sampled(Base):
    def __getitem__(self, index):
        return Sample(index)

class ByKey(Base):
    def __getitem__(self, key):
        return key.number

class Kinds(Base):
    def __getitem__(self, index):
        return Kind(index % 2)
"""


@pytest.fixture(params=["spawn", "forkserver"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    kernel.ok(DATASETS)
    return kernel


def load(kernel: Kernel, method: str, loader: str, options: str = "") -> object:
    """Return the batches of a loader."""
    return kernel.ok(
        f"[batch for batch in DataLoader({loader}, num_workers=2, multiprocessing_context={method!r}{options})]"
    ).value


def test_d1_a_dataset_of_the_notebook_with_its_globals_and_imports(notebook: Kernel, method: str) -> None:
    assert notebook.ok(
        f"[batch.tolist() for batch in DataLoader(Images(), batch_size=4, num_workers=2, multiprocessing_context={method!r})]"
    ).value == [[0, 3, 6, 9], [12, 15, 18, 21], [24, 27, 30, 33]]


def test_d2_lambdas_local_functions_and_partials(notebook: Kernel, method: str) -> None:
    notebook.ok("def make(step):\n    def local(value): return value + step\n    return local")
    shapes = "Images(lambda value: -value)", "Images(make(5))", "Images(functools.partial(pow, 2))"
    got = [load(notebook, method, shape, ", batch_size=None") for shape in shapes]
    assert got[0] == [-value for value in range(12)]
    assert got[1] == [value + 5 for value in range(12)]
    assert got[2] == [2**value for value in range(12)]


def test_d2_collate_fn_and_worker_init_fn_of_the_notebook(notebook: Kernel, method: str) -> None:
    notebook.ok(
        "marks = {}\ndef init(worker): marks['worker'] = worker\ndef collate(samples): return sum(samples), marks['worker']"
    )
    got = load(notebook, method, "Images()", ", batch_size=4, collate_fn=collate, worker_init_fn=init")
    assert got == [(18, 0), (66, 1), (114, 0)]


def test_d1_results_come_back_as_the_notebooks_own_classes(notebook: Kernel, method: str) -> None:
    options = f"batch_size=4, num_workers=1, multiprocessing_context={method!r}"
    notebook.ok(f"batches = list(DataLoader(Sampled(), {options}, collate_fn=lambda samples: Batch(samples)))")
    assert (
        notebook.ok(
            "[type(one) is Batch and all(type(s) is Sample and s.doubled() == 2 * s.value for s in one.values) for one in batches]"
        ).value
        == [True] * 3
    )
    notebook.ok(f"kinds = list(DataLoader(Kinds(), {options}, collate_fn=list))")
    assert notebook.ok("kinds[0] == [Kind.EVEN, Kind.ODD, Kind.EVEN, Kind.ODD]").value is True


def test_d1_keys_of_a_sampler_of_the_notebook(notebook: Kernel, method: str) -> None:
    notebook.ok("keys = [Key(3), Key(1), Key(2)]")
    assert notebook.ok(
        f"[int(b) for b in DataLoader(ByKey(), sampler=keys, num_workers=1, multiprocessing_context={method!r})]"
    ).value == [3, 1, 2]


def test_d1_errors_of_the_notebook_keep_their_type(notebook: Kernel, method: str) -> None:
    notebook.ok(
        "class Corrupt(Exception): pass\n"
        "class Bad(Base):\n    def __getitem__(self, index):\n        if index == 5: raise Corrupt('at five')\n        return index"
    )
    reply = notebook.run(f"list(DataLoader(Bad(), num_workers=1, multiprocessing_context={method!r}))")
    assert reply.ename == "Corrupt"
    assert "sample 5" in reply.traceback


@pytest.mark.parametrize(
    ("make", "path"),
    [
        ("open('/dev/null')", "dataset.transform.reader"),
        ("threading.Lock()", "dataset.transform.reader"),
        ("(number for number in range(3))", "dataset.transform.reader"),
        ("sqlite3.connect(':memory:')", "dataset.transform.reader"),
        ("h5py.File('none', 'w', driver='core', backing_store=False)", "dataset.transform.reader"),
        ("{'deep': [1, open('/dev/null')]}", "dataset.transform.reader['deep'][1]"),
    ],
)
def test_d3_what_can_never_travel_is_refused_by_its_path(notebook: Kernel, make: str, path: str) -> None:
    notebook.ok(
        "class Reads:\n    def __init__(self): self.reader = " + make + "\n    def __call__(self, value): return value"
    )
    reply = notebook.run(
        "loader = DataLoader(Images(Reads()), num_workers=2, multiprocessing_context='spawn')\nnext(iter(loader))"
    )
    assert reply.status == "error"
    assert f"{path} is a " in reply.traceback, reply.traceback
    assert "no worker was started" in reply.traceback
    assert notebook.children() == []


def test_d3_a_global_of_a_function_is_found_too(notebook: Kernel) -> None:
    notebook.ok("log = open('/dev/null', 'w')\ndef noisy(value):\n    log.write(str(value))\n    return value")
    reply = notebook.run("next(iter(DataLoader(Images(noisy), num_workers=1, multiprocessing_context='spawn')))")
    assert "log is a _io.TextIOWrapper" in reply.traceback
    notebook.ok("log.close()")


def test_d5_the_traceback_of_a_worker_that_cannot_start_is_in_the_cell(notebook: Kernel, method: str) -> None:
    notebook.ok(
        "def fail(): raise OSError('the disk is not mounted here')\n"
        "class Mounts(Base):\n"
        "    def __getitem__(self, index): return index\n"
        "    def __reduce__(self): return fail, ()"
    )
    reply = notebook.run(
        f"next(iter(DataLoader(Mounts(), num_workers=1, multiprocessing_context={method!r})))", timeout=90
    )
    assert reply.ename == "RuntimeError"
    assert "exited unexpectedly" in reply.evalue
    assert "it could not start" in reply.traceback
    assert "OSError: the disk is not mounted here" in reply.traceback


def test_nothing_travels_by_value_if_it_is_turned_off(notebook: Kernel) -> None:
    notebook.ok("%config LoaderGuard.pickle_by_value = False")
    reply = notebook.run("next(iter(DataLoader(Images(), num_workers=1, multiprocessing_context='spawn')))", timeout=90)
    notebook.ok("%config LoaderGuard.pickle_by_value = True")
    assert "Can't get attribute 'Images'" in reply.traceback


def test_nothing_of_the_users_is_modified(notebook: Kernel) -> None:
    notebook.ok(
        "dataset = Images()\n"
        "def state():\n"
        "    own = {name: value for name, value in vars(Images).items() if name != '__slotnames__'}  # pickle's own note\n"
        "    return own, dict(vars(dataset)), Images.__module__, scaled.__module__, dict(vars(scaled))\n"
        "before = state()"
    )
    load(notebook, "spawn", "dataset", ", batch_size=None")
    assert notebook.ok("before == state()").value is True


def test_persistent_workers_and_iterable_datasets(notebook: Kernel, method: str) -> None:
    notebook.ok(
        "class Stream_(IterableDataset):\n    def __iter__(self): return iter(range(SCALE))\n"
        f"loader = DataLoader(Stream_(), batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context={method!r})"
    )
    assert notebook.ok("[list(loader), list(loader)]").value == [[0, 1, 2], [0, 1, 2]]


def test_an_iterator_that_a_worker_collects_says_nothing(notebook: Kernel) -> None:
    """Plain torch says "Exception ignored in … can only test a child process" there."""
    notebook.ok(
        "import gc\n"
        "class Collects(Base):\n    def __getitem__(self, index):\n        gc.collect()\n        return index\n"
        "gc.disable()\nit = iter(DataLoader(Images(), num_workers=1)); next(it)\nring = [it]; ring.append(ring)\ndel it, ring"
    )
    reply = notebook.ok("n = sum(1 for batch in DataLoader(Collects(), num_workers=2))")
    notebook.ok("gc.enable(); n = gc.collect()")
    assert (reply.stdout, reply.stderr) == ("", "")


def test_cached_functions_properties_and_new_types(notebook: Kernel, method: str) -> None:
    notebook.ok(
        "import typing\n"
        "@functools.lru_cache(None)\n"
        "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "UserId = typing.NewType('UserId', int)\n"
        "@dataclasses.dataclass\nclass User:\n    number: UserId\n"
        "class Cached(Base):\n"
        "    def __init__(self): super().__init__(); self.user = User(UserId(3))\n"
        "    @functools.cached_property\n    def table(self): return [fib(n) for n in range(12)]\n"
        "    @functools.lru_cache(maxsize=4)\n    def load(self, index): return self.table[index] + self.user.number\n"
        "    def __getitem__(self, index): return self.load(index)"
    )
    fib = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    assert load(notebook, method, "Cached()", ", batch_size=None") == [number + 3 for number in fib]


def test_batches_of_a_nested_class_and_of_one_called_main(notebook: Kernel, method: str) -> None:
    notebook.ok(
        "class Outer:\n    class Inner:\n        def __init__(self, value): self.value = value\n"
        "class main(Outer.Inner): pass\n"
        "class Nested(Base):\n    def __getitem__(self, index): return (Outer.Inner if index % 2 else main)(index)"
    )
    notebook.ok(f"got = list(DataLoader(Nested(), batch_size=None, num_workers=1, multiprocessing_context={method!r}))")
    assert notebook.ok("[type(one) is (Outer.Inner if one.value % 2 else main) for one in got]").value == 12 * [True]


def test_d3_an_attribute_of_a_class_is_found(notebook: Kernel) -> None:
    notebook.ok(
        "class Guarded(Dataset):\n    lock = threading.Lock()\n    def __init__(self): super().__init__()\n"
        "    def __len__(self): return 3\n    def __getitem__(self, index): return index"
    )
    reply = notebook.run("next(iter(DataLoader(Guarded(), num_workers=1, multiprocessing_context='spawn')))")
    assert "Guarded.lock is a _thread.lock" in reply.traceback


def test_a_worker_holds_its_dataset_once(notebook: Kernel) -> None:
    notebook.ok(
        "import psutil\n"
        "class Large(Base):\n    def __init__(self): super().__init__(); self.table = numpy.ones(25_000_000)\n"
        "    def __getitem__(self, index): return psutil.Process().memory_info().rss\n"
        "class Small(Large):\n    def __init__(self): Base.__init__(self)"
    )
    large, small = (load(notebook, "spawn", one, ", batch_size=None")[-1] for one in ("Large()", "Small()"))  # type: ignore[index]
    assert large - small < 300e6
