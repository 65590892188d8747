"""Run a notebook in a real kernel and print its cells with what they gave: `python notebooks/run.py FILE [--save]`.

Cells that are tagged `interrupt` are interrupted after two seconds, or `interrupt_seconds` of their metadata, as a user
would.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

INTERRUPT_SECONDS = 2.0


class InterruptingClient(NotebookClient):
    """Presses the stop button in cells that ask for it."""

    async def async_execute_cell(self, cell, cell_index, **options):
        if "interrupt" not in cell.metadata.get("tags", []):
            return await super().async_execute_cell(cell, cell_index, **options)
        seconds = cell.metadata.get("interrupt_seconds", INTERRUPT_SECONDS)
        timer = asyncio.get_running_loop().call_later(seconds, self._press_stop)
        try:
            return await super().async_execute_cell(cell, cell_index, **options)
        finally:
            timer.cancel()

    def _press_stop(self) -> None:
        self._pressed = asyncio.ensure_future(self.km.interrupt_kernel())


ROOT = Path(__file__).parents[1]
_LIBRARY = re.compile(r"(?:/[\w.+-]+)+/(?:site-packages|lib/python3\.\d+)/|/tmp/(?:[\w.-]+/)*")


def _without_places(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Leave out where this machine keeps its files."""
    text = _LIBRARY.sub("", json.dumps(output).replace(f"{ROOT}/", ""))
    return nbformat.from_dict(json.loads(text))


def execute(path: Path) -> nbformat.NotebookNode:
    """Run all cells; those tagged `raises-exception` may fail."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    options = {"timeout": 300, "record_timing": False, "extra_arguments": ["--log-level=40"]}
    InterruptingClient(notebook, resources=resources, **options).execute()
    return notebook


def show(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            print(f"\n{cell.source}\n")
            continue
        print("\n".join(f"    {line}" for line in cell.source.splitlines()))
        for output in cell.outputs:
            print(_text(output).rstrip())
        print()


def _text(output: nbformat.NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return output.data.get("text/plain", "")


def main() -> None:
    path = Path(sys.argv[1])
    notebook = execute(path)
    show(notebook)
    if "--save" in sys.argv:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [_without_places(output) for output in cell.outputs]
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
