"""Kernels with real libraries, and which of them are to be there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import _kernels, kernel  # noqa: F401
from tests.kernel.driver import Kernel

from .protocol import Plain

EVERYWHERE = ("test_fastai", "test_lightning", "test_accelerate", "test_notebook_launcher", "test_endless")
"""What `make test` runs too, as its environment has all they need."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "MPLBACKEND": "agg"}


@pytest.fixture(scope="module", autouse=True)
def _expected(request: pytest.FixtureRequest) -> None:
    """Leave out, and say so, what has no environment here; where a library is expected its absence is a failure."""
    name = request.path.stem
    if os.environ.get("LOADERGUARD_LIBRARIES") != "all" and name not in EVERYWHERE:
        pytest.skip("needs the environment of `make test-libraries`, which sets LOADERGUARD_LIBRARIES=all")


@pytest.fixture(scope="module", autouse=True)
def _offline(_expected: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let no library look for anything on a network, or write into the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        yield


@pytest.fixture(scope="class")
def plain(_offline: None) -> Iterator[Plain]:
    """A kernel without the guard, for one library."""
    unguarded = Kernel(load=False)
    yield Plain(unguarded)
    unguarded._note(unguarded.children())
    unguarded.close()
