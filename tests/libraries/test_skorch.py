"""skorch: `NeuralNetRegressor.fit`, which takes an interrupt for a normal end."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback

class Keep(Callback):
    def on_batch_end(self, net, loss=None, **_):
        step(loss)

def make():
    return Samples()

def make_net():
    seed()
    return NeuralNetRegressor(
        torch.nn.Linear, module__in_features=4, module__out_features=1, lr=0.01, max_epochs=2, batch_size=BATCH,
        iterator_train__shuffle=True, iterator_train__num_workers=2, train_split=None, callbacks=[Keep()],
    )

def train(dataset):
    make_net().fit(dataset, y=None)
"""


class TestNet(Protocol):
    cell = CELL
    batches = "iter(make_net().initialize().get_iterator(made, training=True))"
    interrupted = ""
