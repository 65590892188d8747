"""pytorch-ignite: an engine of its own that runs over a loader."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
from ignite.engine import Events, create_supervised_trainer
from torch.utils.data import DataLoader

def make():
    seed()
    return DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=2)

def train(loader):
    global trainer  # as in a notebook, where it is made in a cell of its own
    seed()
    model = torch.nn.Linear(4, 1)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.functional.mse_loss)

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine):
        step(engine.state.output)

    trainer.run(loader, max_epochs=2)
"""


class TestEngine(Protocol):
    cell = CELL
