"""Drives a real ipykernel as a front end does."""

from __future__ import annotations

import ast
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

CAN_UNSHARE = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
"""Whether a kernel can be given a /dev/shm of its own: `unshare` is util-linux's, and wants rights."""
VIEW = "application/vnd.jupyter.widget-view+json"
SETUP = """
import multiprocessing, os, signal, sys, threading, time
multiprocessing.set_forkserver_preload(["torch.utils.data"])  # or each worker imports it: most of the time of these tests
import torch
from torch.utils.data import DataLoader
from tests.programs.datasets import *
import jupyter_loaderguard as lg
NAMES = set(globals()) | {"NAMES"}
"""


@dataclass
class Reply:
    """What a cell gave back."""

    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, str]] = field(default_factory=list)
    updates: list[dict[str, str]] = field(default_factory=list)
    """What took the place of an earlier display."""
    widgets: list[dict[str, str]] = field(default_factory=list)
    """Displays of the live widget."""
    settled: list[dict[str, str]] = field(default_factory=list)
    """What took the place of such a display."""
    result: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def value(self) -> object:
        """The value of the last expression."""
        return ast.literal_eval(self.result["text/plain"])


class Kernel:
    """One kernel process and the client that talks to it."""

    def __init__(
        self,
        load: bool = True,
        setup: str = SETUP,
        python: str = sys.executable,
        wrapper: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        for chance in (2, 1, 0):
            self._start([*wrapper, python], environment)
            try:
                self.client.wait_for_ready(timeout=60)
                break
            except RuntimeError:  # between the choice of a port and its use another test may have taken it
                self.client.stop_channels()
                if not chance:
                    raise
        self.pid: int = self.manager.provisioner.pid  # type: ignore[union-attr]
        self.started: set[psutil.Process] = set()
        self._live: set[str] = set()
        if load:
            self.ok("%load_ext jupyter_loaderguard")
        if setup:
            self.ok(setup)

    def _start(self, python: list[str], environment: dict[str, str]) -> None:
        self.manager = KernelManager()
        self.manager._kernel_spec = KernelSpec(
            argv=[*python, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=40"],
            language="python",
        )
        self.manager.start_kernel(cwd=os.getcwd(), env={**os.environ, **environment})
        self.client = self.manager.blocking_client()
        self.client.start_channels()

    def ok(self, code: str, timeout: float = 60) -> Reply:
        """Run a cell that must succeed."""
        reply = self.run(code, timeout)
        assert reply.status == "ok", (code, reply.traceback, reply.stderr)
        return reply

    def run(self, code: str, timeout: float = 60) -> Reply:
        """Run a cell and wait for its end."""
        return self.finish(self.begin(code), timeout)

    def begin(self, code: str, **options: object) -> str:
        """Send a cell without waiting for it."""
        return self.client.execute(code, **options)  # type: ignore[arg-type]

    def finish(self, msg_id: str, timeout: float = 60, when_lost: Callable[[], None] | None = None) -> Reply:
        """Collect a cell's output until the kernel is idle again.

        Python itself loses a KeyboardInterrupt that it raises inside of some object's `__del__`, and
        says "Exception ignored in". A user presses the button again: `when_lost`. And ipykernel, interrupted
        before IPython has the cell, says "KeyboardInterrupt caught in kernel." and is idle without a reply.
        """
        reply, since = Reply(), time.monotonic()
        deadline = since + timeout
        while True:
            message = self._iopub(msg_id, deadline)
            content, kind = message["content"], message["msg_type"]
            if kind == "stream":
                setattr(reply, content["name"], getattr(reply, content["name"]) + content["text"])
                if when_lost and "Exception ignored in" in content["text"]:
                    reply.stderr = ""
                    when_lost()
            elif kind == "display_data":
                is_live = VIEW in content["data"]
                (reply.widgets if is_live else reply.displays).append(content["data"])
            elif kind == "update_display_data":
                is_live = content["transient"]["display_id"] in self._live
                (reply.settled if is_live else reply.updates).append(content["data"])
            elif kind == "execute_result":
                reply.result = content["data"]
            elif kind == "error":
                reply.ename, reply.evalue = content["ename"], content["evalue"]
                reply.traceback = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                break
        try:
            reply.status = self._shell_status(msg_id, deadline if when_lost is None else time.monotonic() + 5)
        except queue.Empty:
            if when_lost is None:
                raise
            reply.status = "aborted"
        reply.seconds = time.monotonic() - since
        return reply

    def _iopub(self, msg_id: str, deadline: float) -> dict:
        while True:
            remaining = deadline - time.monotonic()
            assert remaining > 0, "the cell did not end in time"
            try:
                message = self.client.get_iopub_msg(timeout=min(1.0, remaining))
            except queue.Empty:
                assert self.manager.is_alive(), "the kernel died"
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                content = message["content"]
                if message["msg_type"] == "display_data" and VIEW in content["data"]:
                    self._live.add(content["transient"].get("display_id"))
                return message

    def _shell_status(self, msg_id: str, deadline: float) -> str:
        while True:
            message = self.client.get_shell_msg(timeout=max(1.0, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") == msg_id:
                return message["content"]["status"]

    def wait_for_output(self, msg_id: str, text: str, timeout: float = 60) -> None:
        """Wait until a running cell has printed `text`."""
        seen, deadline = "", time.monotonic() + timeout
        while text not in seen:
            message = self._iopub(msg_id, deadline)
            if message["msg_type"] == "stream":
                seen += message["content"]["text"]
            assert message["msg_type"] != "error", message["content"]

    def wait_for_display(self, msg_id: str, timeout: float = 60) -> dict[str, str]:
        """Wait until a running cell has displayed something, and return it."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._iopub(msg_id, deadline)
            assert message["msg_type"] != "error", message["content"]
            content = message["content"]
            if message["msg_type"] == "display_data" and VIEW not in content["data"]:
                return content["data"]

    def interrupt(self, group: bool = True) -> None:
        """Interrupt as jupyter_client does (the group), or as some front ends do (the pid alone)."""
        (os.killpg if group else os.kill)(self.pid, signal.SIGINT)

    def workers(self) -> list[psutil.Process]:
        """Return the live workers that the guard knows."""
        pids = self.ok("[worker.pid for worker in lg.snapshot().workers]").value
        return self._note([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])  # type: ignore[attr-defined]

    def wait_for_workers(self, number: int, timeout: float = 60) -> list[psutil.Process]:
        """Wait, from outside, until so many workers have arrived in torch's worker loop."""
        wait_until(lambda: len(self._arrived()) >= number, timeout, f"the start of {number} workers")
        return self._note(self._arrived())

    def wait_for_children(self, number: int, timeout: float = 60) -> list[psutil.Process]:
        """The same for loaders whose workers do not carry torch's name, as torchdata's."""
        wait_until(lambda: len(self.children()) >= number, timeout, f"the start of {number} workers")
        return self._note(self.children())

    def _arrived(self) -> list[psutil.Process]:
        return [child for child in self.children() if name_of(child).startswith("pt_data_work")]

    def children(self) -> list[psutil.Process]:
        """Return the kernel's children and theirs, without the helpers of Python's multiprocessing."""
        found = psutil.Process(self.pid).children(recursive=True)
        return [child for child in found if not is_helper(child)]

    def _note(self, processes: list[psutil.Process]) -> list[psutil.Process]:
        """Remember what to end after a failed test."""
        self.started.update(processes)
        return processes

    def close(self) -> None:
        """End the kernel and whatever a failed test left of its workers."""
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        for process in self.started:
            if process.is_running():
                process.kill()


def name_of(process: psutil.Process) -> str:
    """Return its name, empty if it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def is_helper(process: psutil.Process) -> bool:
    """Tell Python's resource tracker and forkserver from workers."""
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    is_forked_worker = name_of(process).startswith("pt_data_work")
    return not is_forked_worker and ("resource_tracker" in line or "forkserver" in line)


def is_gone(process: psutil.Process) -> bool:
    """Tell whether it has ended; a zombie of a dead kernel has, it only waits for init."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, timeout: float = 15.0, what: str = "the condition") -> float:
    """Poll with patience; return how long it took."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() - since < timeout, f"{what} did not come true within {timeout} s"
        time.sleep(0.02)
    return time.monotonic() - since


def wait_gone(processes: list[psutil.Process], timeout: float = 15.0) -> float:
    """Wait until all of them have ended."""
    return wait_until(lambda: all(is_gone(process) for process in processes), timeout, f"the end of {processes}")
