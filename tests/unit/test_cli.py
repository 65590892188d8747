"""The command line and the sweep: among orphans, decoys and hostile entries, nothing wrong is ever ended."""

from __future__ import annotations

import configparser
import ctypes
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from jupyter_loaderguard import census, cli, ledger, orphans
from jupyter_loaderguard.population import Orphan
from jupyter_loaderguard.processes import start_mark
from tests.kernel.driver import is_gone, wait_until
from tests.programs.decoys import LOST, Zoo
from tests.programs.guarded_script import Script, python

from .test_ledger import DEAD, NEEDS_ROOT, NOBODY, entry, mark_of, put

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are recognised by /proc")
COMMAND = [sys.executable, "-m", "jupyter_loaderguard.cli"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the test's own, for all that it starts."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


@pytest.fixture
def script(runtime: Path) -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(*arguments: str, **environment: str) -> Script:
        started.append(Script(*arguments, **environment))
        wait_until(lambda: environment.get("GUARD") == "0" or started[-1].pid in kernels(), 30)
        wait_until(lambda: all(named(process) for process in started[-1].processes), 60)
        return started[-1]

    yield start
    for one in started:
        one.close()


def named(process: psutil.Process) -> bool:
    """Tell whether a worker has arrived in torch's loop."""
    return process.name().startswith("pt_data_work")


def kernels() -> dict[int, list[int]]:
    """Return the workers of each kernel under guard."""
    return {
        kernel.pid: [worker.pid for loader in kernel.loaders for worker in loader.workers]
        for kernel in census.take().kernels
    }


def found() -> dict[int, str]:
    """Return the orphans on this machine, and how they were recognised."""
    return {orphan.pid: orphan.recognised for orphan in census.take().orphans}


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, **options)


# -- the commands ---------------------------------------------------------------------------------


def test_the_console_script_is_declared() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"].split("\n")
    assert "jupyter-loaderguard = jupyter_loaderguard.cli:main" in scripts


def test_help_is_complete(runtime: Path) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(
        word in done.stdout for word in ("ps", "sweep", "stacks", "doctor", "examples:", "--yes", "--json", "--watch")
    )
    assert run().stdout == done.stdout
    for command, word in (
        ("ps", "--json"),
        ("ps", "--watch"),
        ("sweep", "--yes"),
        ("stacks", "PID"),
        ("doctor", "machine"),
    ):
        assert word in run(command, "--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["pps"],
        ["ps", "--jsn"],
        ["stacks"],
        ["stacks", "x"],
        ["stacks", "0"],
        ["stacks", "-1"],
        ["stacks", "9" * 5000],
        ["stacks", "1"],
        ["stacks", str(2**22 + 5)],
        ["sweep", "--yes", "1"],
        ["sweep", "--yes", "x"],
        ["sweep", "-y", "self"],
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(
    runtime: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(os.getpid()) if word == "self" else word for word in arguments]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("loaderguard: ") and error.count("\n") == 1 and len(error) < 300


@pytest.mark.parametrize("arguments", [["ps"], ["ps", "--json"], ["sweep"], ["stacks", "1"], ["doctor"]], ids=" ".join)
def test_no_command_imports_torch_ipython_or_ipywidgets(runtime: Path, arguments: list[str]) -> None:
    code = (
        f"import sys; from jupyter_loaderguard.cli import main; main({arguments})\n"
        "print([name for name in ('torch', 'IPython', 'ipywidgets', 'traitlets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_doctor_looks_at_the_machine(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert "this machine" in capsys.readouterr().out


def test_an_empty_machine_is_said_so_and_nothing_is_written(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps"]) == 0
    assert capsys.readouterr().out.startswith("0 kernels under guard, 0 loaders, 0 workers")
    assert not runtime.exists()


def test_ps_goes_on_with_watch_until_it_is_interrupted(runtime: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "ps", "--json", "--watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    assert second["taken"] > first["taken"]
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (0, "")


@pytest.mark.parametrize("words", ["--help", "--version", "ps"])
def test_a_reader_that_has_seen_enough_is_no_error(runtime: Path, words: str) -> None:
    assert without_reader(words) == (0, "")


def without_reader(*arguments: str) -> tuple[int, str]:
    """Run a command whose reader has left; return its exit code and its standard error."""
    read, write = os.pipe()
    os.close(read)
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=buffered())
    os.close(write)
    return done.returncode, done.stderr


def buffered() -> dict[str, str]:
    """Return the environment of a user, in which Python gathers what it writes."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [
        ("ps <&- >&- 2>&-", 0, 0),
        ("pps 2>&-", 1, 0),
        ("pps 2>/dev/full", 1, 0),
        ("ps >/dev/full", 1, 1),
        ("--help >/dev/full", 1, 1),
    ],
)
def test_streams_that_are_closed_or_full(runtime: Path, words: str, code: int, lines: int) -> None:
    command = f"{sys.executable} -m jupyter_loaderguard.cli {words}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=buffered())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", lines)


def test_names_from_the_users_side_cannot_draw_on_the_terminal(
    runtime: Path, capsys: pytest.CaptureFixture[str], sleeper: psutil.Process
) -> None:
    with ledger.opened_folder(str(runtime), is_made=True):
        folder = Path(ledger.folder_path(str(runtime)))
    kernel = entry(sleeper.pid, mark_of(sleeper.pid), (os.getppid(), mark_of(os.getppid())))
    loader = kernel.loaders[0]._replace(dataset="\x1b[2Jcat", name="\r\n")
    put(folder, kernel._replace(notebook="\x1b]0;gone\x07", loaders=(loader,)))
    (folder / "\x1b[2J\nname\x9b").touch()
    assert cli.main(["ps"]) == 0
    out = capsys.readouterr().out
    assert "?[2Jcat" in out
    assert cli.main(["sweep"]) == 0
    out += capsys.readouterr().out
    assert out.count("?[2J?name?: it is not a file of the guard's.\n") == 2
    assert not any(char in out for char in "\x1b\x07\r\x9b")


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = psutil.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


# -- orphans --------------------------------------------------------------------------------------


def test_a_live_script_is_listed_and_its_workers_are_no_orphans(script, capsys: pytest.CaptureFixture[str]) -> None:
    one = script()
    done = run("ps", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert set(data) == {"version", "taken", "kernels", "orphans", "notes"}
    (kernel,) = data["kernels"]
    assert set(kernel) == {"pid", "started", "notebook", "loaders"}
    assert (kernel["pid"], kernel["notebook"]) == (one.pid, "guarded_script.py")
    (loader,) = kernel["loaders"]
    assert set(loader) == {"name", "dataset", "start_method", "cell", "workers"}
    assert (loader["dataset"], loader["start_method"], loader["cell"]) == ("Stuck", "fork", None)
    assert [worker["pid"] for worker in loader["workers"]] == one.workers
    assert set(loader["workers"][0]) == {"worker_id", "pid", "started", "state", "memory_bytes"}
    assert not set(one.workers) & set(found())
    assert cli.main(["ps"]) == 0
    assert "Stuck  ·  fork" in capsys.readouterr().out
    assert cli.main(["sweep", "--yes", str(one.workers[0])]) == 1
    assert not any(is_gone(process) for process in one.processes)


def test_the_stack_of_a_worker_is_shown_again_and_again(script, capsys: pytest.CaptureFixture[str]) -> None:
    one = script("Stuck", "1")
    pid = one.workers[0]

    def ask() -> str:
        code = cli.main(["stacks", str(pid)])
        out = capsys.readouterr().out
        return out if code == 0 else ""

    wait_until(lambda: "in __getitem__" in ask(), 30)
    for _ in range(3):
        out = ask()
        assert f"worker (pid {pid}) · batch 0, sample 1 of 1" in out
        assert out.count("in __getitem__") == 1
    assert cli.main(["stacks", str(one.pid)]) == 1  # has the slots, but none of its own
    assert not is_gone(one.processes[0])
    one.die()
    assert cli.main(["stacks", str(pid)]) == 0


def test_a_dead_script_leaves_orphans_that_the_ledger_knows_until_they_are_swept(script, runtime: Path) -> None:
    one, other = script("StubbornProcesses"), script()
    one.die()
    words = [str(pid) for pid in one.workers]
    assert {pid: found()[pid] for pid in one.workers} == dict.fromkeys(one.workers, "ledger")
    orphan = next(orphan for orphan in census.take().orphans if orphan.pid == one.workers[0])
    assert (orphan.kernel_pid, orphan.dataset, orphan.notebook) == (one.pid, "StubbornProcesses", "guarded_script.py")
    family = [child for process in one.processes for child in process.children(recursive=True)]
    assert len(family) == 2
    listed = run("sweep", *words, stdin=subprocess.DEVNULL)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "Nothing was ended" in listed.stdout
    assert not any(map(is_gone, one.processes))
    done = run("sweep", "--yes", *words)
    assert (done.returncode, done.stderr) == (0, "")
    for process in (*one.processes, *family):
        assert is_gone(process)
        assert done.stdout.count(f"\n{process.pid}  ") == 1
    assert list(kernels()) == [other.pid]
    assert len(os.listdir(ledger.folder_path(str(runtime)))) == 1
    assert not any(map(is_gone, other.processes))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_orphans_of_a_script_that_was_never_guarded_are_known_by_their_marks(script, method: str) -> None:
    one = script("Stuck", "2", method, GUARD="0")
    assert not set(one.workers) & set(found())
    one.die()
    wait_until(lambda: set(one.workers) <= set(found()), 10)
    assert {pid: found()[pid] for pid in one.workers} == dict.fromkeys(one.workers, "marks")
    assert run("sweep", "--yes", *map(str, one.workers)).returncode == 0
    assert all(map(is_gone, one.processes))


def test_a_worker_whose_forkserver_died_but_whose_kernel_lives_is_no_orphan(script) -> None:
    one = script("Stuck", "1", "forkserver", GUARD="0")
    server = one.processes[0].parent()
    assert "forkserver" in " ".join(server.cmdline())
    server.kill()
    wait_until(lambda: is_gone(server))
    taken = census.take()
    assert one.workers[0] not in {orphan.pid for orphan in taken.orphans}
    assert any(f"pid {one.workers[0]} " in note and f"pid {one.pid} " in note for note in taken.notes)
    assert not orphans.Look().is_orphan(one.workers[0])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_a_worker_of_a_live_script_has_left_is_no_orphan(runtime: Path, method: str) -> None:
    """A helper that a worker has forked has all its marks, and the script has closed the pipes of its loader."""
    command = [*python(), "-m", "tests.programs.helper", method]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    helper = psutil.Process(int(script.stdout.readline()))
    try:
        taken = census.take()
        assert helper.pid not in {orphan.pid for orphan in taken.orphans}
        assert any(f"pid {helper.pid} " in note and f"pid {script.pid} " in note for note in taken.notes)
        assert [one.how for one in orphans.sweep([claim(helper.pid, "marks")])] == ["spared"]
        script.kill()
        script.wait()
        assert helper.pid in found()
    finally:
        script.kill()
        script.wait()
        script.stdout.close()
        helper.kill()


def test_a_sweep_goes_on_without_a_reader(script) -> None:
    one = script("Stuck", "1")
    one.die()
    words = ["sweep", str(one.workers[0])]
    assert without_reader(*words) == (0, "")
    assert not is_gone(one.processes[0])  # nobody has agreed
    assert without_reader(*words, "--yes") == (0, "")
    assert is_gone(one.processes[0])


SHORT_OF_FILES = """
import os, resource, sys
from jupyter_loaderguard import census, ledger, orphans
ledger.read()
wrong = [int(word) for word in sys.argv[1:]]
first = len(os.listdir("/proc/self/fd")) - 1
for spare in range(8):
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        found = [orphan.pid for orphan in census.take().orphans]
    except OSError:
        found = []
    found += [pid for pid in wrong if orphans.Look().is_orphan(pid)]
    assert not set(found) & set(wrong), (spare, found)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(len(census.take().kernels))
"""


def test_who_cannot_open_files_takes_nobody_for_an_orphan(script) -> None:
    """A live kernel must not look dead because this process has no descriptor left to look at it."""
    guarded, plain = script("Stuck", "1"), script("Stuck", "1", "forkserver", GUARD="0")
    words = map(str, guarded.workers + plain.workers)
    done = subprocess.run([sys.executable, "-c", SHORT_OF_FILES, *words], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_forged_ledger_cannot_make_an_orphan_of_a_live_kernel(script, runtime: Path) -> None:
    one = script("Stuck", "1")
    put(
        Path(ledger.folder_path(str(runtime))),
        entry(*DEAD, (one.pid, mark_of(one.pid)), (one.workers[0], mark_of(one.workers[0]))),
    )
    assert not {one.pid, *one.workers} & set(found())
    assert [each.how for each in orphans.sweep([claim(one.pid, "ledger")])] == ["spared"]
    assert one.process.poll() is None


def test_decoys_are_neither_listed_nor_ended(runtime: Path) -> None:
    zoo = Zoo(*LOST, "with_parent", "live_worker", "of_live_kernel")
    try:
        with ledger.opened_folder(str(runtime), is_made=True):
            folder = Path(ledger.folder_path(str(runtime)))
        for is_written in (False, True):  # a file that is changed by hand makes no orphan
            if is_written:
                put(folder, entry(*DEAD, *((one.pid, mark_of(one.pid)) for one in zoo.processes.values())))
            listed = found()
            assert [name for name, process in zoo.processes.items() if process.pid in listed] == []
        for recognised in ("ledger", "marks"):  # and if somebody had taken them for orphans
            report = orphans.sweep(claim(process.pid, recognised) for process in zoo.processes.values())
            assert {one.how for one in report} == {"spared"}
        assert zoo.dead() == []
    finally:
        zoo.close()


def claim(pid: int, recognised: str, mark: str | None = None) -> Orphan:
    return Orphan(pid, mark or start_mark(pid) or "", 0.0, "sleeping", 0, recognised)


def test_a_reused_pid_and_this_very_process_are_never_ended(runtime: Path, sleeper: psutil.Process) -> None:
    wrong = str(int(mark_of(sleeper.pid)) - 1)
    report = orphans.sweep(
        [
            claim(sleeper.pid, "ledger", wrong),
            claim(os.getpid(), "ledger"),
            claim(os.getppid(), "marks"),
            claim(1, "marks"),
        ]
    )
    assert [one.how for one in report] == ["gone", "spared", "spared", "spared"]
    assert not is_gone(sleeper)


INNER = """
import os, subprocess, sys
from jupyter_loaderguard import cli, processes
pid = int(sys.argv[1])
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(pid - 1))
innocent = subprocess.Popen(["sleep", "300"])
assert innocent.pid == pid, innocent.pid
print(cli.main(["sweep", "--yes", str(pid)]), cli.main(["sweep", "--yes"]), cli.main(["ps"]), innocent.poll(), flush=True)
handle = processes.Handle(pid)
print(processes.descendants([handle]), processes.stop([handle], 0)[0][pid], processes.start_mark(pid))
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-p", "-f", "true"], check=False).returncode != 0,
    reason="it needs the right to make a namespace",
)
def test_where_proc_numbers_processes_otherwise_nothing_is_swept(script) -> None:
    """In a new namespace with the /proc of the old one, the pid of an orphan is that of an innocent process."""
    one = script("StubbornProcesses", "1")
    one.die()
    command = ["unshare", "-p", "-f", "--kill-child", sys.executable, "-c", INNER, str(one.workers[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-2:] == ["1 1 0 None", "[] SIGTERM None"], done
    assert done.stderr.count("/proc is of another namespace of pids") == 2 and done.stderr.count("\n") == 2
    assert "/proc is of another namespace of pids" in done.stdout
    assert not is_gone(one.processes[0])


def test_what_ends_while_it_is_looked_at_is_gone(monkeypatch: pytest.MonkeyPatch, sleeper: psutil.Process) -> None:
    def look(self: orphans.Look, pid: int) -> bool:
        sleeper.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return False

    monkeypatch.setattr(orphans.Look, "is_orphan", look)
    assert [one.how for one in orphans.sweep([claim(sleeper.pid, "marks")])] == ["gone"]


def test_a_question_at_a_terminal_is_answered(script) -> None:
    one = script("Stuck", "1")
    one.die()
    for answer, is_ended in (("n", False), ("", False), ("y", True)):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, "sweep", str(one.workers[0])], stdin=theirs, stdout=subprocess.PIPE, text=True
        )
        os.write(ours, f"{answer}\n".encode())
        out, _ = process.communicate(timeout=30)
        os.close(ours)
        os.close(theirs)
        assert process.returncode == 0
        assert "End it? [y/N]" in out
        assert is_gone(one.processes[0]) is is_ended


# -- two users ------------------------------------------------------------------------------------


def as_nobody(function: Callable[[], object], runtime: Path) -> object:
    """Run something in a fork that belongs to another user, and return what it returns."""
    runtime.mkdir(mode=0o755, exist_ok=True)
    os.chown(runtime, NOBODY, NOBODY)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process of theirs from the beginning
            os.write(write, json.dumps(function()).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.readline()  # what the fork has started may hold the other end
    os.waitpid(pid, 0)
    return json.loads(text)


@NEEDS_ROOT
def test_another_users_orphans_are_neither_listed_nor_ended(script, runtime: Path, tmp_path: Path) -> None:
    one = script("Stuck", "1")
    one.die()
    (pid,) = one.workers
    assert pid in found()
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    theirs = tmp_path / "theirs"

    def look() -> object:
        os.environ["JUPYTER_RUNTIME_DIR"] = str(theirs)
        listed = list(found())
        ours = claim(pid, "marks"), claim(pid, "ledger")
        return listed, [one.how for each in ours for one in orphans.sweep([each])], cli.main(["stacks", str(pid)])

    listed, hows, code = as_nobody(look, theirs)  # type: ignore[misc]
    assert (listed, hows, code) == ([], ["spared", "spared"], 1)
    assert not is_gone(one.processes[0])


@NEEDS_ROOT
def test_a_process_that_hides_itself_may_be_the_kernel(runtime: Path, tmp_path: Path) -> None:
    """A kernel that has given up root without exec cannot be looked into by its own user."""
    from tests.programs.decoys import everything, fork

    def look() -> object:
        pid = fork(everything, is_lost=True)
        hidden = fork(lambda: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0), is_lost=False)
        try:
            kernel = orphans.Look().possible_kernel(pid)
            os.kill(hidden, signal.SIGKILL)
            os.waitpid(hidden, 0)
            return kernel == hidden, orphans.Look().is_orphan(pid)
        finally:
            os.kill(pid, signal.SIGKILL)

    assert as_nobody(look, tmp_path / "theirs") == [True, True]


@NEEDS_ROOT
def test_root_leaves_other_users_alone(runtime: Path, tmp_path: Path) -> None:
    from tests.programs.decoys import everything, fork

    pid = int(as_nobody(lambda: fork(everything, is_lost=True), tmp_path / "theirs"))  # type: ignore[call-overload]
    process = psutil.Process(pid)
    try:
        assert process.uids().real == NOBODY
        assert pid not in found()
        hows = [one.how for kind in ("ledger", "marks") for one in orphans.sweep([claim(pid, kind)])]
        assert hows == ["spared", "spared"]
        time.sleep(0.1)
        assert not is_gone(process)
    finally:
        process.kill()
