"""What is published, and what `pip install` makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import jupyter_loaderguard

ROOT = Path(__file__).parents[2]
USE = """
import json, sys
import jupyter_loaderguard as lg, torch
from torch.utils.data import DataLoader, TensorDataset
with lg.guard() as run:
    rows = sum(len(batch[0]) for batch in DataLoader(TensorDataset(torch.arange(40)), batch_size=4, num_workers=2))
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "jupyter_loaderguard")
shell.run_line_magic("unload_ext", "jupyter_loaderguard")
print(json.dumps({"place": lg.__file__, "rows": rows, "batches": run.report.batches, "left": run.report.left}))
"""


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(command[0]).anchor,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def test_the_wheel_carries_the_package_its_types_and_its_metadata(published: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(published[1]) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA"))
        scripts = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "jupyter_loaderguard").rglob("*.py")}
    assert sources | {"jupyter_loaderguard/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    assert f"\nVersion: {jupyter_loaderguard.__version__}\n" in metadata
    assert "jupyter-loaderguard = jupyter_loaderguard.cli:main" in scripts
    for requirement in ("torch>=2.6", "ipython>=8.18", "jupyter_core>=5", "psutil>=5.9", "traitlets>=5.9"):
        assert f"Requires-Dist: {requirement}" in metadata
    for extra in ("cluster", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    for framework in ("IPython", "Jupyter"):
        assert f"Classifier: Framework :: {framework}" in metadata


def test_the_source_carries_what_its_wheel_is_made_of(published: tuple[Path, Path]) -> None:
    with tarfile.open(published[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "setup.cfg", "setup.py", "pyproject.toml"} <= names


def test_what_is_published_passes_the_check_of_the_index(published: tuple[Path, Path]) -> None:
    assert _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, published)).count("PASSED") == 2


def test_it_works_in_an_environment_that_has_torch_and_no_trace_of_this_folder(
    published: tuple[Path, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    place = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # its requirements are those of these tests: the path alone, so that no development install comes with it
    (place / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    install = ("-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps", "--no-index", str(published[1]))
    _run(sys.executable, *install, PYTHONPATH="")
    found = json.loads(_run(str(python), "-c", USE, PYTHONPATH="").splitlines()[-1])
    assert Path(found.pop("place")).is_relative_to(place)
    assert found == {"rows": 40, "batches": 10, "left": 0}
    assert "usage" in _run(str(python.with_name("jupyter-loaderguard")), "--help", PYTHONPATH="").lower()
