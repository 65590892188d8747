"""Kernels that lack something: shared memory without memfd, descriptors, a reaper that answers."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .driver import Kernel, wait_until

CLASSES = """
from torch.utils.data import Dataset
class Mine(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 99: raise ValueError("mine")
        return index + 1
class Stuck(Mine):
    def __getitem__(self, index): time.sleep(600 if index == 2 else 0); return index
class Failing(Mine):
    def __getitem__(self, index): return [][index]
"""
NO_FILE = """
from jupyter_loaderguard.worker import slot
def refuse(*_): raise OSError(28, "No space left on device")
slot._make_memfd = slot._make_in_memory = slot._make_temporary = refuse
"""


@pytest.fixture(params=["fork", "spawn"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["del os.memfd_create", NO_FILE, "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))"])
def poor(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel without memfd, without any kind of shared file, or with few descriptors."""
    kernel = Kernel()
    kernel.ok(f"import resource\n{request.param}")
    kernel.ok(CLASSES)
    yield kernel
    kernel.close()


def test_notebook_classes_travel_and_errors_name_their_sample(poor: Kernel, method: str) -> None:
    options = f"num_workers={4 if method == 'fork' else 2}, multiprocessing_context={method!r}, batch_size=2"
    got = poor.ok(f"[batch.tolist() for batch in DataLoader(Mine(), {options})]")
    assert got.value == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert "Traceback" not in got.stderr
    reply = poor.run(f"list(DataLoader(Failing(), {options}))")
    assert reply.ename == "IndexError"
    assert "sample 0" in reply.traceback, "the note is written in the worker"
    assert poor.workers() == []


def test_a_stall_says_what_is_not_known(poor: Kernel, method: str) -> None:
    code = f"next(iter(DataLoader(Stuck(), num_workers=1, multiprocessing_context={method!r}, batch_size=3)))"
    reply = poor.run(f"with lg.guard(stall_seconds=1, on_stall='raise'): {code}")
    assert reply.ename == "LoaderStalled", reply.traceback
    assert "before the guard" not in reply.traceback, "it is not older than the guard"
    wait_until(lambda: not poor.children(), what="the end of the workers")


# -- a reaper that does not answer ------------------------------------------------------------------


def debug(kernel: Kernel, command: str, **arguments: object) -> None:
    """Send what JupyterLab sends when its debugger is switched on."""
    content = {"type": "request", "seq": 1, "command": command, "arguments": arguments}
    message = kernel.client.session.msg("debug_request", content)
    kernel.client.control_channel.send(message)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            reply = kernel.client.control_channel.get_msg(timeout=1)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                assert reply["content"]["success"], reply["content"]
                return
    raise AssertionError("the debugger did not answer")


LAUNCH = """
from accelerate import notebook_launcher
def train():
    print("batches", len(list(DataLoader(list(range(16)), num_workers=1, batch_size=4))), flush=True)
notebook_launcher(train, num_processes=2, use_port={port!r})
"""


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_ranks_with_jupyterlabs_debugger_on(own_kernel: Kernel) -> None:
    pytest.importorskip("accelerate")
    debug(own_kernel, "initialize", clientID="jupyterlab", adapterID="python", pathFormat="path")
    assert own_kernel.ok("'pydevd' in sys.modules").value is True
    reply = own_kernel.ok(LAUNCH.format(port=free_port()), timeout=60)
    assert reply.stdout.count("batches 4") == 2
    wait_until(lambda: not own_kernel.children(), what="the end of the ranks and their workers")
    own_kernel.ok("list(DataLoader(list(range(4)), num_workers=1))")
    assert own_kernel.ok("from jupyter_loaderguard.registry import registry; registry.reaper.pid is not None").value


def test_a_python_that_is_a_script_of_somebodys_does_not_keep_a_loader_from_starting(
    own_kernel: Kernel, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 600\n")
    script.chmod(0o700)
    own_kernel.ok("%unload_ext jupyter_loaderguard")
    own_kernel.ok(f"real, sys.executable = sys.executable, {str(script)!r}\n%load_ext jupyter_loaderguard")
    loop = "list(DataLoader(list(range(4)), num_workers=1, batch_size=2)) and None"
    first, second = own_kernel.ok(loop), own_kernel.ok(loop)
    said = first.stdout + first.stderr
    assert said.count("loaderguard: the reaper has not answered") == 1
    assert first.seconds < 10
    assert second.seconds < 2
    assert "reaper" not in second.stdout + second.stderr
    own_kernel.ok("sys.executable = real\n%unload_ext jupyter_loaderguard")
    wait_until(lambda: not own_kernel.children(), what="the end of what was started")
