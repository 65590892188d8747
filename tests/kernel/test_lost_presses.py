"""One press of the stop button is enough, also if Python raises it where nobody can catch it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .driver import Kernel, Reply, is_gone, wait_until

# a press that hits a finalizer, made certain: the finalizer itself is what presses
FINALIZERS = {
    "__del__": "class Last:\n    def __del__(self): press()\ndef drop(): Last()",
    "weakref": "import weakref\nclass Last: pass\ndef drop():\n    last = Last()\n    ref = weakref.ref(last, lambda _: press())\n    del last",
    "collector": "import gc\nclass Last:\n    def __del__(self): press()\ndef drop():\n    last = Last(); last.me = last\n    del last\n    gc.collect()",
    "generator": "def held():\n    try: yield\n    finally: press()\ndef drop():\n    it = held(); next(it)\n    del it",
}
PRESS = """
def press():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass  # Python raises it here
"""
LOOP = "for batch in DataLoader({dataset}(), num_workers={n}): pass"
COLLECTING = """
import gc
from torch.utils.data import SequentialSampler
class Last:
    def __del__(self): pass
class Collecting(SequentialSampler):  # of the loop's own thread, inside of a wait
    def __iter__(self):
        open({marker!r}, "w").close()
        deadline = time.time() + 20
        while not stop and time.time() < deadline:
            last = Last(); last.me = last
            del last
            gc.collect()
        yield from super().__iter__()
"""
"""Most of the time of this is spent in the collector, or in what it calls."""


def assert_ended_quietly(kernel: Kernel, reply: Reply) -> None:
    assert reply.ename == "KeyboardInterrupt"
    assert "ignored" not in reply.stderr
    assert kernel.children() == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("finalizer", FINALIZERS)
def test_a_press_that_hits_a_finalizer_ends_the_cell(any_kernel: Kernel, finalizer: str, workers: int) -> None:
    any_kernel.ok(PRESS + FINALIZERS[finalizer])
    dataset = "Stuck" if workers else "Slow"
    code = f"it = iter(DataLoader({dataset}(), num_workers={workers}))\ndrop()\nfor batch in it: pass"
    assert_ended_quietly(any_kernel, any_kernel.run(code, 20))


def test_a_press_that_hits_the_collector_in_a_wait_ends_the_cell(kernel: Kernel, tmp_path: Path) -> None:
    marker = tmp_path / "waits"
    kernel.ok(COLLECTING.format(marker=str(marker)))
    for _ in range(5):
        marker.unlink(missing_ok=True)
        cell = kernel.begin(
            "stop = False\ndata = Stuck()\nfor batch in DataLoader(data, sampler=Collecting(data), num_workers=2): pass"
        )
        wait_until(marker.exists, 30)
        time.sleep(0.1)
        kernel.interrupt(group=False)
        assert_ended_quietly(kernel, kernel.finish(cell, 15))


COLLECTS = """
import gc, weakref
class Box: pass
boxes = weakref.WeakSet()  # with a callback in Python
print("go", flush=True)
for batch in DataLoader(Quick(100_000), num_workers={n}):
    for _ in range(100):
        box = Box(); box.me = box; boxes.add(box)
    del box
    gc.collect()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_collects_all_the_time_hears_the_first_press(any_kernel: Kernel, workers: int) -> None:
    before = any_kernel.ok("import gc; len(gc.callbacks)").value  # ipykernel 6 has one
    for pause in (0.3, 0.5, 0.7):
        cell = any_kernel.begin(COLLECTS.format(n=workers))
        any_kernel.wait_for_output(cell, "go")
        time.sleep(pause)
        any_kernel.interrupt(group=False)
        assert_ended_quietly(any_kernel, any_kernel.finish(cell, 15))
    assert any_kernel.ok("time.sleep(0.1); len(gc.callbacks)").value == before


SILENT = """
import io
class Quiet(io.RawIOBase):
    def close(self):  # what this raises is dropped by Python without a word
        if not self.closed:
            super().close()
            press()
def unpack():
    Quiet()
class Batch:
    def __reduce__(self): return unpack, ()
class Dropping(Quick):
    def __getitem__(self, index):
        time.sleep(1 if index else 1000)  # the loop waits for the first batch, and unpacks the second in that wait
        return Batch()
"""


def test_a_press_that_python_drops_without_a_word_in_a_wait_ends_the_cell(any_kernel: Kernel) -> None:
    any_kernel.ok(PRESS + SILENT)
    reply = any_kernel.run("for batch in DataLoader(Dropping(), batch_size=None, num_workers=2): pass", 20)
    assert_ended_quietly(any_kernel, reply)


OWN_HANDLER = """
calls = []
def mine(signum, frame):
    calls.append(frame.f_code.co_name)
    if {raises}: raise KeyboardInterrupt
signal.signal(signal.SIGINT, mine)
drop()
"""


def test_a_handler_of_the_users_is_called_once_for_a_press(kernel: Kernel) -> None:
    kernel.ok(PRESS + FINALIZERS["__del__"])
    kernel.ok(OWN_HANDLER.format(raises=False) + "\ntime.sleep(1)")
    assert kernel.ok("len(calls)").value == 1
    cell = kernel.begin(OWN_HANDLER.format(raises=False) + LOOP.format(dataset="Stuck", n=1))
    processes = kernel.wait_for_workers(1)
    time.sleep(1.5)
    assert not is_gone(processes[0])  # it has decided to go on, and so does the loop
    kernel.interrupt(group=False)
    time.sleep(1.5)
    assert not is_gone(processes[0])
    processes[0].kill()
    kernel.finish(cell, 20)
    assert kernel.ok("len(calls)").value == 2


def test_a_handler_of_the_users_that_raises_where_it_is_lost_is_not_called_again(kernel: Kernel) -> None:
    kernel.ok(PRESS + FINALIZERS["__del__"])
    code = OWN_HANDLER.format(raises=True) + LOOP.format(dataset="Stuck", n=1)
    reply = kernel.run(
        "try:\n"
        + "\n".join(f"    {line}" for line in code.splitlines())
        + "\nfinally:\n    kept = signal.getsignal(signal.SIGINT)",
        20,
    )
    assert_ended_quietly(kernel, reply)
    assert kernel.ok("len(calls), kept is mine").value == (1, True)


SWALLOWING = """
caught = 0
it = iter(DataLoader({dataset}({length}), num_workers={n}))
print("go", flush=True)
while True:
    try:
        next(it)
    except KeyboardInterrupt:
        caught += 1
    except StopIteration:
        break
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_that_the_loop_catches_does_not_come_again(any_kernel: Kernel, workers: int) -> None:
    cell = any_kernel.begin(SWALLOWING.format(dataset="Slow", length=150, n=workers))
    any_kernel.wait_for_output(cell, "go")
    time.sleep(0.5)
    any_kernel.interrupt(group=False)
    assert any_kernel.finish(cell, 30).status == "ok"
    assert any_kernel.ok("caught").value == 1


def test_what_is_not_an_interrupt_is_said_as_ever(kernel: Kernel) -> None:
    kernel.ok("class Bad:\n    def __del__(self): raise {}\n".format("ValueError('mine')"))
    assert "ValueError: mine" in kernel.ok("Bad()\n1").stderr
    kernel.ok("class Bad:\n    def __del__(self): raise KeyboardInterrupt('nobody pressed')\n")
    assert "nobody pressed" in kernel.ok("Bad()\ntime.sleep(0.3)").stderr


def test_a_hook_of_the_users_stays_and_is_called(kernel: Kernel) -> None:
    kernel.ok("said = []\nbefore = sys.unraisablehook\nclass Bad:\n    def __del__(self): raise ValueError('mine')")
    kernel.ok(
        "def hook(args):\n    said.append(args.exc_type); previous(args)\nprevious = sys.unraisablehook\nsys.unraisablehook = hook"
    )
    for _ in range(3):
        assert kernel.ok("Bad()\n1").stderr.count("ValueError: mine") == 1
    assert kernel.ok("len(said)").value == 3
    kernel.ok("%unload_ext jupyter_loaderguard")
    assert kernel.ok("sys.unraisablehook is hook").value is True
    kernel.ok("sys.unraisablehook = sys.__unraisablehook__")
    kernel.ok("%load_ext jupyter_loaderguard")
    kernel.ok("%unload_ext jupyter_loaderguard")
    assert kernel.ok("sys.unraisablehook is sys.__unraisablehook__").value is True
    kernel.ok("%load_ext jupyter_loaderguard")
