"""Contests: systems that are warmed up together and timed in turn and repeatedly, so that all meet the same machine."""

import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from benchmarks import machine
from benchmarks.contestant import OURS, Contestant, Entry, Failed, Take
from benchmarks.peers import PEERS, is_installed
from benchmarks.profile import Profile
from benchmarks.scale import training_bytes
from benchmarks.work import Work
from pmae.errors import UserError, require, unknown_name
from pmae.flops import flops_per_image
from pmae.train.environment import pick_device

Say = Callable[[str], None]
Group = Sequence[Entry]
"""Entries that take turns."""
ENOUGH = 10
"""Steps of a profile: each has about a thousand kernels, and every step the same."""
ROOM = 0.7
"""Share of a card's memory that those who compile at once may hold; the others come one at a time into the rest."""


@dataclass(frozen=True)
class Pace:
    """How often and how long: `repeats` rounds of `steps`, or of what fits into `seconds`, each after a lead-in.

    While others have their turn, a peer's loader workers fill their queues: the lead-in empties them again. Before the
    first round come `warm` steps: the graph engine warms up for three and captures in the fourth.
    """

    steps: int
    repeats: int = 3
    lead_in: int = 0
    warm: int = 5
    seconds: float = math.inf
    patience: float = math.inf
    """Seconds until one that does not answer is out."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", "at least 1", self.steps)
        require(self.repeats >= 1, "repeats", "at least 1", self.repeats)
        require(self.seconds > 0, "seconds", "above 0", self.seconds)

    def task(self, entry: Entry) -> Take:
        """A round of one entry."""
        return Take(self.steps, max(self.lead_in, 2 * entry.workers), self.seconds)


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
        """The method's operations, done at this pace; a peer's MAE predicts every patch, ours the hidden ones."""
        whole = self.system not in OURS
        return self.images_per_second * flops_per_image(self.work.config, self.work.shape, whole)

    @property
    def title(self) -> str:
        """Which row it is."""
        return f"{self.work.method} {self.work.side}x{self.work.side}, {self.system}"


def contest(groups: Sequence[Group], pace: Pace, say: Say) -> Iterator[list[Row]]:
    """The rows of each group as soon as it is done; those who are missing or fail get a row that says so."""
    for wave in waves(groups):
        present = [entry for group in wave for entry in group if entry.system in OURS or is_installed(entry.system)]
        with_process = {entry: Contestant(entry, pace.patience) for entry in present}
        try:
            warm = dict(warmed(with_process, pace.warm, say))
            for group in wave:
                rows = {entry: warm.get(entry) or _missing(entry) for entry in group}
                for _ in range(pace.repeats):
                    for entry in [entry for entry, row in rows.items() if not row.note]:
                        rows[entry] = _round(rows[entry], with_process[entry], pace.task(entry), say)
                yield list(rows.values())
        finally:
            part(with_process.values())


def waves(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Groups whose processes exist at the same time: on a CPU one; on CUDA as many as card and host have room for.

    Compiling takes most of the time on CUDA, and a core of the host for each who compiles: so all compile at once.
    """
    wave: list[Group] = []
    for group in groups:
        if wave and not _has_room([*wave, group]):
            yield wave
            wave = []
        wave.append(group)
    yield wave


def _has_room(wave: Sequence[Group]) -> bool:
    entries = [entry for group in wave for entry in group]
    device = pick_device(entries[0].work.device)
    if device.type != "cuda":
        return False
    held = sum(bytes_held(entry.work) for entry in entries if entry.compiles)
    return held <= ROOM * machine.memory(device) and len(entries) <= machine.processes()


@functools.cache
def bytes_held(work: Work) -> float:
    """An estimate of what our engines hold: the images, and a step."""
    return training_bytes(work.config, work.shape, work.batch) + work.images * math.prod(work.shape)


def warmed(contestants: Mapping[Entry, Contestant], steps: int, say: Say) -> Iterator[tuple[Entry, Row]]:
    """A row for each, without timings yet; on CUDA those who compile do so while the others come one by one."""
    at_once = [entry for entry in contestants if entry.compiles and entry.work.device.startswith("cuda")]
    for entry in at_once:
        with suppress(Failed):  # and again below, where it becomes a note
            contestants[entry].begin(steps)
    for entry in sorted(contestants, key=lambda entry: entry in at_once):
        row = Row(entry.system, entry.work)
        try:
            row = replace(row, warm_up=contestants[entry].warm_up(steps))
        except Failed as reason:
            row = replace(row, note=str(reason))
        say(f"{row.title}: {row.note or f'warm after {row.warm_up:,.1f} s'}")
        yield entry, row


def part(contestants: Collection[Contestant]) -> None:
    """Let all go, then wait for them: they end at the same time."""
    for one in contestants:
        one.dismiss()
    for one in contestants:
        one.join()


def _missing(entry: Entry) -> Row:
    return Row(entry.system, entry.work, note="not installed")


def _round(row: Row, one: Contestant, task: Take, say: Say) -> Row:
    """The row with one more round."""
    try:
        timing = one.time(task)
    except Failed as reason:
        say(f"{row.title}: {reason}")
        return replace(row, note=str(reason), step_seconds=())
    step = timing.seconds / timing.steps
    say(f"{row.title}: {row.work.batch / step:,.0f} images/s, {1e3 * step:,.2f} ms/step")
    return replace(row, step_seconds=(*row.step_seconds, step), peak=max(row.peak, timing.peak))


def profiles(entries: Sequence[Entry], pace: Pace, say: Say) -> Iterator[tuple[Row, Profile | None]]:
    """Every entry's profile as it comes, or none and a row whose note says why."""
    for wave in waves([[entry] for entry in entries]):
        contestants = {entry: Contestant(entry, pace.patience) for (entry,) in wave}
        try:
            for entry, row in list(warmed(contestants, pace.warm, say)):
                yield _watched(contestants[entry], row, min(ENOUGH, pace.steps), say)
        finally:
            part(contestants.values())


def _watched(one: Contestant, row: Row, steps: int, say: Say) -> tuple[Row, Profile | None]:
    if row.note:
        return row, None
    try:
        found = one.watch(steps)
    except Failed as reason:
        say(f"{row.title}: {reason}")
        return replace(row, note=str(reason)), None
    return row, found if isinstance(found, Profile) else None


# One comparison: every system at every size and method.


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
