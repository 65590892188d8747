"""Which setting is recommended, and why: a sentence with figures, and the line of code to paste."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..lending.serial import Serial
from ..timing import TuneRow
from ..views import text
from .limits import Limit

LEAST_MARGIN, MOST_MARGIN = 0.02, 0.05


def margin_of(rows: Sequence[TuneRow]) -> float:
    """Return which differences are not taken for one: twice the noise of the fastest ones, within bounds."""
    top = max(row.batches_per_second for row in rows)
    noise = max(row.noise for row in rows if row.batches_per_second >= 0.8 * top)
    return min(MOST_MARGIN, max(LEAST_MARGIN, 2 * noise))


def choose(rows: Sequence[TuneRow], margin: float) -> TuneRow:
    """Return the row with the fewest workers, and the least loaded ahead, that is as fast as the fastest."""
    top = max(row.batches_per_second for row in rows)
    close = [row for row in rows if row.batches_per_second >= (1 - margin) * top]
    return min(close, key=lambda row: row.setting)


def explain(
    rows: Sequence[TuneRow], best: TuneRow, limit: Limit, serial: Serial | None, has_step: bool, is_complete: bool
) -> str:
    """Say in a sentence what is recommended, and why."""
    is_not = f"were not {'tried' if is_complete else 'measured'}"
    unit = "steps/s" if has_step else "batches/s"
    speed = f"{text.rate(best.batches_per_second)} {unit}"
    others = [row for row in rows if row.num_workers > best.num_workers]
    if best.num_workers == 0:
        return _explain_none(best, others, f"{limit.why}, so workers {is_not}", serial, speed)
    parts = [f"num_workers={best.num_workers}: {speed}"]
    plain = next((row for row in rows if row.num_workers == 0), None)
    if plain is not None and plain.batches_per_second:
        parts[0] += f", {best.batches_per_second / plain.batches_per_second:.1f} times as fast as without workers"
    if serial is not None:
        parts.append(f"more do not help, {_blame(serial)}")
    elif others:
        parts.append(f"more is no faster ({_table(others)})")
    else:
        parts.append(f"{limit.why}, so more {is_not}")
    return "; ".join(parts)


def _explain_none(best: TuneRow, others: list[TuneRow], end: str, serial: Serial | None, speed: str) -> str:
    if not others:
        return f"num_workers=0: {speed}; {end}"
    why = _blame(serial) if serial is not None else f"{_table(others)} against {speed}"
    return f"num_workers=0: workers do not help, {why}" + (f"; {speed}" if serial is not None else "")


def _blame(serial: Serial) -> str:
    return (
        f"they wait for {serial.lock}: in {serial.looks} looks at {serial.workers} workers, "
        f"{serial.waiting:.1f} of them waited for it on average"
    )


def _table(rows: Sequence[TuneRow]) -> str:
    shown = {row.num_workers: row for row in sorted(rows, key=lambda row: row.batches_per_second)}
    return ", ".join(f"{text.rate(shown[number].batches_per_second)} with {number}" for number in sorted(shown)[:4])


def code_line(loader: Any, name: str | None, settings: dict[str, Any]) -> str:
    """Return the line that makes the same loader with other settings."""
    whole = name or "loader"
    arguments = [f"{whole}.dataset", *_order(loader, whole)]
    default = sys.modules["torch.utils.data"]
    usual = (default.default_collate, sys.modules["torch.utils.data._utils"].collate.default_convert)
    if loader.collate_fn not in usual:
        arguments.append(f"collate_fn={whole}.collate_fn")
    for option in ("worker_init_fn", "generator", "multiprocessing_context"):
        if getattr(loader, option) is not None and (option != "multiprocessing_context" or settings["num_workers"]):
            arguments.append(f"{option}={whole}.{option}")
    if loader.pin_memory:
        arguments.append("pin_memory=True")
    if loader.timeout and settings["num_workers"]:
        arguments.append(f"timeout={loader.timeout:g}")
    if not getattr(loader, "in_order", True):  # torch has it since 2.6
        arguments.append("in_order=False")
    arguments += [f"{option}={value}" for option, value in settings.items() if not _is_default(option, value)]
    kind = "DataLoader" if type(loader) is default.DataLoader else f"type({whole})"  # a name that is there
    return f"{whole} = {kind}({', '.join(arguments)})"


def _is_default(option: str, value: Any) -> bool:
    return (option, value) in (("prefetch_factor", 2), ("persistent_workers", False))


def _order(loader: Any, whole: str) -> list[str]:
    """Return the arguments that say which samples come in which order."""
    data = sys.modules["torch.utils.data"]
    if isinstance(loader.dataset, data.IterableDataset):
        return [f"batch_size={loader.batch_size}", *_drop_last(loader)]
    has_own = loader.batch_size is None or type(loader.batch_sampler) is not data.BatchSampler
    if loader.batch_sampler is not None and has_own:
        return [f"batch_sampler={whole}.batch_sampler"]
    return [f"batch_size={loader.batch_size}", *_sampler(loader, whole, data), *_drop_last(loader)]


def _sampler(loader: Any, whole: str, data: Any) -> list[str]:
    """Return the argument that makes the same sampler: none, or `shuffle`, if torch made it by itself."""
    sampler = loader.sampler
    if getattr(sampler, "data_source", None) is loader.dataset:
        if type(sampler) is data.SequentialSampler:
            return []
        is_plain = type(sampler) is data.RandomSampler and not (sampler.replacement or sampler._num_samples)
        if is_plain and sampler.generator is loader.generator:
            return ["shuffle=True"]
    return [f"sampler={whole}.sampler"]


def _drop_last(loader: Any) -> list[str]:
    return ["drop_last=True"] if loader.drop_last else []
