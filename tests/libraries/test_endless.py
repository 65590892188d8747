"""Loaders in the manner of timm and of ultralytics: a subclass with one iterator for ever."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from tests.kernel.driver import Kernel

from .protocol import PATIENCE, Plain, Protocol, values_in

CELL = """
from tests.programs.endless import {loader} as Loader

def make():
    seed()
    return Loader(Samples(noise=False), batch_size=BATCH, num_workers=2)

def train(loader):
    seed()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for features, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
            step([features, targets])
"""


class Endless(Protocol):
    is_endless = True

    def test_the_cell_that_made_it_fails_and_it_trains_all_the_same(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        kernel.ok("del made")
        with TemporaryDirectory() as folder:
            reply = kernel.run(f"begin({folder!r}, error_at=3)\nmade = make()\ntrain(made)", PATIENCE)
        assert reply.ename == "Mistake", reply.traceback
        values, expected = lines.train(), self._plain(plain, "twice")[0]
        # from the beginning, or from where it was
        assert [sorted(one, key=repr) for one in values] == [sorted(one, key=repr) for one in expected]
        self._let_go(kernel)

    def test_it_trains_again_and_again_after_interrupts_in_a_row(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        for _ in range(3):
            assert lines.interrupt("pause_at", group=True).ename == "KeyboardInterrupt"
            lines.wait_until_nothing_is_left()
            assert lines.train() == self._plain(plain, "twice")[0]

    def test_a_typo_between_epochs_of_a_loop_by_hand_changes_nothing(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        with TemporaryDirectory() as folder:
            kernel.ok(f"begin({folder!r})")
            kernel.ok("for batch in made: step(batch)", PATIENCE)
            lines.mistype()
            kernel.ok("for batch in made: step(batch)", PATIENCE)
            assert values_in(folder) == self._plain(plain, "twice")[0]


class TestMannerOfTimm(Endless):
    cell = CELL.format(loader="MultiEpochsLoader")


class TestMannerOfUltralytics(Endless):
    cell = CELL.format(loader="InfiniteLoader")

    def test_it_can_be_told_to_begin_anew(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        lines.fail(self.error)
        kernel.ok("made.reset()")
        assert lines.train() == self._plain(plain, "twice")[0]
        assert len(kernel.children()) == 2
        self._let_go(kernel)
