"""What a person reads."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_loaderguard.model import (
    Ending,
    Frame,
    Holder,
    LateWorker,
    LoaderState,
    MachineState,
    RunReport,
    Snapshot,
    Stall,
    StopReport,
    WorkerState,
)
from jupyter_loaderguard.views import html, text

NOW = 1_800_000_000.0
WORKERS = (
    WorkerState(0, 4711, NOW - 12, "sleeping", 210_000_000, "idle", None, 0.004, 96),
    WorkerState(1, 4712, NOW - 12, "stopped", 1_900_000_000, "loading", "80312", 34.2, 88),
    WorkerState(2, 4713, NOW - 12, "dead", 0),
)
LOADER = LoaderState(
    7, "train_loader", "Cifar", 50_000, 391, 3, "fork", True, "waiting", NOW - 12, 120, 7.44, WORKERS
)  # fmt: skip
MACHINE = MachineState(2, 25_000_000_000, 22_000_000_000, 12_000_000_000, 86_000)
SNAPSHOT = Snapshot(NOW, 99, True, (LOADER,), MACHINE)


def test_status_as_text() -> None:
    assert text.status(SNAPSHOT) == (
        "train_loader: Cifar of 50,000 samples  ·  fork  ·  persistent  ·  cell 3  ·  120 of 391 batches"
        "  ·  waited 7.44 s  ·  waiting\n"
        "  worker   pid  state     sample     for  memory     age\n"
        "       0  4711  sleeping  idle      4 ms  210 MB  12.0 s\n"
        "       1  4712  stopped   80312   34.2 s  1.9 GB  12.0 s\n"
        "       2  4713  dead      –            –       –  12.0 s\n"
        "1 loader, 2 workers  ·  2 CPUs usable  ·  memory 3.0 GB of 25.0 GB used  ·  /dev/shm 86 kB of 12.0 GB"
    )


def test_status_when_off_or_unknown() -> None:
    plain = dataclasses.replace(
        LOADER, dataset_length=None, batches_total=None, start_method=None, persistent=False, cell=None, workers=()
    )
    lines = text.status(dataclasses.replace(SNAPSHOT, guarding=False, loaders=(plain,))).splitlines()
    assert lines[0] == "loaderguard is off; %loaderguard on resumes."
    assert lines[1] == "train_loader: Cifar  ·  no workers  ·  120 batches  ·  waited 7.44 s  ·  waiting"
    assert lines[2].startswith("1 loader, 0 workers")


def test_a_second_epoch_of_a_persistent_loader_shows_no_nonsense() -> None:
    assert "500 batches" in text.status(
        dataclasses.replace(SNAPSHOT, loaders=(dataclasses.replace(LOADER, batches=500),))
    )


def test_html_escapes_and_clips_what_the_user_named() -> None:
    hostile = dataclasses.replace(LOADER, name="<b onload='x'>" + "y" * 10_000, dataset='"&<script>\x1b[31m\n')
    drawn = html.status(dataclasses.replace(SNAPSHOT, loaders=(hostile,)))
    assert "<b onload" not in drawn
    assert "<script" not in drawn
    assert "\x1b" not in drawn
    assert "&lt;b onload=&#x27;x&#x27;&gt;yyy" in drawn
    assert len(drawn) < 10_000
    assert "\x1b" not in text.status(dataclasses.replace(SNAPSHOT, loaders=(hostile,)))


def test_html_names_states_in_words_and_colours() -> None:
    drawn = html.status(SNAPSHOT)
    assert '<th scope="col"' in drawn
    for word in ("stopped", "dead"):
        assert f">{word}</span>" in drawn
    assert ">sleeping</td>" in drawn


REPORT = RunReport(1, 4, 1250, 31.2, 19.3, 1_900_000_000, 0)


def test_the_closing_line() -> None:
    assert text.run(REPORT) == (
        "loaderguard: 1 loader, 4 workers · 1,250 batches in 31.2 s (40.1/s) · 62 % of it waiting for data"
        " · peak 1.9 GB · 0 workers left"
    )
    assert text.run(RunReport(2, 0, 1, 0.05, 0.01, 0, 0)) == (
        "loaderguard: 2 loaders, 0 workers · 1 batch in 50 ms (20.0/s) · 20 % of it waiting for data · 0 workers left"
    )
    assert text.run(RunReport(0, 0, 0, 1.0, 0.0, 0, 0)) == "loaderguard: no DataLoader was iterated · 0 workers left"
    assert "1 worker left" in html.run(dataclasses.replace(REPORT, left=1))


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (StopReport((), 0.0), "loaderguard: no workers to stop"),
        (
            StopReport((Ending(1, 0, "left"), Ending(2, 1, "SIGTERM"), Ending(3, 2, "SIGTERM")), 0.53, 1),
            "loaderguard: stopped 3 workers of 1 loader in 0.53 s (1 left by itself, 2 by SIGTERM)",
        ),
        (
            StopReport((Ending(1, 0, "unkillable"), Ending(2, 1, "SIGKILL")), 2.8, 1, 2),
            "loaderguard: stopped 1 worker of 1 loader and 2 processes that they had started in 2.80 s"
            " (1 cannot be killed, 1 by SIGKILL)",
        ),
        (
            StopReport((Ending(5, 0, "dead"),), 0.001, 1),
            "loaderguard: stopped 0 workers of 1 loader in 1 ms (1 was dead already)",
        ),
    ],
)
def test_what_a_stop_did(report: StopReport, line: str) -> None:
    assert text.stop(report) == line
    assert report.pids == tuple(ending.pid for ending in report.endings)


@pytest.mark.parametrize(
    ("value", "drawn"),
    [(0, "0 ms"), (0.0994, "99 ms"), (0.0996, "0.10 s"), (9.99, "9.99 s"), (9.999, "10.0 s"), (99.9, "99.9 s"),
     (100, "2 min"), (5999, "100 min"), (6000, "1.7 h")],
)  # fmt: skip
def test_durations(value: float, drawn: str) -> None:
    assert text.seconds(value) == drawn


@pytest.mark.parametrize(
    ("value", "drawn"), [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1_000_000, "1 MB"), (1_949_000_000, "1.9 GB")]
)
def test_sizes(value: float, drawn: str) -> None:
    assert text.size(value) == drawn


def test_a_snapshot_travels_as_json() -> None:
    again = Snapshot.from_json(SNAPSHOT.to_json())
    assert again == SNAPSHOT
    assert again.workers == WORKERS


def test_wait_fraction_is_a_share() -> None:
    assert REPORT.wait_fraction == pytest.approx(0.6186, abs=1e-3)
    assert dataclasses.replace(REPORT, wait_seconds=99).wait_fraction == 1
    assert dataclasses.replace(REPORT, seconds=0).wait_fraction == 0


FRAME = Frame("/work/data.py", 57, "decode", "data.py", "while not done:", True)
LATE = LateWorker(
    worker_id=2,
    pid=4711,
    batch=17,
    index=80312,
    samples="on sample 80312",
    seconds=34.21,
    kind="CPU-bound",
    detail="98 % of a CPU",
    advice="",
    frames=(FRAME,),
    frame=FRAME,
    stack="  data.py:57 in decode\n      while not done:",
)
STALL = Stall(7, "train_loader", "Cifar", 3, 17, 391, 30.02, 30.0, (LATE,))


def test_a_stall_as_text() -> None:
    assert text.stall(STALL) == (
        "loaderguard: batch 17 of 391 of train_loader (Cifar) has not come for 30.0 s\n"
        "  worker 2 (pid 4711) has been on sample 80312 for 34.2 s, CPU-bound (98 % of a CPU), "
        "in decode() at data.py:57\n"
        "    › while not done:\n"
        "    stack, most recent call first:\n"
        "      data.py:57 in decode\n"
        "          while not done:"
    )


def test_a_stall_of_a_lock_names_its_holder_and_what_to_do() -> None:
    holder = Holder("worker 1 (pid 4710)", 4710, FRAME)
    late = dataclasses.replace(LATE, kind="waiting for a lock", detail="dataset.lock", holder=holder, advice="Go.")
    lines = text.stall(dataclasses.replace(STALL, workers=(late,))).splitlines()
    assert lines[3] == "    held by worker 1 (pid 4710), which is in decode() at data.py:57: while not done:"
    assert lines[4] == "    → Go."


def test_a_stall_that_is_over() -> None:
    came = dataclasses.replace(STALL, came_after_seconds=34.5)
    assert text.stall(came) == (
        "loaderguard: batch 17 of 391 of train_loader came after 34.5 s\n"
        "  it was late: worker 2 (pid 4711) has been on sample 80312 for 34.2 s, CPU-bound (98 % of a CPU), "
        "in decode() at data.py:57"
    )
    assert "what was late</summary>" in html.stall(came), "it stays there, folded"
    ended = dataclasses.replace(STALL, ended="by an error or an interrupt")
    assert text.headline(ended) == "the wait for batch 17 of 391 of train_loader ended by an error or an interrupt"


def test_the_next_epoch_that_does_not_begin() -> None:
    assert "the next epoch of train_loader (Cifar) has not come" in text.stall(dataclasses.replace(STALL, batch=None))


def test_a_run_lists_its_stalls() -> None:
    came = dataclasses.replace(STALL, came_after_seconds=34.5)
    lines = text.run(dataclasses.replace(REPORT, stalls=(came,))).splitlines()
    assert lines[0].startswith("loaderguard: 1 loader, 4 workers")
    assert lines[1].startswith(
        "loaderguard: stall: batch 17 of 391 of train_loader had not come after 30.0 s; worker 2"
    )
    assert lines[1].endswith("in decode() at data.py:57, came after 34.5 s")
    assert html.run(dataclasses.replace(REPORT, stalls=(came,))).count("<div") == 2


def test_a_stall_draws_nothing_that_the_user_named_as_markup() -> None:
    nasty = "<img src=x onerror=alert(1)>\x1b[31m"
    frame = dataclasses.replace(FRAME, function=nasty, place=nasty, code=nasty)
    late = dataclasses.replace(
        LATE, samples=nasty, detail=nasty, advice=nasty, frame=frame, stack=nasty * 1000, holder=Holder(nasty, 1, frame)
    )
    stall = dataclasses.replace(STALL, loader=nasty, dataset=nasty, workers=(late,))
    for over in (None, 3.0):
        drawn = html.stall(dataclasses.replace(stall, came_after_seconds=over))
        assert "<img" not in drawn
        assert "\x1b" not in drawn
        assert len(drawn) < 20_000
    assert "\x1b" not in text.stall(stall)
    assert "<img" not in html.stacks({1: nasty})
    assert "\x1b" not in text.stacks({1: nasty})


def test_stacks_when_there_are_none() -> None:
    assert text.stacks({}) == "no live workers"
    assert "no live workers" in html.stacks({})


def test_the_sentence_of_a_worker_that_could_not_send() -> None:
    late = dataclasses.replace(LATE, kind="done, but its batch could not be sent", detail="TypeError: no", frame=None)
    assert late.sentence() == (
        "worker 2 (pid 4711), sample 80312: done, but its batch could not be sent: TypeError: no"
    )
    idle = dataclasses.replace(LATE, kind="idle", detail="it has no task left")
    assert idle.sentence() == "worker 2 (pid 4711) is idle (it has no task left)"
    kernel = dataclasses.replace(LATE, worker_id=None, kind="sleeping", detail="")
    assert kernel.sentence().startswith("the kernel itself (pid 4711) has been on sample 80312 for 34.2 s")
