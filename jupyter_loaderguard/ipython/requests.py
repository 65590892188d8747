"""What an engine of ipyparallel runs besides cells: `view.apply` and silent `view.execute` end like plain cells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .cells import ERROR, INTERRUPT, OK, Cells


def follow_requests(kernel: Any, cells: Cells) -> Callable[[], None]:
    """Follow these requests of an engine from now on, and return the undo; of other kernels there are none."""
    if not hasattr(kernel, "engine_id"):
        return lambda: None
    apply, execute = kernel.do_apply, kernel.do_execute

    @functools.wraps(apply)
    def do_apply(*arguments: Any, **options: Any) -> Any:
        with cells.request() as note:
            reply = apply(*arguments, **options)
            note(_outcome(reply[0]))
            return reply

    @functools.wraps(execute)
    async def do_execute(code: str, silent: bool, *arguments: Any, **options: Any) -> Any:
        if not silent:  # a cell
            return await execute(code, silent, *arguments, **options)
        with cells.request() as note:
            reply = await execute(code, silent, *arguments, **options)
            note(_outcome(reply))
            return reply

    kernel.do_apply, kernel.do_execute = do_apply, do_execute

    def undo() -> None:
        if kernel.do_apply is do_apply and kernel.do_execute is do_execute:
            del kernel.do_apply, kernel.do_execute

    return undo


def _outcome(reply: dict[str, Any]) -> str:
    if reply.get("status") != "error":
        return OK
    return INTERRUPT if reply.get("ename") in ("KeyboardInterrupt", "CancelledError") else ERROR
