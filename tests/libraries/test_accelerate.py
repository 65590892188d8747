"""accelerate: a loop over what `prepare` returns."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)

def make():
    seed()
    return accelerator.prepare(DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=2))

def train(loader):
    seed()
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for epoch in range(2):
        for features, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            step(loss)
"""


class TestPrepared(Protocol):
    cell = CELL
