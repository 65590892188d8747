"""`jupyter loaderguard`: the loader workers of this user on this machine, without a kernel.

Imports neither torch nor IPython nor ipywidgets. Exit code 0, or 1 with one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TextIO

from . import census as censuses
from . import ledger, orphans
from ._version import __version__
from .errors import LoaderGuardError
from .population import Census
from .views import census as view

WATCH_SECONDS = 2.0
CLEAR_SCREEN = "\x1b[H\x1b[2J\x1b[3J"
LARGEST_PID = (1 << 31) - 1
EXAMPLES = """\
examples:
  jupyter loaderguard ps              which loader workers are alive, whose they are, which are orphans
  jupyter loaderguard ps --watch      the same, again and again
  jupyter loaderguard ps --json | jq '.orphans[].pid'
  jupyter loaderguard sweep           list the orphans, and ask whether to end them
  jupyter loaderguard sweep --yes     end them; with pids, only these
  jupyter loaderguard stacks 4711     where a worker is, also one that is stuck in C code
  jupyter loaderguard doctor          is there anything wrong with this machine

An orphan is a DataLoader worker whose kernel is dead. It is known by what its kernel had written down ("ledger") or,
if that was never under guard, by what torch does to every worker ("marks"); never by its name alone. Only processes of
this user are listed and ended. The exit code is 0, or 1 with one line on standard error."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        """Refuse them."""
        raise LoaderGuardError(f"{message}; {self.prog} --help shows what there is")


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says."""
    _prepare_streams()
    try:
        return _run(arguments)
    except LoaderGuardError as error:
        return _fail(str(error))
    except BrokenPipeError:  # `| head` has seen enough
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted")
    except OSError as error:
        return _fail(f"{type(error).__name__}: {error}")


def _run(arguments: list[str] | None) -> int:
    try:
        options = make_parser().parse_args(arguments)
        code: int = options.run(options)
    except SystemExit:  # after --help and --version
        code = 0
    _say("", end="")  # what is printed by others is written here, where its failure is seen
    return code


def _prepare_streams() -> None:
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed by who started this
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - for good
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show everything


def _fail(line: str) -> int:
    try:
        print(f"loaderguard: {' '.join(line.split())}", file=sys.stderr, flush=True)  # noqa: T201 - this is a command
    except OSError:  # nobody can be told
        _silence(sys.stderr)
    return 1


def _say(text: str, is_needed: bool = True, end: str = "\n") -> None:
    """Print something; what is not needed may be said to a reader that has left."""
    try:
        print(text, end=end, flush=True)  # noqa: T201 - this is a command
    except OSError as error:
        _silence(sys.stdout)
        if is_needed or not isinstance(error, BrokenPipeError):
            raise


def _silence(stream: TextIO) -> None:
    """Let what waits to be written, and all that comes, go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def make_parser() -> Parser:
    """Return the parser of all commands, each with its own help."""
    parser = Parser(
        prog="jupyter loaderguard",
        description="See and end the DataLoader workers of this user on this machine. No kernel is needed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(run=lambda options: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    ps = _add(commands, "ps", run_ps, "list kernels under guard, their loaders and workers, and orphans")
    ps.add_argument("--json", action="store_true", help="as JSON; docs/command_line.md says what is in it")
    ps.add_argument("--watch", action="store_true", help=f"again every {WATCH_SECONDS:g} s, until Ctrl-C")
    sweep = _add(commands, "sweep", run_sweep, "end orphans, with all that they have started")
    sweep.add_argument("--yes", action="store_true", help="without a question")
    sweep.add_argument("pids", metavar="PID", nargs="*", help="only these orphans")
    stacks = _add(commands, "stacks", run_stacks, "show the Python stack of a worker that was started under guard")
    stacks.add_argument("pid", metavar="PID", help="the worker's pid, as ps shows it")
    _add(commands, "doctor", run_doctor, "check this machine: shared memory, open files, memory")
    return parser


def _add(
    commands: argparse._SubParsersAction[Parser], name: str, run: Callable[[argparse.Namespace], int], does: str
) -> Parser:
    parser: Parser = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
    parser.set_defaults(run=run)
    return parser


def _help(parser: Parser) -> int:
    parser.print_help()
    return 0


def run_ps(options: argparse.Namespace) -> int:
    """List who is alive; with `--watch` until interrupted."""
    try:
        while True:
            found = censuses.take()
            _show(found, options)
            if not options.watch:
                return 0
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        if options.watch:
            return 0
        raise


def _show(found: Census, options: argparse.Namespace) -> None:
    if options.json:
        _say(found.to_json())
        return
    if options.watch and sys.stdout.isatty():
        sys.stdout.write(CLEAR_SCREEN)
    _say("\n".join([view.census(found), *view.notes(found)]))


def run_sweep(options: argparse.Namespace) -> int:
    """List the orphans, and end them if that is wanted."""
    found = censuses.take()
    chosen = orphans.choose(found.orphans, options.pids)
    listed = view.orphans(chosen, found.taken) if chosen else ["loaderguard: no orphans"]
    _say("\n".join([*listed, *view.notes(found)]), is_needed=not options.yes)
    if not chosen:
        return 0
    if not options.yes and not _is_agreed(len(chosen)):
        return 0
    report = orphans.sweep(chosen)
    _say("\n".join(view.swept(report)), is_needed=False)
    left = [one.pid for one in report if one.how in ("spared", "unkillable")]
    if left:
        raise LoaderGuardError(f"not ended: {', '.join(map(str, left))}")
    ledger.read()  # removes what dead kernels have left there
    return 0


def _is_agreed(number: int) -> bool:
    """Ask at a terminal; elsewhere say how to agree."""
    if not sys.stdin.isatty():
        _say("Nothing was ended; jupyter loaderguard sweep --yes ends them.")
        return False
    try:
        _say(f"End {'it' if number == 1 else f'these {number}'}? [y/N] ", end="")
        answer = input()
    except EOFError:
        answer = ""
    return answer.strip().lower() in ("y", "yes")


def run_stacks(options: argparse.Namespace) -> int:
    """Show where a worker is."""
    from .traces import ask_stranger
    from .views import text

    word = options.pid
    if not (word.isascii() and word.isdigit() and 0 < int(word[:20]) <= LARGEST_PID) or int(word) == os.getpid():
        raise LoaderGuardError(f"{word[:40]!r} is not the pid of a worker")
    _say(text.stacks({int(word): ask_stranger(int(word))}))
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Check the machine."""
    from .doctor import examine
    from .views import text

    _say(text.findings(examine()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
