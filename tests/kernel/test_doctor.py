"""`%loaderguard doctor`, as a user types it."""

from __future__ import annotations

from .driver import Kernel

LOCKED = """
import multiprocessing
class Locked(Quick):
    def __init__(self):
        super().__init__()
        self.lock = multiprocessing.get_context("fork").Lock()
    def __getitem__(self, index):
        with self.lock:
            time.sleep(0.01)
        return super().__getitem__(index)
loader = DataLoader(Locked(), num_workers=4)
"""


def test_b8_a_class_of_the_notebook_whose_workers_wait_for_a_lock(kernel: Kernel) -> None:
    kernel.ok(LOCKED)
    (drawn,) = kernel.ok("%loaderguard doctor loader").displays
    for mime in ("text/plain", "text/html"):
        assert "LG109 warning: 4 workers do the work of 1." in drawn[mime]
        assert "dataset.lock" in drawn[mime]
        assert "with 4 workers in" in drawn[mime]
    assert kernel.workers() == []


def test_a_healthy_loader_and_the_machine_have_nothing(kernel: Kernel) -> None:
    (drawn,) = kernel.ok("%loaderguard doctor DataLoader(Quick(64), num_workers=2)").displays
    assert "nothing wrong was found with DataLoader of Quick (num_workers=2, fork)" in drawn["text/plain"]
    assert "ran 64 batches with 2 workers" in drawn["text/html"]
    (drawn,) = kernel.ok("%loaderguard doctor").displays
    assert "nothing wrong was found with this machine" in drawn["text/plain"]
    assert "looked for: the size of /dev/shm" in drawn["text/plain"]


def test_what_is_no_loader_gives_one_line(kernel: Kernel) -> None:
    kernel.ok("nothing = None")
    for argument, said in (
        ("nowhere", "%loaderguard doctor: 'nowhere' is not a loader here (NameError: name 'nowhere' is not defined)"),
        ("[1, 2]", "%loaderguard doctor: this list is not a DataLoader"),
        ("nothing", "%loaderguard doctor: 'nothing' is None, not a loader"),
    ):
        reply = kernel.run(f"%loaderguard doctor {argument}")
        assert said in reply.stderr + reply.evalue
        assert "Traceback" not in reply.stderr


def test_as_a_function_it_is_drawn_and_leaves_live_loaders_alone(kernel: Kernel) -> None:
    kernel.ok(
        "loader = DataLoader(Quick(64), batch_size=4, num_workers=2, persistent_workers=True); it = iter(loader); next(it)"
    )
    before = kernel.workers()
    drawn = kernel.ok("lg.doctor(loader)").result
    assert "nothing wrong was found" in drawn["text/plain"]
    assert "<div" in drawn["text/html"]
    assert kernel.workers() == before
    assert kernel.ok("[int(batch[0, 0]) for batch in it] == list(range(4, 64, 4))").value is True


def test_an_interrupt_ends_it_and_its_workers(kernel: Kernel) -> None:
    kernel.ok("loader = DataLoader(Stuck(), num_workers=2)")
    running = kernel.begin("lg.doctor(loader, seconds=60)")
    kernel.wait_for_workers(2)
    kernel.interrupt()
    reply = kernel.finish(running, when_lost=kernel.interrupt)
    assert reply.ename == "KeyboardInterrupt"
    assert kernel.workers() == []


def test_loading_the_extension_does_not_load_the_doctor(own_kernel: Kernel) -> None:
    code = "[name for name in sys.modules if name.startswith('jupyter_loaderguard.doctor')]"
    assert own_kernel.ok(code).value == []
    assert "doctor [LOADER]" in own_kernel.ok("print(get_ipython().find_line_magic('loaderguard').__doc__)").stdout
