"""torch_geometric: mini-batches of graphs."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
from torch_geometric.data import Data, Dataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

class Graphs(Dataset):
    def len(self):
        return SAMPLES

    def get(self, index):
        features, target = sample(index)
        edges = torch.tensor([[0, 1, 2, 1], [1, 2, 0, 0]])
        return Data(x=features.repeat(3, 1) + torch.rand(3, 4), edge_index=edges, y=target)

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = GCNConv(4, 8)
        self.last = torch.nn.Linear(8, 1)

    def forward(self, batch):
        x = self.convolution(batch.x, batch.edge_index).relu()
        return self.last(global_mean_pool(x, batch.batch))[:, 0]

def make():
    seed()
    return DataLoader(Graphs(), batch_size=BATCH, shuffle=True, num_workers=2)

def train(loader):
    seed()
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            step(loss)
"""


class TestGraphs(Protocol):
    cell = CELL
