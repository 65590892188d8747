"""Retry and skip in a notebook: what the user types, and what the user reads."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from .driver import Kernel, wait_until

IMPORT = "from tests.programs.frail import *\n"


def _cell(options: str, dataset: str, **loader: object) -> str:
    settings = "".join(f", {name}={value}" for name, value in loader.items())
    return (
        f"%%guarded_loader --no-widget --name report {options}\n"
        f"{IMPORT}"
        f"loader = DataLoader({dataset}, batch_size=4, num_workers=2{settings})\n"
        "got = [batch[:, 0].tolist() for batch in loader]\n"
        "sum(map(len, got))"
    )


def test_c2_c4_the_closing_lines_say_what_was_done(any_kernel: Kernel, tmp_path: Path) -> None:
    dataset = f"Frail(40, raises=(5,), kills=(13,), once={str(tmp_path)!r})"
    reply = any_kernel.ok(_cell("--retry 2 --skip 3", dataset))
    assert reply.value == 39
    lines = reply.stdout.splitlines()
    assert re.match(r"loaderguard: 1 loader, 2 workers · 10 batches in .* · 0 workers left", lines[0])
    assert re.match(
        r"loaderguard: retry: the workers of loader were replaced in [\d.]+ s and \d+ batch(es were| was) produced again: "
        r"worker \d \(pid \d+\) was ended by SIGKILL, on sample 13 of batch 3",
        lines[1],
    )
    assert lines[2] == "loaderguard: skip: sample 5 of loader was left out: it raised (ValueError: sample 5 is corrupt)"
    assert lines[3].startswith(
        "loaderguard: note: batches, their order and their samples are those of an undisturbed run"
    )
    assert any_kernel.ok("report.retries, [s.index for s in report.skipped], report.left").value == (1, [5], 0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_c3_a_dataset_class_of_the_notebook_is_mended_too(kernel: Kernel, method: str) -> None:
    kernel.ok(
        "class Poisoned(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 24\n"
        "    def __getitem__(self, index):\n"
        "        if index == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        if index == 14: raise ValueError('broken')\n"
        "        return torch.tensor([index, 0])"
    )
    options = "--retry 1 --skip 2"
    reply = kernel.ok(_cell(options, "Poisoned()", multiprocessing_context=repr(method)))
    assert reply.value == 22
    assert kernel.ok("sorted((s.index, s.reason) for s in report.skipped)").value == [(9, "killed"), (14, "raised")]


def test_c5_a_hanging_sample_is_left_out_while_the_cell_runs(kernel: Kernel) -> None:
    reply = kernel.ok(_cell("--stall 0.5 --on-stall retry --retry 1 --skip 1", "Frail(40, hangs=(9,))"))
    assert reply.value == 39
    assert "it did not return (brought nothing for 0.5 s)" in reply.stdout
    assert "stall: batch 2 of 10 of loader" in reply.stdout


def test_c2_the_configuration_holds_for_plain_cells(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok("%config LoaderGuard.retry = 1\n%config LoaderGuard.skip = 1")
    try:
        dataset = f"Frail(40, raises=(5,), kills=(13,), once={str(tmp_path)!r})"
        reply = kernel.ok(f"{IMPORT}sum(len(batch) for batch in DataLoader({dataset}, batch_size=4, num_workers=2))")
        assert reply.value == 39
        assert "sample 5 of" in reply.stderr
        assert "were replaced in" in reply.stderr
        bad = kernel.run("%config LoaderGuard.retry = -1")
        assert "LoaderGuard.retry must be a number from 0 to" in bad.stderr + bad.evalue + bad.traceback
    finally:
        kernel.ok("%config LoaderGuard.retry = 0\n%config LoaderGuard.skip = 0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--retry x", "--retry must be a whole number, not 'x'"),
        ("--skip -1", "--skip"),
        ("--retry 1.5", "--retry must be a whole number, not '1.5'"),
        ("--on-stall later", "invalid choice"),
        ("--quarantine none.json", "none.json' cannot be read"),
    ],
)
def test_bad_options_give_one_line_and_run_nothing(kernel: Kernel, options: str, words: str) -> None:
    reply = kernel.run(f"%%guarded_loader {options}\nhas_run = True")
    assert words in reply.stderr + reply.evalue
    assert kernel.ok("'has_run' in globals()").value is False


def test_an_error_after_the_last_retry_has_a_card_and_leaves_nothing(kernel: Kernel) -> None:
    reply = kernel.run(_cell("--retry 1", "Frail(40, kills=(13,))"))
    assert reply.ename == "RuntimeError"
    assert "replaced once (retry=1)" in reply.traceback
    assert any("a worker died" in display.get("text/plain", "") for display in reply.displays)
    assert kernel.ok("report.left, report.retries").value == (0, 1)


def test_a11_interrupts_during_recovery_leave_no_worker(kernel: Kernel) -> None:
    for delay in (0.1, 0.25, 0.4, 0.6):
        message = kernel.begin(
            "%%guarded_loader --no-widget --retry 100000\n"
            f"{IMPORT}"
            "for batch in DataLoader(Frail(4000, kills=tuple(range(0, 4000, 7))), batch_size=4, num_workers=2): pass"
        )
        wait_until(kernel.children, what="the workers")
        time.sleep(delay)
        kernel.interrupt()
        reply = kernel.finish(message, when_lost=kernel.interrupt)
        assert reply.ename == "KeyboardInterrupt", reply
        wait_until(lambda: not kernel.children(), what="the end of the workers")
        assert kernel.ok("[t.name for t in threading.enumerate() if 'QueueFeeder' in t.name]").value == []
