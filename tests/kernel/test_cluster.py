"""Many ranks in one view, on a real cluster of 8 engines; the tests build on one another, and the last ones end it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .driver import Kernel, is_gone, name_of, wait_gone, wait_until

ENGINES = 8
SETUP = f"""
import logging, os, signal, sys, time
import ipyparallel as ipp
import jupyter_loaderguard as lg
logging.getLogger("ipyparallel").setLevel(logging.CRITICAL)
cluster = ipp.Cluster(n={ENGINES}, log_level=50)
cluster.start_cluster_sync()
rc = cluster.connect_client_sync()
rc.wait_for_engines({ENGINES}, timeout=100)
view = rc[:]
view.block = True
view.activate()
for number in (2, 4):
    few = rc[:number]
    few.block = True
    few.activate('_' + str(number))
"""
ON_ENGINES = """%%px
import os, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from tests.programs.datasets import *
"""


class Ranks:
    """A notebook with a cluster, and its engines as processes."""

    def __init__(self) -> None:
        self.kernel = Kernel(setup="")
        self.engines: dict[int, psutil.Process] = {}
        self.kernel.ok(SETUP, timeout=110)
        controller = psutil.Process(self.kernel.ok("cluster.controller.pid").value)
        self.kernel._note([controller, *controller.children(recursive=True)])

    def look_up_engines(self) -> None:
        pids = self.kernel.ok("rc[:].apply_sync(os.getpid)").value
        ids = self.kernel.ok("rc.ids").value
        self.engines = {number: psutil.Process(pid) for number, pid in zip(ids, pids, strict=True)}

    def workers(self, *numbers: int) -> list[psutil.Process]:
        chosen = [one for number, one in self.engines.items() if not numbers or number in numbers]
        children = [child for one in chosen if not is_gone(one) for child in one.children(recursive=True)]
        found = [child for child in children if name_of(child).startswith("pt_data")]
        return self.kernel._note(found)

    def wait_for_workers(self, number: int) -> list[psutil.Process]:
        wait_until(lambda: len(self.workers()) == number, 60, f"{number} workers")
        return self.workers()

    def table(self) -> str:
        return self.kernel.ok("print(lg.cluster())").stdout

    def wait_for_table(self, pattern: str, timeout: float = 30) -> str:
        wait_until(lambda: re.search(pattern, self.table()), timeout, pattern)
        return self.table()

    def close(self) -> None:
        try:
            self.kernel.run("rc.close(); cluster.stop_cluster_sync()", timeout=30)
        finally:
            self.kernel._note(list(self.engines.values()))
            self.kernel.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def _start_keepers(ranks: Ranks, number: int) -> list[psutil.Process]:
    ranks.kernel.ok(
        f"%%px\nkept = DataLoader(Quick(), num_workers={number}, persistent_workers=True)\nfirst = next(iter(kept))",
        timeout=60,
    )
    return ranks.workers()


@pytest.mark.timeout(240)  # the start of 8 engines, and torch on each
def test_what_is_no_client_gets_one_line(ranks: Ranks) -> None:
    for words, line in (
        ("nothing", "'nothing' is not an ipyparallel client here (NameError"),
        ("view", "this DirectView is not an ipyparallel Client"),
        ("stacks one", "'one' is not the number of a rank"),
    ):
        reply = ranks.kernel.run(f"%loaderguard cluster {words}")
        assert line in reply.stderr, reply.stderr
        assert reply.stderr.count("\n") <= 1, reply.stderr


def test_one_widget_has_all_ranks(ranks: Ranks) -> None:
    shown = ranks.kernel.ok("%loaderguard cluster rc", timeout=60)
    assert len(shown.widgets) == 1
    assert shown.widgets[0]["text/plain"].endswith(f"{ENGINES} ranks  ·  0 workers")
    ranks.kernel.ok(ON_ENGINES, timeout=100)
    ranks.look_up_engines()


def test_eight_engines_with_four_workers_are_live_while_their_cells_run_and_one_interrupt_cleans_them(
    ranks: Ranks,
) -> None:
    cell = ranks.kernel.begin("%%px\n%%guarded_loader\nfor batch in DataLoader(Slow(), num_workers=4): pass")
    workers = ranks.wait_for_workers(4 * ENGINES)
    drawn, deadline = "", time.monotonic() + 30
    while f"{4 * ENGINES} workers" not in drawn:
        assert time.monotonic() < deadline, drawn
        message = ranks.kernel.client.get_iopub_msg(timeout=30)
        drawn = str(message["content"].get("data", "")) if message["msg_type"] == "comm_msg" else drawn
    ranks.kernel.interrupt()
    took = wait_gone(workers)
    reply = ranks.kernel.finish(cell)
    assert took < 10, took
    assert "0 workers left" in reply.stdout + reply.stderr + str(reply.displays)
    ranks.wait_for_table(r"ranks  ·  0 workers")
    wait_until(lambda: "busy" not in ranks.table(), 30, "idle ranks")  # 8 engines on few CPUs take a moment


def test_a_guarded_cell_on_engines_is_as_anywhere_but_has_no_widget_there(ranks: Ranks) -> None:
    loop = "for batch in DataLoader(Quick(50), num_workers=2): pass"
    reply = ranks.kernel.ok(f"%%px_2\n%%guarded_loader --name report\n{loop}")
    assert not reply.widgets
    assert ranks.kernel.ok("rc[:2].apply_sync(eval, '(report.batches, report.left)')").value == [(50, 0), (50, 0)]
    assert not ranks.workers()


@pytest.mark.parametrize("number", [2, 4])
def test_a_hanging_rank_is_named_and_the_others_are_told(ranks: Ranks, number: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = f"'gloo', init_method='tcp://127.0.0.1:{port}', world_size={number}, timeout=timedelta(seconds=8)"
    # ranks in the opposite order of the engines: it is the rank that is named
    last = number - 1
    ranks.kernel.ok(f"rc[:{number}].scatter('rank', list(range({number}))[::-1], flatten=True, block=True)")
    ranks.kernel.ok(f"%%px_{number}\ndist.init_process_group({group}, rank=rank)", timeout=60)
    cell = ranks.kernel.begin(
        f"%%px_{number} --stream\n%%guarded_loader --stall 1\n"
        f"for batch in DataLoader(Stuck() if rank == {last} else Slow(), num_workers=1): dist.all_reduce(torch.ones(2))"
    )
    seen, deadline = "", time.monotonic() + 60
    told = [f"rank {one} waits in all_reduce() for rank {last}" for one in range(last)]
    while not all(line in seen for line in told):
        assert time.monotonic() < deadline, seen
        message = ranks.kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "display_data":
            seen += message["content"]["data"].get("text/plain", "") + "\n"
    assert re.search(rf"batch 0 of 1,000 of DataLoader #\d+ on rank {last} \(\S+\) \(Stuck\) has not come", seen), seen
    assert re.search(r"worker 0 \(pid \d+\) has been on sample 0 for", seen), seen
    ranks.kernel.interrupt()
    assert wait_gone(ranks.workers()) < 10
    reply = ranks.kernel.finish(cell)
    assert "goes on in all_reduce(), which no interrupt ends; its workers are gone" in reply.stderr, reply.stderr
    wait_until(lambda: "busy" not in ranks.table(), 40, "the timeout of gloo")
    ranks.kernel.ok(f"%%px_{number}\ndist.destroy_process_group()", timeout=60)


def test_functions_and_silent_code_end_like_cells(ranks: Ranks) -> None:
    loop = "for batch in DataLoader(Slow(), num_workers=2): pass"
    for code in (
        f"rc[0].execute({loop!r}, block=True)",
        "rc[0].apply_sync(lambda: [one for one in DataLoader(Slow(), num_workers=2)])",
        "rc.load_balanced_view().apply_sync(lambda: [one for one in DataLoader(Slow(), num_workers=2)])",
    ):
        cell = ranks.kernel.begin(code)
        workers = ranks.wait_for_workers(2)
        ranks.kernel.interrupt()
        ranks.kernel.finish(cell)
        wait_gone(workers)
    function = "def fail():\n    it = iter(DataLoader(Quick(), num_workers=2)); next(it); 1 / 0"
    ranks.kernel.ok(f"rc[0].execute({function!r}, block=True)")
    assert "ZeroDivisionError" in ranks.kernel.run("rc[0].apply_sync(eval, 'fail()')").traceback
    wait_until(lambda: not ranks.workers(), what="the end of the workers that a traceback holds")


@pytest.mark.parametrize("how", ["%%px_2\n{}", "rc[:2].execute({!r}, block=True)"], ids=["px", "execute"])
def test_what_a_rank_saves_after_an_interrupt_is_not_interrupted_again(ranks: Ranks, how: str, tmp_path: Path) -> None:
    run = f"from tests.programs import launch\nlaunch.save_at_interrupt(os.getpid(), {str(tmp_path)!r})"
    logs = [tmp_path / str(ranks.engines[number].pid) for number in (0, 1)]
    cell = ranks.kernel.begin(how.format(run))
    wait_until(lambda: all(log.exists() and log.read_text() == "training" for log in logs), 60, "two trainings")
    ranks.kernel.interrupt()
    ranks.kernel.finish(cell)
    wait_until(lambda: "busy" not in ranks.table(), 30, "idle ranks")
    assert [log.read_text() for log in logs] == ["saved", "saved"]


def test_stacks_clean_and_doctor_of_all_ranks_or_one_while_they_are_busy(ranks: Ranks) -> None:
    ranks.kernel.ok(
        "busy = rc[:2].execute('for batch in DataLoader(Slow(), num_workers=2): pass', silent=False, block=False)"
    )
    ranks.wait_for_workers(4)
    ranks.wait_for_table("4 workers")
    ranks.wait_for_table(rf"(?m)^ +{ENGINES - 1} ")  # they have no ranks of torch.distributed any more
    stacks = ranks.kernel.ok("{rank: sorted(found) for rank, found in lg.cluster().stacks().items()}").value
    assert {rank: len(found) for rank, found in stacks.items() if found} == {0: 2, 1: 2}
    said = ranks.kernel.ok("%loaderguard cluster stacks 1").stdout
    assert said.startswith("rank 1 (")
    assert said.count("_worker_loop") == 2
    assert set(
        ranks.kernel.ok("{rank: found.checked != '' for rank, found in lg.cluster().doctor().items()}").value
    ) == set(range(ENGINES))
    assert (
        "rank 0 ("
        in ranks.kernel.run("lg.cluster().doctor(loader='kept')").evalue
        + ranks.kernel.run("lg.cluster().doctor(0, 'x')").evalue
    )
    assert "stopped 2 workers of 1 loader" in ranks.kernel.ok("%loaderguard cluster clean 1").stdout
    assert [len(ranks.workers(one)) for one in (0, 1)] == [2, 0]
    said = ranks.kernel.ok("%loaderguard cluster interrupt").stdout
    assert re.search("interrupted (1 rank|2 ranks) · 0 workers left", said), said
    assert not ranks.workers()
    ranks.kernel.ok("rc[0].execute('loader = DataLoader(Quick(), num_workers=1)', block=True)")
    wait_until(lambda: "busy" not in ranks.table(), 30, "idle ranks")
    found = ranks.kernel.ok("lg.cluster().doctor(0, 'loader')[0].subject").value
    assert found == "DataLoader of Quick (num_workers=1, fork)"
    assert "there is no rank 99 on an engine here" in ranks.kernel.run("%loaderguard cluster stacks 99").stderr


def test_an_engine_that_cannot_answer_does_not_hide_the_others(ranks: Ranks) -> None:
    ranks.kernel.ok("sys.modules['jupyter_loaderguard.cluster.follow'].ANSWER_SECONDS = 3")
    ranks.engines[1].suspend()
    try:
        reply = ranks.kernel.ok("sorted(lg.cluster().clean())")
        said = ranks.kernel.run("%loaderguard cluster stacks 1").stderr
        interrupted = ranks.kernel.run("%loaderguard cluster interrupt").stdout
    finally:
        ranks.engines[1].resume()
    assert reply.value == [0, *range(2, ENGINES)]
    assert re.fullmatch(r"loaderguard: no answer from rank 1 \(\S+\)\n", reply.stderr), reply.stderr
    assert "no answer from rank 1" in said
    assert interrupted.startswith("loaderguard: interrupted 0 ranks · 0 workers left\nloaderguard: rank 1 ("), (
        interrupted
    )
    assert interrupted.endswith("did not answer within 3 s; its workers are not known\n"), interrupted


def test_a_busy_engine_is_not_waited_for_and_is_guarded_after_its_cell(ranks: Ranks) -> None:
    ranks.kernel.ok("lg.cluster().close()\nbusy = rc[0].execute('time.sleep(8)', block=False)")
    opened = ranks.kernel.ok("print(lg.cluster(rc))")
    assert opened.seconds < 7
    assert re.search(r"(?m)^ +0  \S+ +busy, guarded after its cell", opened.stdout), opened.stdout
    assert opened.stdout.endswith(f"{ENGINES - 1} ranks  ·  0 workers\n")
    ranks.kernel.run("rc.abort(block=False)")  # of what waits there, the guard included
    ranks.wait_for_table(f"{ENGINES} ranks  ·  0 workers")


def test_a_reload_on_the_engines_is_survived_and_an_unload_is_respected(ranks: Ranks) -> None:
    ranks.kernel.ok("sys.modules['jupyter_loaderguard.cluster.engines'].SILENT_SECONDS = 6")  # idle ones tell each 5 s
    ranks.kernel.ok("%px %reload_ext jupyter_loaderguard")
    ranks.kernel.ok("rc[1].execute('%unload_ext jupyter_loaderguard', block=True)")
    ranks.wait_for_table(r"(?m)^ +1  \S+ +not guarded: LoaderGuardError: it was unloaded there", 40)
    assert f"{ENGINES - 1} ranks  ·" in ranks.wait_for_table(rf"{ENGINES - 1} ranks  ·  0 workers$", 40)
    ranks.kernel.ok("sys.modules['jupyter_loaderguard.cluster.engines'].SILENT_SECONDS = 12")
    ranks.kernel.ok("lg.cluster().close()\nprint(lg.cluster(rc))")
    ranks.wait_for_table(f"{ENGINES} ranks  ·  0 workers")


def test_two_clients_hear_of_the_same_engines_and_one_that_closes_leaves_the_other_alone(ranks: Ranks) -> None:
    ranks.kernel.ok(
        "def hear(one):\n"
        "    since = time.time()\n"
        "    while min(rank.heard for rank in one.state().ranks if rank.status != 'lost') < since:\n"
        "        time.sleep(0.1)\n"
        "first, other = lg.cluster(rc), cluster.connect_client_sync()\n"
        f"other.wait_for_engines({ENGINES}, timeout=60)\n"
        "second = lg.cluster(other)\n"
        "for one in (first, second): hear(one)\n"
        "first.close()\n"
        "hear(second)"
    )
    assert ranks.kernel.ok("len(second.stacks())").value == ENGINES
    widget = "[one.widget for one in get_ipython().configurables if type(one).__name__ == 'LoaderGuard']"
    assert ranks.kernel.ok(f"rc[0].apply_sync(eval, {widget!r})").value == [False]
    ranks.kernel.ok("second.close()")
    wait_until(lambda: ranks.kernel.ok(f"rc[0].apply_sync(eval, {widget!r})").value == [True], 20, "its own setting")
    ranks.kernel.ok("other.close()\nlg.cluster(rc)")


def test_an_engine_that_vanishes_while_it_is_attached_freezes_nothing(ranks: Ranks) -> None:
    ranks.kernel.ok(
        "from jupyter_loaderguard.cluster import wire\n"
        "there, wire.engines = wire.engines, lambda client: {99: 'gone', **there(client)}\n"
        "lg.cluster()._engines.look()\n"
        "wire.engines = there\n"
        "lg.cluster()._engines.look()"
    )
    assert f"{ENGINES} ranks" in ranks.table()


def test_a_killed_engine_stays_visible_as_lost_and_leaves_no_workers(ranks: Ranks) -> None:
    workers = _start_keepers(ranks, 1)
    assert len(workers) == ENGINES
    mine = ranks.workers(7)
    ranks.engines[7].kill()
    wait_gone(mine)
    ranks.wait_for_table(r"7  \S+ +lost")
    ranks.wait_for_table(r"7 ranks  ·  7 workers  ·  1 lost")


def test_a_new_engine_in_its_place_is_guarded_by_itself(ranks: Ranks) -> None:
    ranks.kernel.ok("cluster.start_engines_sync(n=1)\nrc.wait_for_engines(8, timeout=60)", timeout=80)
    ranks.wait_for_table(r"8 ranks  ·  7 workers  ·  1 lost")
    ranks.look_up_engines()
    assert ranks.kernel.ok('rc[rc.ids[-1]].apply_sync(eval, "get_ipython().extension_manager.loaded")').value


def test_when_the_controller_is_killed_the_table_says_so_and_the_end_of_engines_ends_workers(ranks: Ranks) -> None:
    workers = ranks.workers()
    assert len(workers) == ENGINES - 1
    controller = psutil.Process(ranks.kernel.ok("cluster.controller.pid").value)
    for one in [controller, *controller.children(recursive=True)]:  # its schedulers are processes of their own
        one.kill()
    ranks.wait_for_table("the controller is gone", 40)
    for one in list(ranks.engines.values())[:3]:  # an engine that is asked to end, as a batch system does
        mine = ranks.workers(*[number for number, engine in ranks.engines.items() if engine is one])
        one.terminate()
        wait_gone([one, *mine], 20)
    ranks.kernel.run("rc.close(); cluster.stop_cluster_sync()", timeout=40)
    wait_gone(workers)
    wait_gone(list(ranks.engines.values()), 20)
