"""Acting on an import without importing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from jupyter_loaderguard.late_import import when_imported


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "late_pkg").mkdir()
    (tmp_path / "late_pkg" / "__init__.py").write_text("")
    (tmp_path / "late_pkg" / "inner.py").write_text("value = 5\n")
    (tmp_path / "late_pkg" / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("late_pkg")]:
        del sys.modules[name]


def test_it_waits_for_the_import_and_leaves_no_trace() -> None:
    seen = []
    when_imported("late_pkg.inner", seen.append)
    assert "late_pkg" not in sys.modules
    module = importlib.import_module("late_pkg.inner")
    assert seen == [module]
    assert module.value == 5
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    importlib.reload(module)
    assert seen == [module]


def test_an_imported_module_is_told_at_once() -> None:
    module = importlib.import_module("late_pkg.inner")
    seen = []
    when_imported("late_pkg.inner", seen.append)
    assert seen == [module]


def test_it_can_be_called_off() -> None:
    seen = []
    when_imported("late_pkg.inner", seen.append)()
    importlib.import_module("late_pkg.inner")
    assert seen == []


def test_a_failed_import_fails_as_ever_and_can_be_tried_again() -> None:
    seen = []
    forget = when_imported("late_pkg.broken", seen.append)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("late_pkg.broken")
    assert seen == []
    forget()


def test_a_missing_module_is_missing_as_ever() -> None:
    forget = when_imported("late_pkg.nowhere", print)
    with pytest.raises(ModuleNotFoundError, match=r"late_pkg\.nowhere"):
        importlib.import_module("late_pkg.nowhere")
    forget()
