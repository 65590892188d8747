"""Loading prints and imports nothing, and unloading is a true inverse."""

from __future__ import annotations

import pytest

from .driver import Kernel, is_gone, wait_until

STATE = """
def readlink(fd):
    return os.readlink(f"/proc/self/fd/{fd}") if os.path.lexists(f"/proc/self/fd/{fd}") else ""
def state():
    import gc, signal, sys, threading
    from IPython import get_ipython
    shell = get_ipython()
    import torch.utils.data.dataloader as D
    names = ("__init__", "_next_data", "_try_get_data", "_shutdown_workers", "__del__", "__next__", "_reset")
    classes = (D._MultiProcessingDataLoaderIter, D._SingleProcessDataLoaderIter, D.DataLoader)
    return {
        "classes": [(c.__name__, n, id(vars(c).get(n))) for c in classes for n in (*names, "multiprocessing_context")],
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "threads": sorted(t.name for t in threading.enumerate() if "History" not in t.name),
        "events": {k: [f.__qualname__ for f in v] for k, v in shell.events.callbacks.items()},
        "magics": {k: sorted(v) for k, v in shell.magics_manager.magics.items()},
        "registry": sorted(shell.magics_manager.registry),
        "transforms": [f.__name__ for f in shell.input_transformer_manager.line_transforms],
        "configurables": [type(c).__name__ for c in shell.configurables],
        "meta_path": [type(f).__name__ for f in sys.meta_path],
        "observers": {k: {e: len(h) for e, h in v.items()} for k, v in shell._trait_notifiers.items() if k == "exit_now"},
        "formatters": {k: len(f.type_printers) for k, f in shell.display_formatter.formatters.items()},
        "fds": sorted(link.partition(":")[0] for link in map(readlink, os.listdir("/proc/self/fd")) if ":" in link),
    }
"""


@pytest.fixture
def bare_kernel():
    kernel = Kernel(load=False, setup="")
    yield kernel
    kernel.close()


def test_loading_is_silent_quick_and_imports_neither_torch_nor_ipywidgets(bare_kernel: Kernel) -> None:
    reply = bare_kernel.ok(
        "import time; since = time.perf_counter()\n%load_ext jupyter_loaderguard\ntime.perf_counter() - since"
    )
    assert (reply.stdout, reply.stderr, reply.displays) == ("", "", [])
    assert float(reply.result["text/plain"]) < 1  # 0.1 s is promised, and measured by benchmarks/
    loaded = bare_kernel.ok("import sys; [name for name in ('torch', 'ipywidgets', 'numpy') if name in sys.modules]")
    assert loaded.value == []


def test_importing_the_package_imports_nothing_heavy(bare_kernel: Kernel) -> None:
    code = (
        "import subprocess, sys\n"
        'code = \'import sys, jupyter_loaderguard; print([n for n in ("torch", "IPython", "psutil", "ipywidgets",\'\n'
        'code += \'"traitlets", "multiprocessing") if n in sys.modules])\'\n'
        "subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip()"
    )
    assert bare_kernel.ok(code).value == "[]"


def test_torch_imported_after_loading_is_guarded_too(bare_kernel: Kernel) -> None:
    bare_kernel.ok("%load_ext jupyter_loaderguard\nimport jupyter_loaderguard as lg")
    bare_kernel.ok("from tests.kernel.driver import SETUP\nexec(SETUP)")
    bare_kernel.ok(
        "import sys; assert not [f for f in sys.meta_path if 'Late' in type(f).__name__ and f.name[:12] == 'torch.utils.']"
    )
    bare_kernel.ok("it = iter(DataLoader(Stuck(), num_workers=2))")
    assert len(bare_kernel.workers()) == 2
    assert bare_kernel.ok("torch.utils.data.dataloader.__spec__.loader.__class__.__name__").value == "SourceFileLoader"


def test_a_loader_in_the_very_cell_that_loads_is_guarded(bare_kernel: Kernel) -> None:
    cell = bare_kernel.begin(
        "%load_ext jupyter_loaderguard\nfrom tests.kernel.driver import SETUP\nexec(SETUP)\n"
        "def train():\n    it = iter(DataLoader(Stuck(), num_workers=2))\n    next(it)\ntrain()"
    )
    processes = bare_kernel.wait_for_workers(2)
    bare_kernel.interrupt(group=False)
    assert bare_kernel.finish(cell, 30).ename == "KeyboardInterrupt"
    assert all(is_gone(process) for process in processes)


def test_unloading_is_a_true_inverse(bare_kernel: Kernel) -> None:
    bare_kernel.ok("from tests.kernel.driver import SETUP\nexec(SETUP)\n" + STATE)
    bare_kernel.run("%unload_ext nothing")  # makes IPython register its own magics for extensions
    bare_kernel.ok("for batch in DataLoader(Quick(8), num_workers=1): pass\nbefore = state()")
    before = bare_kernel.ok("before = state()")
    bare_kernel.ok("%load_ext jupyter_loaderguard")
    assert bare_kernel.ok("state()['classes'] != before['classes']").value is True
    bare_kernel.ok("for batch in DataLoader(Quick(8), num_workers=2): pass\n")
    bare_kernel.ok("%%guarded_loader\nfor batch in DataLoader(Quick(8), num_workers=2): pass")
    bare_kernel.ok("from jupyter_loaderguard.registry import registry; pid = registry.reaper.pid; pid")
    reaper = bare_kernel.ok("pid").value
    bare_kernel.ok("%unload_ext jupyter_loaderguard")
    after = bare_kernel.ok(
        "after = state(); {key: (before[key], after[key]) for key in before if before[key] != after[key]}"
    )
    assert after.value == {}, before
    wait_until(lambda: not __import__("psutil").pid_exists(reaper), what="the reaper's leave")
    assert bare_kernel.run("%loaderguard").status == "error" or "not found" in bare_kernel.run("%loaderguard").stderr


def test_loading_twice_is_harmless(kernel: Kernel) -> None:
    kernel.ok("import jupyter_loaderguard; ip = get_ipython(); count = len(ip.events.callbacks['post_run_cell'])")
    kernel.ok("jupyter_loaderguard.load_ipython_extension(ip)")
    assert kernel.ok("len(ip.events.callbacks['post_run_cell']) == count").value is True
    assert "already loaded" in kernel.ok("%load_ext jupyter_loaderguard").stdout


def test_a_reload_with_live_loaders_goes_on_guarding_them(kernel: Kernel, method: str) -> None:
    kernel.ok(
        f"it = iter(DataLoader(Quick(), num_workers=1, multiprocessing_context='{method}')); next(it)\n"
        f"loader = DataLoader(Quick(8), num_workers=1, persistent_workers=True, multiprocessing_context='{method}')\n"
        "for batch in loader: pass"
    )
    before = kernel.workers()
    kernel.ok("%reload_ext jupyter_loaderguard")
    assert kernel.workers() == before
    assert kernel.ok("int(next(it)[0, 0]), len(list(loader))").value == (1, 8)
    assert kernel.ok("sorted(lg.clean().pids)").value == sorted(process.pid for process in before)
    assert kernel.ok("len(list(loader))").value == 8


def test_an_unload_with_live_loaders_leaves_them_working_as_torch_made_them(kernel: Kernel) -> None:
    kernel.ok("it = iter(DataLoader(Quick(20), num_workers=2)); next(it)")
    kernel.ok("%unload_ext jupyter_loaderguard")
    assert kernel.ok("len(list(it)), it._shutdown").value == (19, True)
    kernel.ok("%load_ext jupyter_loaderguard")
    assert kernel.workers() == []


def test_an_unload_in_a_guarded_cell_ends_it_cleanly(kernel: Kernel) -> None:
    kernel.ok("%%guarded_loader\n%unload_ext jupyter_loaderguard")
    kernel.ok("%load_ext jupyter_loaderguard")
    assert kernel.ok("%%guarded_loader --quiet\n7").value == 7


def test_an_unknown_torch_gives_one_warning_and_a_working_loader(bare_kernel: Kernel) -> None:
    bare_kernel.ok("from tests.kernel.driver import SETUP\nexec(SETUP)\nimport torch.utils.data.dataloader as D")
    bare_kernel.ok("del D._SingleProcessDataLoaderIter._next_data\nD._SingleProcessDataLoaderIter._fetch_next = None")
    bare_kernel.ok("real = D._BaseDataLoaderIter._next_data; del D._BaseDataLoaderIter._next_data")
    reply = bare_kernel.ok("%load_ext jupyter_loaderguard")
    assert reply.stderr.count("LoaderGuardWarning") == 1
    assert "is unknown to it (no _SingleProcessDataLoaderIter._next_data)" in reply.stderr
    assert "DataLoaders work, but are not guarded" in reply.stderr
    assert bare_kernel.ok("len(list(DataLoader(Quick(8), num_workers=2)))").value == 8
    assert bare_kernel.ok("lg.snapshot().loaders").value == ()


def test_an_iterator_with_other_insides_is_left_unguarded_but_works(kernel: Kernel) -> None:
    kernel.ok(
        "import torch.utils.data.dataloader as D\n"
        "class Renamed(D._MultiProcessingDataLoaderIter):\n"
        "    def __init__(self, loader):\n        super().__init__(loader)\n"
        "    def __getattribute__(self, name):\n"
        "        if name == '_workers_status' and not armed: raise AttributeError(name)\n"
        "        return super().__getattribute__(name)\n"
        "armed = True"
    )
    reply = kernel.ok(
        "import jupyter_loaderguard.torch_adapter.birth as T; T.ATTRIBUTES += ('_of_a_later_torch',)\n"
        "print(len(list(DataLoader(Quick(8), num_workers=1))))\nT.ATTRIBUTES = T.ATTRIBUTES[:-1]"
    )
    assert reply.stdout == "8\n"
    assert "this DataLoader works, but is not guarded" in reply.stderr
    assert "has no _of_a_later_torch" in reply.stderr


def test_a_silent_execution_is_refused_clearly_and_harms_nothing(kernel: Kernel) -> None:
    kernel.finish(kernel.begin("%%guarded_loader\nsilent_ran = True", silent=True, store_history=False))
    assert kernel.ok("'silent_ran' in globals()").value is False
    assert kernel.ok("1 + 1").value == 2


def test_python_surface_in_a_script(bare_kernel: Kernel) -> None:
    code = """
import subprocess, sys
program = '''
import os, signal, threading, time
import jupyter_loaderguard as lg
from torch.utils.data import DataLoader
from tests.programs.datasets import Quick, Stuck
if __name__ == "__main__":
    with lg.guard(grace_seconds=0.1) as run:
        for batch in DataLoader(Quick(20), num_workers=2): pass
        kept = iter(DataLoader(Stuck(), num_workers=2))
        snapshot = lg.snapshot()
        assert lg.Snapshot.from_json(snapshot.to_json()) == snapshot
        assert len(snapshot.workers) == 2 and snapshot.guarding
    assert run.report.batches == 20 and run.report.left == 0 and run.report.workers == 4, run.report
    assert not lg.snapshot().guarding
    try:
        with lg.guard() as run:
            kept = iter(DataLoader(Stuck(), num_workers=1))
            raise KeyError("mine")
    except KeyError as error:
        assert error.args == ("mine",)
    assert run.report.left == 0
    for bad in (-1, "soon", True, float("nan")):
        try:
            with lg.guard(grace_seconds=bad): pass
        except lg.LoaderGuardError as error:
            assert "grace_seconds must be a number of seconds from 0 to 3600" in str(error)
        else:
            raise AssertionError(bad)
    with lg.guard():
        kept = iter(DataLoader(Stuck(), num_workers=1))
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            next(kept)
        except KeyboardInterrupt:
            print("interrupted")
    print("done")
'''
done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
done.stdout + done.stderr
"""
    assert bare_kernel.ok(code).value == "interrupted\ndone\n"


def test_a_script_that_ends_with_a_stubborn_loader_ends(bare_kernel: Kernel) -> None:
    code = """
import subprocess, sys
program = '''
import time
import jupyter_loaderguard.guarding as guarding
from torch.utils.data import DataLoader
from tests.programs.datasets import Stubborn
if __name__ == "__main__":
    guarding.activate(object())
    kept = iter(DataLoader(Stubborn(), num_workers=2))
    time.sleep(0.5)
'''
subprocess.run([sys.executable, "-c", program], timeout=30).returncode
"""
    assert bare_kernel.ok(code).value == 0
