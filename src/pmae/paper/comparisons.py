"""What runs came to beside the paper's numbers, as tables: its layout, every cell, ratios, epochs, spread and time."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from pmae.paper.tables import Row
from pmae.report.published import published, published_accuracy
from pmae.report.tables import NOTHING, Cell, Table
from pmae.results import PROTOCOLS, Score
from pmae.runs import Run
from pmae.sweep.find import logged_speeds, validation
from pmae.sweep.grid import mean
from pmae.sweep.scoring import own_scores

EPOCHS = 800  # how long the paper trains
AUGMENTED = ("paper", "released")  # presets that train their probes on crops
FEATURES = {"cls": "[CLS]", "mean": "the mean of the patch tokens"}
SHORT = {
    "mae_std": "MAE 75%",
    "mae_oracle": "MAE",
    "pmae_oracle_components": "PMAE",
    "pmae_oracle_pixels": "PMAE, pixel objective",
}
"""What a family of runs is called in figures, by its key among the published methods."""


@dataclass(frozen=True)
class CellRuns:
    """A row on a data set at one ratio (None: random), the runs that repeat it, and how the ratio came about."""

    row: Row
    data: str
    ratio: float | None
    runs: tuple[Run, ...]
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """One protocol of one method on one data set, over the runs that repeat it; accuracies in percent."""

    data: str
    method: str  # key among the published methods
    protocol: str
    preset: str
    pooling: str
    ratio: float | None  # the share that was hidden; None if it was random, or no run says
    values: tuple[float, ...]  # on the test split, one a run
    heads: float | None  # standard deviation between the heads of a single run
    on_val: float | None  # mean on the val split, where there is one
    validation: float | None  # of the quick probe by which ratios are chosen
    epoch: int
    runs: tuple[str, ...]
    note: str

    @property
    def family(self) -> str:
        """Its method, a random ratio among the fixed ones."""
        return self.method.replace("_random", "_oracle")

    @property
    def value(self) -> float | None:
        return mean(self.values)

    @property
    def std(self) -> float | None:
        """Standard deviation between runs, or between the heads of the only one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else self.heads

    @property
    def over(self) -> str:
        return f"{len(self.values)} runs" if len(self.values) > 1 else "heads" if self.heads is not None else ""

    @property
    def published(self) -> float | None:
        return published_accuracy(self.protocol, self.method, self.data)

    @property
    def difference(self) -> float | None:
        return None if self.value is None or self.published is None else self.value - self.published


def measure(one: CellRuns, protocol: str, preset: str, pooling: str, epoch: int | None = None) -> Measured:
    """What the runs of a cell came to under a protocol, at their last epoch or a given one."""
    how = (protocol, preset, pooling)
    test, val = (scores_of_cell(one, *how, split, epoch) for split in ("test", "val"))
    diverged = [f"diverged in {run.path.name}" for run, score in test if score.accuracy.value is None]
    return Measured(
        one.data, one.row.key, protocol, preset, test[0][1].pooling if test else pooling, one.ratio,
        values=tuple(score.accuracy.value for _, score in test if score.accuracy.value is not None),
        heads=test[0][1].accuracy.std if len(test) == 1 else None,
        on_val=mean([score.accuracy.value for _, score in val]),
        validation=mean([validation(run) for run in one.runs]),
        epoch=max(((run.config.train.epochs or 0) if epoch is None else epoch for run in one.runs), default=0),
        runs=tuple(run.path.name for run, _ in test),
        note="; ".join(filter(None, [one.note, *diverged])),
    )  # fmt: skip


def scores_of_cell(
    one: CellRuns, protocol: str, preset: str, pooling: str, split: str = "test", epoch: int | None = None
) -> list[tuple[Run, Score]]:
    """What each run of a cell was scored by a protocol, at its last epoch or a given one."""
    found = {run: own_scores(run, protocol, preset, split, pooling) for run in one.runs}
    ends = {run: (run.config.train.epochs or 0) if epoch is None else epoch for run in one.runs}
    return [(run, score) for run, scores in found.items() for score in scores if score.epoch == ends[run]]


def grouped(cells: Sequence[Measured], *keys: str) -> dict[Any, list[Measured]]:
    """Cells by one of their attributes, or by several, in the order of their first."""
    found: dict[Any, list[Measured]] = {}
    for cell in cells:
        found.setdefault(attrgetter(*keys)(cell), []).append(cell)
    return found


def best_by_validation(cells: Sequence[Measured]) -> Measured | None:
    """The cell whose quick probe on validation images is best, among those of one ratio that were measured."""
    known = [c for c in cells if c.ratio is not None and c.validation is not None and c.value is not None]
    return max(known, key=lambda cell: cell.validation or 0, default=None)


def title(kind: Literal["data", "methods"], key: str) -> str:
    """A data set or a method as the paper writes it."""
    return str(published()[kind][key])


def with_ratio(method: str) -> str:
    """A method by its short name, and how its ratio came about."""
    return SHORT[method] + (", chosen ratio" if "_oracle" in method else "")


def features_of(cells: Sequence[Measured]) -> str:
    """Which representation the accuracies are of, in words."""
    frozen = {cell.pooling for cell in cells if cell.protocol != "finetune"}
    return f"Frozen features are {' or '.join(FEATURES.get(name, name) for name in sorted(frozen))}." if frozen else ""


def grid(name: str, heading: str, cells: Sequence[Measured]) -> Table:
    """The paper's layout: a row a protocol and method, a column a data set, ours with the published in brackets."""
    datasets = list(dict.fromkeys(c.data for c in cells))
    several = len({c.preset for c in cells}) > 1
    rows: list[list[Cell]] = []
    for (protocol, preset, method), line in grouped(cells, "protocol", "preset", "method").items():
        there = {}
        for cell in line:
            ours = NOTHING if cell.value is None else f"{cell.value:.1f}"
            ours += "" if cell.value is None or cell.std is None else f" ± {cell.std:.1f}"
            there[cell.data] = ours if cell.published is None else f"{ours} ({cell.published:.1f})"
        rows.append([PROTOCOLS[protocol], *[preset] * several, title("methods", method), *(there[d] for d in datasets)])
    missing = sum(c.value is None for c in cells)
    over = " or ".join(sorted({f"between {'its ' * (c.over == 'heads')}{c.over}" for c in cells if c.over}))
    spread = f" ± the standard deviation {over}" if over else ""
    lengths = " or ".join(map(str, sorted({c.epoch for c in cells if c.value is not None})))
    ours = f"ours after {lengths} epoch{'s' * (lengths != '1')} of pretraining" if lengths else "ours"
    note = f"Test accuracy in %, {ours}{spread}, and the published number in brackets, after {EPOCHS}"
    note += f"; {NOTHING} is not measured yet ({missing} of {len(cells)} cells)." if missing else "."
    header = ["protocol", *["preset"] * several, "method", *(title("data", name) for name in datasets)]
    return Table(name, heading, header, rows, f"{note} {features_of(cells)}".strip())


def comparison(name: str, heading: str, cells: Sequence[Measured]) -> Table:
    """A row a cell: the published number beside ours, their difference, and where ours comes from."""
    header = ["data", "protocol", "method", "hidden", "published", "ours", "difference", "spread", "spread over"]
    header += ["ours on val", "preset", "features", "epochs", "runs", "note"]
    rows: list[list[Cell]] = []
    for cell in cells:
        hidden = "random" if "_random" in cell.method else None if cell.ratio is None else f"{cell.ratio:g}"
        row: list[Cell] = [title("data", cell.data), PROTOCOLS[cell.protocol], title("methods", cell.method), hidden]
        row += [cell.published, cell.value, cell.difference, cell.std, cell.over, cell.on_val]
        row += [cell.preset, cell.pooling, str(cell.epoch or ""), " ".join(cell.runs), cell.note]
        rows.append(_rounded(row))
    note = f"{published()['source']} {published()['setting']}"
    if any(cell.data.endswith("mnist") for cell in cells):
        note += " The paper tests medical sets on their val images. Ours is the test split; val, on which an oracle's "
        note += "ratio is chosen, has a column of its own."
    return Table(f"{name}-comparison", f"{heading}: published and ours", header, rows, note)


def ratio_grid(cells: Sequence[Measured]) -> Table:
    """A row a data set, protocol, preset and method: the accuracy at every ratio, and at a random one."""
    ratios = sorted({cell.ratio for cell in cells if cell.ratio is not None})
    rows: list[list[Cell]] = []
    known = [cell for cell in cells if cell.value is not None]
    for data, found in grouped(known, "data").items():
        for protocol, scored in grouped(found, "protocol").items():
            for (family, preset), line in grouped(scored, "family", "preset").items():
                at = {cell.ratio: cell.value for cell in line}
                named: list[Cell] = [title("data", data), PROTOCOLS[protocol], preset, SHORT[family]]
                rows.append([*named, *(at.get(ratio) for ratio in (*ratios, None))])
    header = ["data", "protocol", "preset", "method", *(f"{ratio:.0%}" for ratio in ratios), "random"]
    note = f"Test accuracy in % by hidden share: of patches (MAE), of the variance (PMAE); {NOTHING} was not run, "
    note += f"and what has no number at all is left out. {features_of(cells)}"
    return Table("ratio-grid", "Accuracy against the masking ratio", header, rows, note)


def ratio_table(cells: Sequence[Measured]) -> Table:
    """A row a data set, method and preset: the ratio that validation chooses, the accuracy there and the paper's."""
    header = ["data", "method", "preset", "ratios run", "best ratio by validation", "accuracy there", "published best"]
    header += ["difference", "accuracy at 20%", "best of all ratios on test"]
    fixed = [c for c in cells if c.protocol == "linear" and c.ratio is not None and c.value is not None]
    rows: list[list[Cell]] = []
    for data, found in grouped(fixed, "data").items():
        for (method, preset), line in grouped(found, "method", "preset").items():
            best, fifth = best_by_validation(line), next((cell.value for cell in line if cell.ratio == 0.2), None)
            row: list[Cell] = [title("data", data), SHORT[method], preset, str(len(line))]
            row += [None, None] if best is None else [f"{best.ratio:g}", best.value]
            # The published best was found with augmentation on: it says nothing about probes without.
            row += [best.published, best.difference] if best and preset.startswith(AUGMENTED) else [None, None]
            rows.append(_rounded([*row, fifth, max(cell.value or 0.0 for cell in line)]))
    claim = published()["claims"]["ratio"]
    note = f"The paper: {claim}. Its best ratios are not printed; its best accuracies are."
    return Table("ratio-comparison", "Masking ratio: published and ours", header, rows, note)


def epoch_table(cells: Sequence[Measured]) -> Table:
    """A row a data set and kind of MAE: when PMAE passes what it ends with."""
    header = ["data", "MAE", "MAE at the end", "PMAE at the end", "PMAE first above it at epoch", "of epochs"]
    header += ["epochs of PMAE scored"]
    rows: list[list[Cell]] = []
    for data, found in grouped([cell for cell in cells if cell.value is not None], "data").items():
        curves = grouped(sorted(found, key=lambda cell: cell.epoch), "method")
        pmae = curves.pop("pmae_oracle_components", [])
        for method, mae in sorted(curves.items(), reverse=True) or [("mae_oracle", [])]:
            last, end = (line[-1] if line else None for line in (mae, pmae))
            above = [cell.epoch for cell in pmae if last and (cell.value or 0) > (last.value or 0)]
            ends: list[Cell] = [None if one is None else one.value for one in (last, end)]
            # Of an end alone it cannot be said when it was passed.
            first = str(min(above)) if above and len(pmae) > 1 else None
            when: list[Cell] = [first, str(end.epoch) if end else None, len(pmae)]
            rows.append([title("data", data), with_ratio(method), *ends, *when])
    note = f"The paper: {published()['claims']['epochs']}. Above is by any margin, chance or not."
    return Table("epochs-comparison", "Epochs: published and ours", header, rows, note)


def over_ratios(cells: Sequence[Measured]) -> Iterator[tuple[str, str, str, list[float], float | None]]:
    """Data set, method, preset, the accuracies over the ratios and the standard error of their mean, if it has one."""
    for data, found in grouped([cell for cell in cells if cell.value is not None], "data").items():
        for (method, preset), line in grouped(found, "method", "preset").items():
            values = [cell.value or 0.0 for cell in line]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            yield data, method, preset, values, error


def spread_table(cells: Sequence[Measured]) -> Table:
    """A row a data set, method and preset: mean and standard error over the masking ratios."""
    rows: list[list[Cell]] = []
    for data, method, preset, values, error in over_ratios(cells):
        row: list[Cell] = [title("data", data), SHORT[method], preset, str(len(values)), statistics.fmean(values)]
        rows.append([*row, None if error is None else f"{error:.2f}"])
    header = ["data", "method", "preset", "ratios", "mean accuracy", "standard error"]
    note = f"The paper: {published()['claims']['spread']}; it prints a figure and no numbers."
    return Table("spread-comparison", "Spread over masking ratios: ours", header, rows, note)


def time_table(filled: Sequence[CellRuns]) -> Table:
    """A row a data set and method: minutes for the paper's number of epochs, from the speed that its runs logged."""
    rows: list[list[Cell]] = []
    for one in filled:
        speeds = [statistics.median(logged) for run in one.runs if (logged := logged_speeds(run))]
        if speeds:
            speed, first = statistics.median(speeds), one.runs[0]
            images, batch = first.environment["data"]["counts"]["train"], first.config.train.batch_size or 1
            # A step takes a whole batch, so the images that do not fill one are left out of an epoch.
            minutes = EPOCHS * (images // batch) * batch / speed / 60
            name = "PMAE" if one.row.method == "pmae" else f"MAE {100 * (one.ratio or 0):.0f}%"
            rows.append([title("data", one.data), name, minutes, round(speed), str(first.environment["device"])])
    header = ["data", "method", f"minutes for {EPOCHS} epochs", "images/s", "device"]
    note = f"The paper: {published()['claims']['time']}."
    return Table("time-comparison", "Training time: ours", header, rows, note)


def _rounded(row: Sequence[Cell]) -> list[Cell]:
    return [round(cell, 6) if isinstance(cell, float) else cell for cell in row]
