"""fastai: `Learner.fit` over its own loaders, which build torch's iterator themselves."""

from __future__ import annotations

from .protocol import Protocol

BASICS = """
from fastai.basics import Callback, DataLoader, DataLoaders, Learner, MSELossFlat, SGD

class Keep(Callback):
    def after_loss(self):
        step(self.loss)

def make():
    seed()
    training = DataLoader(Samples(), bs=BATCH, shuffle=True, num_workers=2)
    validation = DataLoader(Samples(), bs=BATCH, num_workers=2)
    return DataLoaders(training, validation)

def train(dls):
    seed()
    dls.train.rng.seed(0)
    dls.valid.rng.seed(0)
    learner = Learner(dls, torch.nn.Linear(4, 1), loss_func=MSELossFlat(), opt_func=SGD, lr=0.01, cbs=[Keep()])
    learner.fit(2)
"""
TABULAR = """
import pandas
from fastai.tabular.all import (
    Callback, Categorify, MSELossFlat, Normalize, RegressionBlock, TabularDataLoaders, Transform, tabular_learner
)

class Keep(Callback):
    def after_loss(self):
        step(self.loss)

def make():
    seed()
    frame = pandas.DataFrame({
        "kind": [str(index % 3) for index in range(2 * SAMPLES)],
        "size": [index / SAMPLES for index in range(2 * SAMPLES)],
        "target": [float(index % 5) for index in range(2 * SAMPLES)],
    })
    dls = TabularDataLoaders.from_df(
        frame, procs=[Categorify, Normalize], cat_names=["kind"], cont_names=["size"], y_names="target",
        y_block=RegressionBlock(), valid_idx=list(range(SAMPLES)), bs=BATCH, num_workers=2,
    )
    for dl in dls:
        dl.before_batch.add(Transform(pass_through))
    return dls

def train(dls):
    seed()
    dls.train.rng.seed(0)
    dls.valid.rng.seed(0)
    tabular_learner(dls, layers=[8], loss_func=MSELossFlat(), cbs=[Keep()]).fit(2, lr=0.01)
"""


class TestBasics(Protocol):
    cell = BASICS
    batches = "iter(made.train)"


class TestTabular(Protocol):
    cell = TABULAR
    batches = "iter(made.train)"
