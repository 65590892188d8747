"""accelerate's `notebook_launcher`, which wants a kernel that never made an `Accelerator`."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
import gc, socket
from accelerate import Accelerator, notebook_launcher
from torch.utils.data import DataLoader

def make():
    return None

def training_loop():
    seed()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for epoch in range(2):
        for features, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            step(loss)

def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]

def train(_):
    # A failed launch keeps its store as long as its traceback lives. So each has a port of its own; and what is garbage
    # goes here: if the collector of a forked process ends the store, torch waits there for a thread that only the kernel has.
    gc.collect()
    notebook_launcher(training_loop, (), num_processes=2, use_port=str(free_port()))
"""


class TestLaunched(Protocol):
    cell = CELL
    batches = ""
    has_processes = False  # of this kernel: each process that was launched has its own
    error = "ChildFailedError"
    interrupted = "SignalException"
