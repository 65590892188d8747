"""Stacks as faulthandler writes them, and the user's own frame in them."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from jupyter_loaderguard import frames, traces

TEXT = f'''Thread 0x00007f2ddf7fe6c0 (most recent call first):
  File "{sysconfig.get_path("stdlib")}/threading.py", line 327 in wait
  File "{sysconfig.get_path("stdlib")}/multiprocessing/queues.py", line 231 in _feed

Current thread 0x00007f2e0b3f2b80 (most recent call first):
  File "{sysconfig.get_path("stdlib")}/multiprocessing/synchronize.py", line 95 in __enter__
  File "{__file__}", line 3 in decode
  File "/data/my project/data.py", line ??? in __getitem__
  File "{sysconfig.get_path("purelib")}/torch/utils/data/_utils/worker.py", line 374 in _worker_loop
  File "/home/me/kernel.py", line 1 in <module>
'''


def test_the_workers_own_thread_comes_first_and_ends_at_torchs_loop() -> None:
    main, other = traces.parse(TEXT, lambda file: file)
    assert [frame.function for frame in main] == ["__enter__", "decode", "__getitem__", "_worker_loop"]
    assert [frame.function for frame in other] == ["wait", "_feed"]
    assert main[2].line == 0
    assert main[1].code == "from __future__ import annotations"


def test_the_users_own_frame_is_neither_pythons_nor_a_packages() -> None:
    main, other = traces.parse(TEXT, lambda file: file)
    assert [frame.is_user for frame in main] == [False, True, True, False]
    assert traces.users_own(main) == main[1]
    assert traces.users_own(other) == other[0], "better than nothing"
    assert traces.users_own([]) is None


def test_nonsense_is_no_stack() -> None:
    for text in ("", "nonsense\n", '  File "x", line 1 in f\n', "Current thread 0x1 (most recent call first):\n"):
        assert traces.parse(text, lambda file: file) == []


def test_our_own_code_and_installed_code_are_not_the_users() -> None:
    assert not traces.is_user_file(traces.__file__)
    assert not traces.is_user_file("<frozen runpy>")
    assert not traces.is_user_file("/opt/x/site-packages/numpy/core.py")
    assert traces.is_user_file(str(Path("/home/me/project/data.py")))
    assert traces.is_user_file("/tmp/ipykernel_123/456.py")


def test_a_thread_of_this_process() -> None:
    found = traces.of_thread(frames.below(sys._getframe()), lambda file: "here")
    assert found[0].function == "test_a_thread_of_this_process"
    assert found[0].place == "here"
    assert "sys._getframe()" in found[0].code


def test_places_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert traces.short_place(f"{tmp_path}/data/read.py") == "data/read.py"
    assert traces.short_place("/elsewhere/read.py") == "/elsewhere/read.py"
    assert traces.short_place("/opt/x/lib/python3/site-packages/torch/utils/fetch.py") == "torch/utils/fetch.py"
    assert traces.short_place(f"{sysconfig.get_path('stdlib')}/threading.py") == "threading.py"
