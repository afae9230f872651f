"""The cells of a table or figure: their runs, an oracle's ratio chosen on validation images, and what was measured."""

import functools
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pmae.paper.tables import Item, Row, RunChoices, ratios_of, spec_of
from pmae.report import published
from pmae.results import Score
from pmae.runs import Run
from pmae.sweep.find import validation
from pmae.sweep.scored import GetRuns, Requirements, own_scores

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class CellRuns:
    """A row on a data set at one ratio (None: random), the runs that repeat it, and how the ratio came about."""

    row: Row
    data: str
    ratio: float | None
    runs: tuple[Run, ...]
    note: str = ""


def fill_cells(item: Item, chosen: RunChoices, get: GetRuns, needed: Requirements) -> list[CellRuns]:
    """The evaluated runs of every cell; an oracle's ratio is first chosen on validation images, by runs of one seed."""
    spec = functools.partial(spec_of, item, chosen=chosen)
    cells, seeds = item.cells(chosen), chosen.seeds
    searched = [(row, data, r) for row, data in cells if row.ratio == "oracle" for r in chosen.ratios]
    tried = dict(zip(searched, get([spec(*one, seeds[0]) for one in searched], None), strict=True))
    wanted: list[tuple[Row, str, float | None, str]] = []
    for row, data in cells:
        if row.ratio == "oracle":
            found = {r: run for r in chosen.ratios if (run := tried[row, data, r]) is not None}
            wanted += [(row, data, *choice) for choice in choose_ratio(found, len(chosen.ratios))]
        else:
            wanted += [(row, data, ratio, "") for ratio in ratios_of(row, chosen)]
    runs = iter(get([spec(row, data, ratio, seed) for row, data, ratio, _ in wanted for seed in seeds], needed))
    filled = []
    for row, data, ratio, note in wanted:
        group = [next(runs) for _ in seeds]
        filled.append(CellRuns(row, data, ratio, tuple(run for run in group if run is not None), note))
    known = {(one.row, one.data) for one in filled}
    filled += [CellRuns(*cell, None, (), "no run of any ratio was found") for cell in cells if cell not in known]
    return sorted(filled, key=lambda one: cells.index((one.row, one.data)))


def choose_ratio(tried: dict[float, Run], planned: int) -> list[tuple[float, str]]:
    """The ratio whose probe is best on validation images, with a word on how many there were; nothing without runs."""
    scores = {ratio: score for ratio, run in tried.items() if (score := validation(run)) is not None}
    if not scores:
        return []
    best = max(scores, key=lambda ratio: scores[ratio])
    if planned == 1:
        return [(best, "the only ratio; no search")]
    if len(scores) == 1:
        return [(best, f"the only one of {planned} ratios that was found; no search")]
    return [(best, f"best of {len(scores)} of {planned} ratios on validation images ({scores[best]:.1f}%)")]


@dataclass(frozen=True)
class Measured:
    """One protocol of one method on one data set, over the runs that repeat it."""

    data: str
    method: str
    """Key among the published methods."""
    protocol: str
    preset: str
    pooling: str
    ratio: float | None
    """The share that was hidden; None if it was random, or no run says."""
    values: tuple[float, ...] = ()
    """Test accuracy in percent, one a run."""
    heads: float | None = None
    """Standard deviation between the heads of a single run."""
    on_val: float | None = None
    """The same accuracy on the val split, where there is one."""
    validation: float | None = None
    """Accuracy of the quick probe by which ratios are chosen."""
    epoch: int = 0
    runs: tuple[str, ...] = ()
    note: str = ""

    @property
    def value(self) -> float | None:
        """Mean over the runs; None if nothing was measured."""
        return _mean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation between runs, or between the heads of the only one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else self.heads

    @property
    def over(self) -> str:
        """What the standard deviation is over."""
        return f"{len(self.values)} runs" if len(self.values) > 1 else "heads" if self.heads is not None else ""

    @property
    def published(self) -> float | None:
        """The paper's number."""
        return published.accuracy(self.protocol, self.method, self.data)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points."""
        return None if self.value is None or self.published is None else self.value - self.published


def measured(filled: Sequence[CellRuns], needed: Requirements) -> list[Measured]:
    """Every protocol and preset of every cell, protocols outermost as in the paper."""
    wanted = [(kind, protocols.name) for protocols in needed.protocols for kind in protocols.kinds]
    return [measure(one, *how, needed.pooling) for how in wanted for one in filled]


def measure(one: CellRuns, protocol: str, preset: str, pooling: str, epoch: int | None = None) -> Measured:
    """What the runs of a cell came to under a protocol, at their last epoch or a given one."""
    at = [(run, (run.config.train.epochs or 0) if epoch is None else epoch) for run in one.runs]
    test, val = ([_score(run, e, protocol, preset, split, pooling) for run, e in at] for split in ("test", "val"))
    found = [(run, score) for (run, _), score in zip(at, test, strict=True) if score]
    diverged = [run.path.name for run, score in found if score.accuracy.value is None]
    return Measured(
        one.data, one.row.key, protocol, preset, found[0][1].pooling if found else pooling, one.ratio,
        values=_known(test),
        heads=found[0][1].accuracy.std if len(found) == 1 else None,
        on_val=_mean(_known(val)),
        validation=_mean([quick for run in one.runs if (quick := validation(run)) is not None]),
        epoch=max((e for _, e in at), default=0),
        runs=tuple(run.path.name for run, _ in found),
        note="; ".join(filter(None, [one.note, *(f"diverged in {name}" for name in diverged)])),
    )  # fmt: skip


def grouped(cells: Sequence[Measured], key: Callable[[Measured], Key]) -> dict[Key, list[Measured]]:
    """Cells by a key, in the order of their first."""
    found: dict[Key, list[Measured]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def by_data(cells: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Cells by data set."""
    return grouped(cells, lambda cell: cell.data)


def by_method(cells: Sequence[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """Cells by method and preset."""
    return grouped(cells, lambda cell: (cell.method, cell.preset))


def by_family(cells: Sequence[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """Cells by method and preset, a random ratio among the fixed ones of its method."""
    return grouped(cells, lambda cell: (cell.method.replace("_random", "_oracle"), cell.preset))


def best_by_validation(cells: Sequence[Measured]) -> Measured | None:
    """The cell whose quick probe on validation images is best, among those of one ratio that were measured."""
    known = [c for c in cells if c.ratio is not None and c.validation is not None and c.value is not None]
    return max(known, key=lambda cell: cell.validation or 0, default=None)


def augmented(preset: str) -> bool:
    """Whether a preset trains its probes on crops, as the paper does."""
    return preset.startswith(("paper", "released"))


def data_title(data: str) -> str:
    """A data set as the paper writes it."""
    return str(published.paper()["data"][data])


def method_title(method: str) -> str:
    """A method in words, by its key among the published ones."""
    return str(published.paper()["methods"][method])


def _score(run: Run, epoch: int, *how: str) -> Score | None:
    return next((score for score in own_scores(run, *how) if score.epoch == epoch), None)


def _known(scores: Sequence[Score | None]) -> tuple[float, ...]:
    """The accuracies that there are: a head that diverged has none."""
    return tuple(score.accuracy.value for score in scores if score and score.accuracy.value is not None)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
