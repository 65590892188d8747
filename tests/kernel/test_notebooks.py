"""Every notebook that a user opens runs in a real kernel and shows what it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("run", NOTEBOOKS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_test_for_every_notebook() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {
        "broken_pipe_and_spawn",
        "cluster",
        "num_workers",
        "quickstart",
        "recovery",
        "stuck_batch",
    }


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_its_outputs_and_without_places_of_a_machine(path: Path) -> None:
    text = path.read_text()
    assert '"output_type": "' in text
    assert not re.search(r"/(root|home|tmp|work|Users)/", text)


def _said(run, name: str) -> dict[str, str]:
    """Run a notebook, and return what each of its cells gave."""
    notebook = run.execute(NOTEBOOKS / f"{name}.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source: "".join(run._text(output) for output in cell.outputs) for cell in cells}


def test_stuck_batch(run) -> None:
    said = _said(run, "stuck_batch")
    closing = [text for source, text in said.items() if source.startswith("%%guarded_loader")]
    assert all("LoaderStalled: batch" in text and "0 workers left" in text for text in closing)
    looping, alone, locked, unsendable = closing
    assert re.search(r"worker \d \(pid \d+\) has been on sample 9 for .* in get_stuck\(\) at Cell In\[3\]", looping)
    assert "the kernel itself" in alone
    assert "waiting for a lock (dataset.lock" in locked
    assert "could not be sent" in unsendable
    assert "batch[1]['close']" in unsendable
    assert "in get_stuck" in said["%loaderguard stacks"]


def test_d1_d2_d3_d5_broken_pipe_and_spawn(run) -> None:
    said = _said(run, "broken_pipe_and_spawn")
    assert list(said.values()).count("torch.Size([4, 3, 8, 8])") == 3
    refused = next(text for source, text in said.items() if source.startswith("class Logged"))
    assert "dataset.log is a _io.TextIOWrapper, which cannot travel" in refused
    assert "Got pickle error" not in refused
    fragile = next(text for source, text in said.items() if source.startswith("class Fragile"))
    assert "RuntimeError: DataLoader worker" in fragile
    assert said["import jupyter_loaderguard as lg\n\nlg.snapshot().workers"] == "()"


def test_recovery(run) -> None:
    said = _said(run, "recovery")
    assert said["epoch(loader)"].startswith("ValueError")
    closing = next(text for source, text in said.items() if source.startswith("%%guarded_loader --retry 5"))
    assert "sample 77 of loader was left out: it ended its worker (was ended by SIGKILL)" in closing
    assert "(197, True, [41, 77, 120])" in said.values()
    assert "[(41, 'raised'" in "".join(said.values())
    assert said["killed == undisturbed, report.retries > 0, report.left"] == "(True, True, 0)"


def test_e8_num_workers(run) -> None:
    said = _said(run, "num_workers")
    report = said["%loaderguard report"]
    assert "100 batches of 98 kB in 2 epochs" in report
    assert "slowest samples: " in report
    assert "worker 0" in report
    tuned = said["%loaderguard tune loader --seconds 6"]
    assert "loader = DataLoader(loader.dataset, batch_size=8, shuffle=True, num_workers=" in tuned
    with_step = next(text for source, text in said.items() if "step=step" in source)
    assert "steps/s" in with_step
    locked = said["%loaderguard tune locked --seconds 5"]
    assert "not help, they wait for dataset.lock" in locked
    assert said["lg.snapshot().workers  # nothing is left of it"] == "()"


def test_quickstart(run) -> None:
    said = _said(run, "quickstart")
    sources = list(said)
    assert said["%load_ext jupyter_loaderguard"] == ""
    interrupted = next(source for source in sources if "Frozen()" in source)
    assert said[interrupted].startswith("KeyboardInterrupt")
    assert said["%loaderguard"].startswith("0 loaders, 0 workers")
    assert said[next(source for source in sources if source.endswith("lg.snapshot().workers"))] == "()"
    assert "worker 1 (pid" in said["train(loader)"]
    assert "was ended by SIGKILL" in said["train(loader)"]
    assert "1 loader, 2 workers" in said["train(loader)\nlg.snapshot()"]
    shown = said["%%guarded_loader --stall 0.5\ntrain(endless)"]
    assert "has been on sample 77 for" in shown
    assert re.search(r"CPU-bound \(\d+ % of a CPU\), in __getitem__\(\) at Cell In\[\d+\]:[34]", shown)
    raised = said["%%guarded_loader --stall 0.5 --on-stall raise\ntrain(endless)"]
    assert "LoaderStalled: batch 2 of 63 of endless did not come within 0.5 s: worker 0" in raised
    assert "has been on sample 77 for" in raised.partition("LoaderStalled")[0], "the settled widget's log comes first"
    guarded = next(source for source in sources if source.startswith("%%guarded_loader --name"))
    assert "63 batches" in said[guarded]
    assert said[guarded].endswith("0 workers left\n")
    assert "loader: a worker died" in said["train(loader)"], "the card"
    spawned = next(source for source in sources if source.startswith("spawned ="))
    assert said[spawned] == "torch.Size([32, 3, 32, 32])"
    assert said["%loaderguard doctor loader"].startswith("loaderguard: nothing wrong was found")
    assert "stopped 2 workers of 1 loader" in said["%loaderguard clean"]


def test_cluster(run) -> None:
    said = _said(run, "cluster")
    assert said["%loaderguard cluster client"].endswith("2 ranks  ·  0 workers")
    trained = said["%%px\n%%guarded_loader\ntrain(Images())"]
    assert trained.count("63 batches") == trained.count("0 workers left") == 2, trained
    hung = said["%%px\n%%guarded_loader --stall 1\ntrain(Hangs())"]
    assert re.search(r"of DataLoader #\d+ on rank 1 \(\S+\) \(Hangs\) has not come", hung), hung
    assert re.search(r"worker \d \(pid \d+\) has been on sample 77 for", hung), hung
    assert "rank 0 waits in backward() for rank 1" in hung
    assert "0 workers left" in hung
    assert "2 ranks  ·  0 workers" in said[next(source for source in said if "print(lg.cluster())" in source)]
