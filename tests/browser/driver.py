"""Opens notebooks in a browser as a person does."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import psutil
from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright

SETUP = """%load_ext jupyter_loaderguard
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 2000
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((4,), index)
class Stuck(Slow):
    def __getitem__(self, index):
        while index == 40: pass
        return super().__getitem__(index)"""
LOOP = "%%guarded_loader\nloader = DataLoader(Slow(), batch_size=4, num_workers=2)\nfor batch in loader:\n    pass"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run"
APPS = {"lab": ("jupyterlab", "lab/tree"), "notebook": ("notebook", "notebooks")}


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium; `make test` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield browser
        browser.close()


class Server:
    """A Jupyter server, and the pages that are open on it."""

    def __init__(self, app: str, browser: Browser, folder: Path, screenshots: Path) -> None:
        module, self._path = APPS[app]
        self.app, self.folder, self.browser = app, folder, browser
        self._screenshots = screenshots
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        settings = folder / ".settings"
        options = [f"--port={port}", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}"]
        options += ["--IdentityProvider.token=", "--ServerApp.password=", "--ServerApp.log_level=ERROR"]
        self.settings = settings
        self._set("notification", {"fetchNews": "false", "checkForUpdates": False})
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *options],
            env={**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTER_CONFIG_DIR": str(folder / ".config")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=os.getcwd(),
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self._address}/api", timeout=5)
                return
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.3)

    def use_theme(self, name: str) -> None:
        """Have the next pages opened in a theme."""
        self._set("themes", {"theme": name})

    def _set(self, plugin: str, values: dict[str, object]) -> None:
        folder = self.settings / "@jupyterlab" / "apputils-extension"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{plugin}.jupyterlab-settings").write_text(json.dumps(values))

    def open(self, name: str, *cells: str, width: int = 1280) -> Page:
        """Write a notebook, open it and run all its cells."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (SETUP, *cells)])
        book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(book, self.folder / f"{name}.ipynb")
        page = self.show(name, width)
        started = page.locator(".jp-InputPrompt", has_text=re.compile(r"\[(\*|\d+)\]")).first
        for _ in range(4):  # a click that comes before the kernel is there is lost, and one beside a dialog as well
            self._answer_dialog(page)
            with suppress(TimeoutError):
                page.locator(".jp-Notebook .jp-Cell").first.click(timeout=15_000)
                page.locator("#jp-MainMenu").get_by_text("Run", exact=True).click(timeout=15_000)
                page.get_by_text("Run All Cells", exact=True).first.click(timeout=15_000)
                started.wait_for(timeout=15_000)
                return page
        self.screenshot(page, f"{name}-did-not-run")
        raise AssertionError("the cells did not run")

    def _answer_dialog(self, page: Page) -> None:
        """Accept what the front end asks before it runs anything: on a slow machine, which kernel."""
        dialog = page.locator(".jp-Dialog")
        if dialog.count():
            print("a dialog:", dialog.first.inner_text())
            dialog.first.locator("button.jp-mod-accept").last.click(timeout=15_000)

    def show(self, name: str, width: int = 1280) -> Page:
        """Open a notebook."""
        page = self.browser.new_page(viewport={"width": width, "height": 1000})
        page.set_default_timeout(60_000)
        page.goto(f"{self._address}/{self._path}/{name}.ipynb?reset")  # without the notebooks of earlier pages
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle], .jp-KernelStatus").first.wait_for(
            state="attached"
        )
        return page

    def screenshot(self, page: Page, name: str) -> None:
        """Keep a picture for a person to look at."""
        self._screenshots.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=self._screenshots / f"{self.app}-{name}.png")

    def workers(self) -> list[psutil.Process]:
        """Return the live DataLoader workers of all kernels of this server."""
        found = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in found if _name(process).startswith("pt_data_work")]

    def close(self) -> None:
        """End the server and its kernels."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        _, alive = psutil.wait_procs([psutil.Process(self._process.pid), *children], timeout=15)
        for process in alive:
            process.kill()
        self._process.wait()


def _name(process: psutil.Process) -> str:
    try:
        return process.name() if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


def wait_until(
    condition: Callable[[], bool], seconds: float = 30.0, page: Page | None = None, pause: float = 0.1
) -> None:
    """Poll with patience; the page goes on meanwhile."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        if page is not None:
            page.wait_for_timeout(1000 * pause)
        else:
            time.sleep(pause)
