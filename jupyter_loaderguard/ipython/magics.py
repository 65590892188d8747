"""`%%guarded_loader` and `%loaderguard`."""

from __future__ import annotations

import keyword
import re
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from ..allowance import Allowance
from ..errors import LoaderGuardError
from ..guarding import ON_STALL, check_seconds, clean, make_allowance, stacks
from ..model import Snapshot
from ..registry import Run, registry
from ..seam import rim, say
from ..views import text
from .cells import OK
from .live import can_show

_FIRST_LINE = re.compile(r"%%guarded_loader(?:\s+(?P<options>.*?))?\s*$")


@rim
def guard_cell(lines: list[str]) -> list[str]:
    """Turn a `%%guarded_loader` cell into a plain cell whose first line begins the guard.

    So the body runs as if the magic were not there: its variables, last expression, `await`, other
    cell magics and line numbers are IPython's own business.
    """
    match = _FIRST_LINE.match(lines[0]) if lines else None
    if match is None:
        return lines
    try:
        return _guarded(match["options"] or "", lines[1:])
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - see NOTE [ Fail open ] in seam.py
        say("this cell is not guarded strictly", error)
        return ["\n", *lines[1:]]


def _guarded(options: str, body: list[str]) -> list[str]:
    if not "".join(body).strip():
        raise UsageError("%%guarded_loader: the cell is empty; the code to guard goes on the lines below")
    begin = f"get_ipython().run_line_magic('guarded_loader', {options!r})"
    first = next(number for number, line in enumerate(body) if line.strip())
    if body[first].startswith("%%"):
        return [f"{begin}\n", *body[:first], *cell_magic(body[first:])]
    last = _last_future_import(body)
    if last is None:
        return [f"{begin}\n", *body]
    body[last] = f"{body[last].partition('#')[0].rstrip()}; {begin}\n"  # nothing may stand before these
    return ["\n", *body]


def _last_future_import(body: list[str]) -> int | None:
    """Return the line of the last `from __future__ import` at the top of a cell."""
    last = None
    for number, line in enumerate(body):
        if line.startswith("from __future__ import ") and "(" not in line and "\\" not in line:
            last = number
        elif line.strip() and not line.startswith("#"):
            break
    return last


@magics_class
class LoaderGuardMagics(Magics):
    """The magics; what they are called with is checked here, what they do is done elsewhere."""

    def __init__(self, shell: Any, extension: Any) -> None:
        super().__init__(shell)
        self._extension = extension

    @magic_arguments()
    @argument("--stall", metavar="SECONDS", help="a wait for one batch longer than this is a stall (30)")
    @argument(
        "--on-stall",
        choices=ON_STALL,
        help="warn: show what is late, at which line, and go on waiting (default); raise: raise LoaderStalled; "
        "retry: treat the late worker as dead, see --retry and --skip",
    )
    @argument(
        "--retry",
        metavar="N",
        help="when a worker dies, replace the workers and deliver their batches all the same, at most N times (0)",
    )
    @argument(
        "--skip", metavar="N", help="leave out at most N samples that raise, kill or hang a worker, and list them (0)"
    )
    @argument("--quarantine", metavar="FILE", help="do not touch the samples that an earlier run left out")
    @argument("--grace", metavar="SECONDS", help="time for workers to leave by themselves before SIGTERM (0.5)")
    @argument("--keep", action="store_true", help="leave the workers running at the cell's normal end")
    @argument("--no-widget", action="store_true", help="no live widget, only the closing line")
    @argument("--quiet", action="store_true", help="not even the closing line when all went well")
    @argument("--name", help="bind the cell's RunReport to this name")
    @line_cell_magic
    def guarded_loader(self, line: str, cell: str | None = None) -> None:
        """Run a cell under the strict guard: no DataLoader worker that it starts outlives it.

        The cell runs as if the magic were not there. At its end, however it ends, all workers of the
        loaders that it started are gone, with everything that they started themselves. The closing
        line says what happened, e.g.::

            loaderguard: 1 loader, 4 workers · 1,250 batches in 31.2 s (40.1/s) ·
            62 % of it waiting for data · peak 1.9 GB · 0 workers left

        Examples::

            %%guarded_loader
            for batch in loader:
                train(batch)

            %%guarded_loader --grace 2 --name report
            train(loader)

            %%guarded_loader --stall 10 --on-stall raise
            train(loader)

            %%guarded_loader --retry 3 --skip 10 --stall 60 --on-stall retry --name report
            train(loader)

        A batch that does not come within `--stall` seconds is a stall: a card in the cell's output names the
        late worker, the sample that it is on, what it is doing, and the line of code. Only time in which
        the loop waits for data counts.

        With `--retry` an epoch outlives its workers: for a dataset with `__getitem__`, batches and their order are
        those of an undisturbed run. With `--skip` a sample that raises, or that ends or hangs one worker after the
        other, is left out of its batch; `report.skipped` lists them, and `report.save_quarantine(FILE)` keeps
        them for `--quarantine FILE` of a later run.

        As a line, `%guarded_loader` guards the rest of its cell.
        """
        if cell is not None:  # called by other code, not typed as a cell
            self.shell.run_cell(f"%%guarded_loader {line}\n{cell}").raise_error()
            return
        try:
            options = self._parse(line)
            self._extension.begin_run(options)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - see NOTE [ Fail open ] in seam.py
            say("this cell is guarded as a plain one", error)

    def _parse(self, line: str) -> Any:
        try:
            options = parse_argstring(self.guarded_loader, line)
        except (UsageError, ValueError) as error:
            raise UsageError(f"%%guarded_loader: {error}; %%guarded_loader? shows the options") from None
        if options.name is not None and (not options.name.isidentifier() or keyword.iskeyword(options.name)):
            raise UsageError(f"%%guarded_loader: --name {options.name!r} is not a name")
        options.grace = _seconds("--grace", options.grace)
        options.stall = _seconds("--stall", options.stall, least=0.1)
        options.allowance = _allowance(options)
        return options

    @line_magic
    def loaderguard(self, line: str) -> None:
        """See and stop the DataLoader workers of this kernel.

        %loaderguard [status]
            table of the live loaders and workers
        %loaderguard widget
            the same live, with buttons that stop loaders and show stacks; a table where there are no widgets
        %loaderguard clean [LOADER_OR_PID ...]
            stop all workers, or those of these loaders (names, expressions, or #3 for the number in the
            table); the loaders stay usable. A pid ends that worker alone, at once, and its loader says
            so at its next use. Tells how many stopped, and how.
        %loaderguard stacks [PID ...]
            the Python stack of each worker, or of these; also of one that is stuck in C code
        %loaderguard doctor [LOADER]
            check a loader (a name or an expression): run a few batches of a copy of it, at most 5 s, and
            say what is wrong, with the evidence and a fix. Without a loader, check the machine.
        %loaderguard tune LOADER [--max N] [--seconds S]
            measure how fast a loader is with 0, 1, 2 ... workers, at most N of them and for at most S seconds (25),
            draw the curve and recommend a number. Copies of the loader run; an interrupt gives the result so far.
        %loaderguard report
            where the time of the last guarded cell went: waiting for data or computing, each worker, each
            epoch, the slowest samples
        %loaderguard sweep [--yes] [PID ...]
            list the orphans on this machine, or these: workers of this user whose kernel is dead; with --yes,
            end them and all that they have started. `jupyter loaderguard` does the same in a terminal.

        %loaderguard cluster [CLIENT]
            guard every engine of an ipyparallel client (a name or an expression; without it, the one of this
            notebook; if there is none, the processes that it launches) and show all ranks in one live widget;
            a table where there are no widgets
        %loaderguard cluster stacks|clean|doctor|interrupt [RANK]
            the same for all ranks, or one; it is answered while their cells run
        %loaderguard off
            suspend guarding: loaders work as without the extension
        %loaderguard on
            resume it

        Examples::

            %loaderguard
            %loaderguard clean train_loader
            %loaderguard clean 4711
            %loaderguard stacks
            %loaderguard doctor train_loader
            %loaderguard tune train_loader --max 4 --seconds 10
            %loaderguard sweep --yes
            %loaderguard cluster rc
            %loaderguard cluster stacks 1
        """
        try:
            command, *arguments = shlex.split(line, posix=False) or ["status"]  # quotes belong to an expression
        except ValueError as error:
            raise UsageError(f"%loaderguard: {error}") from None
        commands = {
            "status": self._status,
            "widget": self._widget,
            "clean": self._clean,
            "stacks": self._stacks,
            "doctor": self._doctor,
            "tune": self._tune,
            "report": self._report,
            "sweep": self._sweep,
            "cluster": self._cluster,
            "on": self._on,
            "off": self._off,
        }
        if command not in commands:
            raise UsageError(f"%loaderguard: there is no {command!r}; there is {', '.join(commands)}")
        if arguments and command not in ("clean", "stacks", "doctor", "tune", "sweep", "cluster"):
            raise UsageError(f"%loaderguard {command} takes no argument, but got {' '.join(arguments)!r}")
        try:
            commands[command](arguments)
        except LoaderGuardError as error:
            raise UsageError(f"%loaderguard {command}: {error}") from None

    def _status(self, arguments: list[str]) -> None:
        show_status(registry.snapshot())

    def _widget(self, arguments: list[str]) -> None:
        if can_show(self.shell):
            self._extension.show_widget()
        else:
            show_status(registry.snapshot())

    def _clean(self, arguments: list[str]) -> None:
        if not registry.is_guarding:
            raise LoaderGuardError("loaderguard is off and knows of no loader; %loaderguard on resumes")
        targets = [self._target(argument) for argument in arguments]
        print(text.stop(clean(targets or None)))  # noqa: T201 - the answer to a question

    def _stacks(self, arguments: list[str]) -> None:
        if not registry.is_guarding:
            raise LoaderGuardError("loaderguard is off and knows of no loader; %loaderguard on resumes")
        wrong = [word for word in arguments if not (word.isascii() and word.isdigit())]
        if wrong:
            raise LoaderGuardError(f"{wrong[0]!r} is not the pid of a worker")
        found = {} if arguments else stacks()
        for word in arguments:
            found.update(stacks(int(word)))
        from ..views import html  # not in the first cell

        display({"text/plain": text.stacks(found), "text/html": html.stacks(found)}, raw=True)

    def _doctor(self, arguments: list[str]) -> None:
        loader = self._expression(" ".join(arguments)) if arguments else None
        if arguments and loader is None:
            raise LoaderGuardError(f"{' '.join(arguments)!r} is None, not a loader")
        from ..doctor import examine  # only now: it is not needed to load the extension

        found = examine(loader)
        from ..views import html  # not in the first cell

        display({"text/plain": text.findings(found), "text/html": html.findings(found)}, raw=True)

    def _tune(self, arguments: list[str]) -> None:
        words, options = split_options(arguments, ("--max", "--seconds"))
        if not words:
            raise LoaderGuardError("which loader? %loaderguard tune LOADER [--max N] [--seconds S]")
        most, seconds = options.get("--max"), options.get("--seconds")
        if most is not None and not (most.isascii() and most.isdigit()):
            raise LoaderGuardError(f"--max must be a whole number, not {most!r}")
        loader = self._expression(" ".join(words))
        from ..tuning import tune  # only now: it is not needed to load the extension
        from ..views import curve

        found = tune(
            loader, None if most is None else int(most), _seconds("--seconds", seconds, magic="%loaderguard tune")
        )
        display({"text/plain": curve.result(found), "text/html": curve.result_html(found)}, raw=True)

    def _report(self, arguments: list[str]) -> None:
        report = self._extension.last_report
        if report is None:
            raise LoaderGuardError("no guarded cell has run yet; %%guarded_loader guards one")
        from ..views import timeline

        display({"text/plain": timeline.report(report), "text/html": timeline.report_html(report)}, raw=True)

    def _sweep(self, arguments: list[str]) -> None:
        from .. import census, orphans  # only now: they are not needed to load the extension
        from ..views import census as census_view

        try:
            found = census.take()
        except OSError as error:  # no descriptors left
            raise LoaderGuardError(f"the machine cannot be looked at ({error})") from None
        chosen = orphans.choose(found.orphans, [word for word in arguments if word != "--yes"])
        lines = census_view.notes(found)
        if registry.ledger.problem:
            lines.append(f"loaderguard: other terminals and kernels do not see this one ({registry.ledger.problem}).")
        if not chosen:
            lines.append("loaderguard: no orphans")
        elif "--yes" in arguments:
            lines += census_view.swept(orphans.sweep(chosen))
        else:
            lines += census_view.orphans(chosen, found.taken)
            lines.append("Nothing was ended; %loaderguard sweep --yes ends them.")
        print("\n".join(lines))  # noqa: T201 - the answer to a question

    def _cluster(self, arguments: list[str]) -> None:
        from . import ranks  # only now: it is not needed to load the extension

        ranks.run(self.shell, arguments)

    def _target(self, argument: str) -> Any:
        """Return the pid, the loader's name in the status table, or what an expression means."""
        if argument.isascii() and argument.isdigit():
            return int(argument)
        if argument in [name for record in registry.all() for name in (registry.name(record), f"#{record.loader_id}")]:
            return argument
        target = self._expression(argument)
        if isinstance(target, int):
            raise LoaderGuardError(f"{argument!r} is a number, not a loader; a worker is named by its pid itself")
        return target

    def _expression(self, argument: str) -> Any:
        try:
            return self.shell.ev(argument)
        except Exception as error:  # noqa: BLE001 - any error of the user's expression is told in a line
            raise LoaderGuardError(f"{argument!r} is not a loader here ({type(error).__name__}: {error})") from None

    def _on(self, arguments: list[str]) -> None:
        self._extension.resume()

    def _off(self, arguments: list[str]) -> None:
        self._extension.suspend()


def split_options(arguments: list[str], names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Take options with a value out of the words of a line, wherever they stand."""
    words, options, rest = [], {}, list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in names:
            words.append(name + equals + value)
            continue
        if not equals and not rest:
            raise LoaderGuardError(f"{name} needs a value")
        options[name] = value if equals else rest.pop(0)
    return words, options


def _seconds(name: str, value: str | None, least: float = 0.0, magic: str = "%%guarded_loader") -> float | None:
    if value is None:
        return None
    try:
        return check_seconds(name, float(value), least)
    except ValueError:
        raise UsageError(f"{magic}: {name} must be a number of seconds, not {value!r}") from None
    except LoaderGuardError as error:
        raise UsageError(f"{magic}: {error}") from None


def _allowance(options: Any) -> Allowance:
    try:
        file = options.quarantine and options.quarantine.strip("\"'")
        return make_allowance(_times("--retry", options.retry), _times("--skip", options.skip), file)
    except LoaderGuardError as error:
        raise UsageError(f"%%guarded_loader: {error}") from None


def _times(name: str, value: str | None) -> int | None:
    if value is not None and not (value.isascii() and value.isdigit() and len(value) < 10):
        raise UsageError(f"%%guarded_loader: {name} must be a whole number, not {value!r}")
    return None if value is None else int(value)


def show_status(snapshot: Snapshot) -> None:
    """Show it as a table and as text, in the same display."""
    from ..views import html  # not in the first cell

    display({"text/plain": text.status(snapshot), "text/html": html.status(snapshot)}, raw=True)


def show_closing_line(outcome: str, run: Run, quiet: bool) -> None:
    """Print what a guarded cell did, unless it went well and was asked to be quiet."""
    report = run.report
    if report is not None and not (quiet and outcome == OK and (run.keep or not report.left)):
        print(text.run(report))  # noqa: T201 - asked for by the magic
