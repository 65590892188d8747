"""All ranks of a distributed job: one table, as text and as HTML, and the cards of what is late on any of them."""

from __future__ import annotations

from collections import Counter
from html import escape

from ..model import ClusterState, RankState, Stall
from . import board, html, text

COLUMNS = ("rank", "host", "state", "loaders", "workers", "doing", "waits for data", "stalls")
WORD_COLUMNS = (1, 2, 5)
_HOST, _WORDS = 24, 60


def table(state: ClusterState) -> str:
    """Draw the table, and the cards below it, as text."""
    rows = [COLUMNS, *(cells_of(rank) for rank in state.ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [_line(row, widths) for row in rows] if state.ranks else []
    told = [*(text.stall(stall) for stall in late(state)), *(text.clean(line) for line in waiting(state))]
    return "\n".join([*lines, summary(state), *told])


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.ljust(width) if column in WORD_COLUMNS else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def cells_of(rank: RankState) -> tuple[str, ...]:
    """Return what is said of a rank, under COLUMNS."""
    seen, share = rank.snapshot, rank.wait_share
    is_gone = rank.status == "lost"
    loaders = [one for one in seen.loaders if one.workers or one.activity != "idle"] if seen and not is_gone else []
    engine = f" (engine {rank.engine})" if rank.engine not in (None, rank.rank) else ""
    return (
        f"{rank.rank}{engine}",
        text.clean(rank.host, _HOST) or "–",
        text.clean(state_of(rank), _WORDS),
        str(len(loaders)) if seen else "",
        str(sum(worker.state != "dead" for worker in rank.workers)) if seen else "",
        _doing(rank),
        f"{100 * share:.0f} %" if share is not None and not is_gone and rank.is_busy else "",
        str(rank.stall_count) if rank.stall_count else "",
    )


def state_of(rank: RankState) -> str:
    """Say in a few words how a rank is."""
    if rank.status != "live":
        return rank.status
    if rank.stalls:
        return "stalled"
    if rank.waits_for is not None:
        return f"waits for rank {rank.waits_for}"
    if rank.is_slowest:
        return "slowest"
    return "busy" if rank.is_busy else "idle"


def _doing(rank: RankState) -> str:
    """Sum up its workers: how many are in which state."""
    words = Counter(worker.word for worker in rank.workers)
    return ", ".join(f"{number} {word}" for word, number in sorted(words.items()))


def summary(state: ClusterState) -> str:
    """Say in a line how many there are."""
    live = [rank for rank in state.ranks if rank.status == "live"]
    lost = sum(rank.status == "lost" for rank in state.ranks)
    workers = sum(worker.state != "dead" for rank in state.ranks for worker in rank.workers)
    words = [text.count(len(live), "rank"), text.count(workers, "worker")]
    if lost:
        words.append(f"{lost} lost")
    return "  ·  ".join([*words, state.note] if state.note else words)


def late(state: ClusterState) -> list[Stall]:
    """Return the stalls that last, each with the ranks that wait for it."""
    return [stall for rank in state.ranks if rank.status == "live" for stall in rank.stalls]


def waiting(state: ClusterState) -> list[str]:
    """Say which ranks wait for which."""
    return [
        f"{rank.name} waits for rank {rank.waits_for} in {rank.collective}"
        for rank in state.ranks
        if rank.waits_for is not None
    ]


def drawing(state: ClusterState) -> str:
    """Draw the table, the cards and who waits, for the widget."""
    head = "".join(f'<th scope="col"{_class(column)}>{name}' for column, name in enumerate(COLUMNS))
    rows = "".join(_row(rank) for rank in state.ranks)
    drawn = f"<table><thead><tr>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""
    foot = f'<div class="p">{escape(text.clean(summary(state)))}</div>'
    lines = "".join(f'<div class="p">{escape(text.clean(line))}</div>' for line in waiting(state))
    cards = "".join(html.stall(stall) for stall in late(state))
    told = f'<div class="lgb">{lines}</div>' if lines else ""
    return f'<div class="lgb">{drawn}{foot}</div>{cards}{told}'


def static(state: ClusterState) -> str:
    """Draw it as it stays in a saved notebook."""
    return board.with_styles(drawing(state))


def _row(rank: RankState) -> str:
    cells = cells_of(rank)
    words = {2: _colour(rank)}
    drawn = "".join(f"<td{_class(column, words.get(column, ''))}>{escape(cell)}" for column, cell in enumerate(cells))
    return f"<tr>{drawn}"


def _colour(rank: RankState) -> str:
    """Return the class whose colour a rank's state has."""
    if rank.status != "live":
        return "starting" if rank.status.startswith(("starting", "busy")) else "dead"
    if rank.stalls or rank.is_slowest or rank.waits_for is not None:
        return "stalled"
    return "loading" if rank.is_busy else "idle"


def _class(column: int, word: str = "") -> str:
    return f' class="w {word}"' if word else ' class="w"' if column in WORD_COLUMNS else ""
