"""The live board, and what stays of it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from jupyter_loaderguard.model import Event, LoaderState, MachineState, Snapshot, WorkerState
from jupyter_loaderguard.views import board, text

HOSTILE = "<script>alert(1)</script>&amp;\"'🙂\x1b[31m" + "x" * 10_000
MACHINE = MachineState(2, 25_300_000_000, 20_000_000_000, 67_000_000, 1_000_000)


def worker(number: int, word: str = "loading", **facts: object) -> WorkerState:
    return replace(
        WorkerState(number, 4_194_000 + number, 0.0, "dead" if word == "dead" else "running", 10),
        word=word,
        sample="1234567",
        sample_seconds=12.3,
        samples_per_second=1234.5,
        cpu_percent=99.4,
        private_bytes=123_456_789,
        descriptors=123,
        **facts,
    )


def loader(*workers: WorkerState, **facts: object) -> LoaderState:
    known: dict[str, object] = {
        "loader_id": 1,
        "name": "train_loader",
        "dataset": "Images",
        "dataset_length": 100_000,
        "batches_total": 12_500,
        "cell": 3,
        "start_method": "fork",
        "persistent": False,
        "activity": "waiting",
        "started": 0.0,
        "batches": 1_250,
        "wait_seconds": 5.0,
        "workers": workers,
        "ready": 3,
        "capacity": 2 * len(workers),
        "batches_per_second": 40.1,
        "wait_share": 0.62,
        "history": tuple(float(number) for number in range(30)),
    }
    return LoaderState(**{**known, **facts})  # type: ignore[arg-type]


def snapshot(*loaders: LoaderState, events: tuple[Event, ...] = ()) -> Snapshot:
    return Snapshot(1000.0, 4711, True, loaders, MACHINE, events)


class Reader(HTMLParser):
    """What a browser would make of it: the tags, and the text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


def test_the_board_says_what_a_person_asks() -> None:
    words = Reader(board.board(snapshot(loader(worker(0), worker(1, "idle"))))).words
    for fact in (
        "train_loader",
        "Images",
        "1,250 of 12,500 batches",
        "40.1 batches/s",
        "data-bound 62 %",
        "3 of 4 ready",
        "loading",
        "idle",
        "4194000",
        "1234567",
        "12.3 s",
        "1,234",
        "99 %",
        "123 MB",
        "2 CPUs usable",
        "of 25.3 GB used",
        "/dev/shm 1 MB of 67 MB",
    ):
        assert fact in words, fact


@pytest.mark.parametrize(
    ("share", "activity", "said"),
    [
        (0.62, "waiting", "data-bound 62 %"),
        (1.0, "waiting", "data-bound 100 %"),
        (0.05, "busy", "compute-bound (5 % waiting)"),
        (0.05, "idle", ""),
        (1.0, "broken", ""),
        (None, "busy", ""),
    ],
)
def test_who_waits_for_whom_is_said_in_a_word(share: float | None, activity: str, said: str) -> None:
    assert board.bound(loader(wait_share=share, activity=activity)) == said


def test_nothing_is_said_of_a_loader_that_nobody_uses() -> None:
    assert board.bound(loader(wait_share=0.0, activity="busy", in_use=False)) == ""


def test_a_stall_without_workers_is_said_aloud_too() -> None:
    event = Event(1000.0, "batch 3 did not come", True)
    assert board.warning(snapshot(loader(stalled=True), events=(event,))) is event
    assert board.warning(snapshot(loader(), events=(event,))) is None


def test_many_workers_are_folded_but_for_those_that_are_not_well() -> None:
    workers = [worker(number) for number in range(30)] + [worker(30, "stalled"), worker(31, "dead")]
    folded = board.board(snapshot(loader(*workers)))
    assert folded.count("<tr>") == 1 + 2 + 1
    assert "30 workers" in folded
    assert "30 loading" in folded
    assert "stalled" in folded
    assert board.board(snapshot(loader(*workers)), is_folded=False).count("<tr>") == 1 + 32


@pytest.mark.parametrize("is_folded", [True, False])
def test_sixteen_workers_fit_into_a_small_message(is_folded: bool) -> None:
    events = tuple(Event(1000.0, "x" * 100, False) for _ in range(5))
    drawn = board.board(snapshot(loader(*map(worker, range(16))), events=events), is_folded)
    assert len(drawn.encode()) < 5_000


def test_everything_of_the_users_side_is_escaped() -> None:
    hostile = loader(worker(0), name=HOSTILE, dataset=HOSTILE, start_method=HOSTILE)
    hostile = replace(hostile, workers=(replace(hostile.workers[0], sample=HOSTILE),))
    shown = snapshot(hostile, events=(Event(1000.0, HOSTILE, True),))
    for markup in (board.board(shown), board.static(shown)):
        reader = Reader(markup)
        assert "script" not in reader.tags
        assert "<script>alert" in reader.words
        assert "\x1b" not in markup
        assert len(markup) < 12_000


def test_what_stays_needs_no_style_sheet() -> None:
    kept = board.static(snapshot(loader(worker(0, "stalled"), worker(1))))
    assert "class=" not in kept
    assert "<style" not in kept
    assert re.search(r'<td style="[^"]*color:#c77700;[^"]*">stalled', kept)
    assert Reader(kept).words == Reader(board.board(snapshot(loader(worker(0, "stalled"), worker(1))))).words


def test_colours_have_a_literal_for_front_ends_without_variables() -> None:
    for name in re.findall(r"var\(([^)]*)\)", board.STYLE):
        assert name.startswith("--jp-")
        assert "," in name


def test_a_curve_is_drawn_to_the_scale_of_its_top() -> None:
    assert board.sparkline((0.0, 5.0, 10.0)) == "▁▅█"
    assert board.sparkline(()) == board.sparkline((0.0, 0.0)) == ""


def test_a_persistent_loader_counts_the_batches_of_its_epoch() -> None:
    assert (
        text.batches(loader(batches=30, batches_before=20, batches_total=20)) == "10 of 20 batches (30 in all epochs)"
    )
    assert text.batches(loader(batches=30, batches_total=None)) == "30 batches"


def test_a_snapshot_with_everything_travels_as_json() -> None:
    full = snapshot(loader(worker(0)), events=(Event(1.0, "something", True),))
    assert Snapshot.from_json(full.to_json()) == full
