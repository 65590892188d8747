"""webdataset: a pipeline over tar files."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
import glob, tempfile
import webdataset as wds

folder = tempfile.TemporaryDirectory()
with wds.ShardWriter(folder.name + "/shard-%06d.tar", maxcount=SAMPLES // 4, verbose=0) as writer:
    for index in range(SAMPLES):
        writer.write({"__key__": f"{index:06d}", "json": {"index": index, "target": float(index % 3)}})
shards = sorted(glob.glob(folder.name + "/*.tar"))

def prepare(row):
    features, _ = sample(row["index"])
    return features, torch.tensor([row["target"]])

def make():
    seed()
    rows = wds.WebDataset(shards, shardshuffle=False).decode().to_tuple("json").map_tuple(prepare)
    batches = rows.map(lambda row: row[0]).shuffle(8, seed=0).batched(BATCH)
    return wds.WebLoader(batches, batch_size=None, num_workers=2)

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


class TestWebLoader(Protocol):
    cell = CELL
