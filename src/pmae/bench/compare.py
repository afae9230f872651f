"""One comparison: every system at every size and method, in turn and repeatedly, so that all meet the same machine."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pmae.bench.contestant import OURS, Contestant, Entry, Failed, Timing
from pmae.bench.flops import flops_per_image
from pmae.bench.peers import PEERS, is_installed
from pmae.bench.work import Work
from pmae.errors import UserError, require, unknown_name

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """How often and how long: `repeats` rounds of `steps` timed steps, each after `lead_in` that do not count.

    While others have their turn, a peer's loader workers fill their queues: the lead-in empties them again. Before the
    first round come `warm` steps: the graph engine warms up for three and captures in the fourth.
    """

    steps: int
    repeats: int = 3
    lead_in: int = 0
    warm: int = 5

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", "at least 1", self.steps)
        require(self.repeats >= 1, "repeats", "at least 1", self.repeats)


@dataclass(frozen=True)
class Row:
    """What one system did at one work; without timings, the note says why there are none."""

    system: str
    work: Work
    step_seconds: tuple[float, ...] = ()
    """Of each round, so that the spread can be seen."""
    peak: int = 0
    warm_up: float = 0.0
    note: str = ""
    best_peer: float = field(default=0.0)
    """Images a second of the fastest peer at the same work; 0 where there is none."""

    @property
    def images_per_second(self) -> float:
        """The median over the rounds; 0 without any."""
        return self.work.batch / statistics.median(self.step_seconds) if self.step_seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        """The method's operations, done at this pace."""
        return self.images_per_second * flops_per_image(self.work.config, self.work.shape)


def compare(works: Iterable[Work], systems: Sequence[str], workers: int, pace: Pace, say: Say) -> list[Row]:
    """A row for every system at every work; systems that are missing or fail get a row that says so."""
    for name in systems:
        if name not in OURS and name not in PEERS:
            raise unknown_name("peers", name, PEERS)
    rows: list[Row] = []
    for work in works:
        found = list(_contest([Entry(name, work, workers) for name in systems], pace, say))
        peers = [row.images_per_second for row in found if row.system in PEERS]
        rows += [replace(row, best_peer=max(peers, default=0.0)) for row in found]
    return rows


def engines(cuda: bool) -> tuple[str, ...]:
    """Ours that are timed unless told otherwise; a graph needs CUDA, and compiling for a CPU takes a minute or two."""
    return OURS if cuda else ("plain",)


def measure(entry: Entry, pace: Pace, say: Say) -> Row:
    """One system alone."""
    return next(iter(_contest([entry], pace, say)))


def _contest(entries: Sequence[Entry], pace: Pace, say: Say) -> Iterator[Row]:
    """All entries at once, each in its process, one working at a time."""
    present = [entry for entry in entries if entry.system in OURS or is_installed(entry.system)]
    contestants = {entry: Contestant(entry) for entry in present}
    rows = {entry: Row(entry.system, entry.work, note="" if entry in present else "not installed") for entry in entries}
    try:
        for entry, one in contestants.items():
            rows[entry] = _warm(rows[entry], one, pace.warm, say)
        for _ in range(pace.repeats):
            for entry, one in contestants.items():
                rows[entry] = _round(rows[entry], one, pace)
    finally:
        for one in contestants.values():
            one.close()
    return iter(rows.values())


def _warm(row: Row, one: Contestant, steps: int, say: Say) -> Row:
    say(f"{row.work.method} {row.work.side}x{row.work.side}, {row.system}: warming up")
    try:
        return replace(row, warm_up=one.warm_up(steps))
    except Failed as reason:
        return replace(row, note=str(reason))


def _round(row: Row, one: Contestant, pace: Pace) -> Row:
    """The row with one more round, if it is still in the race."""
    if row.note:
        return row
    try:
        timing: Timing = one.time(pace.steps, pace.lead_in)
    except Failed as reason:
        return replace(row, note=str(reason), step_seconds=())
    seconds = (*row.step_seconds, timing.seconds / timing.steps)
    return replace(row, step_seconds=seconds, peak=max(row.peak, timing.peak))


def refuse_engine(name: str, cuda: bool) -> None:
    """An engine must exist, and the graph needs CUDA."""
    if name not in OURS:
        raise unknown_name("engines", name, OURS)
    if name == "full" and not cuda:
        raise UserError("engines: 'full' must run on CUDA, for it replays a CUDA graph; choices here: plain, compiled")
