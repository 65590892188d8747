"""torchdata: the loader that can tell its state, and a pipeline of nodes."""

from __future__ import annotations

from tests.kernel.driver import Kernel

from .protocol import PATIENCE, Plain, Protocol

TRAIN = """
def train(loader):
    seed()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for features, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features), targets)
            loss.backward()
            optimizer.step()
            step(loss)
"""
STATEFUL = """
from torchdata.stateful_dataloader import StatefulDataLoader

def make():
    seed()
    return StatefulDataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=2, generator=torch.Generator())
""" + TRAIN.replace(
    "    seed()\n", "    seed()\n    loader.generator.manual_seed(0)  # its order goes on from epoch to epoch\n"
)
NODES = (
    """
from torch.utils.data import SequentialSampler, default_collate
from torchdata.nodes import Batcher, Loader, ParallelMapper, SamplerWrapper

dataset = Samples(noise=False)

def load(indices):
    return default_collate([dataset[index] for index in indices])

def make():
    seed()
    node = Batcher(SamplerWrapper(SequentialSampler(dataset)), batch_size=BATCH)
    return Loader(ParallelMapper(node, load, num_workers=2, in_order=True, method="thread"))
"""
    + TRAIN
)
HALF = """
import itertools
made.generator.manual_seed(0)
first = [numbers(one) for one in itertools.islice(made, 5)]
state = made.state_dict()
"""
REST = """
seed()
made = make()
made.load_state_dict(state)
first, [numbers(one) for one in made]
"""


class TestStateful(Protocol):
    cell = STATEFUL

    def test_it_goes_on_from_its_state_after_a_typo(self, kernel: Kernel, plain: Plain) -> None:
        results = []
        for one in (kernel, plain.kernel):
            lines = self._define(one)
            one.ok(HALF, PATIENCE)
            lines.mistype()
            results.append(one.ok(REST, PATIENCE).value)
        guarded, unguarded = results
        assert guarded == unguarded
        assert [len(part) for part in guarded] == [5, 7]


class TestNodes(Protocol):
    """Threads are its workers; random samples are left out, as threads share one generator."""

    cell = NODES
    has_processes = False
