"""What every library is put through: train, interrupt, an error in the loop, again, a typo, unload; as without the guard.

A library is a class derived from `Protocol` with a cell that defines `make()`, which returns what is trained with,
and `train(made)`, which calls `step` for each batch. Both are called over and over in one kernel.
"""

from __future__ import annotations

import ast
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.kernel.driver import Kernel, Reply, wait_gone, wait_until

PATIENCE = 240.0
"""Seconds for an import of a large library, or a training, beside other work on the machine."""
SHARED = "from tests.libraries.steering import *\n"
TYPO = "undefined_name"


class Protocol:
    """The tests that all libraries have in common."""

    pytestmark = pytest.mark.timeout(900)

    cell: str
    """Defines `make()` and `train(made)`."""
    batches: str = "iter(made)"
    """An iterator over the loader, or nothing if no loader can be reached."""
    has_processes: bool = True
    """Whether workers are processes that the guard knows."""
    can_be_stuck: bool = True
    """Whether a worker that is stuck can be ended; without the guard, too, nothing ends a thread."""
    is_endless: bool = False
    """Whether the loader keeps one iterator, whose workers then outlive an error in a later cell."""
    error: str = "Mistake"
    """What an error in the loop is to the notebook."""
    interrupted: str = "KeyboardInterrupt"
    """What an interrupt is to the notebook; nothing if the library takes it for a normal end."""

    def test_it_trains_as_without_the_guard(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        assert [lines.train(), lines.train()] == self._plain(plain, "twice")

    def test_its_workers_are_seen_and_counted(self, kernel: Kernel, plain: Plain) -> None:
        if not self.has_processes:
            pytest.skip("its workers are no processes of a DataLoader")
        self._define(kernel)
        with TemporaryDirectory() as folder:
            kernel.ok(f"begin({folder!r})")
            kernel.ok("%%guarded_loader --name report --quiet\nmade = make()\ntrain(made)", PATIENCE)
        workers, left = kernel.ok("report.workers, report.left").value  # type: ignore[misc]
        assert workers >= 2
        assert left == 0

    @pytest.mark.parametrize("where", ["pause_at", "stuck_at"])
    @pytest.mark.parametrize("group", [True, False], ids=["group", "pid"])
    def test_an_interrupt_in_mid_epoch_leaves_nothing_and_it_trains_again(
        self, kernel: Kernel, plain: Plain, where: str, group: bool
    ) -> None:
        if where == "stuck_at" and not self.can_be_stuck:
            pytest.skip("its workers are threads, and the library waits for them")
        lines = self._define(kernel)
        reply = lines.interrupt(where, group)
        assert reply.ename == self.interrupted, reply.traceback
        lines.wait_until_nothing_is_left()
        assert lines.train() == self._plain(plain, "twice")[0]

    def test_an_error_in_the_loop_leaves_nothing_and_it_trains_again(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        lines.fail(self.error)
        if not self.is_endless:
            lines.wait_until_nothing_is_left()
        assert lines.train() == self._plain(plain, "after an error")
        self._let_go(kernel)

    def test_errors_in_a_row_leave_nothing(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        for _ in range(3):
            lines.fail(self.error)
        if not self.is_endless:
            lines.wait_until_nothing_is_left()
        assert len(kernel.children()) <= 2
        assert [len(one) for one in lines.train()] == [len(one) for one in self._plain(plain, "twice")[0]]
        self._let_go(kernel)

    def test_a_typo_in_a_later_cell_changes_nothing(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        results = [lines.train()]
        lines.mistype()
        assert [*results, lines.train()] == self._plain(plain, "twice")

    def test_an_open_iterator_goes_on_after_a_typo_and_without_the_guard(self, kernel: Kernel, plain: Plain) -> None:
        if not self.batches:
            pytest.skip("it gives no loader away")
        lines = self._define(kernel)
        lines.open(self.batches)
        values = lines.take(2)
        lines.mistype()
        values += lines.take(2)
        try:
            kernel.ok("%unload_ext jupyter_loaderguard")
            values += lines.take(2)
            lines.mistype()
            values += lines.take(1000)
            assert values == self._plain(plain, "batches")
            kernel.ok("del made, it")
            lines.wait_until_nothing_is_left()
        finally:
            kernel.ok("%load_ext jupyter_loaderguard")

    def test_it_trains_after_unloading_and_leaves_nothing(self, kernel: Kernel, plain: Plain) -> None:
        lines = self._define(kernel)
        results = [lines.train()]
        try:
            kernel.ok("%unload_ext jupyter_loaderguard")
            assert [*results, lines.train()] == self._plain(plain, "twice")
            kernel.ok("del made")
            lines.wait_until_nothing_is_left()
        finally:
            kernel.ok("%load_ext jupyter_loaderguard")
        kernel.ok("made = make()", PATIENCE)
        assert lines.train() == self._plain(plain, "twice")[0]

    def _let_go(self, kernel: Kernel) -> None:
        """End an endless loader that the traceback of an error, which is nobody's business any more, still holds."""
        if self.is_endless:
            kernel.ok("lg.clean()")

    def _define(self, kernel: Kernel) -> Lines:
        kernel.ok(SHARED + self.cell, PATIENCE)
        said = kernel.ok("made = make()", PATIENCE)
        assert_the_guard_is_quiet(said)
        return Lines(kernel)

    def _plain(self, plain: Plain, what: str) -> list:
        """Return what the same cells give in a kernel without the guard."""
        if what not in plain.results:
            lines = self._define(plain.kernel)
            if what == "twice":
                plain.results[what] = [lines.train(), lines.train()]
            elif what == "after an error":
                lines.fail(self.error)
                plain.results[what] = lines.train()
            else:
                lines.open(self.batches)
                plain.results[what] = lines.take(1000)
            assert plain.results[what]
            plain.kernel._note(plain.kernel.children())  # it may leave some: nobody guards them
        return plain.results[what]


@dataclass
class Plain:
    """A kernel without the guard, and what came of the cells in it."""

    kernel: Kernel
    results: dict[str, list] = field(default_factory=dict)


@dataclass
class Lines:
    """What a user types in one notebook after `made = make()`."""

    kernel: Kernel
    seen: list[psutil.Process] = field(default_factory=list)
    """What ran when it was interrupted, workers of launched processes included: they may be nobody's children afterwards."""

    def train(self) -> list[list]:
        """Train, and return what the loop has seen: of each launched process, or of the one there is."""
        with TemporaryDirectory() as folder:
            self.kernel.ok(f"begin({folder!r})")
            assert_the_guard_is_quiet(self.kernel.ok("train(made)", PATIENCE))
            return values_in(folder)

    def fail(self, error: str) -> None:
        """Train, with an error of the user's own in the third step."""
        with TemporaryDirectory() as folder:
            self.kernel.ok(f"begin({folder!r}, error_at=3)")
            reply = self.kernel.run("train(made)", PATIENCE)
            assert reply.ename == error, (reply.ename, reply.traceback)
            assert "LoaderGuardError" not in reply.traceback
            assert max(len(values) for values in values_in(folder)) == 3, values_in(folder)

    def interrupt(self, where: str, group: bool) -> Reply:
        """Train, and interrupt it in mid-epoch: in the body of the loop, or waiting for workers that are stuck."""
        with TemporaryDirectory() as folder:
            self.kernel.ok(f"begin({folder!r}, {where}=3)")
            cell = self.kernel.begin("train(made)")
            mark, has_ended = Path(folder, "mark"), self.kernel.client.shell_channel.msg_ready
            wait_until(lambda: mark.exists() or has_ended(), PATIENCE, "the third step")
            if not mark.exists():
                reply = self.kernel.finish(cell, PATIENCE)
                pytest.fail(f"the training ended before its third step: {reply.ename} {reply.traceback}")
            if where == "stuck_at":  # the batches that are there already are taken first
                wait_until(lambda: is_settled(folder), 60, "the wait for a batch")
            self.seen = self.kernel._note(self.kernel.children())
            self.kernel.interrupt(group)
            return self.kernel.finish(cell, PATIENCE, when_lost=lambda: self.kernel.interrupt(group))

    def open(self, batches: str) -> None:
        """Give an iterator a name."""
        with TemporaryDirectory() as folder:
            self.kernel.ok(f"begin({folder!r})\nseed()\nit = {batches}", PATIENCE)

    def take(self, number: int) -> list:
        """Take so many batches of it, or what is left."""
        reply = self.kernel.ok(
            f"import itertools\nrepr([numbers(one) for one in itertools.islice(it, {number})])", PATIENCE
        )
        assert_the_guard_is_quiet(reply)
        return ast.literal_eval(reply.value)  # type: ignore[arg-type]

    def mistype(self) -> None:
        """Make an error in a cell that has nothing to do with any loader."""
        reply = self.kernel.run(TYPO)
        assert reply.ename == "NameError"
        assert_the_guard_is_quiet(reply)

    def wait_until_nothing_is_left(self) -> None:
        """See all workers, and what else was launched, go."""
        wait_until(lambda: not self.kernel.children(), 30, f"the end of {self.kernel.children()}")
        wait_gone(self.seen, 30)


def values_in(folder: str) -> list[list]:
    """Return what each process has written down, rank by rank."""
    files = sorted(Path(folder).glob("values-*"))
    return [[ast.literal_eval(line) for line in file.read_text().splitlines()] for file in files]


def is_settled(folder: str, seconds: float = 0.5) -> bool:
    """Tell whether no step was made for a while."""
    newest = max(file.stat().st_mtime for file in Path(folder).iterdir())
    return time.time() - newest > seconds


def assert_the_guard_is_quiet(reply: Reply) -> None:
    """See that a cell in which nothing is wrong shows nothing of ours, but that workers which are threads are not guarded."""
    shown = [
        reply.stdout,
        reply.stderr,
        *(text for one in reply.displays for text in one.values() if isinstance(text, str)),
    ]
    lines = [line for text in shown for line in text.splitlines() if "loaderguard" in line.lower()]
    assert not [line for line in lines if "not guarded (its workers are _ProcessThread objects" not in line], shown
