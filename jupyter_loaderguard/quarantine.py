"""Samples that are left out: told apart by their keys, and kept as JSON from one run to the next."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import LoaderGuardError
from .samples import key_text

FORMAT = "loaderguard quarantine"
REASONS = {"raised": "it raised", "killed": "it ended its worker", "hung": "it did not return"}
_LONGEST_REPR = 1000
_LARGEST = 64_000_000


@dataclass(frozen=True)
class SkippedSample:
    """A sample that was left out.

    >>> sample = SkippedSample(5, 0, "raised", "ValueError: corrupt", "5", "loader", "Images", 100)
    >>> sample.sentence()
    'sample 5 of loader was left out: it raised (ValueError: corrupt)'
    """

    index: Any
    """Its key, as the sampler gave it."""
    worker_id: int | None
    """Which worker had it; None if the kernel itself loads the samples."""
    reason: str
    """raised, killed (its worker died on it) or hung."""
    error: str
    """What was raised, or what became of the worker."""
    sample: str = ""
    """The key as a short text."""
    loader: str = ""
    dataset: str = ""
    dataset_length: int | None = None

    def sentence(self) -> str:
        """Say in a sentence what was left out, and why."""
        return f"sample {self.sample} of {self.loader} was left out: {REASONS[self.reason]} ({self.error})"


class LeftOut:
    """The keys of one dataset's samples that nobody is to touch."""

    def __init__(self) -> None:
        self._keys: set[Any] = set()
        self._has_texts = False
        """Whether there are keys that could not be kept as they are."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Any) -> None:
        """Leave this sample out."""
        known = identity(key)
        self._keys.add(known)
        self._has_texts |= isinstance(known, Text)

    def __contains__(self, key: Any) -> bool:
        return identity(key) in self._keys or (self._has_texts and Text(_text(key)) in self._keys)

    def without(self, keys: Any, is_batched: bool) -> Any:
        """Return the keys of a batch that remain; None if that is none of them."""
        if not is_batched:
            return None if keys in self else keys
        if type(keys) not in (list, tuple):
            return keys  # one key for a whole batch, or a tensor of them: not ours to take apart
        rest = [key for key in keys if key not in self]
        if not rest and keys:
            return None
        return keys if len(rest) == len(keys) else rest


@dataclass(frozen=True)
class Text:
    """A key that is known by its text alone."""

    text: str

    def __repr__(self) -> str:
        return self.text


def identity(key: Any) -> Any:
    """Return what makes keys the same: 5 and numpy's 5 are, two lists or tensors with the same content too."""
    try:
        return operator.index(key)
    except Exception:  # noqa: BLE001 - no whole number; the user's class may raise anything
        pass
    try:
        content = key.tolist() if hasattr(key, "tolist") else key  # of tensors, whose hash is their place
        is_by_content = hash(content) != object.__hash__(content)
    except Exception:  # noqa: BLE001 - as above
        return Text(_text(key))
    return content if is_by_content else Text(_text(key))


def _text(key: Any) -> str:
    try:
        return repr(key)[:_LONGEST_REPR]
    except Exception:  # noqa: BLE001 - the user's class
        return key_text(key)


def save(samples: Iterable[SkippedSample], path: Any) -> None:
    """Write samples as JSON; the file is complete or not there."""
    rows = [{**vars(sample), "index": encode(sample.index)} for sample in samples]
    text = json.dumps({"format": FORMAT, "version": 1, "samples": rows}, indent=1)
    path = os.path.abspath(os.fspath(path))
    import tempfile  # seldom needed, and not in the first cell

    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(source: Any) -> tuple[SkippedSample, ...]:
    """Return the samples of a file that `save` wrote, of a RunReport, or of a list of samples."""
    source = getattr(source, "skipped", source)
    if isinstance(source, (str, os.PathLike)):
        return _read(os.fspath(source))
    try:
        samples = tuple(source)
    except TypeError:
        samples = (None,)
    if not all(isinstance(sample, SkippedSample) for sample in samples):
        raise LoaderGuardError(
            f"quarantine must be a file that save_quarantine() wrote, a RunReport or its `skipped`, not {source!r:.80}"
        )
    return samples


def _read(path: str) -> tuple[SkippedSample, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ValueError("it is too large")
        data = json.loads(text)
        if data["format"] != FORMAT or data["version"] != 1:
            raise ValueError("it has another format")
        return tuple(_sample(row) for row in data["samples"])
    except OSError as error:
        raise LoaderGuardError(f"the quarantine {path!r} cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise LoaderGuardError(f"{path!r} is not a quarantine that save_quarantine() wrote ({why})") from None


def _sample(row: dict[str, Any]) -> SkippedSample:
    sample = SkippedSample(**{**row, "index": decode(row["index"])})
    texts = (sample.error, sample.sample, sample.loader, sample.dataset)
    if sample.reason not in REASONS or not all(isinstance(text, str) for text in texts):
        raise ValueError("a sample in it is not as it was written")
    return sample


def encode(key: Any) -> Any:
    """Return a key as something that JSON can hold: `decode` returns it, or its text."""
    if _is_plain(key):
        return {"tuple": [encode(part) for part in key]} if type(key) is tuple else key
    known = identity(key)
    return known if type(known) is int else {"text": _text(key)}


def _is_plain(key: Any) -> bool:
    """Tell whether a key can be written as JSON, and read back as it was."""
    if type(key) in (tuple, list):
        return all(_is_plain(part) for part in key) and (type(key) is tuple or not any(type(p) is tuple for p in key))
    return key is None or type(key) in (bool, int, float, str)


def decode(data: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(data, dict):
        return tuple(decode(part) for part in data["tuple"]) if "tuple" in data else Text(str(data["text"]))
    return data
