"""What the guard says of its own limits: one line, never an error."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from jupyter_loaderguard.errors import LoaderGuardWarning, warn_limited

SAYING = """
import warnings
from jupyter_loaderguard.errors import LoaderGuardWarning, warn_limited
{filter}
warn_limited("something is not guarded")
print("and on it goes")
"""


def said(line: str, *options: str) -> tuple[int, str, str]:
    """Run a script in which the guard has something to say; return its code and what it printed."""
    command = [sys.executable, *options, "-c", SAYING.format(filter=line)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "line", ["", "warnings.simplefilter('error')", "warnings.simplefilter('ignore')", "warnings.simplefilter('once')"]
)
def test_it_is_said_in_one_line_whatever_the_filters_are(line: str) -> None:
    code, out, err = said(line)
    assert (code, out) == (0, "and on it goes\n")
    assert err == "jupyter_loaderguard:1: LoaderGuardWarning: loaderguard: something is not guarded.\n"


def test_an_option_of_the_interpreter_does_not_make_an_error_of_it_either() -> None:
    assert said("", "-W", "error")[:2] == (0, "and on it goes\n")


def test_a_filter_that_names_it_is_heeded() -> None:
    assert said("warnings.simplefilter('ignore', LoaderGuardWarning)") == (0, "and on it goes\n", "")


def test_a_users_way_to_show_warnings_that_fails_does_no_harm() -> None:
    code, out, err = said("def show(*arguments, **options): raise OSError('mine')\nwarnings.showwarning = show")
    assert (code, out, err) == (0, "and on it goes\n", "loaderguard: something is not guarded.\n")


def test_it_can_be_expected_by_a_test() -> None:
    with pytest.warns(LoaderGuardWarning, match="loaderguard: a limit."):
        warn_limited("a limit")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warn_limited("a limit")
    assert [str(one.message) for one in caught] == ["loaderguard: a limit."]
