"""The magics, as a user types them."""

from __future__ import annotations

import re

import pytest

from .driver import Kernel, is_gone, wait_until

CLOSING_LINE = re.compile(
    r"loaderguard: 1 loader, 2 workers · 125 batches in [\d.]+ m?s \([\d,.]+/s\) · \d+ % of it waiting for data"
    r" · peak [\d.]+ [kMG]B · 0 workers left\n"
)


def test_guarded_loader_prints_the_closing_line(any_kernel: Kernel) -> None:
    reply = any_kernel.ok("%%guarded_loader\nfor batch in DataLoader(Slow(125), num_workers=2): pass")
    assert CLOSING_LINE.fullmatch(reply.stdout)
    assert reply.stderr == ""


def test_guarded_loader_ends_what_the_cell_started_and_nothing_else(kernel: Kernel) -> None:
    kernel.ok("earlier = iter(DataLoader(Quick(), num_workers=1)); next(earlier)")
    before = kernel.workers()
    kernel.ok(
        "%%guarded_loader\n"
        "named = iter(DataLoader(Quick(), num_workers=1)); next(named)\n"
        "persistent = DataLoader(Quick(8), num_workers=1, persistent_workers=True)\n"
        "for batch in persistent: pass\n"
        "next(earlier)"
    )
    assert kernel.workers() == before
    assert kernel.ok("len(list(persistent)), int(next(earlier)[0, 0])").value == (8, 2)
    kernel.ok("del persistent")
    reply = kernel.run("next(named)")
    assert reply.ename == "LoaderGuardError"
    assert "stopped by loaderguard (its guarded cell ended)" in reply.evalue


def test_guarded_loader_after_an_error_leaves_nothing(any_kernel: Kernel) -> None:
    reply = any_kernel.run("%%guarded_loader\nit = iter(DataLoader(Stuck(), num_workers=2))\n\n1 / 0")
    assert reply.ename == "ZeroDivisionError"
    assert "line 4" in reply.traceback
    assert "0 workers left" in reply.stdout
    assert any_kernel.workers() == []


def test_keep_leaves_the_workers_at_a_normal_end_only(kernel: Kernel) -> None:
    reply = kernel.ok("%%guarded_loader --keep\nit = iter(DataLoader(Quick(), num_workers=2)); next(it)")
    assert "2 workers left" in reply.stdout
    assert len(kernel.workers()) == 2
    kernel.ok("lg.clean()")
    kernel.run("%%guarded_loader --keep\nit = iter(DataLoader(Quick(), num_workers=2)); 1 / 0")
    assert kernel.workers() == []


def test_quiet_says_nothing_when_all_went_well(kernel: Kernel) -> None:
    code = "--quiet --no-widget\nfor batch in DataLoader(Quick(8), num_workers=2): pass"
    assert kernel.ok(f"%%guarded_loader {code}").stdout == ""
    assert "0 workers left" in kernel.run(f"%%guarded_loader {code}\n1 / 0").stdout


def test_epochs_of_a_loader_count_it_once(kernel: Kernel) -> None:
    code = "for epoch in range(3):\n    for batch in loader: pass"
    kernel.ok(f"loader = DataLoader(Quick(8), num_workers=2)\n%guarded_loader --name report\n{code}")
    assert kernel.ok("report.loaders, report.workers, report.batches").value == (1, 2, 24)


def test_name_binds_the_report(kernel: Kernel) -> None:
    kernel.ok("%%guarded_loader --name report\nfor batch in DataLoader(Slow(40), batch_size=4, num_workers=2): pass")
    facts = kernel.ok(
        "(report.batches, report.left, report.loaders, report.workers, 0 < report.wait_fraction <= 1, report.seconds > 0,"
        " report.peak_bytes > 1e6, report.stalls, report.retries, report.skipped)"
    ).value
    assert facts == (10, 0, 1, 2, True, True, True, (), 0, ())
    drawn = kernel.ok("report").result
    assert "10 batches" in drawn["text/plain"]
    assert "10 batches" in drawn["text/html"]


def test_the_cell_runs_as_if_the_magic_were_not_there(any_kernel: Kernel) -> None:
    run = any_kernel.ok
    assert run("%%guarded_loader --quiet\nx = 20\nx + 1").value == 21
    assert run("x").value == 20
    assert run("%%guarded_loader --quiet\nimport asyncio\nawait asyncio.sleep(0, 'awaited')").value == "awaited"
    assert run("%%guarded_loader --quiet\nfrom __future__ import annotations\nawait asyncio.sleep(0, 1)").value == 1
    assert "Wall time" in run("%%guarded_loader --quiet\n%%time\nx = 22").stdout
    assert "Wall time" in run("%%time\n%%guarded_loader --quiet\nx = 23").stdout
    assert run("%%guarded_loader --quiet\n%%capture said\nprint('hidden')").stdout == ""
    assert run("said.stdout").value == "hidden\n"
    assert run("x").value == 23
    assert run("%%guarded_loader --quiet\nfiles = !echo one\nfiles[0]").value == "one"
    assert any_kernel.run("%%guarded_loader\nx = (\n").ename == "SyntaxError"
    failed = any_kernel.run("%%guarded_loader --quiet\n\n\ndef f():\n    1 / 0\nf()")
    assert "line 6" in failed.traceback
    assert "line 5" in failed.traceback


def test_a_loader_in_a_captured_cell_is_guarded_too(kernel: Kernel) -> None:
    kernel.ok(
        "%%guarded_loader --name report --quiet\n%%capture\nfor batch in DataLoader(Quick(8), num_workers=1): pass\n"
        "kept = iter(DataLoader(Quick(8), num_workers=1))"
    )
    assert kernel.ok("(report.batches, report.left)").value == (8, 0)
    assert kernel.workers() == []


def test_guarded_loader_called_by_code(kernel: Kernel) -> None:
    reply = kernel.ok("get_ipython().run_cell_magic('guarded_loader', '--name report', 'y = 5\\ny')")
    assert "0 workers left" in reply.stdout
    assert kernel.ok("y, report.left").value == (5, 0)
    assert kernel.run("get_ipython().run_cell_magic('guarded_loader', '', '1 / 0')").ename == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--grace -1", "--grace must be a number of seconds from 0 to 3600, not -1.0"),
        ("--grace soon", "--grace must be a number of seconds, not 'soon'"),
        ("--grace nan", "--grace must be a number of seconds from 0 to 3600, not nan"),
        ("--grace", "expected one argument"),
        ("--name 1x", "--name '1x' is not a name"),
        ("--name class", "--name 'class' is not a name"),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
        ("--stall 0", "--stall must be a number of seconds from 0.1 to 3600, not 0.0"),
        ("--stall soon", "--stall must be a number of seconds, not 'soon'"),
        ("--on-stall panic", "argument --on-stall: invalid choice: 'panic'"),
        ("--retries 3", "unrecognized arguments: --retries 3"),
        ("word", "unrecognized arguments: word"),
        ("'", "No closing quotation"),
    ],
)
def test_bad_options_give_one_line_and_the_cell_does_not_run(kernel: Kernel, options: str, complaint: str) -> None:
    reply = kernel.run(f"%%guarded_loader {options}\nran = True")
    assert reply.status == "error"
    assert reply.stderr.startswith("UsageError: %%guarded_loader: ")
    assert complaint in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert kernel.ok("'ran' in globals()").value is False
    assert kernel.ok("1").value == 1


def test_an_empty_cell_gives_one_line(kernel: Kernel) -> None:
    reply = kernel.run("%%guarded_loader --quiet\n  \n")
    assert (
        reply.stderr == "UsageError: %%guarded_loader: the cell is empty; the code to guard goes on the lines below\n"
    )


def test_status_is_a_table_as_text_and_as_html_in_one_display(any_kernel: Kernel) -> None:
    any_kernel.ok("train_loader = DataLoader(Quick(), batch_size=8, num_workers=2)\nit = iter(train_loader); next(it)")
    pids = [process.pid for process in any_kernel.workers()]
    for call in ("%loaderguard", "%loaderguard status"):
        (display,) = any_kernel.ok(call).displays
        lines = display["text/plain"].splitlines()
        assert re.match(
            r"train_loader: Quick of 1,000 samples  ·  fork  ·  cell \d+  ·  1 of 125 batches  ·  waited .*  ·  busy",
            lines[0],
        )
        assert lines[1].split() == ["worker", "pid", "state", "sample", "for", "memory", "age"]
        assert [int(line.split()[1]) for line in lines[2:4]] == pids
        assert lines[4].startswith("1 loader, 2 workers  ·  ")
        assert "<table" in display["text/html"]
        assert all(str(pid) in display["text/html"] for pid in pids)


def test_status_of_nothing(kernel: Kernel) -> None:
    (display,) = kernel.ok("%loaderguard").displays
    assert display["text/plain"].startswith("0 loaders, 0 workers  ·  ")


def test_single_process_loaders_are_known_without_workers(kernel: Kernel) -> None:
    kernel.ok("plain = DataLoader(Quick(8)); it = iter(plain); next(it)")
    assert kernel.ok("[(l.name, l.workers, l.batches, l.start_method) for l in lg.snapshot().loaders]").value == [
        ("plain", (), 1, None)
    ]
    assert "plain: Quick of 8 samples  ·  no workers" in kernel.ok("%loaderguard").displays[0]["text/plain"]
    kernel.ok("del it")
    assert kernel.ok("lg.snapshot().loaders").value == ()


def test_clean_stops_all_or_the_given_ones_and_says_how(any_kernel: Kernel) -> None:
    any_kernel.ok(
        "first = DataLoader(Stuck(), num_workers=2); second = DataLoader(Stuck(), num_workers=1)\n"
        "one, two = iter(first), iter(second)"
    )
    processes = any_kernel.wait_for_workers(3)
    phases = "[worker.phase for worker in lg.snapshot().workers]"
    wait_until(lambda: any_kernel.ok(phases).value == 3 * ["loading"], what="the first samples")
    reply = any_kernel.ok("%loaderguard clean first")
    assert re.fullmatch(r"loaderguard: stopped 2 workers of 1 loader in [\d.]+ m?s \(2 by SIGTERM\)\n", reply.stdout)
    assert len(any_kernel.workers()) == 1
    assert re.match(r"loaderguard: stopped 1 worker of 1 loader", any_kernel.ok("%loaderguard clean").stdout)
    assert all(is_gone(process) for process in processes)
    assert any_kernel.ok("%loaderguard clean").stdout == "loaderguard: no workers to stop\n"


def test_clean_takes_expressions_numbers_and_pids(kernel: Kernel) -> None:
    kernel.ok("loaders = [DataLoader(Quick(), num_workers=2) for _ in range(3)]; its = [iter(l) for l in loaders]")
    first, second, third = kernel.ok("[l.loader_id for l in lg.snapshot().loaders]").value  # type: ignore[misc]
    kernel.ok("%loaderguard clean loaders[0]")
    kernel.ok(f"%loaderguard clean #{second}")
    assert kernel.ok("[l.loader_id for l in lg.snapshot().loaders]").value == [third]
    one, other = kernel.workers()
    assert "stopped 1 worker in" in kernel.ok(f"%loaderguard clean {one.pid}").stdout
    assert is_gone(one)
    assert not is_gone(other)
    reply = kernel.run("for batch in its[2]: pass")
    assert f"(pid {one.pid}) was stopped by loaderguard (clean)" in reply.evalue
    kernel.ok("lg.clean()")


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (
            "clean nonsense",
            "%loaderguard clean: 'nonsense' is not a loader here (NameError: name 'nonsense' is not defined)",
        ),
        ("clean 1", "%loaderguard clean: pid 1 is not a live worker of a loader in this kernel, and is left alone"),
        ("clean os", "%loaderguard clean: this module is not a loader with live workers; none is live"),
        ("clean 1/0", "%loaderguard clean: '1/0' is not a loader here (ZeroDivisionError: division by zero)"),
        ("clean -5", "%loaderguard clean: '-5' is a number, not a loader; a worker is named by its pid itself"),
        (
            "wash",
            "%loaderguard: there is no 'wash'; there is status, widget, clean, stacks, doctor, tune, report, sweep, cluster, on, off",
        ),
        ("stacks now", "%loaderguard stacks: 'now' is not the pid of a worker"),
        (
            "stacks 1",
            "%loaderguard stacks: pid 1 is not a live worker of a loader in this kernel, and is left alone",
        ),
        ("status now", "%loaderguard status takes no argument, but got 'now'"),
        ("clean '", "%loaderguard: No closing quotation"),
    ],
)
def test_bad_calls_give_one_line(kernel: Kernel, call: str, complaint: str) -> None:
    reply = kernel.run(f"%loaderguard {call}")
    assert reply.stderr == f"UsageError: {complaint}\n"


def test_clean_of_a_worker_that_died_meanwhile(kernel: Kernel) -> None:
    kernel.ok("it = iter(DataLoader(Stuck(), num_workers=2))")
    victim = kernel.workers()[0]
    kernel.ok(f"os.kill({victim.pid}, signal.SIGKILL); time.sleep(0.3)")
    reply = kernel.run(f"%loaderguard clean {victim.pid}")
    assert reply.stderr.startswith(f"UsageError: %loaderguard clean: worker {victim.pid} of DataLoader #")
    assert reply.stderr.endswith("has already ended\n")
    assert "1 was dead already" in kernel.ok("%loaderguard clean").stdout


def test_off_and_on(kernel: Kernel) -> None:
    kernel.ok("it = iter(DataLoader(Quick(), num_workers=1)); next(it)")
    kernel.ok("%loaderguard off")
    assert "loaderguard is off" in kernel.ok("%loaderguard").displays[0]["text/plain"]
    assert "loaderguard is off" in kernel.run("%%guarded_loader\n1").stderr
    assert "loaderguard is off" in kernel.run("%loaderguard clean").stderr
    kernel.ok("next(it); other = iter(DataLoader(Quick(), num_workers=1)); next(other)")
    kernel.ok("%loaderguard on")
    assert len(kernel.workers()) == 2
    assert kernel.ok("(int(next(it)[0, 0]), int(next(other)[0, 0]))").value == (2, 1)


def test_help_is_complete(kernel: Kernel) -> None:
    for name, words in {
        "%%guarded_loader?": ["--grace", "--keep", "--no-widget", "--quiet", "--name", "Examples"],
        "%loaderguard?": ["status", "clean", "on", "off", "Examples"],
    }.items():
        kernel.client.execute(name)
        reply = kernel.client.get_shell_msg(timeout=20)
        text = reply["content"]["payload"][0]["data"]["text/plain"]
        assert all(word in text for word in words), text


def test_rude_and_hostile_datasets_are_shown_as_text(kernel: Kernel) -> None:
    kernel.ok(
        "name = '<script>alert(1)</script>&\"' + 'x' * 10_000\n"
        "Hostile = type(name, (Quick,), {})\n"
        "loader = DataLoader(Hostile(), num_workers=1); it = iter(loader)\n"
        "rude = iter(DataLoader(Rude(), sampler=range(4), num_workers=1)); next(rude)"
    )
    (display,) = kernel.ok("%loaderguard").displays
    assert "<script" not in display["text/html"]
    assert "&lt;script&gt;" in display["text/html"]
    assert len(display["text/plain"]) < 2000
    assert "Rude  ·  fork" in display["text/plain"]


def test_configuration(kernel: Kernel) -> None:
    assert "LoaderGuard.grace_seconds" in kernel.ok("%config LoaderGuard").stdout
    for value in ("-1", "'soon'", "float('nan')", "10**9"):
        reply = kernel.run(f"%config LoaderGuard.grace_seconds = {value}")
        text = reply.traceback + reply.stderr
        assert "LoaderGuard.grace_seconds must be a number of seconds from 0 to 3600, not" in text
    kernel.ok("%config LoaderGuard.grace_seconds = 0")
    kernel.ok("it = iter(DataLoader(Stuck(), num_workers=2))")
    kernel.wait_for_workers(2)
    assert kernel.ok("report = lg.clean(); report.seconds < 0.45, set(report.how.values())").value == (
        True,
        {"SIGTERM"},
    )
    kernel.ok("%config LoaderGuard.grace_seconds = 0.5")
