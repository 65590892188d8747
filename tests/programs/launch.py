"""What launchers run in each process: importable, as torch.multiprocessing.spawn wants it."""

from __future__ import annotations

import time
from pathlib import Path

from torch.utils.data import DataLoader

from .datasets import Slow, Stuck


def train(*rank: int) -> None:
    """Load for a moment, and return."""
    for _ in zip(range(5), DataLoader(Slow(), num_workers=2, multiprocessing_context="fork"), strict=False):
        pass


def train_for_ever(*rank: int) -> None:
    """Keep the iterator, as a traceback would, and load until something ends it."""
    global it
    it = iter(DataLoader(Slow(1_000_000), num_workers=2, multiprocessing_context="fork"))
    for _ in it:
        pass


def hang(*rank: int) -> None:
    """Wait for a worker that never delivers, and let no interrupt end it."""
    loader = DataLoader(Stuck(), num_workers=2, multiprocessing_context="fork")
    it = iter(loader)
    while True:
        try:
            next(it)
        except BaseException:
            time.sleep(0.05)


def save_at_interrupt(rank: int, folder: str) -> None:
    """Take a while to save, as a training that is interrupted does."""
    log = Path(folder, str(rank))
    try:
        log.write_text("training")
        time.sleep(600)
    except KeyboardInterrupt:
        log.write_text("saving")
        time.sleep(1.5)
        log.write_text("saved")
