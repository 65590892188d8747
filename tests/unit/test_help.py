"""Every public name has help, with an example that runs; every scenario has a test, and a row in the index."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest

import jupyter_loaderguard as lg

ROOT = Path(__file__).parents[2]
LETTERS = {"A": 26, "B": 11, "C": 8, "D": 5, "E": 8}
SCENARIOS = [f"{letter}{number}" for letter, last in LETTERS.items() for number in range(1, last + 1)]
PUBLIC = [name for name in lg.__all__ if not name.startswith("__")]


def _written(name: str) -> str:
    """Return the help of a function whose place its module has taken, once it was used: the doctor's."""
    tree = ast.parse(Path(lg.__file__).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return ast.get_docstring(found) or ""


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    thing = getattr(lg, name)
    space = vars(inspect.getmodule(thing)) | {key: getattr(lg, key) for key in PUBLIC}
    text = _written(name) if inspect.ismodule(thing) else inspect.getdoc(thing) or ""
    example = doctest.DocTestParser().get_doctest(text, dict(space), name, None, None)
    assert example.examples, f"{name} has no example"
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    told: list[str] = []
    results = doctest.DocTestRunner(optionflags=options).run(example, out=told.append)
    assert results.failed == 0, "".join(told)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_has_a_test_that_names_it(scenario: str) -> None:
    names = " ".join(
        re.findall(r"def (test_\w+)", " ".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py")))
    )
    assert re.search(rf"_{scenario.lower()}(_|\b)", names)


def test_every_scenario_is_in_the_index_of_messages() -> None:
    index = (ROOT / "docs" / "errors.md").read_text()
    listed = {word for row in re.findall(r"\| ([A-E\d, ]+) \|$", index, re.MULTILINE) for word in row.split(", ")}
    assert listed == set(SCENARIOS)
