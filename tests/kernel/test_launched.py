"""Processes that a notebook launches guard themselves, are in the table, and leave no worker when the cell ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .driver import Kernel, is_gone, name_of, wait_gone, wait_until

SETUP = """
import os, re, threading, time
import torch.multiprocessing as mp
from accelerate import notebook_launcher
from tests.programs import launch
import jupyter_loaderguard as lg
tables = []
def look(mark):
    while not any("2 ranks  ·  4 workers" in one and re.search(r"\\n +1  ", one) for one in tables):
        time.sleep(0.2)
        tables.append(repr(lg.cluster()))
    open(mark, "w").close()
"""
LAUNCHES = {
    "spawn": "mp.spawn(lg.ranked(launch.{}), nprocs=2)",
    "accelerate": "notebook_launcher(lg.ranked(launch.{}), num_processes=2)",
}


@pytest.fixture(scope="module")
def launcher():
    kernel = Kernel(setup=SETUP)
    yield kernel
    kernel.close()


def _workers(kernel: Kernel) -> list:
    return kernel._note([one for one in kernel.children() if name_of(one).startswith("pt_data")])


def test_the_widget_opens_before_a_launch(launcher: Kernel) -> None:
    reply = launcher.ok("%loaderguard cluster")
    assert [one["text/plain"] for one in reply.widgets] == ["0 ranks  ·  0 workers"]
    said = launcher.run("stacks = 5\n%loaderguard cluster stacks").stderr  # a variable of that name changes nothing
    assert "no engines are followed here" in said, said


def _pidfds(kernel: Kernel) -> list[str]:
    links = [os.readlink(one) for one in Path(f"/proc/{kernel.pid}/fd").iterdir() if one.is_symlink()]
    return [link for link in links if "pidfd" in link]


@pytest.mark.parametrize("how", LAUNCHES)
def test_a_launch_that_ends_leaves_nothing(launcher: Kernel, how: str) -> None:
    launcher.ok("function = lg.ranked(launch.train)")
    launcher.ok(LAUNCHES[how].replace("lg.ranked(launch.{})", "function"))
    wait_until(lambda: not launcher.children(), what="the end of all processes")
    wait_until(lambda: not _pidfds(launcher), what="the end of all handles")


@pytest.mark.parametrize("how", LAUNCHES)
def test_an_interrupt_of_the_kernel_alone_ends_the_workers_of_each_process(
    launcher: Kernel, how: str, tmp_path: Path
) -> None:
    mark = tmp_path / "seen"
    launcher.ok(
        f"os.environ['RANK'] = '7'  # which is not for them\ntables.clear()\nthreading.Thread(target=look, args=({str(mark)!r},), daemon=True).start()"
    )
    cell = launcher.begin(LAUNCHES[how].format("train_for_ever"))
    wait_until(lambda: len(_workers(launcher)) == 4, 60, "4 workers")
    workers, processes = _workers(launcher), launcher.children()
    wait_until(mark.exists, 30, "all ranks in the table")
    launcher.interrupt(group=False)
    launcher.finish(cell)
    wait_gone(workers)
    wait_gone(processes, 30)


def test_a_process_that_ignores_the_end_of_its_cell_loses_its_workers(launcher: Kernel) -> None:
    cell = launcher.begin(LAUNCHES["spawn"].format("hang"))
    wait_until(lambda: len(_workers(launcher)) == 4, 60, "4 workers")
    workers, processes = _workers(launcher), launcher._note(launcher.children())
    launcher.interrupt(group=False)
    launcher.finish(cell)
    wait_gone(workers)
    for one in processes:
        if not is_gone(one):
            one.kill()
    wait_until(lambda: not launcher.children(), what="the end of all processes")


def test_what_is_saved_after_an_interrupt_is_not_interrupted_again(launcher: Kernel, tmp_path: Path) -> None:
    cell = launcher.begin(f"mp.spawn(lg.ranked(launch.save_at_interrupt), ({str(tmp_path)!r},), nprocs=2)")
    logs = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(log.exists() and log.read_text() == "training" for log in logs), 60, "two trainings")
    launcher.interrupt()  # the group, as Jupyter does
    launcher.finish(cell)
    wait_until(lambda: not launcher.children(), what="the end of all processes")
    assert [log.read_text() for log in logs] == ["saved", "saved"]
