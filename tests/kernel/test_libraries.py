"""Subclasses and wrappers that users meet: accelerate, Lightning, torchdata."""

from __future__ import annotations

import time

import pytest

from .driver import Kernel, is_gone

ACCELERATE = """
from accelerate import Accelerator
loader = Accelerator(cpu=True).prepare(DataLoader({dataset}, batch_size=4, num_workers=2))
def train():
    for batch in loader: pass
"""
TORCHDATA = """
from torchdata.stateful_dataloader import StatefulDataLoader
loader = StatefulDataLoader({dataset}, batch_size=4, num_workers=2)
def train():
    for batch in loader: pass
"""
LIGHTNING = """
import logging, warnings
import lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        return self.layer(batch.float()).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)
loader = DataLoader({dataset}, batch_size=4, num_workers=2)
def train():
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), loader)
"""
LIBRARIES = pytest.mark.parametrize(
    "library", [ACCELERATE, TORCHDATA, LIGHTNING], ids=["accelerate", "torchdata", "lightning"]
)


@LIBRARIES
def test_their_loaders_are_seen_and_counted(kernel: Kernel, library: str) -> None:
    kernel.ok(library.format(dataset="Quick(40)"), 120)
    kernel.ok("%%guarded_loader --name report\ntrain()", 120)
    assert kernel.ok("report.batches >= 10, report.workers >= 2, report.left").value == (True, True, 0)


@LIBRARIES
def test_their_workers_are_gone_after_an_interrupt(kernel: Kernel, library: str) -> None:
    kernel.ok(library.format(dataset="Slow(4000)"), 120)
    cell = kernel.begin("train()")
    processes = kernel.wait_for_children(2)
    time.sleep(1.0)
    kernel.interrupt(group=False)
    reply = kernel.finish(cell, 30, when_lost=lambda: kernel.interrupt(group=False))
    assert reply.status == "error"
    assert all(is_gone(process) for process in processes)


def test_a_stateful_loader_keeps_its_state_over_an_interrupt(kernel: Kernel) -> None:
    kernel.ok(TORCHDATA.format(dataset="Slow(400)"))
    kernel.ok("seen = []\ndef train():\n    for batch in loader:\n        seen.extend(batch[:, 0].tolist())")
    cell = kernel.begin("train()")
    kernel.wait_for_children(2)
    time.sleep(1.0)
    kernel.interrupt()
    assert kernel.finish(cell, 30, when_lost=kernel.interrupt).ename == "KeyboardInterrupt"
    kernel.ok("state = loader.state_dict(); count = len(seen)")
    kernel.ok("loader = StatefulDataLoader(Quick(400), batch_size=4, num_workers=2); loader.load_state_dict(state)")
    kernel.ok("rest = [int(v) for batch in loader for v in batch[:, 0]]")
    assert kernel.ok("rest[-1] == 399 and rest[0] in (count, count + 4)").value is True


def test_a_stateful_loader_is_stopped_quickly(kernel: Kernel) -> None:
    kernel.ok(TORCHDATA.format(dataset="Stuck()"))
    kernel.ok("def train():\n    it = iter(loader)\n    next(it)")
    cell = kernel.begin("train()")
    processes = kernel.wait_for_children(2)
    time.sleep(0.5)
    kernel.interrupt()
    assert kernel.finish(cell, 30).ename == "KeyboardInterrupt"
    assert all(is_gone(process) for process in processes)
