"""The doctor finds what is wrong, and nothing else. Real loaders, real workers."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

import jupyter_loaderguard as lg
from jupyter_loaderguard.doctor.checks import CODES, LOADER_CHECKS, MACHINE_CHECKS
from jupyter_loaderguard.doctor.checks.handles import _descriptors_of
from jupyter_loaderguard.doctor.checks.memory import MemoryCheck
from jupyter_loaderguard.doctor.checks.thread_pools import _FIXES
from jupyter_loaderguard.lending.batch import count_storages
from jupyter_loaderguard.model import Finding, Findings
from jupyter_loaderguard.views import html, text
from tests.programs.datasets import Quick, Slow, Stuck
from tests.programs.healthy import HEALTHY, Caches, Stream
from tests.programs.ill import ILL, Ill, SharesFile, _rows

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
ROOM = Path(lg.__file__).parent / "doctor"


def _words(found: list[Finding]) -> str:
    return " ".join(f"{one.title} {one.evidence}" for one in found)


# -- what is found, and what is not ---------------------------------------------------------------


@pytest.mark.quiet  # the doctor has 5 s, and a spawned worker imports torch first
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loader_has_no_findings(name: str, tmp_path: Path) -> None:
    loader = HEALTHY[name](tmp_path)
    found = lg.doctor(loader)
    assert found == [], found
    assert re.match(r"ran [\d,]+ batch", found.ran), found.ran


@pytest.mark.parametrize("ill", ILL, ids=lambda ill: f"{ill.code} {ill.name}")
def test_an_ill_loader_has_this_finding_and_no_other(ill: Ill, tmp_path: Path) -> None:
    found = lg.doctor(ill.make(tmp_path))
    assert [one.code for one in found] == [ill.code], (found, found.ran)
    for word in ill.words:
        assert word in _words(found)
    assert found[0].severity in ("error", "warning")
    assert found[0].fix


def test_every_code_of_loaders_has_an_ill_one() -> None:
    """LG102 needs a GPU, and has a test of its own."""
    assert {ill.code for ill in ILL} | {"LG102"} == {code for code in CODES if code >= "LG100"}


def test_e2_cuda_before_fork_is_a_note_while_workers_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    (finding,) = lg.doctor(DataLoader(Quick(64), num_workers=2))
    assert (finding.code, finding.severity) == ("LG102", "note")
    assert "2 workers start by fork" in finding.evidence
    assert lg.doctor(DataLoader(Quick(64), num_workers=1, multiprocessing_context="forkserver")) == []
    found = lg.doctor(DataLoader(Quick(64)))
    assert found == []
    assert found.ran.startswith("not run: CUDA")


class Grows(Slow):
    """Keeps 2 MB per sample, in the worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept = [*getattr(self, "kept", []), bytearray(os.urandom(1 << 16)) * 32]
        return super().__getitem__(index)


def test_e4_workers_that_use_up_the_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is told to have 100 MB: filling a real one would end other processes."""
    from jupyter_loaderguard import machine, usage

    def memory() -> tuple[int, int]:
        workers = [child.pid for child in psutil.Process().children() if child.name().startswith("pt_data_work")]
        return 10**9, max(0, 10**8 - sum(usage.private_bytes(pid) for pid in workers))

    monkeypatch.setattr(machine, "_memory", memory)
    found = lg.doctor(DataLoader(Grows(), num_workers=2))
    assert [(one.code, one.severity) for one in found] == [("LG105", "error")], found.ran
    assert "2 workers held" in found[0].evidence
    assert "100 MB were available" in found[0].evidence


def test_e3_the_position_in_a_shared_file_is_put_back(tmp_path: Path) -> None:
    dataset = SharesFile(_rows(tmp_path))
    dataset.reader.file.seek(640)
    before = dataset.reader.file.read(8)
    position = os.lseek(dataset.reader.file.fileno(), 0, os.SEEK_CUR)
    assert [one.code for one in lg.doctor(DataLoader(dataset, num_workers=2))] == ["LG103"]
    assert os.lseek(dataset.reader.file.fileno(), 0, os.SEEK_CUR) == position
    dataset.reader.file.seek(640)
    assert dataset.reader.file.read(8) == before
    dataset.reader.file.close()


def test_e3_descriptors_that_come_and_go_hide_none(tmp_path: Path) -> None:
    """Once the kernel's own descriptor was overlooked, and a shared database taken for one that workers opened."""
    path, is_over = tmp_path / "rows", threading.Event()
    path.write_bytes(b"rows")

    def churn() -> None:
        while not is_over.is_set():
            for fd in [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]:
                os.close(fd)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        with path.open("rb"):
            looks = [_descriptors_of(str(path.resolve()), "self") for _ in range(2000)]
    finally:
        is_over.set()
        thread.join()
    assert len(looks[0]) == 1
    assert all(look == looks[0] for look in looks)


def test_e5_the_growth_of_copied_objects_is_measured_for_each_worker(tmp_path: Path) -> None:
    (ill,) = [one for one in ILL if one.code == "LG106" and one.name == "a list of strings"]
    (finding,) = lg.doctor(ill.make(tmp_path))
    assert re.search(r"Worker \d grew by .* samples, \d+(\.\d+)? [kM]B per 1,000", finding.evidence), finding.evidence


@pytest.mark.parametrize("workers", [0, 2])
def test_e6_what_collate_copies_is_not_claimed(workers: int) -> None:
    data = TensorDataset(torch.rand(64, 4).share_memory_())
    assert lg.doctor(DataLoader(data, batch_size=4, num_workers=workers)) == []


def test_views_are_not_counted_as_the_whole_that_they_are_a_part_of() -> None:
    """Each batch is a view of a tensor that is half as large as /dev/shm, and is never touched here."""
    shm = os.statvfs("/dev/shm")
    rows = torch.empty(shm.f_blocks * shm.f_frsize // 2 // 1024, 1024, dtype=torch.uint8)
    assert count_storages([rows[0], rows[1:3]]) == (1, 3072)


def test_e7_running_out_of_descriptors_in_the_run_is_no_other_error() -> None:
    code = (
        "import resource, torch\n"
        "from torch.utils.data import DataLoader\n"
        "import jupyter_loaderguard as lg\n"
        "from tests.programs.ill import ManyTensors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "found = lg.doctor(DataLoader(ManyTensors(), num_workers=2))\n"
        "print([(one.code, one.severity) for one in found], 'limit is 100' in found[0].evidence)"
    )
    assert _python(code) == "[('LG108', 'error')] True"


def test_a_loader_that_fits_into_a_small_shm_is_healthy_and_one_that_does_not_is_not() -> None:
    code = (
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "import jupyter_loaderguard as lg\n"
        "from tests.programs.datasets import Big, Quick\n"
        "print([one.code for one in lg.doctor()])\n"
        "print([one.code for one in lg.doctor(DataLoader(Quick(64), num_workers=2))])\n"
        "print([one.code for one in lg.doctor(DataLoader(Big(64), batch_size=8, num_workers=2))])\n"
        "unshared = DataLoader(Big(64), batch_size=8, num_workers=2, collate_fn=torch.stack)\n"
        "print([one.code for one in lg.doctor(unshared)])"
    )
    wrapper = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    assert _python(code, wrapper) == "['LG001']\n[]\n['LG110']\n['LG110']"


def _python(code: str, wrapper: tuple[str, ...] = ()) -> str:
    done = subprocess.run([*wrapper, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


# -- fixes that can be typed ----------------------------------------------------------------------


class Counter:
    """Something that a sampler holds."""

    def __init__(self) -> None:
        self.epochs = 0


class Keyed(Quick):
    """Has keys of any kind, and fails with each."""

    def __getitem__(self, index: object) -> torch.Tensor:
        raise ValueError("broken")


@pytest.mark.parametrize("key", [(1, 2), "a, b. c", -7, 1.5, ("x", (1, None))])
def test_the_key_of_a_broken_sample_can_be_typed(key: object) -> None:
    loader = DataLoader(Keyed(), sampler=[key], num_workers=1)
    (finding,) = lg.doctor(loader)
    assert finding.fix == f"See it alone: `loader.dataset[{key!r}]`"


@pytest.mark.parametrize("key", [tuple(range(99)), np.datetime64(3, "D"), Counter])
def test_a_key_that_cannot_be_typed_is_not_code(key: object) -> None:
    (finding,) = lg.doctor(DataLoader(Keyed(), sampler=[key], num_workers=1))
    assert "loader.dataset[" not in finding.fix
    assert _code(finding) == "for _ in loader: pass"


def _code(finding: Finding) -> str:
    """Return what a fix puts between backticks."""
    return re.findall("`(.+?)`", finding.fix)[0]


def test_code_in_fixes_brings_its_imports() -> None:
    code = (
        "import resource as r\n"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (300, hard))\n"
        "import re, jupyter_loaderguard as lg\n"
        "for finding in lg.doctor():\n"
        "    exec(re.findall('`(.+?)`', finding.fix)[0])\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0] == hard)"
    )
    assert _python(code) == "True"
    for call in _FIXES.values():
        if "threadpoolctl" not in call or importlib.util.find_spec("threadpoolctl"):
            subprocess.run([sys.executable, "-c", call], check=True)


# -- the machine ----------------------------------------------------------------------------------


def test_a_healthy_machine_has_no_findings() -> None:
    found = lg.doctor()
    assert found == []
    assert "/dev/shm" in found.checked
    assert found.ran == ""


def test_a_low_limit_of_open_files_is_found() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        (finding,) = lg.doctor()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.code == "LG002"
    assert "The limit is 300" in finding.evidence


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
def test_more_threads_than_usable_cpus_are_found() -> None:
    code = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import torch, jupyter_loaderguard as lg\n"
        "print(lg.doctor())\n"
        "torch.set_num_threads(8)\n"
        "print([(one.code, one.evidence) for one in lg.doctor()])"
    )
    healthy, ill = _python(code).splitlines()
    assert healthy == "[]"
    assert "'LG004', 'torch.get_num_threads() is 8; this process may use 1 of" in ill


def test_little_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_loaderguard import machine

    monkeypatch.setattr(machine, "_memory", lambda: (10**10, 10**8))
    (finding,) = lg.doctor()
    assert finding.code == "LG003"
    assert "100 MB of 10.0 GB" in finding.evidence


# -- nothing of the user's is touched -------------------------------------------------------------


class Remembers(Sampler):
    """A sampler with a state of its own."""

    def __init__(self) -> None:
        self.epoch = 0
        self.log: list[int] = []
        self.random = random.Random(3)
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        self.epoch += 1
        self.log.append(self.epoch)
        first = self.random.randrange(10) + int(torch.randint(10, (1,), generator=self.generator))
        yield from range(first, first + 40)

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_state_stays(workers: int) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    generator = torch.Generator().manual_seed(7)
    sampler = RandomSampler(range(64), generator=torch.Generator().manual_seed(9))
    loaders = [
        DataLoader(Quick(64), num_workers=workers, shuffle=True),
        DataLoader(Quick(64), num_workers=workers, shuffle=True, generator=generator),
        DataLoader(Quick(64), num_workers=workers, batch_sampler=BatchSampler(sampler, 4, False)),
    ]
    before = [generator.get_state(), sampler.generator.get_state()]
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for loader in loaders:
        assert lg.doctor(loader) == []
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(sampler.generator.get_state(), before[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_with_a_state_stays_as_it_is(workers: int) -> None:
    sampler, twin = Remembers(), Remembers()
    assert lg.doctor(DataLoader(Quick(), sampler=sampler, num_workers=workers)) == []
    assert (sampler.epoch, sampler.log) == (0, [])
    assert list(sampler) == list(twin)


class ShufflesInPlace(Sampler):
    """Changes all that it holds."""

    def __init__(self) -> None:
        self.keys = list(range(40_000))
        self.array = np.arange(64)
        self.groups = {"a": [1, 2, 3]}
        self.counter = Counter()

    def __iter__(self):
        random.shuffle(self.keys)
        np.random.shuffle(self.array)
        self.groups["a"].append(4)
        self.counter.epochs += 1
        yield from (key % 64 for key in self.keys[:64])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_shuffles_in_place_stays_as_it_is(workers: int) -> None:
    sampler = ShufflesInPlace()
    found = lg.doctor(DataLoader(Quick(64), sampler=sampler, num_workers=workers))
    assert found == []
    assert found.ran.startswith("ran ")
    assert sampler.keys == list(range(40_000))
    assert sampler.array.tolist() == list(range(64))
    assert (sampler.groups, sampler.counter.epochs) == ({"a": [1, 2, 3]}, 0)


def test_a_sampler_that_can_be_used_once_is_left_to_the_user() -> None:
    keys = iter([3, 1, 2])
    found = lg.doctor(DataLoader(Quick(16), sampler=keys, num_workers=2))
    assert found == []
    assert found.ran.startswith("ran 3 batches")
    assert list(keys) == [3, 1, 2]


class BadSampler(ShufflesInPlace):
    """Raises."""

    def __iter__(self):
        yield 1
        raise KeyError("no such group")


def test_what_a_sampler_raises_is_a_finding() -> None:
    (finding,) = lg.doctor(DataLoader(Quick(64), sampler=BadSampler(), num_workers=2))
    assert finding.code == "LG100"
    assert "KeyError: 'no such group', at tests/unit/test_doctor.py" in finding.evidence


class CudaSampler(ShufflesInPlace):
    """Raises what torch raises in a fork."""

    def __iter__(self):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")


def test_a_sampler_that_needs_cuda_is_not_blamed_for_the_fork() -> None:
    found = lg.doctor(DataLoader(Quick(64), sampler=CudaSampler(), num_workers=2))
    assert found == []
    assert found.ran.startswith("not run: the sampler uses CUDA")


class SlowSampler(ShufflesInPlace):
    """Takes its time before the first key."""

    def __iter__(self):
        time.sleep(14)
        yield 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_sampler_does_not_hold_the_doctor(workers: int) -> None:
    since = time.monotonic()
    found = lg.doctor(DataLoader(Quick(64), sampler=SlowSampler(), num_workers=workers), seconds=2)
    assert found == []
    assert found.ran.startswith("not run: the sampler gave no key" if workers else "no batch came within")
    assert time.monotonic() - since < 4


class Lines(IterableDataset):
    """Reads on from where its file is, unbuffered."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __iter__(self):
        while row := self.file.read(8):
            yield len(row)


def test_a_file_that_is_read_without_workers_stays_where_it_is(tmp_path: Path) -> None:
    dataset = Lines(_rows(tmp_path))
    dataset.file.seek(128)
    assert lg.doctor(DataLoader(dataset, batch_size=4)) == []
    assert dataset.file.tell() == 128
    dataset.file.close()


class Consumes(IterableDataset):
    """Takes what another process sends."""

    def __init__(self, source: object, take: Callable[[], object]) -> None:
        self.source, self.take = source, take

    def __iter__(self):
        for _ in range(3):
            yield self.take()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["queue", "pipe", "socket"])
def test_what_is_consumed_is_not_taken_from_the_user(kind: str, workers: int) -> None:
    near, far = socket.socketpair()
    ours, theirs = multiprocessing.Pipe()
    queue = multiprocessing.get_context("fork").SimpleQueue()
    for number in range(3):
        queue.put(number), theirs.send(number), far.sendall(b"x")
    source, take = {
        "queue": (queue, queue.get),
        "pipe": (ours, ours.recv),
        "socket": (near, lambda: near.recv(1)),
    }[kind]
    found = lg.doctor(DataLoader(Consumes(source, take), batch_size=None, num_workers=workers))
    assert found.ran.startswith("not run: dataset.source is a")
    assert (queue.get(), ours.recv(), near.recv(9)) == (0, 0, b"xxx")
    for thing in (near, far, ours, theirs, queue):
        thing.close()


def test_the_dataset_of_a_loader_without_workers_stays_as_it_is() -> None:
    dataset = Caches()
    assert lg.doctor(DataLoader(dataset, batch_size=8)) == []
    assert dataset.cache == {}


def test_a_live_persistent_iterator_goes_on() -> None:
    with lg.guard():
        loader = DataLoader(Quick(64), batch_size=4, num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        next(iterator)
        pids = [worker.pid for worker in lg.snapshot().workers]
        assert lg.doctor(loader) == []
        assert [worker.pid for worker in lg.snapshot().workers] == pids
        assert [int(batch[0, 0]) for batch in iterator] == list(range(4, 64, 4))
        assert loader._iterator is iterator
        assert len(list(loader)) == 16
        assert [worker.pid for worker in lg.snapshot().workers] == pids


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_never_delivers_does_not_hold_the_doctor(workers: int) -> None:
    since = time.monotonic()
    found = lg.doctor(DataLoader(Stuck(), num_workers=workers), seconds=2)
    assert found == []
    assert "no batch came within" in found.ran
    assert time.monotonic() - since < 4  # 2, and some of a noisy machine


def test_a_slow_loader_is_stopped_in_time() -> None:
    since = time.monotonic()
    found = lg.doctor(DataLoader(Slow(), batch_size=64, num_workers=2), seconds=1.5)
    assert found == []
    assert time.monotonic() - since < 3.5


@pytest.mark.parametrize("thing", [3, "loader", [1, 2], object()])
def test_what_is_no_loader_is_refused_in_a_line(thing: object) -> None:
    with pytest.raises(lg.LoaderGuardError, match=f"this {type(thing).__name__} is not a DataLoader"):
        lg.doctor(thing)


@pytest.mark.parametrize("seconds", [0, -1, "5", None])
def test_bad_seconds_are_refused_in_a_line(seconds: object) -> None:
    with pytest.raises(lg.LoaderGuardError, match=r"seconds must be a number of seconds from 0\.5 to 3600"):
        lg.doctor(DataLoader(Quick()), seconds=seconds)  # type: ignore[arg-type]


def test_it_works_in_a_thread() -> None:
    found: list[Findings] = []
    thread = threading.Thread(target=lambda: found.append(lg.doctor(DataLoader(Quick(64), num_workers=2))))
    thread.start()
    thread.join()
    assert found == [[]]
    assert found[0].ran.startswith("ran 64 batches with 2 workers")


# -- the function and the module ------------------------------------------------------------------


def test_doctor_is_a_function_before_and_after_its_module_is_imported() -> None:
    code = (
        "import sys, jupyter_loaderguard as lg\n"
        "print('jupyter_loaderguard.doctor' in sys.modules, lg.doctor())\n"
        "import jupyter_loaderguard.doctor\n"
        "print(lg.doctor(), lg.doctor(loader=None, seconds=1), lg.doctor.examine())"
    )
    assert _python(code) == "False []\n[] [] []"


def test_the_machine_is_examined_without_torch() -> None:
    assert _python("import sys, jupyter_loaderguard as lg; lg.doctor(); print('torch' in sys.modules)") == "False"


# -- drawing --------------------------------------------------------------------------------------


def test_findings_are_drawn_with_evidence_and_fix() -> None:
    found = Findings([Finding("LG199", "warning", "a title", "the evidence", "the fix")], "DataLoader", "this", "ran 3")
    drawn = text.findings(found)
    assert drawn.splitlines() == [
        "loaderguard: 1 finding with DataLoader",
        "  LG199 warning: a title",
        "    the evidence",
        "    → the fix",
        "  looked for: this",
        "  ran 3",
    ]


def test_nothing_found_says_what_was_checked_and_run() -> None:
    for drawn in (text.findings(found := lg.doctor(DataLoader(Quick(8), num_workers=1))), html.findings(found)):
        assert "nothing wrong was found with DataLoader of Quick (num_workers=1, fork)" in drawn
        assert "workers that wait for one lock" in drawn
        assert "ran 8 batches with 1 worker" in drawn


def test_words_of_the_users_side_are_escaped_and_cut() -> None:
    bad = "<script>alert(1)</script>\x1b[31m" + "x" * 5000
    found = Findings([Finding("LG100", "error", bad, bad, bad)], bad, bad, bad)
    drawn = html.findings(found)
    assert "<script>" not in drawn
    assert "\x1b" not in drawn + text.findings(found)
    assert len(drawn) < 8000


# -- codes and documentation ----------------------------------------------------------------------


def test_each_file_of_checks_has_one_code_and_its_docstring_begins_with_it() -> None:
    files = [path for path in (ROOM / "checks").glob("*.py") if path.name != "__init__.py"]
    codes = [re.match(r'"""(LG\d{3}): ', path.read_text()) for path in files]
    assert all(codes)
    assert sorted(one[1] for one in codes if one) == list(CODES)
    assert len(set(CODES)) == len(CODES) == len(LOADER_CHECKS) + len(MACHINE_CHECKS) + 1


def test_every_code_is_in_the_table_and_vice_versa() -> None:
    assert re.findall(r"^\| (LG\d{3}) \|", DOCS.read_text(), re.MULTILINE) == list(CODES)


def test_streams_are_examined_where_they_are() -> None:
    """An iterable dataset that is its own iterator loses nothing."""

    class Own(Stream):
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self):
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at > 100:
                raise StopIteration
            return self.at

    dataset = Own()
    assert lg.doctor(DataLoader(dataset, batch_size=4)) == []
    assert dataset.at == 0


def test_a_memory_check_counts_what_spawn_copies() -> None:
    from jupyter_loaderguard.lending.subject import describe

    loader = DataLoader(TensorDataset(torch.zeros(1000)), num_workers=2, multiprocessing_context="spawn")
    check = MemoryCheck(describe(loader))
    assert check.refuses_run() is None
    check.available = 7999
    assert check.refuses_run() is not None
