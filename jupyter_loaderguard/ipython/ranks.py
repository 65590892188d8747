"""`%loaderguard cluster`: all ranks in one widget or table, and questions to all of them or to one."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from ..cluster import current, follow
from ..cluster.follow import Cluster
from ..errors import LoaderGuardError

_ACTS = ("stacks", "clean", "doctor", "interrupt")


def run(shell: InteractiveShell, words: list[str]) -> None:
    """Carry out what stands behind `%loaderguard cluster`."""
    is_act = words[:1] and words[0] in _ACTS and not _is_client_class(type(shell.user_ns.get(words[0])))
    act = words[0] if is_act else None
    if act is None:
        display(_follow(shell, " ".join(words)))
        return
    ranks = current() or _follow(shell, "")
    acts = {
        "stacks": ranks.stacks_text,
        "clean": ranks.clean_text,
        "doctor": ranks.doctor_text,
        "interrupt": ranks.interrupt,
    }
    print(acts[act](_rank(words[1:])))  # noqa: T201 - the answer to a question


def _rank(words: list[str]) -> int | None:
    if not words:
        return None
    if len(words) > 1 or not (words[0].isascii() and words[0].isdigit()):
        raise LoaderGuardError(f"{' '.join(words)!r} is not the number of a rank")
    return int(words[0])


def _follow(shell: InteractiveShell, expression: str) -> Cluster:
    """Return the cluster of a client; without an expression, of the only one in the notebook.

    If there is none, it has the processes that the notebook launches.
    """
    if expression:
        try:
            client = shell.ev(expression)
        except Exception as error:  # noqa: BLE001 - any error of the user's expression is told in a line
            why = f"{type(error).__name__}: {error}"
            raise LoaderGuardError(f"{expression!r} is not an ipyparallel client here ({why})") from None
        if client is None:
            raise LoaderGuardError(f"{expression!r} is None, not an ipyparallel client")
        return follow(client)
    known = current()
    if known is not None and known.client is not None:
        return known
    found = _clients(shell)
    if len(found) > 1:
        raise LoaderGuardError(
            "there is more than one ipyparallel client in this notebook; name it: %loaderguard cluster CLIENT"
        )
    return follow(found[0] if found else None)


def _clients(shell: InteractiveShell) -> list[Any]:
    """Return the clients that have a name in the notebook; ipyparallel is not imported for it."""
    values = {id(value): value for name, value in list(shell.user_ns.items()) if not name.startswith("_")}
    return [one for one in values.values() if _is_client_class(type(one))]


def _is_client_class(kind: type) -> bool:
    return any(one.__name__ == "Client" and one.__module__.startswith("ipyparallel.") for one in kind.__mro__)
