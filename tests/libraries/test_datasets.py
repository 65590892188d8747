"""datasets: rows that are mapped and formatted for torch, all at hand or as a stream."""

from __future__ import annotations

from .protocol import Protocol

TRAIN = """
def collate(rows):
    pass_through(rows)
    return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}

def train(loader):
    seed()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch["features"]), batch["target"][:, None])
            loss.backward()
            optimizer.step()
            step(loss)
"""
MAPPED = (
    """
from datasets import Dataset
from torch.utils.data import DataLoader

def make():
    seed()
    rows = Dataset.from_dict({"index": list(range(SAMPLES))})
    rows = rows.map(lambda row: {"features": [1.0, row["index"] / SAMPLES, 0.5, row["index"] % 5], "target": row["index"] % 3 + 0.5})
    return DataLoader(rows.with_format("torch"), batch_size=BATCH, shuffle=True, num_workers=2, collate_fn=collate)
"""
    + TRAIN
)
STREAM = (
    """
from datasets import IterableDataset
from torch.utils.data import DataLoader

def rows_of(shards):
    for shard in shards:
        for index in range(shard, SAMPLES, 2):
            pass_through(index)
            yield {"index": index, "features": [1.0, index / SAMPLES, 0.5, index % 5]}

def make():
    seed()
    rows = IterableDataset.from_generator(rows_of, gen_kwargs={"shards": [0, 1]})
    rows = rows.map(lambda row: {**row, "target": row["index"] % 3 + 0.5}).shuffle(seed=0, buffer_size=8)
    return DataLoader(rows.with_format("torch"), batch_size=BATCH, num_workers=2, collate_fn=collate)
"""
    + TRAIN
)


class TestMapped(Protocol):
    cell = MAPPED


class TestStream(Protocol):
    cell = STREAM
