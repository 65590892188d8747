"""A script in which descriptors are few: `python -m tests.programs.scarce METHOD {plain,guard} WORKERS KEPT`.

Iterates a loader and keeps KEPT batches, of one tensor each; prints how many came, and how many files it has open.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Tensors(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index)


def main(method: str, how: str, workers: int, most_kept: int) -> None:
    around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if how == "guard":
        import jupyter_loaderguard as lg

        around = lg.guard()
    kept, count = [], 0
    with around:
        for batch in DataLoader(Tensors(), batch_size=4, num_workers=workers, multiprocessing_context=method):
            count += 1
            if len(kept) < most_kept:
                kept.append(batch)
    assert all(batch.sum() for batch in kept)
    print(count, len(os.listdir("/proc/self/fd")))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
