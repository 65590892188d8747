"""Kernels for the tests. What a test leaves behind in one is the test's failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import psutil
import pytest

from .driver import Kernel, wait_until

IPYKERNEL6 = os.environ.get("LOADERGUARD_IPYKERNEL6_PYTHON", "")
START_METHODS = ("fork", "spawn", "forkserver")

# not %reset: it takes __main__.__spec__ along, without which no process can be spawned
FORGET = """
for name in [name for name in globals() if name not in NAMES and not name.startswith("_")]:
    del globals()[name]
"""
HYGIENE = """
import threading
[thread.name for thread in threading.enumerate() if "QueueFeeder" in thread.name or "loaderguard" in thread.name]
"""


@pytest.fixture(params=START_METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """A start method for the workers."""
    return request.param


@pytest.fixture(scope="module")
def _kernels() -> Iterator[dict[str, Kernel]]:
    kernels: dict[str, Kernel] = {}
    yield kernels
    for kernel in kernels.values():
        kernel.close()


def _shared(kernels: dict[str, Kernel], python: str) -> Iterator[Kernel]:
    """Lend the module's kernel for one test, and see that it comes back clean."""
    kernel = kernels.get(python)
    if kernel is None or not kernel.manager.is_alive():
        kernel = kernels[python] = Kernel(python=python)
    yield kernel
    try:
        assert kernel.manager.is_alive(), "the kernel died"
        kernel.ok(FORGET)
        wait_until(lambda: not kernel.children(), what=f"the end of {kernel.children()}")
        wait_until(lambda: kernel.ok(HYGIENE).value == [], what="the end of the guard's threads")
    except BaseException:
        kernels.pop(python).close()
        raise


@pytest.fixture
def kernel(_kernels: dict[str, Kernel]) -> Iterator[Kernel]:
    """A kernel with the extension loaded, shared by the tests of a module."""
    yield from _shared(_kernels, sys.executable)


@pytest.fixture(params=["newest", "ipykernel6"])
def any_kernel(_kernels: dict[str, Kernel], request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """The same with the newest ipykernel, and with one of the 6 series in an environment of its own."""
    if request.param == "ipykernel6" and not IPYKERNEL6:
        pytest.skip("LOADERGUARD_IPYKERNEL6_PYTHON is not set; `make test` sets it")
    yield from _shared(_kernels, IPYKERNEL6 if request.param == "ipykernel6" else sys.executable)


@pytest.fixture
def own_kernel() -> Iterator[Kernel]:
    """A kernel for one test, which may kill it."""
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    """A process that is nobody's worker, and must live through everything."""
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    assert process.is_running()
    assert process.status() != psutil.STATUS_ZOMBIE
    process.kill()
    process.wait()
