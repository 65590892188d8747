"""Requests of a kernel: cells that end without a word, and what an engine of ipyparallel runs besides cells."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from ..seam import rim, shield
from .cells import ERROR, INTERRUPT, OK, Cells


def follow_ends(kernel: Any, cells: Cells) -> Callable[[], None]:
    """Look after each request whether IPython has left its cell without post_run_cell, and return the undo.

    It does so if a second interrupt comes when it is done with the cell's code; ipykernel then says
    "KeyboardInterrupt caught in kernel". The hook comes before SIGINT is ignored again: one more hurries the stop.
    """
    original = getattr(kernel, "post_handler_hook", None)
    if original is None:
        return lambda: None

    @rim
    @functools.wraps(original)
    def post_handler_hook() -> None:
        with contextlib.suppress(KeyboardInterrupt), shield("a cell that ended without a word is not cleared away"):
            cells.end_abandoned()  # an interrupt was meant for the cell, which has ended
        original()

    kernel.post_handler_hook = post_handler_hook

    def undo() -> None:
        if vars(kernel).get("post_handler_hook") is post_handler_hook:
            del kernel.post_handler_hook

    return undo


def follow_requests(kernel: Any, cells: Cells) -> Callable[[], None]:
    """Let `view.apply` and silent `view.execute` of an engine end like plain cells, and return the undo."""
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
