"""Cells with loaders, run in a real shell while one of our own functions raises: does torch's work go on?

`python -m tests.programs.faults [--each] [--workers] [SCENARIO …]` prints a line of JSON for each function of ours that a
scenario goes through in the kernel's main thread, or with `--workers` in that of each worker: found by a trace of the scenario
itself, from what torch, IPython and the collector call of ours, so that a new function is covered without anyone remembering
it. With `--each` a function is tried in every scenario, else in the first one. Each trial is a fork of its own: what goes
wrong in one is not seen by the next.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil
import torch
import torch.utils.data.dataloader
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from torch.utils.data import Dataset, IterableDataset

import jupyter_loaderguard
from jupyter_loaderguard import seam

PACKAGE = str(Path(jupyter_loaderguard.__file__).parent)
TRUSTED = (f"{PACKAGE}/seam.py", f"{PACKAGE}/errors.py")
"""The seam itself, and what it says its line with."""
ASKED_FOR = ("unload_ipython_extension", "unload", "guarded_loader")
"""What the user calls: that it fails is for the user to see."""
SECONDS = 60
"""More than any trial takes on a crowded machine."""
IMPORTS = (
    "import torch\nfrom torch.utils.data import DataLoader\n"
    "from tests.programs.faults import DiesOnce, Numbers, NumberStream, Raises"
)


class Numbers(Dataset):
    """So many numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class NumberStream(IterableDataset):
    """So many numbers of each worker."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Raises(Numbers):
    """One of them raises."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("not this one")
        return index


class DiesOnce(Numbers):
    """A worker dies of one of them, the first time."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.has_died = multiprocessing.get_context("fork").Value("i", 0)

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.has_died.value:
            self.has_died.value = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return index


SCENARIOS: dict[str, list[str]] = {
    "fork": ["seen = [b.tolist() for b in DataLoader(Numbers(12), batch_size=2, num_workers=2)]"],
    "alone": ["seen = [b.tolist() for b in DataLoader(Numbers(6), batch_size=2)]"],
    "shuffled": [
        "torch.manual_seed(3); loader = DataLoader(Numbers(12), batch_size=5, shuffle=True, num_workers=2, drop_last=True)",
        "seen = [b.tolist() for b in loader]",
    ],
    "persistent": [
        "loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)",
        "seen = [b.tolist() for epoch in range(2) for b in loader]",
        "del loader",
    ],
    "stream": ["seen = sorted(int(b) for b in DataLoader(NumberStream(6), batch_size=None, num_workers=2))"],
    "large": [
        "def collate(samples): return 'x' * 200_000",
        "seen = [len(b) for b in DataLoader(Numbers(6), num_workers=2, collate_fn=collate)]",
    ],
    "del": [
        "it = iter(DataLoader(Numbers(40), num_workers=2)); seen = [int(next(it)) for _ in range(3)]",
        "del it",
    ],
    "failed": [
        "seen = []\n"
        "def train():\n"
        "    it = iter(DataLoader(Numbers(40), num_workers=2))\n"
        "    for batch in it:\n"
        "        seen.append(int(batch))\n"
        "        if len(seen) == 3: raise ZeroDivisionError\n"
        "train()",
    ],
    "interrupted": [
        "seen = []\n"
        "for batch in DataLoader(Numbers(40), num_workers=2):\n"
        "    seen.append(int(batch))\n"
        "    if len(seen) == 3: raise KeyboardInterrupt",
    ],
    "raising": [
        "seen = []\n"
        "try:\n"
        "    for batch in DataLoader(Raises(8), num_workers=2): seen.append(int(batch))\n"
        "except ValueError as error:\n"
        "    seen.append('ValueError')",
    ],
    "raising alone": [
        "seen = []\n"
        "try:\n"
        "    for batch in DataLoader(Raises(8)): seen.append(int(batch))\n"
        "except ValueError as error:\n"
        "    seen.append('ValueError')",
    ],
    "guarded": [
        "%%guarded_loader --quiet --name report\n"
        "seen = [b.tolist() for b in DataLoader(Numbers(12), batch_size=2, num_workers=2)]",
        "seen += [b.tolist() for b in DataLoader(Numbers(4), batch_size=2)]",
    ],
    "dying": [
        "%%guarded_loader --quiet --retry 3\n"
        "seen = []\n"
        "try:\n"
        "    for batch in DataLoader(DiesOnce(12), num_workers=2): seen.append(int(batch))\n"
        "except Exception as error:  # torch says it in several ways\n"
        "    seen = 'error'",
    ],
    "skipping": [
        "%%guarded_loader --quiet --skip 3\n"
        "seen = []\n"
        "try:\n"
        "    for batch in DataLoader(Raises(8), batch_size=2, num_workers=2): seen.extend(batch.tolist())\n"
        "except ValueError as error:\n"
        "    seen = 'ValueError'",
    ],
    "unloaded": [
        "it = iter(DataLoader(Numbers(20), num_workers=2)); seen = [int(next(it)) for _ in range(3)]",
        "%unload_ext jupyter_loaderguard",
        "seen += [int(b) for b in it]",
    ],
}
EITHER: dict[str, list[Any]] = {"dying": ["error"], "skipping": ["ValueError"]}
"""What plain torch gives, where the guard was asked for more than that."""


LEFT_BY_PLAIN = ("failed", "interrupted")
"""Where plain torch leaves workers: a stored traceback holds them."""


class Injected(Exception):
    """What our function raises, all of a sudden."""


FIRED = "fired"


class Tracer:
    """Notes every function of ours that the main thread calls, here or in workers; or raises in the first call of one.

    A worker is forked with the trace on. It has a copy of what is known here, and writes into a file what it finds.
    """

    def __init__(self, target: str | None, in_workers: bool) -> None:
        self._known: set[str] = set()
        self._target = target
        self._owner = os.getpid()
        self._in_workers = in_workers
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or (os.getpid() != self._owner) is not self._in_workers:
            return
        if code.co_filename in TRUSTED or code in seam.RIM or code.co_name in ("__del__", *ASKED_FOR):
            return  # nothing stands around these
        if code.co_name.startswith("<"):
            return  # a comprehension is part of its function
        key = key_of(code)
        self._note(key)
        if key == self._target and FIRED not in self._known:
            self._note(FIRED)
            raise Injected(key)

    def _note(self, key: str) -> None:
        if key not in self._known:
            self._known.add(key)
            os.write(self._file.fileno(), f"{key}\n".encode())

    def found(self) -> list[str]:
        """Return what was found, in whichever process."""
        self._file.seek(0)
        return sorted(set(self._file.read().decode().split()))

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def key_of(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE + '/')}:{code.co_qualname}"


def run(name: str, target: str | None, is_guarded: bool, in_workers: bool) -> dict[str, Any]:
    """Run the cells of a scenario in this process; say what they gave, and what was left and said."""
    HistoryManager.enabled = False
    shell = InteractiveShell.instance(colors="NoColor")
    said, printed = io.StringIO(), io.StringIO()
    tracer = Tracer(target, in_workers)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        if is_guarded:
            shell.run_cell("%load_ext jupyter_loaderguard")
        shell.run_cell(IMPORTS)
        with tracer.on():
            for cell in SCENARIOS[name]:
                if is_guarded or not cell.startswith("%unload"):
                    is_magic = cell.startswith("%%") and not is_guarded
                    shell.run_cell(cell.partition("\n")[2] if is_magic else cell)
        left = _await_none_left(1 if name in LEFT_BY_PLAIN else 5 if name in EITHER else 20)
    found = tracer.found()
    return {
        "seen": shell.user_ns.get("seen"),
        "left": left,
        "said": said.getvalue().splitlines(),
        "printed": printed.getvalue()[-2000:],
        "found": [key for key in found if key != FIRED],
        "fired": FIRED in found,
    }


def _await_none_left(seconds: float) -> list[str]:
    """Return the worker processes that are still there after a while."""
    deadline = time.monotonic() + seconds
    while True:
        children = psutil.Process().children(recursive=True)
        left = [child.name() for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        left = [name for name in left if name.startswith("pt_data_work")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def trial(name: str, target: str | None, is_guarded: bool = True, in_workers: bool = False) -> dict[str, Any]:
    """Run a scenario in a fork, and return what it gave."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        _answer(write, lambda: run(name, target, is_guarded, in_workers))
    os.close(write)
    answer = b""
    deadline = time.monotonic() + SECONDS
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(read, 65536)
        if not piece:
            break
        answer += piece
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    os.waitpid(pid, 0)
    return json.loads(answer) if answer else {"hung": True}


def _answer(write: int, ask: Callable[[], dict[str, Any]]) -> None:
    try:
        answer = ask()
    except BaseException:
        answer = {"crashed": traceback.format_exc()}
    with os.fdopen(write, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def verdict(name: str, plain: Any, left_by_plain: int, found: dict[str, Any], in_workers: bool) -> str:
    """Say what is wrong with what a trial gave; empty if nothing is."""
    if "seen" not in found:
        return str(found)
    wrong = []
    if found["seen"] != plain and found["seen"] not in EITHER.get(name, []):
        wrong.append(f"gave {found['seen']}")
    is_unguarded = any("is not guarded" in line for line in found["said"])
    if name in EITHER and is_unguarded:
        left_by_plain = 2  # held by the error, as in plain torch
    if len(found["left"]) > left_by_plain:
        wrong.append(f"left {found['left']}")
    said = found["said"]
    is_told = name == "dying" and found["seen"] == "error"  # by a note of that error
    if name == "dying":  # torch's own clean-up is not quiet when a worker was killed
        said = [line for line in said if "LoaderGuardWarning" in line]
    # what is not reached depends e.g. on when a message comes; all goes well then, and nothing is said
    # and what a worker says goes to its terminal, which is not looked at
    expected = (1, 1 - is_told) if found["fired"] and not in_workers else (0,)
    if [line for line in said if "loaderguard: " not in line] or len(said) not in expected:
        wrong.append(f"said {found['said']}")
    return "; ".join(wrong) and f"{'; '.join(wrong)}\n{found['printed']}"


def explore(names: list[str], in_workers: bool) -> list[tuple[str, str]]:
    """Return each function of ours with the first of these scenarios that goes through it."""
    known: dict[str, str] = {}
    for name in names:
        clean = trial(name, None, in_workers=in_workers)
        if clean["said"] or clean["left"]:
            raise AssertionError(f"{name} is not clean without a fault: {clean}")
        known = {**dict.fromkeys(clean["found"], name), **known}
    return [(name, target) for target, name in known.items()]


def main(names: list[str], is_each: bool, in_workers: bool) -> None:
    """Try every function in the first of these scenarios that goes through it, or in `each`."""
    plain = {name: trial(name, None, is_guarded=name in EITHER) for name in names}
    groups = [[name] for name in names] if is_each else [names]
    for name, target in [pair for group in groups for pair in explore(group, in_workers)]:
        found = trial(name, target, in_workers=in_workers)
        wrong = verdict(name, plain[name]["seen"], len(plain[name]["left"]), found, in_workers)
        fired = found.get("fired", False)
        print(json.dumps({"scenario": name, "target": target, "fired": fired, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    main(
        [word for word in sys.argv[1:] if word not in options] or list(SCENARIOS),
        "--each" in options,
        "--workers" in options,
    )
