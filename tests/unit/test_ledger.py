"""The ledger: private, atomic, cleaned up after crashes, and never believed."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_loaderguard import census, ledger
from jupyter_loaderguard.entries import KernelEntry, LoaderEntry, Unfit, WorkerEntry, parse
from jupyter_loaderguard.ledger import Ledger
from jupyter_loaderguard.orphans import Look
from jupyter_loaderguard.processes import start_mark
from tests.kernel.driver import wait_until

NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
DEAD = (2**22 + 7, "77")
"""A pid that Linux never gives, with a start time."""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


@pytest.fixture
def folder(runtime: Path) -> Path:
    """The directory, as a kernel makes it."""
    with ledger.opened_folder(str(runtime), is_made=True):
        return Path(ledger.folder_path(str(runtime)))


@pytest.fixture
def own(runtime: Path) -> Iterator[Ledger]:
    loaders = [LoaderEntry("loader", "Images", "fork", 3, (WorkerEntry(0, *DEAD, 1.0),))]
    one = Ledger(lambda: loaders, lambda: None)
    yield one
    one.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def entry(pid: int, mark: str, *workers: tuple[int, str]) -> KernelEntry:
    listed = tuple(WorkerEntry(number, *worker, 1.0) for number, worker in enumerate(workers))
    return KernelEntry(pid, mark, 1.0, "a.ipynb", None, (LoaderEntry("loader", "Images", "fork", 3, listed),))


def put(folder: Path, one: KernelEntry) -> Path:
    path = folder / ledger.file_name(one.pid, one.mark)
    path.write_bytes(one.to_json())
    return path


def mark_of(pid: int) -> str:
    mark = start_mark(pid)
    assert mark is not None
    return mark


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


# -- writing --------------------------------------------------------------------------------------


def test_a_kernel_is_written_down_while_it_guards_and_not_after(own: Ledger, runtime: Path) -> None:
    own.open()
    wait_until(lambda: ledger.read()[0] != [])
    (found,), notes = ledger.read()
    assert (found.pid, found.is_alive(), notes) == (os.getpid(), True, [])
    assert found.loaders[0].dataset == "Images"
    own.close()
    assert ledger.read() == ([], [])
    assert files(Path(ledger.folder_path(str(runtime)))) == []


def test_directory_and_file_are_closed_to_others_whatever_the_umask(own: Ledger, runtime: Path) -> None:
    before = os.umask(0)
    try:
        own.open()
        wait_until(lambda: ledger.read()[0] != [])
    finally:
        os.umask(before)
    folder = Path(ledger.folder_path(str(runtime)))
    (name,) = files(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_changes_are_written_soon_and_many_at_once_are_one_write(runtime: Path) -> None:
    written = []

    def loaders() -> list[LoaderEntry]:
        written.append(time.monotonic())
        return [LoaderEntry(str(len(written)), "Images", None, None, ())]

    one = Ledger(loaders, lambda: None)
    one.open()
    for _ in range(1000):
        one.touch()
    wait_until(lambda: ledger.read()[0] != [])
    assert len(written) < 100
    one.touch()
    last = len(written)
    wait_until(lambda: len(written) > last)
    wait_until(lambda: ledger.read()[0][0].loaders[0].name == str(len(written)))
    one.close()


def test_the_collector_may_touch_it_in_the_middle_of_its_own_work(runtime: Path) -> None:
    one = Ledger(lambda: one.touch() or [], lambda: one.touch())  # type: ignore[func-returns-value]
    one.open()
    wait_until(lambda: ledger.read()[0] != [])
    one.close()
    assert ledger.read() == ([], [])


def test_closing_before_anything_was_written_leaves_nothing(own: Ledger, runtime: Path) -> None:
    for _ in range(20):
        own.open()
        own.close()
    assert not own._is_writing
    assert files(Path(ledger.folder_path(str(runtime)))) == []


def _in_a_fork(function) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_fork_of_the_kernel_writes_and_removes_nothing_of_the_kernels(own: Ledger, runtime: Path) -> None:
    own.open()
    wait_until(lambda: ledger.read()[0] != [])
    folder = Path(ledger.folder_path(str(runtime)))
    (name,) = files(folder)
    before = (folder / name).stat()
    _in_a_fork(lambda: (own.touch(), time.sleep(0.2), own.close()))
    after = (folder / name).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert files(folder) == [name]


def test_a_fork_that_guards_for_itself_has_a_file_of_its_own(own: Ledger, runtime: Path, tmp_path: Path) -> None:
    own.open()
    wait_until(lambda: ledger.read()[0] != [])

    def guard() -> None:
        own.open()
        wait_until(lambda: len(ledger.read()[0]) == 2)
        (tmp_path / "two").touch()
        own.close()

    _in_a_fork(guard)
    assert (tmp_path / "two").exists()
    assert [one.pid for one in ledger.read()[0]] == [os.getpid()]


WRITE = """
import resource, sys, time
from jupyter_loaderguard.ledger import Ledger
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
one = Ledger(lambda: [], lambda: None)
one.open()
time.sleep(0.3)
print(one.problem, flush=True)
sys.stdin.readline()
one.close()
print(one._is_writing)
"""


def test_a_full_disk_is_harmless_and_leaves_no_half_file(runtime: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITE, "10"], input="\n", capture_output=True, text=True, check=True)
    assert done.stdout == "OSError: [Errno 27] File too large\nFalse\n"
    assert done.stderr == ""
    assert files(Path(ledger.folder_path(str(runtime)))) == []


@pytest.mark.parametrize("place", ["/proc/self/nothing", "/dev/null/nothing"])
def test_an_unwritable_place_is_harmless(own: Ledger, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", place)
    own.open()
    wait_until(lambda: own.problem is not None)
    own.close()
    entries, notes = ledger.read()
    assert entries == []
    assert len(notes) <= 1


def test_two_kernels_do_not_disturb_each_other(own: Ledger, runtime: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", WRITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert other.stdout.readline() == "None\n"
    own.open()
    wait_until(lambda: len(ledger.read()[0]) == 2)
    own.close()
    assert [one.pid for one in ledger.read()[0]] == [other.pid]
    assert other.communicate("\n")[0] == "False\n"
    assert ledger.read() == ([], [])


# -- the directory --------------------------------------------------------------------------------


def test_a_link_in_the_place_of_the_directory_is_not_followed(own: Ledger, runtime: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    runtime.mkdir()
    os.symlink(target, ledger.folder_path(str(runtime)))
    own.open()
    wait_until(lambda: own.problem is not None)
    own.close()
    entries, (note,) = ledger.read()
    assert entries == []
    assert "the ledger cannot be read" in note
    assert files(target) == []


@NEEDS_ROOT
def test_a_directory_of_another_user_is_not_used(own: Ledger, runtime: Path, folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    own.open()
    wait_until(lambda: own.problem is not None)
    own.close()
    assert own.problem is not None
    assert "belongs to another user" in ledger.read()[1][0]
    assert files(folder) == []


def test_a_directory_that_was_opened_to_others_is_closed_again(own: Ledger, folder: Path) -> None:
    folder.chmod(0o777)
    assert ledger.read() == ([], [])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# -- reading --------------------------------------------------------------------------------------


def test_what_dead_kernels_have_left_is_removed(folder: Path, sleeper: subprocess.Popen) -> None:
    put(folder, entry(*DEAD, (2**22 + 8, "5")))
    half = ledger.file_name(*DEAD) + ".0123abcd.part"
    (folder / half).write_text("{")
    living = ledger.file_name(sleeper.pid, mark_of(sleeper.pid)) + ".0123abcd.part"
    (folder / living).write_text("{")
    assert ledger.read() == ([], [])
    assert files(folder) == [living]


def test_a_dead_kernel_with_a_live_worker_is_kept(folder: Path, sleeper: subprocess.Popen) -> None:
    put(folder, entry(*DEAD, (sleeper.pid, mark_of(sleeper.pid))))
    (found,), notes = ledger.read()
    assert (found.pid, found.is_alive(), notes) == (DEAD[0], False, [])
    assert [worker.pid for _, worker in found.workers()] == [sleeper.pid]


def test_a_reused_pid_is_not_the_worker_that_it_was(folder: Path, sleeper: subprocess.Popen) -> None:
    mark = str(int(mark_of(sleeper.pid)) - 1)
    put(folder, entry(*DEAD, (sleeper.pid, mark)))
    put(folder, entry(sleeper.pid, mark, (os.getppid(), "1")))
    assert ledger.read() == ([], [])
    assert files(folder) == []


def test_a_worker_by_the_ledger_needs_a_mark_of_its_own(folder: Path, sleeper: subprocess.Popen) -> None:
    """A file can be changed by hand: what it says of an innocent process, pid and start time being right, is nothing."""
    put(
        folder,
        entry(*DEAD, (sleeper.pid, mark_of(sleeper.pid)), (1, mark_of(1)), (os.getppid(), mark_of(os.getppid()))),
    )
    entries, _ = ledger.read()
    assert census.find_written(entries, Look()) == []


def test_files_of_other_machines_are_kept_for_a_month(folder: Path) -> None:
    young, old = folder / "12-34-aaaaaaaabbbb.json", folder / "12-34-aaaaaaaacccc.json"
    for path in (young, old):
        path.write_text("not even JSON")
    os.utime(old, (1, 1))
    assert ledger.read() == ([], [])
    assert files(folder) == [young.name]


GOOD = json.loads(entry(*DEAD, (5, "6")).to_json())
WORKER = GOOD["loaders"][0]["workers"][0]


def with_worker(**changes: object) -> str:
    return json.dumps({**GOOD, "loaders": [{**GOOD["loaders"][0], "workers": [{**WORKER, **changes}]}]})


HOSTILE = {
    "empty": "",
    "not_json": "{",
    "binary": "\0\1\2",
    "deep": "[" * 100_000,
    "list": "[]",
    "null": "null",
    "number": "5",
    "no_version": "{}",
    "other_version": json.dumps({**GOOD, "version": 2}),
    "other_pid": json.dumps({**GOOD, "pid": 1}),
    "text_pid": json.dumps({**GOOD, "pid": str(DEAD[0])}),
    "loaders_object": json.dumps({**GOOD, "loaders": {}}),
    "loader_number": json.dumps({**GOOD, "loaders": [1]}),
    "notebook_list": json.dumps({**GOOD, "notebook": []}),
    "reaper_text": json.dumps({**GOOD, "reaper": "no"}),
    "reaper_short": json.dumps({**GOOD, "reaper": [5]}),
    "worker_list": json.dumps({**GOOD, "loaders": [{**GOOD["loaders"][0], "workers": [[]]}]}),
    "negative_pid": with_worker(pid=-1),
    "group_pid": with_worker(pid=0),
    "true_pid": with_worker(pid=True),
    "huge_pid": with_worker(pid=2**64),
    "float_pid": with_worker(pid=5.0),
    "endless_pid": with_worker(pid=float("inf")),
    "mark_number": with_worker(mark=6),
    "mark_path": with_worker(mark="../../1"),
    "started_nan": with_worker(started=float("nan")),
    "started_huge": with_worker(started=10**400),
    "own_pid": with_worker(pid=os.getpid()),
    "large": json.dumps({**GOOD, "notebook": "x" * (ledger.MOST_BYTES + 1)}),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_broken_file_is_ignored_with_one_line_and_removed_with_its_kernel_dead(folder: Path, text: str) -> None:
    path = folder / ledger.file_name(*DEAD)
    path.write_text(text)
    entries, notes = ledger.read()
    assert entries == []
    assert (
        len(notes) == 1
        and "\n" not in notes[0]
        and str(path) in notes[0]
        and notes[0].startswith("loaderguard: ignored")
    )
    assert ledger.read() == ([], [])


def test_a_broken_file_of_a_live_kernel_is_left_to_it(folder: Path, sleeper: subprocess.Popen) -> None:
    path = folder / ledger.file_name(sleeper.pid, mark_of(sleeper.pid))
    path.write_text("{")
    assert len(ledger.read()[1]) == 1
    assert path.exists()


def test_what_is_no_file_of_ours_is_ignored_with_one_line_and_left_alone(folder: Path, tmp_path: Path) -> None:
    secret = put(tmp_path, entry(*DEAD, (os.getppid(), mark_of(os.getppid()))))
    os.symlink(secret, folder / ledger.file_name(DEAD[0], "1"))
    os.mkfifo(folder / ledger.file_name(os.getppid(), mark_of(os.getppid())))
    (folder / ledger.file_name(1, mark_of(1))).mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "x-y-z.json").write_text("{}")
    (folder / ".nfs0001").write_text("a file server's")
    since = time.monotonic()
    entries, notes = ledger.read()
    assert time.monotonic() - since < 5  # a FIFO would have waited for ever
    assert entries == []
    assert len(notes) == 5
    assert secret.exists()
    assert {"notes.txt", "x-y-z.json", ".nfs0001"} <= set(files(folder))


@NEEDS_ROOT
def test_a_file_of_another_user_is_ignored(folder: Path, sleeper: subprocess.Popen) -> None:
    path = put(folder, entry(sleeper.pid, mark_of(sleeper.pid)))
    os.chown(path, NOBODY, NOBODY)
    entries, (note,) = ledger.read()
    assert entries == []
    assert "belongs to another user" in note


def test_thousands_of_files_are_not_all_read(folder: Path) -> None:
    for number in range(ledger.MOST_FILES + 20):
        (folder / f"note-{number}").touch()
    _, notes = ledger.read()
    assert len(notes) == ledger.MOST_FILES + 1


def test_no_change_to_a_file_is_ever_an_exception() -> None:
    """Change bytes and values of a good file at random: it is read, or refused with a reason."""
    chance = random.Random(7)
    text = entry(*DEAD, (5, "6"), (7, "8")).to_json()
    for _ in range(2000):
        broken = bytearray(text)
        for _ in range(chance.randint(1, 6)):
            broken[chance.randrange(len(broken))] = chance.choice(b'0123456789{}[]",:-.eEnul\\ \0\xff')
        try:
            found = parse(bytes(broken), *DEAD)
        except Unfit:
            continue
        assert all(worker.pid > 0 for loader in found.loaders for worker in loader.workers)
