"""`%loaderguard report` and `%loaderguard tune`, as a user types them."""

from __future__ import annotations

import pytest

from .driver import Kernel

PACES = "from tests.programs.paces import *"


def test_the_report_of_the_last_guarded_cell(kernel: Kernel) -> None:
    kernel.ok("loader = DataLoader(Slow(32), batch_size=4, num_workers=2)")
    closing = kernel.ok("%%guarded_loader --no-widget --name mine\nfor batch in loader: pass").stdout
    (drawn,) = kernel.ok("%loaderguard report").displays
    assert drawn["text/plain"].startswith(closing.strip())
    assert "loader (Slow)" in drawn["text/plain"], "by its name in the notebook"
    assert "worker 1" in drawn["text/plain"]
    assert "<svg" in drawn["text/html"]
    assert kernel.ok("mine").result == drawn, "it draws itself"
    assert kernel.ok("lg.RunReport.from_json(mine.to_json()) == mine and len(mine.to_trace()) > 100").value is True


def test_without_a_guarded_cell_there_is_one_line(own_kernel: Kernel) -> None:
    reply = own_kernel.run("%loaderguard report")
    said = reply.stderr + reply.evalue
    assert "%loaderguard report: no guarded cell has run yet; %%guarded_loader guards one" in said
    assert "Traceback" not in reply.stderr
    assert own_kernel.ok("[name for name in sys.modules if 'loaderguard.tuning' in name]").value == []


def test_e8_tune_shows_how_far_it_is_then_a_curve_and_a_line_to_paste(kernel: Kernel) -> None:
    kernel.ok(f"{PACES}\ntrain = DataLoader(Sleeps(), batch_size=4, shuffle=True)")
    reply = kernel.ok("%loaderguard tune train --max 1 --seconds 2")
    bar, drawn = reply.displays
    assert "loaderguard: tune [" in bar["text/plain"]
    assert "s left" in bar["text/html"]
    assert reply.updates[-1] == {"text/plain": "", "text/html": ""}, "nothing stays of it"
    assert "train = DataLoader(train.dataset, batch_size=4, shuffle=True, num_workers=" in drawn["text/plain"]
    assert "<svg" in drawn["text/html"]
    assert kernel.workers() == []
    result = kernel.ok("result = lg.tune(train, max_workers=1, seconds=2); result").result
    assert "measured in" in result["text/plain"]
    assert kernel.ok("result.plot()").result["text/html"].startswith("<svg")
    assert kernel.ok("[row.num_workers for row in result.rows]").value == [0, 1]


def test_what_cannot_be_tuned_gives_one_line(kernel: Kernel) -> None:
    for arguments, said in (
        ("", "which loader? %loaderguard tune LOADER [--max N] [--seconds S]"),
        ("[1, 2]", "this list is not a DataLoader"),
        ("DataLoader(Quick(8)) --max many", "--max must be a whole number, not 'many'"),
        ("DataLoader(Quick(8)) --seconds soon", "--seconds must be a number of seconds, not 'soon'"),
        ("DataLoader(Quick(8)) --seconds", "--seconds needs a value"),
    ):
        reply = kernel.run(f"%loaderguard tune {arguments}")
        assert said in reply.stderr + reply.evalue
        assert "Traceback" not in reply.stderr


@pytest.mark.parametrize("group", [True, False], ids=["group", "pid"])
def test_e8_an_interrupt_gives_the_result_so_far_and_leaves_no_worker(kernel: Kernel, group: bool) -> None:
    kernel.ok(
        f"{PACES}\nloader = DataLoader(Sleeps(), batch_size=4); torch.manual_seed(3); before = torch.get_rng_state()"
    )
    running = kernel.begin("result = lg.tune(loader, seconds=60)")
    kernel.wait_for_workers(1)
    kernel.interrupt(group)
    reply = kernel.finish(running, timeout=20, when_lost=kernel.interrupt)
    assert reply.status == "ok", reply.traceback
    assert kernel.children() == []
    assert kernel.ok("result.rows[0].num_workers, result.is_complete, result.limited_by").value == (
        0,
        False,
        "interrupted",
    )
    assert kernel.ok("bool((torch.get_rng_state() == before).all())").value is True


def test_e8_an_interrupt_before_anything_was_measured(kernel: Kernel) -> None:
    kernel.ok("loader = DataLoader(Stuck(), num_workers=1)")
    running = kernel.begin("lg.tune(loader, seconds=60)")
    kernel.wait_for_children(1)
    kernel.interrupt()
    reply = kernel.finish(running, timeout=20, when_lost=kernel.interrupt)
    assert reply.ename == "KeyboardInterrupt"
    assert kernel.children() == []


def test_live_loaders_are_left_alone(kernel: Kernel) -> None:
    kernel.ok(
        "loader = DataLoader(Quick(64), batch_size=4, num_workers=2, persistent_workers=True); it = iter(loader); next(it)"
    )
    before = kernel.workers()
    kernel.ok("lg.tune(loader, max_workers=1, seconds=1)")
    assert kernel.workers() == before
    assert kernel.ok("[int(batch[0, 0]) for batch in it] == list(range(4, 64, 4))").value is True
