"""Imports go one way, and importing the package is free."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import jupyter_loaderguard

PACKAGE = Path(jupyter_loaderguard.__file__).parent
LAYERS = [
    {"errors", "frames", "samples", "timing", "_version"},
    {"quarantine", "seam"},
    {"model", "population"},
    {"processes", "interrupts", "late_import", "queues", "reach", "views", "allowance"},
    {"usage"},
    {"machine", "reaper", "worker", "entries"},
    {"accounts", "traces", "waits", "ledger", "orphans"},
    {"registry", "census"},
    {"torch_adapter", "examine", "explain", "meter"},
    {"watch"},
    {"guarding", "lending"},
    {"status", "doctor", "tuning", "reporter"},
    {"launched"},
    {"cluster"},
    {"ipython", "cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported_rooms(path: Path) -> set[str]:
    """Return the rooms of ours that a file imports, at its top or anywhere in it."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.partition(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jupyter_loaderguard."):
            found.add((node.module or "").split(".")[1])
    return found


def _files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def test_every_file_has_a_room() -> None:
    assert {_room(path) for path in _files()} == set(LEVEL)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in _files()
        for room in _imported_rooms(path)
        if LEVEL[room] >= LEVEL[_room(path)] and room != _room(path)
    ]
    assert wrong == []


def test_views_know_the_model_only() -> None:
    for path in (PACKAGE / "views").glob("*.py"):
        assert _imported_rooms(path) <= {"model", "population", "timing"}


def test_foreign_libraries_stay_in_their_rooms() -> None:
    rooms = {
        "IPython": {"ipython"},
        "traitlets": {"ipython"},
        "torch": {"torch_adapter"},
        "ipyparallel": {"cluster"},
    }
    for path in _files():
        tree = ast.walk(ast.parse(path.read_text()))
        for node in tree:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                allowed = rooms.get(name.partition(".")[0])
                assert allowed is None or _room(path) in allowed, f"{path} imports {name}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, jupyter_loaderguard\n"
        "print([name for name in ('torch', 'IPython', 'psutil', 'ipywidgets', 'traitlets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
