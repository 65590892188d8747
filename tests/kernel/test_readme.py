"""What the README shows runs as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .driver import Kernel

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LOADER = """
from tests.programs.datasets import Quick
loader = train_loader = DataLoader(Quick(64), batch_size=8, num_workers=2)
def train(loader):
    for batch in loader:
        pass
"""


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_of_code_runs(kernel: Kernel, number: int, tmp_path: Path) -> None:
    block = BLOCKS[number]
    if block.startswith("c."):
        config = tmp_path / "profile_default" / "ipython_config.py"
        config.parent.mkdir()
        config.write_text(block)
        code = "import sys; print('loaderguard' in get_ipython().magics_manager.magics['line'])"
        command = [sys.executable, "-m", "IPython", f"--ipython-dir={tmp_path}", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.strip() == "True", done.stderr
        return
    kernel.ok(LOADER)
    reply = kernel.ok(block)
    assert not reply.stderr
    kernel.ok("lg.clean()")


def test_every_option_and_subcommand_is_in_the_readme(kernel: Kernel) -> None:
    told = kernel.ok("%loaderguard?\n")
    assert told.status == "ok"
    wash = kernel.run("%loaderguard wash")
    commands = (wash.stderr + wash.evalue).partition("there is status")[2].split(", ")
    for command in commands:
        assert f"%loaderguard {command.strip()}" in README or f"`{command.strip()}`" in README, command
    options = kernel.ok(
        "from jupyter_loaderguard.ipython.magics import LoaderGuardMagics as M\nM.guarded_loader.__doc__"
    )
    for option in set(re.findall(r"--[a-z-]+", str(options.value))):
        assert option in README, option


def test_every_setting_is_in_the_readme(kernel: Kernel) -> None:
    names = kernel.ok(
        "from jupyter_loaderguard.ipython.configuration import LoaderGuard\n"
        "sorted(name for name in LoaderGuard.class_own_traits(config=True))"
    ).value
    for name in names:  # type: ignore[attr-defined]
        assert f"`{name}`" in README or f"LoaderGuard.{name}" in README, name


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[2]
    for page in (root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), (page.name, target)
