"""LG107: a batch is a part of the dataset, so that in-place changes of the batch alter the data.

Batches that are put together by the default collate_fn are copies. Those of batch_size=None, and of a collate_fn that
hands views on, may not be. Measured without workers: whether a tensor or array of a batch lies within the memory
of one that the dataset holds, and may be written to. With workers a batch is copied on its way, unless the
dataset's tensor is in shared memory: then the batch and the tensor are parts of one file of /dev/shm. A view
of another tensor takes that whole tensor of the worker into shared memory; two batches are then parts of one
file, and of persistent workers the next epoch shows the changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...lending.batch import extent_of, is_tensor, tensors_in, tensors_reached
from ...model import Finding
from ...views import text
from ..check import Check
from ..pages import Mapping, mapping_at, mappings
from ..trial import Trial

File = tuple[str, int]
_MOST_PARTS = 64


class AliasesCheck(Check):
    """See the docstring of this file."""

    code = "LG107"
    looks_for = "batches that are part of the dataset"

    def __init__(self, subject: Any) -> None:
        super().__init__(subject)
        self._shared: dict[File, str] = {}
        self._sizes: dict[int, str] = {}
        self._seen: dict[File, str] = {}
        self._found: tuple[str, str] | None = None
        self._is_workers_own = False

    def before(self) -> None:
        """Note which tensors of the dataset could be met again in a batch."""
        if not self.subject.workers:
            return
        found = mappings()
        for path, thing in tensors_reached(self.subject.roots):
            extent = extent_of(thing) if is_tensor(thing) else None
            if extent is None:
                continue
            mapping = mapping_at(found, extent.start)
            if extent.is_shared and mapping is not None:
                self._shared.setdefault(mapping.file, path)
            elif not extent.is_shared:
                self._sizes.setdefault(extent.storage, path)

    def see(self, batch: Any) -> None:
        """Look which files of shared memory a batch from a worker lies in."""
        if self._found is not None or not (self._shared or self._sizes):
            return
        parts = [(path, extent_of(one), one) for path, one in list(tensors_in(batch))[:_MOST_PARTS] if is_tensor(one)]
        found, files = mappings(), {}
        for path, extent, part in parts:
            mapping = mapping_at(found, extent.start) if extent is not None and extent.is_shared else None
            if extent is None or mapping is None:
                continue
            files[mapping.file] = path
            is_view = extent.storage > part.nbytes and extent.storage in self._sizes
            self._compare(path, mapping, self._sizes[extent.storage] if is_view else None)
        self._seen.update(files)

    def _compare(self, path: str, mapping: Mapping, same_size: str | None) -> None:
        if mapping.file in self._shared:
            self._found = path, self._shared[mapping.file]
        elif same_size is not None and mapping.file in self._seen and self.subject.is_persistent:
            self._found, self._is_workers_own = (path, same_size), True

    def findings(self, trial: Trial) -> Iterable[Finding]:
        """Return which part of a batch is which part of the dataset."""
        found = self._found or next(iter(trial.aliases), None)
        if found is None:
            return []
        part, own = found
        fix = "Return a copy from __getitem__, .clone() of a tensor or .copy() of an array; or copy in collate_fn."
        if self._is_workers_own:
            evidence = (
                f"{part} of two batches lies in one piece of shared memory, as large as {own}, that the worker holds "
                "too. Workers are persistent: after an in-place change the next epoch brings changed data."
            )
            return self.finding("warning", f"{part} is a view of the worker's {own}", evidence, fix)
        how = "one file of shared memory" if self._found else "the same memory"
        count = f" of {text.count(trial.batches, 'batch', 'batches')}" if trial.batches else ""
        evidence = f"{part}{count} and {own} lie in {how}: an in-place change of the batch changes the dataset."
        return self.finding("warning", f"{part} is a part of {own}, not a copy", evidence, fix)


def find_aliases(batch: Any, roots: dict[str, Any]) -> list[tuple[str, str]]:
    """Return which tensors and arrays of a batch lie in memory of these objects, where it can be written to."""
    owned = [(path, extent) for path, one in tensors_reached(roots) if (extent := extent_of(one)) is not None]
    found, maps = [], mappings() if owned else []
    for part, one in list(tensors_in(batch))[:_MOST_PARTS]:
        extent = extent_of(one)
        if extent is None or not extent.is_writable:
            continue
        own = next((path for path, other in owned if extent.meets(other)), None)
        mapping = mapping_at(maps, extent.start)
        if own is not None and (mapping is None or mapping.is_writable):
            found.append((part, own))
    return found
