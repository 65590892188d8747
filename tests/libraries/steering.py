"""What the cells of these tests share: samples, the body of a training loop, and where it goes wrong if it is told to.

Runs in kernels, in their workers and in the processes that they launch. What happens is written to files,
so that a test sees it from outside, whoever did it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

SAMPLES = 48
BATCH = 4

_is_stuck = multiprocessing.Value("b", 0)
"""Shared with workers: those of an endless loader are older than the cell that wants them to be stuck."""


class Mistake(Exception):
    """An error of the user, in the body of the loop."""


@dataclass
class _Plan:
    folder: str = ""
    error_at: int = 0
    pause_at: int = 0
    stuck_at: int = 0
    steps: int = 0


plan = _Plan()


def begin(folder: str, error_at: int = 0, pause_at: int = 0, stuck_at: int = 0) -> None:
    """Begin a training whose results go to `folder`: at this step raise, stay for ever, or let the workers be stuck."""
    global plan
    plan = _Plan(folder, error_at, pause_at, stuck_at)
    _is_stuck.value = 0


def seed() -> None:
    """Make the training repeatable."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def sample(index: int, noise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a dataset returns for `index`; the noise tells whether workers are seeded as ever."""
    pass_through(index)
    index = int(index)
    features = torch.tensor([1.0, index / SAMPLES, index % 2, index % 5])
    return features + 0.1 * torch.rand(4) if noise else features, torch.tensor([float(index % 3)])


def pass_through(value: object) -> object:
    """Return the value at once, unless workers are to be stuck."""
    deadline = time.monotonic() + 600
    while _is_stuck.value and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def step(value: object) -> None:
    """Do what the body of a loop does with a batch: keep a number, and go wrong as planned."""
    plan.steps += 1
    rank = os.environ.get("RANK", "0")
    with open(Path(plan.folder, f"values-{rank}"), "a") as file:
        file.write(f"{numbers(value)!r}\n")
    if plan.steps == plan.error_at:
        raise Mistake(f"at step {plan.steps}")
    if plan.steps == plan.stuck_at:
        _is_stuck.value = 1
        Path(plan.folder, "mark").touch()
    if plan.steps == plan.pause_at:
        Path(plan.folder, "mark").touch()
        time.sleep(600)


def numbers(batch: object) -> object:
    """Return the numbers of a batch, whatever it is made of."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().tolist()
    if hasattr(batch, "to_dict"):
        batch = batch.to_dict()
    if isinstance(batch, dict):
        return {key: numbers(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [numbers(one) for one in batch]
    return batch


class Samples(torch.utils.data.Dataset):
    """A dataset of them, as most libraries take it."""

    def __init__(self, noise: bool = True) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(index, self.noise)
