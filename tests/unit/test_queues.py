"""Queues of multiprocessing, closed and written to when their threads may have been finished by the collector."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

import jupyter_loaderguard as lg
from jupyter_loaderguard import queues


def _free_places(queue: Any) -> int:
    return int(queue._sem._semlock._get_value())


@pytest.fixture
def finished() -> Iterator[Any]:
    """A queue whose thread counts as finished, as after the collector came by, while its pipe is still open."""
    queue = multiprocessing.get_context("fork").Queue(3)
    queue.put("first")
    assert queue.get(timeout=10) == "first"
    finish = queue._close
    finish._key = (1.5, -finish._key[1])  # unknown to multiprocessing: so it is not active
    yield queue
    queue._close = None
    queue._finalize_close(queue._buffer, queue._notempty)
    queue._thread.join(10)
    queue.close()


def test_what_is_sent_past_a_queues_thread_is_counted(finished: Any) -> None:
    assert not finished._close.still_active()
    queues.put_last(finished, None)
    assert _free_places(finished) == 2
    assert finished.get(timeout=10) is None, "its reader gives back what was taken for it"
    assert _free_places(finished) == 3


def test_a_full_queue_is_not_waited_for(finished: Any) -> None:
    for _ in range(3):
        finished._sem.acquire()
    queues.put_last(finished, None)
    assert not finished._reader.poll(0)
    for _ in range(3):
        finished._sem.release()


def test_what_could_not_be_sent_takes_no_place(finished: Any) -> None:
    writer, finished._writer = finished._writer, multiprocessing.Pipe()[0]
    finished._writer.close()
    queues.put_last(finished, None)
    finished._writer = writer
    assert _free_places(finished) == 3


class Bad(list):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("mine")
        return index


def test_loaders_that_the_collector_frees_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with lg.guard():
        for _ in range(15):
            loader = DataLoader(Bad(range(40)), num_workers=2)
            with pytest.raises(ValueError, match="mine"):
                list(loader)
            cycle: list[Any] = [iter(loader)]
            cycle.append(cycle)
            del cycle
            gc.collect()
    assert "Traceback" not in capfd.readouterr().err
