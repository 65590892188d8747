"""Load and unload: everything that the guard changes in a shell, each change beside its undo."""

from __future__ import annotations

import importlib
import sys
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from .. import interrupts
from ..guarding import activate, deactivate, dismiss_multiprocessing_helpers, stop_everything
from ..ledger import find_abandoned
from ..model import Findings, RunReport, Snapshot, Stall, StopReport
from ..registry import Cell, Record, Run, registry
from ..seam import shield
from ..traces import short_place
from ..views import text
from ..watch import watchdog
from .cells import Cells
from .configuration import LoaderGuard
from .live import LiveDisplay, can_show, close_clusters, close_widget
from .magics import LoaderGuardMagics, guard_cell, show_closing_line
from .outlet import Outlet
from .requests import follow_ends, follow_requests

if TYPE_CHECKING:
    from ..timing import TuneProgress


def _later(module: str, name: str) -> Callable[[Any], str]:
    """Return a drawing whose module is loaded at its first use: most notebooks never need it."""

    def draw(thing: Any) -> str:
        found: Callable[[Any], str] = getattr(importlib.import_module(f"{text.__package__}.{module}"), name)
        return found(thing)

    return draw


_MAGICS = {"line": ("loaderguard", "guarded_loader"), "cell": ("guarded_loader",)}
_VIEWS: tuple[tuple[type | str, Callable[[Any], str], Callable[[Any], str]], ...] = (
    (Snapshot, text.status, _later("html", "status")),
    (StopReport, text.stop, _later("html", "stop")),
    (RunReport, _later("timeline", "report"), _later("timeline", "report_html")),
    (Stall, text.stall, _later("html", "stall")),
    (Findings, text.findings, _later("html", "findings")),
    ("jupyter_loaderguard.timing.TuneResult", _later("curve", "result"), _later("curve", "result_html")),
)

loaded: Extension | None = None


class Extension:
    """The guard in one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.configuration = LoaderGuard(parent=shell)
        self.cells = Cells(shell)
        self._undo: list[Callable[[], None]] = []
        self._options: dict[Cell, Any] = {}
        self._live: dict[Cell, LiveDisplay] = {}
        self._widget: LiveDisplay | None = None
        self._common_outlet: Outlet | None = None
        self.last_report: RunReport | None = None

    def load(self) -> None:
        """Change the shell; every step leaves its undo."""
        self._add_configuration()
        self._add_magics()
        self._add_views()
        self._add_exit()
        self._add_voice()
        self.cells.after_run = self._after_run
        self.cells.after_stop = self._after_stop
        self.cells.after_error = self._after_error
        self.cells.start()
        self._undo.append(self.cells.stop)
        kernel = getattr(self.shell, "kernel", None)
        self._undo.append(follow_requests(kernel, self.cells))
        self._undo.append(follow_ends(kernel, self.cells))
        activate(self)
        _mention_orphans()

    def unload(self) -> None:
        """Leave the shell as it was; live loaders go on working."""
        for undo in (self._stop_widget, close_clusters, lambda: deactivate(self), *reversed(self._undo)):
            with shield("something of loaderguard is left in this shell"):
                undo()
        self._undo.clear()

    def suspend(self) -> None:
        """Guard nothing until `resume`."""
        deactivate(self)

    def resume(self) -> None:
        """Guard again."""
        activate(self)

    def _add_configuration(self) -> None:
        self.shell.configurables.append(self.configuration)
        self._undo.append(lambda: self.shell.configurables.remove(self.configuration))

    def _add_magics(self) -> None:
        manager = self.shell.magics_manager
        before = {kind: dict(manager.magics[kind]) for kind in _MAGICS}
        magics = LoaderGuardMagics(self.shell, self)
        self.shell.register_magics(magics)
        transforms = self.shell.input_transformer_manager.line_transforms
        transforms.insert(0, guard_cell)

        def undo() -> None:
            transforms.remove(guard_cell)
            self.shell.configurables.remove(magics)
            manager.registry.pop(LoaderGuardMagics.__name__, None)
            for kind, names in _MAGICS.items():
                for name in names:
                    manager.magics[kind].pop(name, None)
                    if name in before[kind]:
                        manager.magics[kind][name] = before[kind][name]

        self._undo.append(undo)

    def _add_views(self) -> None:
        formatters = self.shell.display_formatter.formatters
        for kind, as_text, as_html in _VIEWS:
            formatters["text/plain"].for_type(
                kind, lambda thing, printer, cycle, draw=as_text: printer.text(draw(thing))
            )
            formatters["text/html"].for_type(kind, as_html)

        def undo() -> None:
            for kind, _, _ in _VIEWS:
                formatters["text/plain"].pop(kind, None)
                formatters["text/html"].pop(kind, None)

        self._undo.append(undo)

    def _add_exit(self) -> None:
        """Stop everything as soon as the kernel is asked to end, before it waits for its children."""
        self.shell.observe(self._on_exit, names="exit_now")
        self._undo.append(lambda: self.shell.unobserve(self._on_exit, names="exit_now"))

    def _on_exit(self, change: Any) -> None:
        if change["new"]:
            with shield("workers may be left when the kernel ends"):
                stop_everything("the kernel ends")
                dismiss_multiprocessing_helpers()

    def _add_voice(self) -> None:
        before = registry.tell, registry.name_of, watchdog.show, watchdog.place_of, registry.open_progress
        registry.tell, registry.name_of = _tell, self._name_of
        watchdog.show, watchdog.place_of = self._show_stall, self._place_of
        registry.place_of, earlier = self._place_of, registry.place_of
        if getattr(self.shell, "kernel", None) is not None:  # a terminal has a bar of its own
            registry.open_progress = self._open_progress

        def undo() -> None:
            registry.tell, registry.name_of, watchdog.show, watchdog.place_of, registry.open_progress = before
            registry.place_of = earlier

        self._undo.append(undo)

    def _name_of(self, loader: Any) -> str | None:
        names = [name for name, value in list(self.shell.user_ns.items()) if value is loader]
        return next((name for name in names if not name.startswith("_")), None)

    def _show_stall(self, stall: Stall, record: Record, key: str) -> None:
        """Show a stall in the cell that waits, also while the kernel is busy."""
        outlet = record.last_cell.outlet if record.last_cell else None
        if outlet is None:  # a thread that works for no cell: where the notebook's output goes at present
            outlet = self._common_outlet = self._common_outlet or Outlet(self.shell)
        outlet.show({"text/plain": text.stall(stall), "text/html": _later("html", "stall")(stall)}, key)

    def _open_progress(self) -> Callable[[TuneProgress | None], None]:
        """Return what shows how far `tune` is, in this cell and from any thread; nothing stays of it."""
        from ..views import curve

        outlet, key = Outlet(self.shell), uuid.uuid4().hex

        def show(progress: TuneProgress | None) -> None:
            as_text = curve.progress(progress) if progress is not None else ""
            as_html = curve.progress_html(progress) if progress is not None else ""
            outlet.show({"text/plain": as_text, "text/html": as_html}, key)

        return show

    def _place_of(self, file: str) -> str:
        """Return the name of a cell for its file, as IPython's tracebacks have it."""
        name_of = getattr(self.shell.compile, "format_code_name", None)
        found = name_of(file) if name_of is not None else None
        return f"{found[0]} {found[1]}" if found else short_place(file)

    # -- guarded cells --------------------------------------------------------------------------

    def begin_run(self, options: Any) -> None:
        """Guard the rest of the running cell strictly."""
        cell = self.cells.current()
        if cell is None and threading.get_ident() in self.cells.unfollowed:
            return  # that was said; it runs as it would without the guard
        if cell is None:
            raise UsageError("%%guarded_loader: no cell is running here (silent execution?)")
        if not registry.is_guarding:
            raise UsageError("%%guarded_loader: loaderguard is off; %loaderguard on resumes")
        if cell.run is not None:
            raise UsageError("%%guarded_loader: this cell is guarded already")
        grace = registry.grace_seconds if options.grace is None else options.grace
        stall = registry.stall_seconds if options.stall is None else options.stall
        on_stall = options.on_stall or registry.on_stall
        with (
            shield("this cell is guarded as a plain one"),
            interrupts.held(),  # a run that has begun is known to its cell, which ends it
        ):
            self._options[cell] = options
            cell.run = Run(registry, grace, options.keep, registry.refresh_seconds, stall, on_stall, options.allowance)
            if self.configuration.widget and not options.no_widget and can_show(self.shell):
                live = LiveDisplay(self.shell)
                live.show()
                self._live[cell] = live

    def _after_run(self, cell: Cell, outcome: str) -> None:
        options, live = self._options.pop(cell), self._live.pop(cell, None)
        assert cell.run is not None
        self.last_report = cell.run.report
        with shield("the live widget of this cell stays as it is"):
            if live is not None:
                live.settle(cell.run.summary())
        if options.name:
            self.shell.push({options.name: cell.run.report})
        show_closing_line(outcome, cell.run, options.quiet)

    def show_widget(self) -> None:
        """Show the live widget on its own."""
        with interrupts.held():
            live = self._widget or LiveDisplay(self.shell)
            live.show()
            self._widget = live

    def _stop_widget(self) -> None:
        """Have what is displayed stay as it is now, without buttons that nobody hears."""
        shown = [live for live in (self._widget, *self._live.values()) if live is not None]
        for live in shown:
            live.settle(registry.snapshot())
        close_widget()

    def _after_error(self, cell: Cell, error: BaseException) -> None:
        """Explain the error of a loader below its traceback."""
        if not self.configuration.explain or not registry.is_guarding:
            return
        from ..explain import explain_once

        found = explain_once(error)
        if found is not None:
            cell.outlet.show(
                {"text/plain": text.card(found), "text/html": _later("html", "card")(found)}, uuid.uuid4().hex
            )

    def _after_stop(self, report: StopReport) -> None:
        if report.left:
            _tell(text.stop(report))


def _tell(line: str) -> None:
    """Say something that the user did not ask for: something is wrong."""
    print(line, file=sys.stderr)  # noqa: T201


def _mention_orphans() -> None:
    """Say in a line that dead kernels have left workers, if they have; by the ledger alone, which is quick."""
    try:
        kernels = find_abandoned()
        if kernels:
            from ..census import find_written  # only now: it takes time
            from ..orphans import Look

            left = find_written(kernels, Look())
            who = text.count(len({orphan.kernel_pid for orphan in left}), "dead kernel")
            if left:
                words = f"{text.count(len(left), 'worker')} of {who} left on this machine"
                _tell(f"loaderguard: {words}; %loaderguard sweep lists {'it' if len(left) == 1 else 'them'}.")
    except Exception:  # noqa: BLE001 - whatever is wrong with the ledger, the guard is loaded
        return


def load(shell: InteractiveShell) -> None:
    """Load the extension; a second time is harmless."""
    global loaded
    if loaded is None:
        extension = Extension(shell)
        extension.load()
        loaded = extension


def unload(shell: InteractiveShell) -> None:
    """Undo `load`."""
    global loaded
    if loaded is not None:
        extension, loaded = loaded, None
        extension.unload()
