"""The live widget, seen from the front end's side of a real kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .conftest import IPYKERNEL6
from .driver import Kernel, wait_until

LOOP = """
loader = DataLoader(Slow(), batch_size=2, num_workers=2)
for batch in loader:
    pass
"""
COUNT = (
    "import ipywidgets.widgets.widget as found; (len(found._instances), sorted(t.name for t in threading.enumerate()))"
)


def named(kernel: Kernel, name: str) -> str:
    """Return the model of a button."""
    return str(
        kernel.ok(
            f"[one.model_id for one in lg.StatusWidget().children[3].children if getattr(one, 'description', '') == {name!r}][0]"
        ).value
    )


class Front:
    """Clicks as JupyterLab does: through a subshell, where the kernel has such."""

    def __init__(self, kernel: Kernel, in_subshell: bool) -> None:
        self._kernel = kernel
        self._subshell = self._make_subshell() if in_subshell else None

    def _make_subshell(self) -> str:
        client = self._kernel.client
        message = client.session.msg("create_subshell_request", {})
        client.control_channel.send(message)
        while True:
            reply = client.control_channel.get_msg(timeout=30)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return str(reply["content"]["subshell_id"])

    def click(self, model: str) -> None:
        client = self._kernel.client
        content = {"comm_id": model, "data": {"method": "update", "state": {"value": True}, "buffer_paths": []}}
        message = client.session.msg("comm_msg", content)
        if self._subshell is not None:
            message["header"]["subshell_id"] = self._subshell
        client.shell_channel.send(message)

    def close(self) -> None:
        if self._subshell is not None:
            client = self._kernel.client
            client.control_channel.send(client.session.msg("delete_subshell_request", {"subshell_id": self._subshell}))


@pytest.fixture
def front(kernel: Kernel) -> Iterator[Front]:
    front = Front(kernel, in_subshell=True)
    yield front
    front.close()


def test_a_guarded_cell_shows_the_widget_and_leaves_a_snapshot(any_kernel: Kernel) -> None:
    reply = any_kernel.ok(
        "%%guarded_loader\nloader = DataLoader(Quick(), batch_size=10, num_workers=2)\nfor batch in loader: pass"
    )
    assert len(reply.widgets) == 1
    (kept,) = reply.settled
    assert set(kept) == {"text/plain", "text/html"}
    for words in kept.values():
        assert "loader" in words
        assert "100 of 100 batches" in words
        assert "Quick" in words
    assert "loaderguard: 1 loader, 2 workers" in reply.stdout


def test_what_the_guard_stopped_is_kept_as_it_was(any_kernel: Kernel) -> None:
    reply = any_kernel.run(
        "%config LoaderGuard.refresh_seconds = 0.2\n"
        "%guarded_loader --stall 0.5\n"
        "it = iter(DataLoader(Stuck(), num_workers=2))\n"
        "threading.Timer(2.5, lambda: lg.clean()).start()\nnext(it)"
    )
    any_kernel.ok("%config LoaderGuard.refresh_seconds = 1.0")
    assert reply.ename == "LoaderGuardError"
    html = reply.settled[-1]["text/html"]
    assert ">stalled" in html
    assert "2 workers stopped (clean)" in html
    assert "has been on sample" in html


def test_an_empty_guarded_cell_settles_too(kernel: Kernel) -> None:
    reply = kernel.ok("%%guarded_loader\n1 + 1")
    assert reply.result["text/plain"] == "2"
    assert "no loader" in reply.settled[0]["text/html"]


@pytest.mark.parametrize("silence", ["--no-widget", "--no-widget --quiet"])
def test_no_widget_on_request(kernel: Kernel, silence: str) -> None:
    reply = kernel.ok(f"%%guarded_loader {silence}\nfor batch in DataLoader(Quick(), num_workers=1): break")
    assert (reply.widgets, reply.settled, reply.displays) == ([], [], [])


def test_no_widget_by_configuration(kernel: Kernel) -> None:
    kernel.ok("%config LoaderGuard.widget = False")
    reply = kernel.ok("%%guarded_loader\nfor batch in DataLoader(Quick(), num_workers=1): break")
    kernel.ok("%config LoaderGuard.widget = True")
    assert (reply.widgets, reply.settled, reply.displays) == ([], [], [])


def test_running_a_cell_again_piles_nothing_up(any_kernel: Kernel) -> None:
    cells = (
        "%%guarded_loader\nfor batch in DataLoader(Quick(), num_workers=2): break",
        "lg.StatusWidget()",
        "%loaderguard widget",
    )
    for cell in cells:
        any_kernel.ok(cell)
    any_kernel.ok(cells[0])
    before = any_kernel.ok(COUNT).value
    for _ in range(3):
        for cell in cells:
            any_kernel.ok(cell)
    any_kernel.ok(cells[0])
    assert any_kernel.ok(COUNT).value == before


def test_nothing_is_refreshed_when_nothing_is_alive(kernel: Kernel) -> None:
    kernel.ok("%config LoaderGuard.refresh_seconds = 0.1")
    kernel.ok("%loaderguard widget")
    kernel.ok("it = iter(DataLoader(Quick(), num_workers=1)); next(it)")
    threads = "[t.name for t in threading.enumerate() if t.name == 'loaderguard-status']"
    assert kernel.ok(threads).value == ["loaderguard-status"]
    kernel.ok("del it")
    wait_until(lambda: kernel.ok(threads).value == [], what="the end of the refreshing thread")
    kernel.ok("it = iter(DataLoader(Quick(), num_workers=1)); next(it)")
    assert kernel.ok(threads).value == ["loaderguard-status"]
    kernel.ok("del it\n%config LoaderGuard.refresh_seconds = 1.0")
    wait_until(lambda: kernel.ok(threads).value == [], what="the end of the refreshing thread")


def test_unloading_ends_the_refreshing_and_leaves_a_snapshot(own_kernel: Kernel) -> None:
    own_kernel.ok("%loaderguard widget")
    own_kernel.ok("it = iter(DataLoader(Quick(), num_workers=2)); next(it)")
    reply = own_kernel.ok("%unload_ext jupyter_loaderguard")
    assert "Quick" in reply.settled[0]["text/html"]
    names = own_kernel.ok("[t.name for t in threading.enumerate() if 'loaderguard' in t.name]").value
    assert names == []
    own_kernel.ok("next(it); del it")


def test_the_figures_move_while_the_cell_runs_one_message_each(any_kernel: Kernel) -> None:
    any_kernel.ok("%loaderguard widget")
    cell = any_kernel.begin("%%guarded_loader --no-widget\n" + LOOP)
    seen: list[str] = []
    deadline = time.monotonic() + 40
    while len(seen) < 4:
        message = any_kernel.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
        state = message["content"].get("data", {}).get("state", {}) if message["msg_type"] == "comm_msg" else {}
        if "batches" in state.get("value", "") and "<table" in state["value"]:
            seen.append(state["value"])
    assert len(set(seen)) == len(seen)
    any_kernel.interrupt()
    any_kernel.finish(cell)


def test_a_click_on_stop_during_a_cell_ends_its_loop(kernel: Kernel, front: Front) -> None:
    button = named(kernel, "Stop all")
    cell = kernel.begin("%%guarded_loader\n" + LOOP.replace("Slow()", "Stuck()"))
    workers = kernel.wait_for_workers(2)
    front.click(button)
    wait_until(lambda: not any(worker.is_running() for worker in workers), what="the end of the workers")
    reply = kernel.finish(cell)
    assert reply.ename == "LoaderGuardError"
    assert "a button of the status widget" in reply.evalue
    assert "0 workers left" in reply.stdout


def test_a_click_on_stop_loader_leaves_the_others(kernel: Kernel, front: Front) -> None:
    kernel.ok("other = DataLoader(Quick(), num_workers=1, persistent_workers=True); it = iter(other); next(it)")
    kernel.ok("%loaderguard widget")
    button = named(kernel, "Stop loader")
    (own,) = kernel.workers()
    cell = kernel.begin("loader = DataLoader(Stuck(), num_workers=2)\nfor batch in loader: pass")
    kernel.wait_for_workers(3)
    front.click(button)  # the first is chosen
    wait_until(lambda: not own.is_running(), what="the end of the chosen loader's worker")
    assert len(kernel.children()) == 2
    kernel.interrupt()
    assert kernel.finish(cell).ename == "KeyboardInterrupt"
    kernel.ok("del it, other")


def test_stacks_and_diagnosis_are_shown_while_a_cell_runs(kernel: Kernel, front: Front) -> None:
    buttons = {name: named(kernel, name) for name in ("Stacks", "Diagnosis")}
    pane = kernel.ok("lg.StatusWidget().children[4].model_id").value
    cell = kernel.begin("%%guarded_loader\n" + LOOP.replace("Slow()", "Stuck()"))
    kernel.wait_for_workers(2)
    for name, words in (("Stacks", "in __getitem__"), ("Diagnosis", "torch 2.")):
        front.click(buttons[name])
        deadline = time.monotonic() + 30
        while True:
            message = kernel.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            content = message["content"]
            if content.get("comm_id") == pane and words in content["data"]["state"].get("value", ""):
                break
    kernel.interrupt()
    kernel.finish(cell)


@pytest.mark.skipif(not IPYKERNEL6, reason="LOADERGUARD_IPYKERNEL6_PYTHON is not set; `make test` sets it")
def test_without_subshells_a_click_waits_for_the_end_of_the_cell() -> None:
    kernel = Kernel(python=IPYKERNEL6)
    try:
        front = Front(kernel, in_subshell=False)
        button = named(kernel, "Stop all")
        kernel.ok("it = iter(DataLoader(Quick(), num_workers=1)); next(it)")
        (worker,) = kernel.workers()
        cell = kernel.begin("import time; time.sleep(2)")
        front.click(button)
        time.sleep(1)
        assert worker.is_running()
        kernel.finish(cell)
        wait_until(lambda: not worker.is_running(), what="the end of the worker")
    finally:
        kernel.close()


def test_the_widgets_text_is_a_table_for_front_ends_without_widgets(kernel: Kernel) -> None:
    kernel.ok("it = iter(DataLoader(Quick(), num_workers=1)); next(it)")
    reply = kernel.ok("%loaderguard widget")
    assert "Quick of 1,000 samples" in reply.widgets[0]["text/plain"]
    kernel.ok("del it")


def test_an_interrupt_while_a_guarded_cell_begins_leaves_nothing(own_kernel: Kernel) -> None:
    own_kernel.ok("%%guarded_loader\n1")
    for number in range(25):
        cell = own_kernel.begin("%%guarded_loader\nfor batch in DataLoader(Slow(), num_workers=1): pass")
        time.sleep(number * 0.002)
        own_kernel.interrupt(group=False)
        time.sleep(0.3)
        own_kernel.interrupt(group=False)  # the first one may have come before the cell
        reply = own_kernel.finish(cell, when_lost=own_kernel.interrupt)
        assert reply.ename in ("KeyboardInterrupt", ""), reply.traceback
        # an interrupt in a callback of IPython's own is printed, too
        assert "Error in callback <bound method Cells" not in reply.stdout + reply.stderr
        assert "no cell is running" not in reply.stderr
    code = "from jupyter_loaderguard.registry import registry; len(registry.runs)"
    assert own_kernel.ok(code).value == 0
    threads = "[t.name for t in threading.enumerate() if t.name == 'loaderguard-memory']"
    assert own_kernel.ok(threads).value == []
    assert own_kernel.children() == []


def test_a_length_that_blocks_is_never_asked_for_when_a_cell_ends(kernel: Kernel) -> None:
    kernel.ok(
        "lock = threading.Lock()\n"
        "class Blocks(Slow):\n    def __len__(self):\n        with lock: return 1000\n"
        "loader = DataLoader(Blocks(), num_workers=1)"
    )
    reply = kernel.ok("%%guarded_loader\nit = iter(loader); next(it); lock.acquire(); time.sleep(1.5)", timeout=20)
    kernel.ok("lock.release(); del it, loader")
    assert "1 of 1,000 batches" in reply.settled[0]["text/plain"]


def test_a_display_is_drawn_on_when_another_one_has_settled(kernel: Kernel) -> None:
    kernel.ok("%config LoaderGuard.refresh_seconds = 0.1\n%loaderguard widget")
    kernel.ok("%%guarded_loader\nfor batch in DataLoader(Quick(20), num_workers=1): pass")
    kernel.ok("it = iter(DataLoader(Quick(), num_workers=1)); next(it)")
    kernel.ok("board = lg.StatusWidget.__mro__[0]._one.children[1]")
    wait_until(
        lambda: "1 of 1,000 batches" in str(kernel.ok("board.value").value), what="the drawing of the new loader"
    )
    kernel.ok("del it\n%config LoaderGuard.refresh_seconds = 1.0")


def test_the_chosen_loader_stays_chosen_and_never_becomes_another(kernel: Kernel) -> None:
    kernel.ok("%config LoaderGuard.refresh_seconds = 0.1\n%loaderguard widget")
    kernel.ok("choice = lg.StatusWidget().children[3].children[0]")
    kernel.ok(
        "a, b = DataLoader(Quick(), num_workers=1), DataLoader(Quick(), num_workers=1)\nia, ib = iter(a), iter(b)"
    )
    labels = "[label for label, _ in choice.options]"
    wait_until(lambda: kernel.ok(labels).value == ["a", "b"], what="both loaders in the list")
    kernel.ok("choice.value = dict(choice.options)['b']; del ib; ib = iter(b)")
    wait_until(lambda: kernel.ok(labels).value == ["a", "b"], what="the next epoch of the chosen loader")
    wait_until(lambda: kernel.ok("choice.label").value == "b", what="the choice")
    kernel.ok("c = DataLoader(Quick(), num_workers=1); ic = iter(c); del ib")
    wait_until(lambda: kernel.ok(labels).value == ["a", "c"], what="the end of the chosen loader")
    wait_until(lambda: kernel.ok("choice.value is None").value, what="a list in which nobody is chosen")
    kernel.ok("del ia, ic")
    wait_until(lambda: kernel.ok(labels).value == ["no loader"], what="the end of all")
    kernel.ok("%config LoaderGuard.refresh_seconds = 1.0")


def test_the_snapshot_has_loaders_of_earlier_cells_that_were_iterated(kernel: Kernel) -> None:
    kernel.ok("loader = DataLoader(Quick(40), num_workers=1, persistent_workers=True)\nn = len(list(loader))")
    reply = kernel.ok("%%guarded_loader\nn = len(list(loader))")
    assert "loader: Quick of 40 samples" in reply.settled[0]["text/plain"]
    assert "40 of 40 batches" in reply.settled[0]["text/plain"]
    kernel.ok("del loader")


def test_a_cell_with_many_loaders_leaves_a_short_snapshot(kernel: Kernel) -> None:
    reply = kernel.ok("%%guarded_loader\nfor _ in range(300): n = len(list(DataLoader(Quick(2))))")
    assert "more loaders were used before these" in reply.settled[0]["text/plain"]
    assert len(reply.settled[0]["text/html"]) < 20_000


def test_workers_at_the_end_of_their_stream_are_done_and_not_dead(kernel: Kernel) -> None:
    kernel.ok(
        "from torch.utils.data import IterableDataset, get_worker_info\n"
        "class Uneven(IterableDataset):\n    def __iter__(self): return iter(range(1 + 50 * get_worker_info().id))\n"
        "it = iter(DataLoader(Uneven(), num_workers=2, batch_size=None))\nn = [next(it) for _ in range(20)]"
    )
    words = kernel.ok("time.sleep(0.5); [worker.word for worker in lg.snapshot().workers]").value
    kernel.ok("del it")
    assert "dead" not in words  # type: ignore[operator]
    assert "done" in words  # type: ignore[operator]


def test_the_board_says_when_the_guard_is_off(kernel: Kernel) -> None:
    kernel.ok("%loaderguard off\nwidget = lg.StatusWidget()")
    drawn = str(kernel.ok("widget.children[1].value").value)
    kernel.ok("%loaderguard on")
    assert "loaderguard is off" in drawn


def test_unloading_closes_the_widget(own_kernel: Kernel) -> None:
    own_kernel.ok("import ipywidgets.widgets.widget as found\n%loaderguard widget")
    assert own_kernel.ok("len(found._instances)").value
    own_kernel.ok("%unload_ext jupyter_loaderguard")
    assert own_kernel.ok("len(found._instances)").value == 0
