"""The live widget, as a person sees and uses it."""

from __future__ import annotations

import re
import subprocess
import sys

import nbformat
from playwright.sync_api import Locator, Page, expect

from .driver import LOOP, Server, wait_until


def batches(page: Page) -> int:
    """Return the count of batches that the board shows."""
    text = page.locator(".lgw .lgb").first.inner_text()
    found = re.search(r"([\d,]+)(?: of [\d,]+)? batches", text)
    return int(found[1].replace(",", "")) if found else 0


def is_running(page: Page) -> bool:
    return page.locator(".jp-InputPrompt", has_text="[*]").count() > 0


def finish(server: Server, page: Page) -> None:
    """End what still runs in a page, and the page."""
    page.locator(".lgw").first.get_by_role("button", name="Stop all").click()
    wait_until(lambda: not is_running(page), page=page)
    page.close()


def test_the_widget_appears_and_moves_while_the_cell_runs(server: Server) -> None:
    page = server.open("moves", LOOP)
    wait_until(lambda: batches(page) > 0, 90, page)
    first = batches(page)
    wait_until(lambda: batches(page) > first, 30, page)
    assert is_running(page)
    board = page.locator(".lgw .lgb").first
    expect(board.locator("table thead th").first).to_have_text("worker")
    expect(board.locator("tbody tr")).to_have_count(2)
    expect(board.locator("progress")).to_have_count(1)
    assert re.search(r"data-bound \d+ %", board.inner_text())
    assert {process.pid for process in server.workers()} == {
        int(cell.inner_text()) for cell in board.locator("tbody tr td:nth-child(2)").all()
    }
    server.screenshot(page, "live")
    finish(server, page)


def test_stop_all_during_a_running_cell_ends_it_and_leaves_no_worker(server: Server) -> None:
    page = server.open("stop", LOOP.replace("Slow()", "Stuck()"))
    wait_until(lambda: len(server.workers()) == 2, 90, page)
    wait_until(lambda: batches(page) > 0, 30, page)
    assert is_running(page)
    page.locator(".lgw").first.get_by_role("button", name="Stop all").click()
    wait_until(lambda: not server.workers(), 15, page)
    wait_until(lambda: not is_running(page), 15, page)
    expect(page.locator(".jp-OutputArea-output").filter(has_text="LoaderGuardError").first).to_be_visible()
    expect(page.locator(".jp-OutputArea-output").filter(has_text="0 workers left").first).to_be_visible()
    server.screenshot(page, "stopped")
    page.close()


def test_a_stuck_worker_turns_stalled_and_says_where_it_is(server: Server) -> None:
    page = server.open(
        "stalls", LOOP.replace("Slow()", "Stuck()").replace("%%guarded_loader", "%%guarded_loader --stall 1")
    )
    cell = page.locator(".lgw .lgb td.stalled").first
    cell.wait_for(timeout=90_000)
    expect(page.locator(".jp-OutputArea code", has_text="while index == 40: pass").first).to_be_visible()
    page.locator(".lgw").first.get_by_role("button", name="Stacks").click()
    pane = page.locator(".lgw pre").first
    expect(pane).to_contain_text("on sample 40")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.lgw pre'))")
    before = page.evaluate("getSelection().toString()")
    page.wait_for_timeout(2500)
    assert page.evaluate("getSelection().toString()") == before != "", "a refresh has taken the selection away"
    server.screenshot(page, "stalled")
    page.locator(".lgw").first.get_by_role("button", name="Diagnosis").click()
    expect(pane).to_contain_text("Python 3")
    finish(server, page)


def test_a_saved_notebook_keeps_what_happened(lab: Server) -> None:
    page = lab.open("saved", LOOP.replace("    pass", "    if batch[0][0] >= 8: break"))
    wait_until(lambda: page.locator(".jp-OutputArea-output").filter(has_text="0 workers left").count() > 0, 90, page)
    assert page.locator(".lgw").count() == 0, "the live widget has been replaced"
    expect(kept_in(page)).to_contain_text("CPUs usable")
    page.keyboard.press("Control+s")
    saved = lab.folder / "saved.ipynb"
    wait_until(lambda: "3 of 500 batches" in saved.read_text(), 30, page)
    page.close()
    page = lab.show("saved")
    expect(kept_in(page)).to_contain_text("loader")
    assert page.locator(".jp-OutputArea-output").filter(has_text="0 workers left").count() == 1
    lab.screenshot(page, "reloaded")
    page.close()
    outputs = nbformat.read(saved, as_version=4).cells[-1].outputs
    assert set(outputs[0].data) == {"text/html", "text/plain"}
    assert "3 of 500 batches" in outputs[0].data["text/plain"]
    subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "html", str(saved), "--output", "saved.html"],
        check=True,
        capture_output=True,
    )
    page = lab.browser.new_page()
    page.goto(f"file://{lab.folder}/saved.html")
    expect(page.get_by_text("3 of 500 batches").first).to_be_visible()
    expect(page.get_by_text("0 workers left").first).to_be_visible()
    lab.screenshot(page, "exported")
    page.close()


def kept_in(page: Page) -> Locator:
    """Return the snapshot that took the widget's place."""
    return page.locator(".jp-OutputArea-output").filter(has_text="3 of 500 batches").first


def test_the_widget_in_the_dark_and_in_a_narrow_window_with_many_workers(lab: Server) -> None:
    lab.use_theme("JupyterLab Dark")
    page = lab.open("dark", LOOP.replace("num_workers=2", "num_workers=12"), width=900)
    wait_until(lambda: batches(page) > 0, 90, page)
    board = page.locator(".lgw .lgb").first
    expect(board.locator("tbody tr")).to_have_count(1)
    expect(board.locator("tbody tr")).to_contain_text("12 workers")
    page.locator(".lgw").first.get_by_role("button", name="All workers").click()
    expect(board.locator("tbody tr")).to_have_count(12)
    lab.screenshot(page, "dark")
    finish(lab, page)
    lab.use_theme("JupyterLab Light")


def test_a_narrow_window_shows_every_column(lab: Server) -> None:
    page = lab.open("narrow", LOOP, width=600)
    page.get_by_role("tab", name="File Browser").click()  # as a person with a narrow window does
    wait_until(lambda: batches(page) > 30, 90, page)
    board = page.locator(".lgw .lgb").first
    assert board.evaluate("element => element.scrollWidth <= element.clientWidth"), "nothing is cut off"
    expect(board.locator("th").last).to_be_in_viewport()
    lab.screenshot(page, "narrow")
    finish(lab, page)


def test_hostile_names_stay_text(lab: Server) -> None:
    hostile = (
        "name = '<script>window.hacked = 1</script><img src=x onerror=\"window.hacked = 1\">&amp;🙂' + 'x' * 10_000\n"
        "Hostile = type(name, (Slow,), {})\n"
    )
    page = lab.open("hostile", hostile + "None", LOOP.replace("Slow()", "Hostile()"))
    wait_until(lambda: batches(page) > 0, 90, page)
    board = page.locator(".lgw .lgb").first
    expect(board).to_contain_text("<script>window.hacked")
    assert page.evaluate("window.hacked") is None
    assert board.locator("script, img").count() == 0
    lab.screenshot(page, "hostile")
    finish(lab, page)
