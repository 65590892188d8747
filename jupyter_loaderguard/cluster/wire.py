"""Private names of ipyparallel (9.2) and of its engines: messages while the engine is busy. Nothing else knows them.

NOTE [ Two ways ]
To the notebook, an engine sends its reports as `status` messages in answer to the request that attached it. They
arrive while a cell runs there, hold nothing but JSON, and are neither logged nor stored by the controller, as
`data_message`s are. To the engine, questions go through the control channel, which ipykernel serves in a thread of
its own: so they are answered while a cell runs, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

FIELD = "loaderguard"
QUESTION, ANSWER = "loaderguard_request", "loaderguard_reply"

# -- in the notebook ------------------------------------------------------------------------------


def is_client(thing: Any) -> bool:
    """Tell whether something is a client of ipyparallel."""
    import ipyparallel  # type: ignore[import-untyped] # only when it is used

    return isinstance(thing, ipyparallel.Client)


def engines(client: Any) -> dict[int, str]:
    """Return the engines that are there, with what makes each one unique: numbers are given again."""
    return {number: client._engines.get(number, "") for number in client.ids}


def is_closed(client: Any) -> bool:
    """Tell whether a client is of no use any more."""
    return bool(client._closed)


def listen(result: Any, begin: Callable[[], None], hear: Callable[[str], None]) -> None:
    """Hear that an engine begins with a request, and what it reports in answer to it."""
    (future,) = result._children

    def on_message(message: dict[str, Any]) -> None:
        begin()
        report = message["content"].get(FIELD)
        if isinstance(report, str):
            hear(report)

    future.iopub_callbacks.append(on_message)


def reason(error: BaseException) -> tuple[str, str]:
    """Return the kind and the text of what a request ended with."""
    kind = getattr(error, "ename", None) or type(error).__name__
    return str(kind), str(getattr(error, "evalue", None) or error)


def keep(client: Any, result: Any) -> None:
    """Have the client go on listening: it forgets a request that has been done, or when it is told to purge."""
    (future,) = result._children
    if future.done() and future.output.done():
        client._futures[future.msg_id] = future
        client.metadata[future.msg_id]  # makes an entry, without which a status is ignored


def forget(client: Any, result: Any) -> None:
    """Undo `keep`."""
    for message in result.msg_ids:
        client._futures.pop(message, None)
        client.metadata.pop(message, None)


def ask(client: Any, numbers: Iterable[int], content: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
    """Ask engines something, and return the answers that came in time."""
    there = client._engines
    sent = {
        number: client._send(client._control_stream, QUESTION, content=content, ident=there[number].encode())
        for number in numbers
        if number in there
    }
    deadline = time.monotonic() + seconds
    answers = {}
    for number, future in sent.items():
        if seconds and future.wait(max(0.0, deadline - time.monotonic())):
            answers[number] = future.result()["content"]
    return answers


def has_hub(client: Any, seconds: float) -> bool:
    """Tell whether the controller answers."""
    asked = client._send(client._query_stream, "queue_request", content={"targets": [], "verbose": False})
    return bool(asked.wait(seconds))


def busy_since(client: Any, moment: float, ours: set[str], seconds: float) -> list[int]:
    """Return the engines that have not answered a request that was sent after that moment, and not by us."""
    late = {one for one in list(client.outstanding) if one not in ours and _sent_at(client, one) >= moment}
    sent = {number: client._outstanding_dict.get(unique, set()) & late for number, unique in engines(client).items()}
    balanced = late.difference(*sent.values())
    tasks = _tasks(client, seconds) if balanced else {}
    return [number for number, own in sent.items() if own or balanced.intersection(tasks.get(number, ()))]


def _tasks(client: Any, seconds: float) -> dict[int, list[str]]:
    """Ask the controller which engine runs what a load-balanced view sent: only that knows."""
    content = {"targets": list(client.ids), "verbose": True}
    asked = client._send(client._query_stream, "queue_request", content=content)
    found = asked.result()["content"] if asked.wait(seconds) else {}
    return {int(key): one["tasks"] for key, one in found.items() if key.isdigit()}


def _sent_at(client: Any, message: str) -> float:
    sent = (client.metadata.get(message) or {}).get("submitted")
    return float(sent.timestamp()) if sent is not None else 0.0


# -- in the engine --------------------------------------------------------------------------------


def engine_number(kernel: Any) -> int:
    """Return the number of this engine."""
    return int(kernel.engine_id)


def reporter_of(kernel: Any) -> Callable[[str], None]:
    """Return what sends a report to the client whose request is being served."""
    parent = dict(kernel.get_parent("shell")["header"])
    topic = kernel._topic("status")

    def send(report: str) -> None:
        content = {"execution_state": "busy", FIELD: report}
        kernel.session.send(kernel.iopub_socket, "status", content, parent=parent, ident=topic)

    return send


def serve(kernel: Any, answer: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]) -> None:
    """Have questions answered; `answer` is given the question and what sends the answer, from any thread."""

    def on_question(stream: Any, ident: Any, message: dict[str, Any]) -> None:
        def send(content: dict[str, Any]) -> None:
            kernel.session.send(stream, ANSWER, {"status": "ok", **content}, parent=message, ident=ident)

        answer(message["content"], lambda content: stream.io_loop.add_callback(send, content))

    kernel.control_handlers[QUESTION] = on_question


def serve_no_longer(kernel: Any) -> None:
    """Undo `serve`."""
    kernel.control_handlers.pop(QUESTION, None)
