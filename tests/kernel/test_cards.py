"""Cards after errors: each one of a real failure, below its traceback."""

from __future__ import annotations

import os

import pytest

from .driver import CAN_UNSHARE, Kernel

SETUP = "from tests.programs import failures, stalls\nfrom tests.programs.mortal import *"


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    kernel.ok(SETUP)
    return kernel


def card_of(kernel: Kernel, code: str, timeout: float = 60) -> tuple[str, str]:
    """Run a cell that fails, and return its card and what was raised."""
    reply = kernel.run(code, timeout)
    assert reply.status == "error"
    (card,) = reply.displays
    assert set(card) == {"text/plain", "text/html"}
    return card["text/plain"], f"{reply.ename}: {reply.evalue}"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT"])
def test_c2_a_worker_that_was_killed(notebook: Kernel, method: str, name: str) -> None:
    card, raised = card_of(
        notebook,
        f"loader = DataLoader(Dies({name!r}), batch_size=4, num_workers=2, multiprocessing_context={method!r})\nfor batch in loader: pass",
    )
    assert raised.startswith("RuntimeError: DataLoader worker (pid(s)")
    assert card.startswith("loaderguard: loader: a worker died\n")
    assert f"was ended by {name}, on sample 9 of batch 2" in card
    assert "→ " in card
    if name == "SIGKILL":
        assert "the system has ended no process of this container for memory" in card
    if name == "SIGBUS":
        assert "/dev/shm has" in card


def test_c2_a_worker_that_leaves(notebook: Kernel) -> None:
    card, _ = card_of(notebook, "for batch in DataLoader(Leaves(), batch_size=4, num_workers=2): pass")
    assert "ended with exit code 3, on sample 9 of batch 2" in card


def test_c6_shared_memory_that_is_full() -> None:
    if not CAN_UNSHARE:
        pytest.skip("needs `unshare` and the right to use it")
    wrapper = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh")
    kernel = Kernel(wrapper=wrapper)
    try:
        kernel.ok(SETUP)
        card, _ = card_of(
            kernel, "loader = DataLoader(Heavy(), batch_size=4, num_workers=2)\nkept = [batch for batch in loader]"
        )
        assert "/dev/shm is full" in card
        assert "/dev/shm has 17 MB, of which" in card
        assert "loader needs 67 MB: 2 workers × 2 batches ahead × 17 MB" in card
        assert "--shm-size" in card
    finally:
        kernel.close()


def test_c7_too_many_open_files(own_kernel: Kernel) -> None:
    own_kernel.ok(SETUP)
    own_kernel.ok("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))")
    card, _ = card_of(own_kernel, "kept = [batch for batch in DataLoader(Quick(4000), num_workers=2)]")
    assert "too many open files" in card
    assert "its limit is 200" in card
    assert "batches that you keep hold theirs" in card


def test_a_worker_without_memory(notebook: Kernel) -> None:
    card, raised = card_of(notebook, "for batch in DataLoader(Hungry(), num_workers=1): pass")
    assert "MemoryError" in raised or "allocate" in raised
    assert "could not get the memory" in card


def test_the_loaders_own_timeout(notebook: Kernel) -> None:
    card, raised = card_of(
        notebook, "loader = DataLoader(Stuck(), num_workers=1, timeout=1)\nfor batch in loader: pass"
    )
    assert "timed out after 1" in raised
    assert "batch 0 is to come from worker 0" in card
    assert "on sample 0" in card


def test_d3_what_cannot_travel(notebook: Kernel) -> None:
    notebook.ok("import threading\ndataset = Quick(); dataset.lock = threading.Lock()")
    card, _ = card_of(
        notebook, "for batch in DataLoader(dataset, num_workers=1, multiprocessing_context='spawn'): pass"
    )
    assert "dataset.lock is a _thread.lock" in card


def test_d4_a_start_method_that_is_set_already(notebook: Kernel) -> None:
    notebook.ok("import multiprocessing; multiprocessing.get_start_method()")
    card, _ = card_of(notebook, "multiprocessing.set_start_method('spawn')")
    assert "multiprocessing_context='spawn'" in card
    assert "it is 'fork'" in card


def test_an_iterator_in_another_process(notebook: Kernel) -> None:
    card, _ = card_of(
        notebook,
        "import multiprocessing\nchild = multiprocessing.get_context('fork').Process(target=print)\n"
        "child.start(); child.join()\nchild._parent_pid = 1\nchild.is_alive()",
    )
    assert "a process that did not start it" in card


def test_errors_that_are_no_loaders_have_no_card(notebook: Kernel) -> None:
    notebook.ok("import multiprocessing")
    for code in (
        "1 / 0",
        "open('/nowhere')",
        "raise BrokenPipeError('of a socket')",
        "raise AssertionError('no')",
        "raise OSError(28, 'No space left on device', '/home/u/shmuel/out.npy')",
        "raise OSError(24, 'Too many open files')",
        "a, b = multiprocessing.Pipe()\nb.close()\na.recv()",
        "with multiprocessing.get_context('fork').Pool(1) as pool: pool.map(lambda x: x, [1])",
    ):
        reply = notebook.run(code)
        assert (reply.status, reply.displays) == ("error", []), code


def test_a_full_disk_and_a_workers_own_files_are_not_mistaken(notebook: Kernel) -> None:
    reply = notebook.run("for batch in DataLoader(FullDisk(), num_workers=1): pass")
    assert (reply.status, reply.displays) == ("error", [])
    card, _ = card_of(notebook, "for batch in DataLoader(OpensAll(), num_workers=1): pass")
    assert "a worker has too many files open" in card


def test_an_error_that_cannot_be_asked_leaves_no_worker(notebook: Kernel) -> None:
    notebook.ok(
        "class Odd(Exception):\n"
        "    def __init__(self, known): self.known = known\n"
        "    def __getattr__(self, name): return self.__dict__['known'][name]\n"
        "def fails():\n    it = iter(DataLoader(Quick(), num_workers=2)); next(it)\n    raise Odd({})"
    )
    reply = notebook.run("fails()")
    assert reply.status == "error"
    assert "Error in callback" not in reply.stdout + reply.stderr
    assert notebook.children() == []


def test_one_error_has_one_card(notebook: Kernel) -> None:
    inner = "for batch in DataLoader(Leaves(), batch_size=4, num_workers=2): pass"
    card_of(notebook, f"get_ipython().run_cell({inner!r}).raise_error()")


def test_an_error_of_the_dataset_has_its_note_and_no_card(notebook: Kernel) -> None:
    reply = notebook.run("for batch in DataLoader(failures.Raises(), num_workers=1): pass")
    assert (reply.status, reply.displays) == ("error", [])


def test_cards_can_be_turned_off(notebook: Kernel) -> None:
    notebook.ok("%config LoaderGuard.explain = False")
    reply = notebook.run("for batch in DataLoader(Leaves(), batch_size=4, num_workers=2): pass")
    notebook.ok("%config LoaderGuard.explain = True")
    assert (reply.status, reply.displays) == ("error", [])


@pytest.mark.parametrize("threads", [1, 0])
def test_e1_thread_pools_are_capped_in_workers_alone(notebook: Kernel, method: str, threads: int) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("pools have one thread on one CPU")
    notebook.ok(f"%config LoaderGuard.worker_threads = {threads}\nfrom tests.programs.threads import *")
    notebook.ok(
        f"it = iter(DataLoader(CountsThreads(), batch_size=None, num_workers=1, multiprocessing_context={method!r}))"
    )
    opencv, blas, _ = notebook.ok("next(it)\nnext(it)").value  # pools of a fork start with its first sample
    said = notebook.ok("%loaderguard").displays[0]["text/plain"]
    notebook.ok("del it\n%config LoaderGuard.worker_threads = 1")
    if threads:
        assert (opencv, blas) == (1, 1)
        assert "OpenCV 2 → 1" in said or "OpenCV" in said
    else:
        assert opencv > 1
        assert blas > 1
        assert "threads in workers" not in said
    assert notebook.ok("import cv2\ncv2.getNumThreads()").value == len(os.sched_getaffinity(0))
    assert notebook.ok("pool_size()").value == len(os.sched_getaffinity(0))


def test_threads_that_the_user_asked_for_stay(notebook: Kernel, method: str) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("pools have one thread on one CPU")
    notebook.ok("from tests.programs.threads import *\nos.environ['OPENBLAS_NUM_THREADS'] = '2'")
    loader = f"DataLoader(CountsThreads(), batch_size=None, num_workers=1, multiprocessing_context={method!r})"
    got = notebook.ok(f"[blas for _, blas, _ in {loader}]").value
    notebook.ok("del os.environ['OPENBLAS_NUM_THREADS']")
    if method != "forkserver":  # its environment is that of its own start
        assert got == 8 * [2]
    asked = loader.replace("num_workers=1", "num_workers=1, worker_init_fn=ask_for_three")
    assert notebook.ok(f"[blas for _, blas, _ in {asked}]").value == 8 * [3]
