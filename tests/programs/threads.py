"""Datasets that tell how many threads native libraries use in a worker."""

from __future__ import annotations

from torch.utils.data import Dataset


class CountsThreads(Dataset):
    """Each sample: the sizes of OpenCV's and numpy's pools, and how many threads the worker has after some work."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        import cv2
        import numpy
        import psutil

        numpy.ones((600, 600)) @ numpy.ones((600, 600))
        cv2.GaussianBlur(numpy.ones((2000, 2000), numpy.float32), (9, 9), 3)
        return cv2.getNumThreads(), pool_size(), psutil.Process().num_threads()


def pool_size() -> int:
    """Return the size of numpy's OpenBLAS pool."""
    from jupyter_loaderguard.worker.threads import find_pools

    return max((pool.size() for pool in find_pools() if pool.name == "OpenBLAS"), default=0)


def ask_for_three(worker_id: int) -> None:
    """Have three threads in numpy's pool."""
    import numpy

    from jupyter_loaderguard.worker.threads import find_pools

    numpy.ones((2, 2)) @ numpy.ones((2, 2))
    for pool in find_pools():
        pool.resize(3)
