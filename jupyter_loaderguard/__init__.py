"""jupyter_loaderguard: no DataLoader worker is left behind, whatever happens to the cell or the kernel.

In a notebook, `%load_ext jupyter_loaderguard` guards every DataLoader of the kernel. In scripts::

    import jupyter_loaderguard as lg

    with lg.guard() as run:
        for batch in loader:
            ...
    print(run.report.batches, run.report.left)

Importing this package changes nothing and imports nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import LoaderGuardError, LoaderGuardWarning, LoaderStalled
from .model import Finding, RunReport, Snapshot, StopReport
from .quarantine import SkippedSample

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from IPython.core.interactiveshell import InteractiveShell

    from .cluster.follow import Cluster
    from .model import Findings
    from .registry import Run
    from .status import StatusWidget
    from .timing import TuneResult, TuneRow

__all__ = [
    "Finding",
    "LoaderGuardError",
    "LoaderGuardWarning",
    "LoaderStalled",
    "RunReport",
    "SkippedSample",
    "Snapshot",
    "StatusWidget",
    "StopReport",
    "TuneResult",
    "TuneRow",
    "__version__",
    "clean",
    "cluster",
    "doctor",
    "guard",
    "ranked",
    "snapshot",
    "stacks",
    "tune",
]


_LATER = {"StatusWidget": "status", "TuneResult": "timing", "TuneRow": "timing"}


def __getattr__(name: str) -> Any:
    """Give out what needs ipywidgets, or is seldom needed, only when it is asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name the public surface, for completion."""
    return __all__


def guard(
    *,
    stall_seconds: float | None = None,
    on_stall: str | None = None,
    retry: int | None = None,
    skip: int | None = None,
    quarantine: Any = None,
    grace_seconds: float | None = None,
    keep: bool = False,
) -> AbstractContextManager[Run]:
    """Guard a block strictly, as `%%guarded_loader` guards a cell; also in scripts and in pytest.

    At its end, however it ends, the workers of all loaders that it started are gone: they have
    `grace_seconds` (0.5) to leave by themselves, then get SIGTERM, then SIGKILL. With `keep` they stay
    at a normal end. A wait for one batch longer than `stall_seconds` (30) is a stall: what is late is
    written to standard error, or with `on_stall="raise"` raised as LoaderStalled.

    When a worker dies, or with `on_stall="retry"` is late, the workers are replaced and what they had not
    delivered is produced again, at most `retry` times; samples that raise, kill or hang a worker are left out,
    at most `skip` of them. `run.report.skipped` has them; `run.report.save_quarantine(path)` writes them to a
    file, and a later run with `quarantine=path` does not touch them.
    `run.report` is the RunReport afterwards.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(8), batch_size=4, num_workers=2)
    >>> with guard(stall_seconds=60, on_stall="raise", retry=1) as run:
    ...     batches = [batch.tolist() for batch in loader]
    >>> batches, run.report.batches, run.report.left
    ([[0, 1, 2, 3], [4, 5, 6, 7]], 2, 0)
    """
    from . import guarding

    return guarding.guard(
        stall_seconds=stall_seconds,
        on_stall=on_stall,
        retry=retry,
        skip=skip,
        quarantine=quarantine,
        grace_seconds=grace_seconds,
        keep=keep,
    )


def snapshot() -> Snapshot:
    """Return what is alive in this process: loaders, their workers, and the machine that they share.

    >>> from torch.utils.data import DataLoader
    >>> with guard():
    ...     iterator = iter(DataLoader(range(8), num_workers=2))
    ...     alive = snapshot()
    >>> [(loader.dataset, len(loader.workers)) for loader in alive.loaders]
    [('range', 2)]
    >>> Snapshot.from_json(alive.to_json()) == alive
    True
    """
    from .registry import registry

    return registry.snapshot()


def clean(target: Any = None) -> StopReport:
    """Stop all workers, or those of `target`, and tell how each one ended. The loaders stay usable.

    A target is a loader, an iterator over one, its name in the notebook, or a list of such. A pid
    stops that worker alone.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(8), num_workers=2, persistent_workers=True)
    >>> with guard():
    ...     first = next(iter(loader))
    ...     report = clean(loader)
    ...     again = sum(len(batch) for batch in loader)
    >>> len(report.pids), report.left, again
    (2, 0, 8)
    """
    from . import guarding

    return guarding.clean(target)


def stacks(pid: int | None = None) -> dict[int, str]:
    """Return the Python stack of each live worker, or of one, as text by pid; also of one stuck in C code.

    The most recent call comes first; a line above says which sample the worker is on.

    >>> from torch.utils.data import DataLoader
    >>> with guard():
    ...     iterator = iter(DataLoader(range(8), num_workers=2))
    ...     batch = next(iterator)
    ...     found, pids = stacks(), {worker.pid for worker in snapshot().workers}
    >>> len(found), set(found) == pids
    (2, True)
    """
    from . import guarding

    return guarding.stacks(pid)


def doctor(loader: Any = None, seconds: float = 5.0) -> Findings:
    """Return what is wrong with a loader, each with its evidence and a fix; without a loader, with the machine.

    A copy of the loader is run for a few batches, with workers of its own and for at most `seconds` in all. Your
    objects, their iterators and the random state stay as they are. The list is empty if all is well; its
    `ran` says what was run.

    >>> from torch.utils.data import DataLoader
    >>> list(doctor(DataLoader(range(64), batch_size=4, num_workers=1)))
    []
    >>> findings = doctor(DataLoader([1, None], batch_size=2, num_workers=1))
    >>> [(finding.code, finding.severity) for finding in findings]
    [('LG100', 'error')]
    """
    from .doctor import examine  # after this, `doctor` is that module, which can be called in the same way

    return examine(loader, seconds)


def tune(
    loader: Any,
    max_workers: int | None = None,
    seconds: float | None = None,
    step: Callable[[Any], Any] | None = None,
) -> TuneResult:
    """Measure how fast a loader is with 0, 1, 2 … workers, and recommend a number.

    Copies of the loader run one after the other, for at most `seconds` (25) in all. Your objects, live iterators and
    the random state stay as they are. It tries no more workers than there are usable CPUs, memory and /dev/shm for,
    nor more than `max_workers`. With a `step`, a function that takes a batch as your training step does, it is the
    time per step that counts, rather than loading alone. An interrupt ends it, and gives what has been measured so
    far.

    >>> from torch.utils.data import DataLoader
    >>> result = tune(DataLoader(range(4096), batch_size=64), max_workers=1, seconds=4)
    >>> result.best in (0, 1), result.rows[0].num_workers, "num_workers=" in result.code
    (True, 0, True)
    """
    from .tuning import tune

    return tune(loader, max_workers, seconds, step)


def cluster(client: Any = None) -> Cluster:
    """Guard every engine of an ipyparallel client, and show all ranks in one widget or table; needs ipyparallel.

    The extension is loaded on each engine. What is returned shows all ranks live as a cell's last line, also
    while cells run on them, and has `stacks`, `clean`, `doctor` and `interrupt` for all ranks or one. Without a
    client: the one that there is, or the processes that were launched with `ranked`.

    >>> cluster("no client")
    Traceback (most recent call last):
    jupyter_loaderguard.errors.LoaderGuardError: ...

    notebooks/cluster.ipynb has the rest: `ranks = cluster(client)`, `ranks.stacks(1)`.
    """
    from .cluster import follow  # after this, `cluster` is that module, which can be called in the same way

    return follow(client)


def ranked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that a launcher runs in each of its processes, so that each one guards itself.

    The workers of each process end with it, and with the cell that launched it; a process that still runs then is
    interrupted. The processes are in the table of `%loaderguard cluster`. A launcher gets the wrapped function:
    `torch.multiprocessing.spawn(ranked(train), (model,), nprocs=2)`, `notebook_launcher(ranked(train), (model,))`.

    >>> ranked(print).__name__
    'print'
    """
    from .launched import Ranked

    return Ranked(function)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Load the extension: `%load_ext jupyter_loaderguard`."""
    from .ipython.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Undo it: `%unload_ext jupyter_loaderguard`."""
    from .ipython.extension import unload

    unload(shell)
