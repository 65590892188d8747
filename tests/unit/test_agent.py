"""The agent's parts, in this process: the slot, the observed keys, the locks that it finds."""

from __future__ import annotations

import copy
import ctypes
import errno
import functools
import multiprocessing
import os
import pickle
import resource
import threading
from typing import Any

import pytest

from jupyter_loaderguard.interrupts import free_signal
from jupyter_loaderguard.worker import locks, observed
from jupyter_loaderguard.worker import slot as slot_module
from jupyter_loaderguard.worker.agent import WorkerEntry
from jupyter_loaderguard.worker.observed import describe_unsent, key_observer
from jupyter_loaderguard.worker.slot import IDLE, LOADING, LOCKS, STACK_START, STARTING, UNSENT, Slot


def opened() -> Slot:
    slot = Slot()
    slot.open()
    return slot


def observe_keys(slot: Slot, task: int, keys: Any, is_batched: bool) -> Any:
    return key_observer(slot, is_batched)(task, keys)


def test_a_slot_follows_a_task() -> None:
    slot = opened()
    assert slot.read().phase == STARTING
    keys = observe_keys(slot, 17, ["a", "b", "c"], is_batched=True)
    assert (slot.read().phase, slot.read().task, slot.read().position, slot.read().keys) == (LOADING, 17, -1, 3)
    seen = []
    for key in keys:
        seen.append((key, slot.read().position))
    assert seen == [("a", 0), ("b", 1), ("c", 2)]
    assert slot.read().position == 3
    slot.end()
    assert (slot.read().phase, slot.read().samples, slot.read().batches) == (IDLE, 3, 1)


def test_time_on_a_sample_begins_with_the_sample() -> None:
    slot = opened()
    times = [slot.read().since for _ in observe_keys(slot, 0, [1, 2, 3], is_batched=True)]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_keys_that_are_no_list_are_the_users_own_object() -> None:
    slot = Slot.local()
    for keys in ((1, 2), {1: 2}, "key", 5, None):
        assert observe_keys(slot, 0, keys, is_batched=True) is keys
    plain = [1, 2]
    assert observe_keys(slot, 0, plain, is_batched=False) is plain, "the key of one sample may be a list"


def test_observed_keys_are_a_list_to_everybody_else() -> None:
    keys = observe_keys(Slot.local(), 0, [3, 1, 2], is_batched=True)
    assert isinstance(keys, list)
    assert keys == [3, 1, 2]
    assert repr(keys) == "[3, 1, 2]"
    assert sorted(keys) == [1, 2, 3]
    assert keys[1:] == [1, 2]
    for other in (pickle.loads(pickle.dumps(keys)), copy.copy(keys), copy.deepcopy(keys)):
        assert type(other) is list
        assert other == [3, 1, 2]


def test_texts_that_do_not_fit_are_left_out() -> None:
    slot = opened()
    slot.write_text(UNSENT, {"error": "x" * 100})
    assert slot.read_text(UNSENT) == {"error": "x" * 100}
    slot.write_text(LOCKS, ["y" * 100_000])
    assert slot.read_text(LOCKS) is None


def test_a_slot_gives_its_descriptor_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    slots = [Slot() for _ in range(8)]
    assert len(os.listdir("/proc/self/fd")) == before + 8
    del slots
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_stack_part_can_be_used_again_and_again() -> None:
    slot = Slot()
    assert slot.fd is not None
    for text in (b"first, a long one", b"second"):
        slot.clear_stack()
        os.write(slot.fd, text)
        assert slot.read_stack() == text.decode()
    assert os.fstat(slot.fd).st_size == STACK_START + len(b"second")


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ([1, {"a": [2, threading.Lock()]}], [1, "'a'", 1]),
        ((lambda: 0,), [0]),
        (threading.Lock(), []),
        ([1, 2], None),
    ],
)
def test_the_part_that_cannot_be_sent_is_found(data: Any, place: list[Any] | None) -> None:
    assert describe_unsent(3, TypeError("no"), data)["place"] == place


@pytest.mark.parametrize(
    ("is_short", "words"),
    [
        (False, "FileNotFoundError: [Errno 2] No usable temporary directory"),
        (True, "OSError: [Errno 24] Too many open files, which came as FileNotFoundError: [Errno 2] No usable"),
    ],
)
def test_a_worker_that_can_open_no_file_says_so_where_python_does_not(is_short: bool, words: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    error = FileNotFoundError(errno.ENOENT, "No usable temporary directory")
    if is_short:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = describe_unsent(3, error, [1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found["error"].startswith(words)
    assert found["is_short"] is is_short


def test_the_bytes_of_a_batch_are_counted() -> None:
    import torch

    assert observed.bytes_of({"a": [torch.zeros(10), torch.zeros(2, dtype=torch.float64)], "b": "text"}) == 56


class _Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


GLOBAL_LOCK = threading.RLock()


class _UsesGlobal(_Holder):
    def __getitem__(self, index: int) -> int:
        with GLOBAL_LOCK:
            return index


def test_locks_are_found_with_their_paths() -> None:
    dataset = _UsesGlobal(
        lock=threading.Lock(),
        inner=_Holder(locks={"a": multiprocessing.Lock(), "b": [threading.RLock()]}),
        semaphore=multiprocessing.Semaphore(3),
    )
    found = {place.path: place.kind for place in locks.find_locks(dataset=dataset)}
    assert (
        found.items()
        >= {
            "dataset.lock": "threading",
            "dataset.inner.locks['a']": "multiprocessing",
            "dataset.inner.locks['b'][0]": "threading",
            "GLOBAL_LOCK": "threading",
        }.items()
    )
    assert not any("semaphore" in path for path in found), "nobody holds a semaphore"


def test_a_look_for_locks_runs_no_code_of_the_users() -> None:
    class Rude:
        def __init__(self) -> None:
            vars(self)["lock"] = threading.Lock()

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("asked for an attribute")

        def __len__(self) -> int:
            raise AssertionError("asked for the length")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    assert locks.find_locks(dataset=[object.__new__(Rude)]) == []


def test_a_large_dataset_is_not_searched_for_ever() -> None:
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    wide = [[object()] * 1000 for _ in range(1000)]
    locks.find_locks(dataset=_Holder(deep=deep, wide=wide, again=wide))


def test_who_has_taken_a_lock_is_read_from_memory() -> None:
    lock = multiprocessing.Lock()
    (place,) = locks.find_locks(dataset=_Holder(lock=lock))
    assert not locks.has_taken(os.getpid(), place)
    with lock:
        assert locks.has_taken(os.getpid(), place)
        (again,) = locks.find_locks(dataset=_Holder(lock=lock))
        assert again.was_locked
    assert not locks.has_taken(os.getpid(), place)


def test_a_threading_lock_that_is_locked_is_seen_as_such() -> None:
    lock = threading.Lock()
    with lock:
        (place,) = locks.find_locks(dataset=_Holder(lock=lock))
    assert place.was_locked
    assert place.address == ctypes.c_size_t.from_address(id(lock) + 16).value


def test_memory_that_cannot_be_read_is_no_error() -> None:
    assert locks.read_memory(os.getpid(), 1, 8) == b""
    assert locks.read_memory(2**22 + 5, id(object()), 8) == b""
    assert locks.read_memory(os.getpid(), 2**64 - 1, 8) == b""


def test_a_free_signal_is_one_that_nobody_handles() -> None:
    import signal

    first = free_signal()
    assert first is not None
    signal.signal(first, functools.partial(print))
    try:
        assert free_signal() != first
    finally:
        signal.signal(first, signal.SIG_DFL)


# -- where there is no memfd, or no descriptor ------------------------------------------------------


def _refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EPERM, "not in this sandbox")


def _without(monkeypatch: pytest.MonkeyPatch, *ways: str) -> None:
    if "memfd" in ways:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    if "seccomp" in ways:
        monkeypatch.setattr(os, "memfd_create", _refuse)
    if "tmpfile" in ways:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    if "memory" in ways:
        monkeypatch.setattr(slot_module, "_make_in_memory", _refuse)


@pytest.mark.parametrize(
    "missing", [("memfd",), ("seccomp",), ("memfd", "tmpfile"), ("memfd", "memory"), ("memfd", "memory", "tmpfile")]
)
def test_a_slot_needs_no_memfd(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]) -> None:
    _without(monkeypatch, *missing)
    slot = opened()
    slot.numbers[slot_module.PID] = os.getpid()
    slot.clear_stack()
    assert slot.fd is not None
    os.write(slot.fd, b"a stack")
    assert slot.read_stack() == "a stack"
    lent = slot_module.borrow(os.getpid())
    assert lent is not None, "another process knows it by what is in it"
    assert lent.read().pid == os.getpid()
    assert os.fstat(slot.fd).st_nlink == 0, "nothing is left of it"


def test_what_is_no_slot_is_not_borrowed(tmp_path: Any) -> None:
    files = []
    for name, content in (("plain", b""), ("loaderguard-named", bytes(STACK_START)), ("#1", bytes(STACK_START))):
        files.append(open(tmp_path / name, "w+b"))  # noqa: SIM115
        files[-1].write(content + bytes(10))
        files[-1].flush()
    os.unlink(tmp_path / "#1")  # without a name, large enough, but without our magic
    try:
        found = [slot_module._open_lent("/proc/self", str(file.fileno())) for file in files]
        assert found == [None, None, None]
    finally:
        for file in files:
            file.close()


def test_a_slot_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: len(data) - 1)  # the disk is full
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left"):
        Slot()
    assert os.listdir("/proc/self/fd") == before


def test_a_forked_worker_can_be_observed_without_a_descriptor() -> None:
    slot = Slot.inherited()
    pid = os.fork()
    if not pid:
        slot.begin(7, 3)
        slot.write_text(UNSENT, "why")
        os._exit(0)
    os.waitpid(pid, 0)
    assert (slot.read().phase, slot.read().task, slot.read().keys) == (LOADING, 7, 3)
    assert slot.read_text(UNSENT) == "why"
    assert (slot.fd, slot.stack_bytes(), slot.read_stack()) == (None, 0, "")


def test_a_text_that_does_not_fit_is_not_taken_for_written() -> None:
    slot = opened()
    assert not slot.write_text(slot_module.FAILURE, "é" * 5000)
    assert slot.write_text(slot_module.FAILURE, "short")


def test_a_worker_without_a_slot_has_an_agent_all_the_same() -> None:
    import signal

    seen: dict[str, Any] = {}

    def prepare(loop: Any, slot: Slot, args: Any, kwargs: Any) -> Any:
        seen["slot"] = slot.read().pid
        return args, {**kwargs, "prepared": True}

    class Parcel:
        def open(self) -> dict[str, Any]:
            return {"dataset": "mine"}

    previous = signal.getsignal(signal.SIGINT)
    entry = WorkerEntry(lambda **given: seen.update(given), (os.getppid(), None), lambda: None, None, prepare, Parcel())
    try:
        entry(number=1)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == {"slot": os.getpid(), "number": 1, "dataset": "mine", "prepared": True}


def test_a_parcel_that_cannot_be_opened_is_heard_of_without_a_slot() -> None:
    class Parcel:
        def open(self) -> dict[str, Any]:
            raise ImportError("no module of that name in the worker")

    for slot in (None, Slot()):
        entry = WorkerEntry(lambda: None, (1, None), lambda: None, slot, lambda *given: given[2:], Parcel())
        with pytest.raises((ImportError, SystemExit)) as caught:
            entry._open_parcel()
        assert caught.type is (ImportError if slot is None else SystemExit)
        assert slot is None or "no module of that name" in slot.read_text(slot_module.FAILURE)
