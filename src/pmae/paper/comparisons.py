"""The paper's numbers beside ours as tables: its layout, every cell, ratios, epochs, spread over ratios and time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pmae.paper.cells import (
    CellRuns,
    Measured,
    augmented,
    best_by_validation,
    by_data,
    by_family,
    by_method,
    data_title,
    method_title,
)
from pmae.report import published
from pmae.report.tables import NOTHING, Cell, Table
from pmae.results import PROTOCOLS
from pmae.runs import Run

EPOCHS = 800
"""How long the paper trains."""
FEATURES = {"cls": "[CLS]", "mean": "the mean of the patch tokens"}
SHORT = {
    "mae_std": "MAE 75%",
    "mae_oracle": "MAE",
    "pmae_oracle_components": "PMAE",
    "pmae_oracle_pixels": "PMAE, pixel objective",
}
"""What a family of runs is called in figures, by its key among the published methods."""


def grid(name: str, title: str, cells: Sequence[Measured]) -> Table:
    """The paper's layout: a row a protocol and method, a column a data set, ours with the published in brackets."""
    by_place = {(c.protocol, c.preset, c.method, c.data): c for c in cells}
    rows = list(dict.fromkeys((c.protocol, c.preset, c.method) for c in cells))
    datasets = list(dict.fromkeys(c.data for c in cells))
    several = len({c.preset for c in cells}) > 1
    body: list[list[Cell]] = []
    for protocol, preset, method in rows:
        named: list[Cell] = [PROTOCOLS[protocol], *[preset] * several, method_title(method)]
        body.append([*named, *(_ours_and_published(by_place[protocol, preset, method, data]) for data in datasets)])
    missing = sum(c.value is None for c in cells)
    over = " or ".join(sorted({f"between {'its ' * (c.over == 'heads')}{c.over}" for c in cells if c.over}))
    spread = f" ± the standard deviation {over}" if over else ""
    note = f"Test accuracy in %, ours{spread}, and the published number in brackets"
    note += f"; {NOTHING} is not measured yet ({missing} of {len(cells)} cells)." if missing else "."
    header = ["protocol", *["preset"] * several, "method", *map(data_title, datasets)]
    return Table(name, title, header, body, f"{note} {features_of(cells)}".strip())


def features_of(cells: Sequence[Measured]) -> str:
    """Which representation the accuracies are of, in words."""
    frozen = {cell.pooling for cell in cells if cell.protocol != "finetune"}
    return f"Frozen features are {' or '.join(FEATURES.get(name, name) for name in sorted(frozen))}." if frozen else ""


def comparison(name: str, title: str, cells: Sequence[Measured]) -> Table:
    """A row a cell: the published number beside ours, their difference, and where ours comes from."""
    header = ["data", "protocol", "method", "hidden", "published", "ours", "difference", "spread", "spread over"]
    header += ["ours on val", "preset", "features", "epochs", "runs", "note"]
    medical = any(cell.data.endswith("mnist") for cell in cells)
    split = (
        " The paper tests medical sets on their val images. Ours is the test split; val, on which an oracle's ratio is "
        "chosen, has a column of its own."
    )
    note = published.source() + (split if medical else "")
    return Table(f"{name}-comparison", f"{title}: published and ours", header, [_row(c) for c in cells], note)


def _row(cell: Measured) -> list[Cell]:
    hidden = "random" if cell.method.split("_")[1] == "random" else None if cell.ratio is None else f"{cell.ratio:g}"
    where: list[Cell] = [data_title(cell.data), PROTOCOLS[cell.protocol], method_title(cell.method), hidden]
    numbers: list[Cell] = [cell.published, cell.value, cell.difference, cell.spread, cell.over, cell.on_val]
    source: list[Cell] = [cell.preset, cell.pooling, str(cell.epoch or ""), " ".join(cell.runs), cell.note]
    return [_rounded(one) for one in (*where, *numbers, *source)]


def _ours_and_published(cell: Measured) -> str:
    """`47.4 ± 0.3 (41.7)`, with a dash for what is not there."""
    ours = NOTHING if cell.value is None else f"{cell.value:.1f}"
    ours += "" if cell.value is None or cell.spread is None else f" ± {cell.spread:.1f}"
    return ours if cell.published is None else f"{ours} ({cell.published:.1f})"


def ratio_grid(cells: Sequence[Measured]) -> Table:
    """A row a data set, protocol, preset and method: the accuracy at every ratio, and at a random one."""
    ratios = sorted({cell.ratio for cell in cells if cell.ratio is not None})
    rows: list[list[Cell]] = []
    for data, found in by_data(cells).items():
        for protocol in dict.fromkeys(cell.protocol for cell in found):
            for (family, preset), line in by_family([c for c in found if c.protocol == protocol]).items():
                row: list[Cell] = [data_title(data), PROTOCOLS[protocol], preset, SHORT[family]]
                at = {cell.ratio: cell.value for cell in line if cell.value is not None}
                rows += [[*row, *(at.get(ratio) for ratio in (*ratios, None))]] if at else []
    header = ["data", "protocol", "preset", "method", *(f"{ratio:.0%}" for ratio in ratios), "random"]
    note = (
        f"Test accuracy in % by hidden share: of patches (MAE), of the variance (PMAE); {NOTHING} was not run, and "
        f"what has no number at all is left out. {features_of(cells)}"
    )
    return Table("ratio-grid", "Accuracy against the masking ratio", header, rows, note)


def ratio_table(cells: Sequence[Measured]) -> Table:
    """A row a data set, method and preset: the ratio that validation chooses, the accuracy there and the paper's."""
    header = ["data", "method", "preset", "ratios run", "best ratio by validation", "accuracy there", "published best"]
    header += ["difference", "accuracy at 20%", "best of all ratios on test"]
    fixed = [cell for cell in cells if cell.protocol == "linear" and cell.ratio is not None]
    rows: list[list[Cell]] = []
    for data, found in by_data(fixed).items():
        for (method, preset), line in by_method(found).items():
            known = [cell.value for cell in line if cell.value is not None]
            if not known:
                continue
            best, fifth = best_by_validation(line), next((cell.value for cell in line if cell.ratio == 0.2), None)
            row: list[Cell] = [data_title(data), SHORT[method], preset, str(len(known))]
            row += [None, None] if best is None else [f"{best.ratio:g}", best.value]
            # The published best was found with augmentation on: it says nothing about probes without.
            row += [best.published, best.difference] if best and augmented(preset) else [None, None]
            rows.append([_rounded(one) for one in (*row, fifth, max(known))])
    claim = published.paper()["claims"]["ratio"]
    note = f"The paper: {claim}. Its best ratios are not printed; its best accuracies are."
    return Table("ratio-comparison", "Masking ratio: published and ours", header, rows, note)


def epoch_table(cells: Sequence[Measured]) -> Table:
    """A row a data set and kind of MAE: when PMAE passes what it ends with."""
    header = ["data", "MAE", "MAE at the end", "PMAE at the end", "PMAE first above it at epoch", "of epochs"]
    header += ["epochs of PMAE scored"]
    rows: list[list[Cell]] = []
    for data, found in by_data([cell for cell in cells if cell.value is not None]).items():
        curves = {method: sorted(line, key=lambda c: c.epoch) for (method, _), line in by_method(found).items()}
        pmae = curves.pop("pmae_oracle_components", [])
        for method, mae in curves.items() or [("mae_oracle", [])]:
            last, end = (line[-1] if line else None for line in (mae, pmae))
            above = [cell.epoch for cell in pmae if last and (cell.value or 0) > (last.value or 0)]
            ends: list[Cell] = [None if one is None else one.value for one in (last, end)]
            # Of an end alone it cannot be said when it was passed.
            first = str(min(above)) if above and len(pmae) > 1 else None
            when: list[Cell] = [first, str(end.epoch) if end else None, len(pmae)]
            rows.append([data_title(data), with_ratio(method), *ends, *when])
    note = f"The paper: {published.paper()['claims']['epochs']}."
    return Table("epochs-comparison", "Epochs: published and ours", header, rows, note)


def with_ratio(method: str) -> str:
    """A method by its short name, and how its ratio came about."""
    return SHORT[method] + (", chosen ratio" if "_oracle" in method else "")


@dataclass(frozen=True)
class OverRatios:
    """Mean and standard error of a method's accuracy over the masking ratios; the error needs two of them."""

    data: str
    method: str
    preset: str
    count: int
    mean: float | None
    error: float | None


def over_ratios(cells: Sequence[Measured]) -> list[OverRatios]:
    """One a data set, method and preset."""
    made = []
    for data, found in by_data(cells).items():
        for (method, preset), line in by_method(found).items():
            values = [cell.value for cell in line if cell.value is not None]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            mean = statistics.fmean(values) if values else None
            made.append(OverRatios(data, method, preset, len(values), mean, error))
    return made


def spread_table(over: Sequence[OverRatios]) -> Table:
    """A row a data set and method."""
    rows: list[list[Cell]] = []
    for one in (one for one in over if one.count):
        error = None if one.error is None else f"{one.error:.2f}"
        rows.append([data_title(one.data), SHORT[one.method], one.preset, str(one.count), one.mean, error])
    header = ["data", "method", "preset", "ratios", "mean accuracy", "standard error"]
    note = f"The paper: {published.paper()['claims']['spread']}; it prints a figure and no numbers."
    return Table("spread-comparison", "Spread over masking ratios: ours", header, rows, note)


@dataclass(frozen=True)
class TrainingTime:
    """How long pretraining would take for the paper's number of epochs, from the speed that runs logged."""

    data: str
    method: str
    """MAE with its ratio, or PMAE."""
    minutes: float
    speed: float
    """Images a second: the median over log lines, and over runs."""
    device: str


def training_times(filled: Sequence[CellRuns]) -> list[TrainingTime]:
    """The time of each cell of which a run logged its speed."""
    found = []
    for one in filled:
        speeds = [speed for run in one.runs if (speed := _speed(run)) is not None]
        if speeds:
            speed, first = statistics.median(speeds), one.runs[0]
            images, batch = first.environment["data"]["counts"]["train"], first.config.train.batch_size or 1
            # A step takes a whole batch, so the images that do not fill one are left out of an epoch.
            seconds = EPOCHS * (images // batch) * batch / speed
            name = "PMAE" if one.row.method == "pmae" else f"MAE {100 * (one.ratio or 0):.0f}%"
            found.append(TrainingTime(one.data, name, seconds / 60, speed, str(first.environment["device"])))
    return found


def _speed(run: Run) -> float | None:
    found = [line["images_per_second"] for line in run.metrics() if "images_per_second" in line]
    return statistics.median(found) if found else None


def time_table(times: Sequence[TrainingTime]) -> Table:
    """A row a data set and method."""
    rows: list[list[Cell]] = [
        [data_title(one.data), one.method, one.minutes, round(one.speed), one.device] for one in times
    ]
    header = ["data", "method", f"minutes for {EPOCHS} epochs", "images/s", "device"]
    note = f"The paper: {published.paper()['claims']['time']}."
    return Table("time-comparison", "Training time: ours", header, rows, note)


def _rounded(cell: Cell) -> Cell:
    return round(cell, 6) if isinstance(cell, float) else cell
