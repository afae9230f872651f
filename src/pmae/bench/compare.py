"""One comparison: every system at every size and method."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pmae.bench.contest import Pace, Row, Say, contest
from pmae.bench.contestant import OURS, Entry
from pmae.bench.peers import PEERS
from pmae.bench.work import Work
from pmae.errors import UserError, unknown_name


def compare(works: Sequence[Work], systems: Sequence[str], workers: int, pace: Pace, say: Say) -> Iterator[list[Row]]:
    """A row for every system, work by work as they come; systems that are missing or fail get a row that says so."""
    for name in systems:
        if name not in OURS and name not in PEERS:
            raise unknown_name("peers", name, PEERS)
    groups = [[Entry(name, work, workers if name in PEERS else 0) for name in systems] for work in works]
    return map(_against_peers, contest(groups, pace, say))


def _against_peers(rows: list[Row]) -> list[Row]:
    best = max((row.images_per_second for row in rows if row.system in PEERS), default=0.0)
    return [replace(row, best_peer=best) for row in rows]


def engines(cuda: bool) -> tuple[str, ...]:
    """Ours that are timed unless told otherwise; a graph needs CUDA, and compiling for a CPU takes a minute or two."""
    return OURS if cuda else ("plain",)


def refuse_engine(name: str, cuda: bool) -> None:
    """An engine must exist, and the graph needs CUDA."""
    if name not in OURS:
        raise unknown_name("engines", name, OURS)
    if name == "full" and not cuda:
        raise UserError("engines: 'full' must run on CUDA, for it replays a CUDA graph; choices here: plain, compiled")
