"""A script whose only worker forks a helper and ends: prints the helper's pid, and stays.

`python -m tests.programs.helper METHOD`. The helper has all that a worker has, also its name and its pipes.
"""

from __future__ import annotations

import os
import signal
import sys
import time


class Daemons:
    """Its only sample starts a helper in a session of its own."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(300)
            os._exit(0)
        return pid


if __name__ == "__main__":
    from torch.utils.data import DataLoader

    for pid in DataLoader(Daemons(), num_workers=1, multiprocessing_context=sys.argv[1]):
        helper = int(pid)
    print(helper, flush=True)
    signal.pause()
