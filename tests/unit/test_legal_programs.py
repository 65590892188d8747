"""Programs that are unusual and legal: what plain torch gives, it gives under the guard."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.context import ForkContext, ForkProcess, SpawnContext, SpawnProcess
from multiprocessing.queues import JoinableQueue
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

import jupyter_loaderguard as lg
from jupyter_loaderguard.errors import LoaderGuardWarning
from tests.programs.datasets import Quick
from tests.programs.endless import InfiniteLoader

FORK = multiprocessing.get_context("fork")


class Once(list):
    """A batch that can be gone through once."""

    def __iter__(self) -> Iterator[Any]:
        while self:
            yield self.pop(0)


def a_batch_that_is_consumed_by_a_look() -> Any:
    return [list(batch) for batch in DataLoader(range(4), batch_size=2, collate_fn=Once)]


class AskedForItsContext(DataLoader):
    """Takes what its base class has, or something else."""

    @property
    def multiprocessing_context(self) -> Any:
        return super().multiprocessing_context or multiprocessing.get_context("forkserver")

    @multiprocessing_context.setter
    def multiprocessing_context(self, value: Any) -> None:
        DataLoader.multiprocessing_context.__set__(self, value)  # type: ignore[attr-defined]


class Parents(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return os.getppid()


def a_context_that_depends_on_that_of_the_base_class() -> Any:
    return os.getpid() in [int(batch) for batch in DataLoader(Parents(), num_workers=1)], os.getpid() in [
        int(batch) for batch in AskedForItsContext(Parents(), num_workers=1)
    ]


class Strict(ForkProcess):
    """Takes what torch gives, and looks at it."""

    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        assert target.__name__ == "_worker_loop"
        super().__init__(target=target, args=args)

    def run(self) -> None:
        assert self._target.__name__ == "_worker_loop"  # type: ignore[attr-defined]
        super().run()


class StrictContext(ForkContext):
    Process = Strict


class StrictSpawn(SpawnProcess):
    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        super().__init__(target=target, args=args)


class StrictSpawnContext(SpawnContext):
    Process = StrictSpawn


def a_process_class_with_arguments_of_its_own() -> Any:
    return [
        int(batch.sum())
        for context in (StrictContext(), StrictSpawnContext())
        for batch in DataLoader(Quick(4), num_workers=1, multiprocessing_context=context)
    ]


def patches_of_a_base_class_that_come_later() -> Any:
    calls: list[str] = []
    own = {name: vars(_BaseDataLoaderIter)[name] for name in ("__next__", "_next_index")}

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any) -> Any:
            calls.append(name)
            return method(self)

        return counted

    try:
        for name, method in own.items():
            setattr(_BaseDataLoaderIter, name, counting(name, method))
        for workers in (0, 1):
            list(DataLoader(Quick(4), num_workers=workers))
    finally:
        for name, method in own.items():
            setattr(_BaseDataLoaderIter, name, method)
    return sorted(calls)


@contextmanager
def _patched(owner: type, name: str, value: Any) -> Iterator[None]:
    """Put something in the place of a method, as a library does."""
    own = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def a_base_class_whose_method_is_no_function() -> Any:
    it = iter(DataLoader(Quick(4)))
    taken: list[Any] = []
    for kind in (mock.Mock(return_value="a"), staticmethod(lambda: "b"), functools.partial(lambda: "c")):
        with _patched(_BaseDataLoaderIter, "__next__", kind):
            taken.append(next(it))
    with _patched(_BaseDataLoaderIter, "_next_index", asked := mock.Mock(return_value=[2])):
        taken.append(int(next(it)[0, 0]))
    return taken, asked.call_args_list == [()]


def a_base_class_whose_method_has_got_an_argument() -> Any:
    def next_index(self: Any, times: int = 1) -> Any:
        return [next(self._sampler_iter) for _ in range(times)][-1]

    with _patched(_BaseDataLoaderIter, "_next_index", next_index):
        it = iter(DataLoader(Quick(8)))
        return it._next_index(times=3), int(next(it)[0, 0])


class Skips(_BaseDataLoaderIter):
    def _next_index(self, times: int = 1) -> Any:
        return [super(Skips, self)._next_index() for _ in range(times)][-1]


class Skipping(_SingleProcessDataLoaderIter, Skips):
    """Has a method of a class that comes after torch's."""


def a_class_behind_torchs_whose_method_has_an_argument() -> Any:
    it = Skipping(DataLoader(Quick(8)))
    return it._next_index(times=3), int(next(it)[0, 0])


class Tidy(_MultiProcessingDataLoaderIter):
    """Does something of its own when it ends."""

    ended: list[str] = []  # noqa: RUF012 - of all of them

    def _shutdown_workers(self) -> None:
        self.ended.append("tidied")
        super()._shutdown_workers()


def a_clean_up_of_its_own() -> Any:
    Tidy.ended.clear()
    it = Tidy(DataLoader(Quick(8), num_workers=1))
    next(it)
    del it
    return Tidy.ended


class SlowToReduce(Exception):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batch = torch.zeros(20_000_000)
        self.nested = [[self.batch]]
        self.place = "here"


class Raises(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise SlowToReduce("mine")


def an_error_with_much_in_it() -> Any:
    try:
        list(DataLoader(Raises(), num_workers=1))
    except SlowToReduce as error:
        return "mine" in str(error)


def test_what_an_error_takes_along_is_small() -> None:
    from jupyter_loaderguard.torch_adapter.failures import NotedError

    try:
        raise SlowToReduce("mine")
    except SlowToReduce:
        noted = NotedError()
    assert noted.attributes.keys() >= {"place"}
    assert not noted.attributes.keys() & {"nested"}
    assert sum(map(len, noted.attributes.values())) < 20_000


class SlowKey:
    """A key whose text takes long."""

    asked = FORK.Value("i", 0)

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        self.asked.value += 1
        return "a key"


class ByKey(Dataset):
    def __getitem__(self, key: SlowKey) -> int:
        time.sleep(0.001)
        return key.value


def keys_whose_text_takes_long() -> Any:
    keys = [SlowKey(number) for number in range(8)]
    values = [int(b) for n in (0, 1) for b in DataLoader(ByKey(), sampler=keys, batch_size=1, num_workers=n)]
    return values, SlowKey.asked.value


class Delegates(Dataset):
    """Asks another object for whatever it does not have."""

    kernel = os.getpid()
    asked = FORK.Value("i", 0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __getattr__(self, name: str) -> Any:
        if os.getpid() == self.kernel and name == "__getitems__":
            self.asked.value += 1
        raise AttributeError(name)


def a_dataset_that_asks_another() -> Any:
    return [int(batch) for batch in DataLoader(Delegates(), num_workers=1)], Delegates.asked.value


PROGRAMS = [
    a_batch_that_is_consumed_by_a_look,
    a_context_that_depends_on_that_of_the_base_class,
    a_process_class_with_arguments_of_its_own,
    patches_of_a_base_class_that_come_later,
    a_base_class_whose_method_is_no_function,
    a_base_class_whose_method_has_got_an_argument,
    a_class_behind_torchs_whose_method_has_an_argument,
    a_clean_up_of_its_own,
    an_error_with_much_in_it,
    keys_whose_text_takes_long,
    a_dataset_that_asks_another,
]


UNGUARDED = (a_base_class_whose_method_has_got_an_argument, a_class_behind_torchs_whose_method_has_an_argument)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_is_as_without_the_guard(program: Callable[[], Any]) -> None:
    plain = program()
    plain = list(plain) if isinstance(plain, list) else plain
    with lg.guard(), pytest.warns(LoaderGuardWarning, match="arguments") if program in UNGUARDED else nullcontext():
        assert program() == plain


def test_a_method_that_a_library_has_wrapped_takes_what_the_wrapper_takes() -> None:
    torchs = _MultiProcessingDataLoaderIter._shutdown_workers
    asked: list[bool] = []

    @functools.wraps(torchs)  # it looks as if it took nothing
    def shut_down(self: Any, force: bool = False) -> None:
        asked.append(force)
        torchs(self)

    with _patched(_MultiProcessingDataLoaderIter, "_shutdown_workers", shut_down):
        with pytest.warns(LoaderGuardWarning, match="is not guarded"), lg.guard():
            it = iter(DataLoader(Quick(8), num_workers=1))
            next(it)
            it._shutdown_workers(force=True)
        del it
    assert asked[0] is True


class RunsItself(SpawnProcess):
    """Has a way of its own to run what it is given."""

    def run(self) -> None:
        self._target(*self._args, **self._kwargs)  # type: ignore[attr-defined]


class RunsItselfContext(SpawnContext):
    Process = RunsItself


def test_a_process_class_that_runs_in_its_own_way_works_unobserved_and_that_is_said_once() -> None:
    with pytest.warns(LoaderGuardWarning) as said, lg.guard():
        for _ in range(2):
            loader = DataLoader(Quick(4), num_workers=1, multiprocessing_context=RunsItselfContext())
            assert len(list(loader)) == 4
    assert [str(one.message) for one in said] == [
        "loaderguard: workers cannot be observed (RunsItself has its own run())."
    ]


class JoinableContext(ForkContext):
    """Has queues of another kind."""

    def Queue(self, maxsize: int = 0) -> Any:
        return JoinableQueue(maxsize, ctx=self.get_context())


def test_workers_behind_queues_of_another_kind_are_told_to_leave() -> None:
    with lg.guard() as run:
        for _ in range(2):
            values = list(DataLoader(Quick(4), num_workers=2, multiprocessing_context=JoinableContext()))
            assert len(values) == 4
    assert run.report.seconds < 18, "workers that were not told are waited for: 5 s each, 20 s in all"


def test_workers_that_nobody_could_tell_to_leave_are_not_waited_for() -> None:
    """An error in the last batch: no task is left, and the collector has closed the queues before the iterator."""
    with lg.guard() as run:
        for _ in range(2):
            with pytest.raises(SlowToReduce):
                list(DataLoader(Raises(), num_workers=2, batch_size=2))
            gc.collect()
    assert run.report.seconds < 18, "workers that were not told are waited for: 5 s each, 20 s in all"


def test_a_kept_iterator_outlives_the_guard() -> None:
    with lg.guard():
        loader = InfiniteLoader(Quick(8), batch_size=2, num_workers=2)
        assert len(list(loader)) == 4
    try:
        assert len(list(loader)) == 4
        assert len(list(loader)) == 4
    finally:
        loader.iterator._shutdown_workers()


def test_an_iterator_class_with_arguments_of_its_own_is_made_anew() -> None:
    class Named(_MultiProcessingDataLoaderIter):
        def __init__(self, loader: Any, name: str) -> None:
            super().__init__(loader)
            self.name = name

    class Loader(InfiniteLoader):
        def _get_iterator(self) -> Any:
            return Named(self, "mine")

    with lg.guard():
        loader = Loader(Quick(8), batch_size=2, num_workers=2)
        assert len(list(loader)) == 4
        lg.clean(loader)
        assert len(list(loader)) == 4
        assert loader.iterator.name == "mine"
