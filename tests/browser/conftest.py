"""JupyterLab and Notebook 7 in a real Chromium."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from .driver import Server, chromium

expect.set_options(timeout=30_000)
SCREENSHOTS = Path(os.environ.get("LOADERGUARD_SCREENSHOTS", "build/screenshots"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", params=["lab", "notebook"])
def server(
    request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of each kind, with a folder of its own."""
    server = Server(request.param, browser, tmp_path_factory.mktemp(request.param), SCREENSHOTS)
    yield server
    server.close()


@pytest.fixture(scope="module")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab alone."""
    server = Server("lab", browser, tmp_path_factory.mktemp("only-lab"), SCREENSHOTS)
    yield server
    server.close()
