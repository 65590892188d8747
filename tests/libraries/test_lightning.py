"""Lightning: `Trainer.fit`."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
import logging, warnings
import lightning
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        features, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(features), targets)
        step(loss)
        return loss

    def validation_step(self, batch, _):
        features, targets = batch
        self.log("loss", torch.nn.functional.mse_loss(self.layer(features), targets))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def make():
    seed()
    return DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=2)

def train(loader):
    lightning.seed_everything(0, workers=True)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_model_summary=False
    )
    trainer.fit(Model(), loader, DataLoader(Samples(), batch_size=BATCH, num_workers=2))
"""


class TestTrainer(Protocol):
    cell = CELL
    interrupted = "SystemExit"
