"""Which sample a worker is on."""

from __future__ import annotations

import pytest

from jupyter_loaderguard.samples import Manner, key_text, locate, span

MAP, WHOLE = Manner(), Manner(asks_whole_batches=True)
SINGLE, STREAM = Manner(is_batched=False), Manner(is_iterable=True)
STREAM_SINGLE = Manner(is_batched=False, is_iterable=True)


@pytest.mark.parametrize(
    ("position", "done", "keys", "manner", "index", "words"),
    [
        (0, 100, [7, 8, 9], MAP, 7, "on sample 7"),
        (2, 100, [7, 8, 9], MAP, 9, "on sample 9"),
        (3, 100, [7, 8, 9], MAP, None, "in collate_fn of samples 7, 8, 9"),
        (-1, 100, [7, 8, 9], WHOLE, [7, 8, 9], "on samples 7, 8, 9"),
        (1, 100, [7, 8, 9], WHOLE, 8, "on sample 8"),
        (3, 100, [7, 8, 9], WHOLE, [7, 8, 9], "on samples 7, 8, 9"),
        (-1, 100, "x1", SINGLE, "x1", "on sample 'x1'"),
        (0, 100, [("a", 1)], MAP, ("a", 1), "on sample ('a', 1)"),
        (-1, 0, (7, 8, 9), MAP, (7, 8, 9), "on the samples (7, 8, 9)"),
        (1, 1000, [None] * 3, STREAM, 1001, "on sample 1,001 of its stream"),
        (3, 1000, [None] * 3, STREAM, None, "in collate_fn of samples 1,000 to 1,002 of its stream"),
        (-1, 1000, None, STREAM_SINGLE, 1000, "on sample 1,000 of its stream"),
    ],
)
def test_locate(position: int, done: int, keys: object, manner: Manner, index: object, words: str) -> None:
    assert locate(position, done, 3, keys, manner) == (index, words)


def test_keys_are_cut_and_may_be_rude() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise ValueError

    assert key_text(Rude()) == "<Rude whose repr raises ValueError>"
    assert len(key_text("x" * 10_000)) == 80
    assert span(list(range(100))) == "0, 1, 2, 3, 4, 5, 6, … 99"
