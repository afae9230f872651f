"""Cells of the paper's tables as the run folders have them, beside the published numbers; and the tables they make."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pmae.report import published
from pmae.report.scores import PROTOCOLS, Score, primary, scores_of
from pmae.report.tables import NOTHING, Cell, Table
from pmae.runs import Run

FEATURES = {"cls": "[CLS]", "mean": "the mean of the patch tokens"}


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
    """Deviation between the heads of a single run."""
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
        """Deviation between runs, or between the heads of the only one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else self.heads

    @property
    def over(self) -> str:
        """What the spread is over."""
        return f"{len(self.values)} runs" if len(self.values) > 1 else "heads" if self.heads is not None else ""

    @property
    def published(self) -> float | None:
        """The paper's number."""
        return published.accuracy(self.protocol, self.method, self.data)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points."""
        return None if self.value is None or self.published is None else self.value - self.published


def score_in(
    run: Run, protocol: str, preset: str, split: str, epoch: int, pooling: str = "cls"
) -> Score | None:  # fmt: skip
    """The score of a run's encoder at an epoch, on its own data; of another pooling where it has not this one."""
    return next((s for s in _scores(run, protocol, preset, pooling) if (s.split, s.epoch) == (split, epoch)), None)


def epochs_scored(run: Run, protocol: str, preset: str) -> list[int]:
    """The epochs of a run with a test score."""
    return [score.epoch for score in _scores(run, protocol, preset) if score.split == "test"]


def _scores(run: Run, protocol: str, preset: str, pooling: str = "cls") -> list[Score]:
    name = run.environment["data"]["name"]
    found = [s for s in scores_of(run.results.get("evaluation", {})) if not s.is_baseline and s.data == name]
    order = (pooling, *(other for other in ("cls", "mean") if other != pooling))
    return [s for s in primary(found, order) if (s.protocol, s.preset) == (protocol, preset)]


def measure(
    runs: Sequence[Run], cell: tuple[str, str], how: tuple[str, str, str], ratio: float | None, note: str = "",
    epoch: int | None = None,
) -> Measured:  # fmt: skip
    """What the runs of a cell (data, method) say, scored in some way (protocol, preset, pooling), at their last epoch
    or a given one."""
    protocol, preset, pooling = how
    at = [(run, (run.config.train.epochs or 0) if epoch is None else epoch) for run in runs]
    test, val = ([score_in(run, protocol, preset, split, e, pooling) for run, e in at] for split in ("test", "val"))
    found = [(run, score) for (run, _), score in zip(at, test, strict=True) if score]
    diverged = [run.path.name for run, score in found if score.accuracy.value is None]
    quick = [q for run in runs if (q := run.results.get("pretrain", {}).get("linear")) is not None]
    return Measured(
        *cell, protocol, preset, found[0][1].pooling if found else pooling, ratio,
        values=_known(test),
        heads=found[0][1].spread if len(found) == 1 else None,
        on_val=_mean(_known(val)),
        validation=_mean([100 * q for q in quick]),
        epoch=max((e for _, e in at), default=0),
        runs=tuple(run.path.name for run, _ in found),
        note="; ".join(filter(None, [note, *(f"diverged in {name}" for name in diverged)])),
    )  # fmt: skip


def grid(name: str, title: str, cells: Sequence[Measured]) -> Table:
    """The paper's layout: a row a protocol and method, a column a data set, ours with the published in brackets."""
    by_place = {(c.protocol, c.preset, c.method, c.data): c for c in cells}
    rows = list(dict.fromkeys((c.protocol, c.preset, c.method) for c in cells))
    datasets, titles = list(dict.fromkeys(c.data for c in cells)), published.paper()
    several = len({c.preset for c in cells}) > 1
    body: list[list[Cell]] = []
    for protocol, preset, method in rows:
        named: list[Cell] = [PROTOCOLS[protocol], *[preset] * several, titles["methods"][method]]
        body.append([*named, *(_shown(by_place[protocol, preset, method, data]) for data in datasets)])
    missing = sum(c.value is None for c in cells)
    over = " or ".join(sorted({f"between {'its ' * (c.over == 'heads')}{c.over}" for c in cells if c.over}))
    note = f"Test accuracy in %, ours{f' ± the deviation {over}' * bool(over)}, and the published number in brackets"
    note += f"; {NOTHING} is not measured yet ({missing} of {len(cells)} cells)." if missing else "."
    header = ["protocol", *["preset"] * several, "method", *(titles["data"][d] for d in datasets)]
    return Table(name, title, header, body, f"{note} {features_of(cells)}".strip())


def features_of(cells: Sequence[Measured]) -> str:
    """Which representation the accuracies are of, in words."""
    frozen = {cell.pooling for cell in cells if cell.protocol != "finetune"}
    return f"Frozen features are {' or '.join(FEATURES.get(name, name) for name in sorted(frozen))}." if frozen else ""


def comparison(name: str, title: str, cells: Sequence[Measured]) -> Table:
    """A row a cell: the published number beside ours, their difference, and where ours comes from."""
    header = ["data", "protocol", "method", "hidden", "published", "ours", "difference", "spread", "spread over"]
    header += ["ours on val", "preset", "features", "epochs", "runs", "note"]
    return Table(f"{name}-comparison", f"{title}: published and ours", header, [_row(c) for c in cells], _source(cells))


def _known(scores: Sequence[Score | None]) -> tuple[float, ...]:
    """The accuracies that there are: a head that diverged has none."""
    return tuple(score.accuracy.value for score in scores if score and score.accuracy.value is not None)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _row(cell: Measured) -> list[Cell]:
    titles = published.paper()
    hidden = "random" if cell.method.split("_")[1] == "random" else None if cell.ratio is None else f"{cell.ratio:g}"
    where: list[Cell] = [titles["data"][cell.data], PROTOCOLS[cell.protocol], titles["methods"][cell.method], hidden]
    exact = (cell.published, cell.value, cell.difference, cell.spread, cell.on_val)
    paper, ours, difference, spread, on_val = (None if number is None else round(number, 6) for number in exact)
    numbers: list[Cell] = [paper, ours, difference, spread, cell.over, on_val]
    return where + numbers + [cell.preset, cell.pooling, str(cell.epoch or ""), " ".join(cell.runs), cell.note]


def _source(cells: Sequence[Measured]) -> str:
    """Where published numbers come from, and the one way in which they cannot be compared."""
    medical = any(cell.data.endswith("mnist") for cell in cells)
    split = (
        " The paper tests medical sets on their val images. Ours is the test split; val, on which an oracle's ratio is "
        "chosen, has a column of its own."
    )
    return published.source() + (split if medical else "")


def _shown(cell: Measured) -> str:
    """`47.4 ± 0.3 (41.7)`, with a dash for what is not there."""
    ours = NOTHING if cell.value is None else f"{cell.value:.1f}"
    ours += "" if cell.value is None or cell.spread is None else f" ± {cell.spread:.1f}"
    return ours if cell.published is None else f"{ours} ({cell.published:.1f})"
