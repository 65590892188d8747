"""MONAI: its DataLoader, which seeds its transforms, and the one that buffers in a thread, with processes and threads as workers."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader
from monai.transforms import Compose, EnsureTyped, Lambdad, RandGaussianNoised, RandScaleIntensityd

def rows():
    return [{{"image": torch.full((1, 4), index / SAMPLES), "label": float(index % 3)}} for index in range(SAMPLES)]

def load(image):
    return pass_through(image)

noise = [RandGaussianNoised("image", prob=1.0), RandScaleIntensityd("image", factors=0.5, prob=0.5)]
still = [Lambdad("image", load), EnsureTyped(["image"])]

def make():
    seed()
    return {loader}

def train(loader):
    seed()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            targets = batch["label"].float()[:, None]
            loss = torch.nn.functional.mse_loss(model(batch["image"].as_tensor()[:, 0]), targets)
            loss.backward()
            optimizer.step()
            step(loss)
"""
TAKEN = "({key: one[key].as_tensor() if key == 'image' else one[key] for key in ('image', 'label')} for one in made)"


class TestLoader(Protocol):
    cell = CELL.format(
        loader="DataLoader(Dataset(rows(), Compose(still + noise)), batch_size=BATCH, shuffle=True, num_workers=2)"
    )
    batches = TAKEN


class TestBuffered(Protocol):
    cell = CELL.format(
        loader="ThreadDataLoader(Dataset(rows(), Compose(still)), buffer_size=1, batch_size=BATCH, num_workers=2)"
    )
    batches = TAKEN


class TestThreadWorkers(Protocol):
    """Random transforms are left out: threads share one generator, so that their order is nobody's promise."""

    cell = CELL.format(
        loader="ThreadDataLoader(Dataset(rows(), Compose(still)), batch_size=BATCH, num_workers=2, use_thread_workers=True)"
    )
    batches = TAKEN
    has_processes = False
    can_be_stuck = False
