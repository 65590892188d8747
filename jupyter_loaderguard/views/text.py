"""Plain text, for terminals and as the text half of every display."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from ..model import (
    Card,
    Event,
    Finding,
    Findings,
    Frame,
    LateWorker,
    LoaderState,
    MachineState,
    RunReport,
    Snapshot,
    Stall,
    StopReport,
    WorkerState,
)

WORKER_COLUMNS = ("worker", "pid", "state", "sample", "for", "memory", "age")
WORD_COLUMNS = (2, 3)
"""Those with words, which begin at the left; figures end at the right."""
_LONGEST_NAME = 60
_LONGEST_LINE = 600


def status(snapshot: Snapshot) -> str:
    """Draw the table of live loaders and workers."""
    lines = [] if snapshot.guarding else ["loaderguard is off; %loaderguard on resumes."]
    for loader in snapshot.loaders:
        lines.append(f"{clip(loader.name)}: {'  ·  '.join(facts(loader))}")
        lines += [f"  {line}" for line in _table(WORKER_COLUMNS, worker_rows(loader, snapshot.taken))]
    lines.append(summary(snapshot))
    return "\n".join(lines)


def facts(loader: LoaderState) -> list[str]:
    """Return what there is to say about a loader, a few words each."""
    dataset = clip(loader.dataset)
    if loader.dataset_length is not None:
        dataset += f" of {count(loader.dataset_length, 'sample')}"
    words = [dataset, loader.start_method or "no workers"]
    if loader.persistent:
        words.append("persistent")
    if loader.cell is not None:
        words.append(f"cell {loader.cell}")
    if loader.capped:
        words.append(f"threads in workers: {', '.join(loader.capped)}")
    words += [batches(loader), f"waited {seconds(loader.wait_seconds)}", loader.activity]
    return words


def batches(loader: LoaderState) -> str:
    """Say how many batches came, and of how many."""
    done, total = loader.batches - loader.batches_before, loader.batches_total
    if total is None or done > total:
        return count(loader.batches, "batch", "batches")
    epochs = f" ({loader.batches:,} in all epochs)" if loader.batches_before else ""
    return f"{done:,} of {count(total, 'batch', 'batches')}{epochs}"


def worker_rows(loader: LoaderState, now: float) -> list[tuple[str, ...]]:
    """Return the cells of the workers' table, under WORKER_COLUMNS."""
    return [_worker_row(worker, now) for worker in loader.workers]


def _worker_row(worker: WorkerState, now: float) -> tuple[str, ...]:
    memory = size(worker.memory_bytes) if worker.memory_bytes else "–"
    sample, since = clip(worker.sample or worker.phase), seconds(worker.sample_seconds)
    if worker.phase == "unknown" or worker.state == "dead":
        sample, since = "–", "–"
    state = worker.word if worker.word == "done" else worker.state
    return str(worker.worker_id), str(worker.pid), state, sample, since, memory, seconds(now - worker.started)


def summary(snapshot: Snapshot) -> str:
    """Say in a line how many there are, and what they share."""
    alive = [worker for worker in snapshot.workers if worker.state != "dead"]
    counted = f"{count(len(snapshot.loaders), 'loader')}, {count(len(alive), 'worker')}"
    return f"{counted}  ·  {machine(snapshot.machine)}"


def settled(snapshot: Snapshot) -> str:
    """Draw what a guarded cell's loaders did."""
    return "\n".join([status(snapshot), *(event(one) for one in snapshot.events)])


def event(event: Event) -> str:
    """Say when something happened, and what."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {clean(event.text, 200)}"


def machine(state: MachineState) -> str:
    """Say what the machine has."""
    used = state.memory_bytes - state.memory_available_bytes
    words = [f"{count(state.cpus, 'CPU')} usable", f"memory {size(used)} of {size(state.memory_bytes)} used"]
    if state.shm_bytes is not None and state.shm_used_bytes is not None:
        words.append(f"/dev/shm {size(state.shm_used_bytes)} of {size(state.shm_bytes)}")
    return "  ·  ".join(words)


def stop(report: StopReport) -> str:
    """Say in a line what a stop did."""
    if not report.endings:
        return "loaderguard: no workers to stop"
    ways = Counter(ending.how for ending in report.endings)
    how = ", ".join(f"{number} {_way(way, number)}" for way, number in ways.items())
    loaders = f" of {count(report.loaders, 'loader')}" if report.loaders else ""
    stopped = len(report.pids) - report.left - ways["dead"]
    line = f"loaderguard: stopped {count(stopped, 'worker')}{loaders}"
    if report.descendants:
        line += f" and {count(report.descendants, 'process', 'processes')} that they had started"
    return f"{line} in {seconds(report.seconds)} ({how})"


def _way(how: str, number: int) -> str:
    if how == "left":
        return "left by itself" if number == 1 else "left by themselves"
    if how == "dead":
        return "was dead already" if number == 1 else "were dead already"
    return "cannot be killed" if how == "unkillable" else f"by {how}"


def run(report: RunReport) -> str:
    """Say in a line what a guarded run did, with a line for each stall, retry and skipped sample."""
    lines = [f"stall: {stall_line(one)}" for one in report.stalls]
    lines += [f"retry: {clean(one.sentence())}" for one in report.retried]
    lines += [f"skip: {clean(one.sentence())}" for one in report.skipped]
    lines += [f"note: {clean(one)}" for one in report.remarks]
    return "\n".join([_run_line(report), *(f"loaderguard: {line}" for line in lines)])


def _run_line(report: RunReport) -> str:
    left = f"{count(report.left, 'worker')} left"
    if not report.loaders:
        return f"loaderguard: no DataLoader was iterated · {left}"
    rate = f" ({report.batches / report.seconds:,.1f}/s)" if report.seconds else ""
    words = [
        f"loaderguard: {count(report.loaders, 'loader')}, {count(report.workers, 'worker')}",
        f"{count(report.batches, 'batch', 'batches')} in {seconds(report.seconds)}{rate}",
        f"{100 * report.wait_fraction:.0f} % of it waiting for data",
    ]
    if report.peak_bytes:
        words.append(f"peak {size(report.peak_bytes)}")
    return " · ".join([*words, left])


def stall(stall: Stall) -> str:
    """Draw a stall: what does not come, who is late, at which line, and the whole stack."""
    lines = [f"loaderguard: {headline(stall)}"]
    if stall.came_after_seconds is not None or stall.ended is not None:
        return "\n".join([*lines, *(f"  it was late: {clean(worker.sentence())}" for worker in stall.workers)])
    for worker in stall.workers:
        lines += [f"  {line}" for line in _late_worker(worker)]
    return "\n".join(lines)


def headline(stall: Stall) -> str:
    """Say in a line what has not come, or that it has come after all."""
    if stall.came_after_seconds is not None:
        return f"{clean(stall.name)} came after {seconds(stall.came_after_seconds)}"
    if stall.ended is not None:
        return f"the wait for {clean(stall.name)} ended {clean(stall.ended)}"
    return f"{clean(stall.name)} ({clip(stall.dataset)}) has not come for {seconds(stall.seconds)}"


def stall_line(stall: Stall) -> str:
    """Sum a stall up in a line."""
    late = stall.workers[0] if stall.workers else None
    what = f"; {clean(late.sentence())}" if late else ""
    end = f", came after {seconds(stall.came_after_seconds)}" if stall.came_after_seconds is not None else ""
    return f"{clean(stall.name)} had not come after {seconds(stall.seconds)}{what}{end}"


def card(card: Card) -> str:
    """Draw an error explained."""
    facts = [f"  {clean(fact)}" for fact in card.facts]
    return "\n".join([f"loaderguard: {clean(card.title)}", *facts, f"  → {clean(card.fix)}"])


def stacks(found: Mapping[int, str]) -> str:
    """Draw the stacks of workers."""
    return "\n\n".join("\n".join(map(clean, one.splitlines())) for one in found.values()) or "no live workers"


def findings(found: Findings) -> str:
    """Draw what the doctor found: each finding with its evidence and its fix, then what was checked and run."""
    lines = [f"loaderguard: {findings_head(found)}"]
    for one in found:
        lines += [f"  {clean(line)}" for line in finding_lines(one)]
    return "\n".join([*lines, *(f"  {clean(line)}" for line in findings_foot(found))])


def findings_head(found: Findings) -> str:
    """Say in a line how many there are."""
    about = f" with {clip(found.subject)}" if found.subject else ""
    return f"{count(len(found), 'finding')}{about}" if found else f"nothing wrong was found{about}"


def finding_lines(finding: Finding) -> tuple[str, str, str]:
    """Return the title of a finding, its evidence and its fix."""
    title = f"{finding.code} {finding.severity}: {finding.title}"
    return title, f"  {finding.evidence}", f"  → {finding.fix}"


def findings_foot(found: Findings) -> list[str]:
    """Say what was checked and run."""
    return [line for line in (found.checked and f"looked for: {found.checked}", found.ran) if line]


def _late_worker(worker: LateWorker) -> list[str]:
    lines = [clean(sentence) for sentence in late_words(worker)]
    if worker.frames:
        lines += ["stack, most recent call first:", *(clean(line) for line in worker.stack.splitlines())]
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def late_words(worker: LateWorker) -> list[str]:
    """Return what there is to say about a late worker, a line each."""
    lines = [worker.sentence() if worker.is_awaited else f"also late: {worker.sentence()}"]
    if worker.frame is not None and worker.frame.code:
        lines.append(f"› {worker.frame.code}")
    if worker.holder is not None:
        lines.append(f"held by {worker.holder.who}{_at(worker.holder.frame)}")
    if worker.advice:
        lines.append(f"→ {worker.advice}")
    return lines


def _at(frame: Frame | None) -> str:
    if frame is None:
        return ""
    code = f": {frame.code}" if frame.code else ""
    return f", which is in {frame.function}() at {frame.place}:{frame.line}{code}"


def count(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def rate(value: float) -> str:
    """Return how often something happens in a second; slow ones with a decimal."""
    return f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"


def seconds(value: float) -> str:
    """Return a duration in the unit that a person would use."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    if value < 6000:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def size(value: float) -> str:
    """Return a size in the unit that a person would use."""
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def clip(name: str) -> str:
    """Cut a name that the user's side chose, and take control characters out of it."""
    return clean(name, _LONGEST_NAME)


def clean(text: str, longest: int = _LONGEST_LINE) -> str:
    """Take control characters out of a line that has words of the user's side in it, and cut it."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Align a table of figures, to the right."""
    whole = [header, *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in whole]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Align columns: the figures to the right, words to the left."""
    table = [header, *rows]
    if len(table) == 1:
        return []
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [_table_line(row, widths) for row in table]


def _table_line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    for column in WORD_COLUMNS:
        cells[column] = row[column].ljust(widths[column])
    return "  ".join(cells).rstrip()
