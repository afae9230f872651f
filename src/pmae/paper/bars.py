"""The paper's bars: accuracy over the masking ratios with its standard error, and the time that training takes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pmae.paper.cells import Measured
from pmae.paper.curves import LOOKS, by_data, legend, lines
from pmae.report import published
from pmae.report.contents import Contents
from pmae.report.galleries import gallery, hidden_pixels, visible_part
from pmae.report.pictures import Array, view_of
from pmae.report.style import INK, PALETTE, Drawing, panels, styled
from pmae.report.tables import Cell, Table
from pmae.runs import Run

EPOCHS = 800
"""How long the paper trains."""


@dataclass(frozen=True)
class Over:
    """Mean and standard error of a method's accuracy over the masking ratios."""

    data: str
    method: str
    preset: str
    count: int
    mean: float | None
    error: float | None


def over_ratios(cells: Sequence[Measured]) -> list[Over]:
    """One a data set, method and preset; the standard error needs two ratios."""
    made = []
    for data, found in by_data(cells).items():
        for (method, preset), line in lines(found).items():
            values = [cell.value for cell in line if cell.value is not None]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            mean = statistics.fmean(values) if values else None
            made.append(Over(data, method, preset, len(values), mean, error))
    return made


@styled
def spread_bars(over: Sequence[Over], preset: str) -> list[Drawing]:
    """Mean over ratios as bars, standard errors as lines, MAE beside PMAE for each data set, under one preset."""
    over = [one for one in over if one.preset == preset and one.mean is not None]
    if not over:
        return []
    datasets = list(dict.fromkeys(one.data for one in over))
    figure, (axes,) = panels([0.7 + 0.55 * len(datasets)])
    for one in over:
        name, colour, _ = LOOKS[one.method]
        place = datasets.index(one.data) + (-0.19 if one.method.startswith("mae") else 0.19)
        axes.barh(place, one.mean or 0.0, height=0.34, color=colour, label=name)
        if one.error is not None:
            axes.errorbar(one.mean or 0.0, place, xerr=one.error, color=INK, capsize=2.5, linewidth=1.2)
        axes.text((one.mean or 0.0) + (one.error or 0.0) + 1.5, place, _in_words(one), va="center", fontsize=8)
    axes.set_yticks(range(len(datasets)), labels=[published.paper()["data"][d] for d in datasets])
    axes.grid(axis="y", visible=False)
    axes.set(
        xlim=(0, 128),
        xticks=range(0, 101, 20),
        ylim=(len(datasets) - 0.5, -0.5),
        title="Linear probe, mean over masking ratios (%)",
    )
    legend(figure, [axes], ncols=2)
    caption = f"Mean of the test accuracy over masking ratios, with its standard error; preset {preset}."
    return [Drawing("spread", "Accuracy over masking ratios", caption, figure)]


def _in_words(one: Over) -> str:
    """The mean and its error; of a single ratio there is none."""
    return f"{one.mean:.1f}, one ratio" if one.error is None else f"{one.mean:.1f} ± {one.error:.1f}"


def spread_table(over: Sequence[Over]) -> Table:
    """A row a data set and method."""
    rows: list[list[Cell]] = []
    for one in (one for one in over if one.count):
        error = None if one.error is None else f"{one.error:.2f}"
        where: list[Cell] = [published.paper()["data"][one.data], LOOKS[one.method][0], one.preset, str(one.count)]
        rows.append([*where, one.mean, error])
    header = ["data", "method", "preset", "ratios", "mean accuracy", "standard error"]
    note = f"The paper: {published.paper()['claims']['spread']}; it prints a figure and no numbers."
    return Table("spread-comparison", "Spread over masking ratios: ours", header, rows, note)


@dataclass(frozen=True)
class Timed:
    """How long pretraining would take for the paper's number of epochs, from the speed that runs logged."""

    data: str
    method: str
    """MAE with its ratio, or PMAE."""
    minutes: float
    speed: float
    """Images a second: the median over log lines, and over runs."""
    device: str


def timed(runs: Sequence[Run], data: str, method: str) -> Timed | None:
    """The time of some runs alike in everything but length; None if none logged its speed."""
    speeds = [
        statistics.median(found)
        for run in runs
        if (found := [line["images_per_second"] for line in run.metrics() if "images_per_second" in line])
    ]
    if not speeds:
        return None
    speed, first = statistics.median(speeds), runs[0]
    images, batch = first.environment["data"]["counts"]["train"], first.config.train.batch_size or 1
    # A step takes a whole batch, so the images that do not fill one are left out of an epoch.
    seconds = EPOCHS * (images // batch) * batch / speed
    return Timed(data, method, seconds / 60, speed, str(first.environment["device"]))


@styled
def time_bars(found: Sequence[Timed]) -> Drawing:
    """Minutes for the paper's epochs, one panel a data set."""
    groups: dict[str, list[Timed]] = {}
    for one in found:
        groups.setdefault(one.data, []).append(one)
    figure, axes = panels([0.6 + 0.24 * len(group) for group in groups.values()])
    for panel, (data, group) in zip(axes, groups.items(), strict=True):
        for place, one in enumerate(group):
            panel.barh(place, one.minutes, height=0.7, color=PALETTE[1] if one.method.startswith("MAE") else PALETTE[0])
            panel.annotate(f" {one.minutes:,.1f}", (one.minutes, place), va="center", fontsize=8)
        panel.set_yticks(range(len(group)), labels=[one.method for one in group])
        panel.grid(axis="y", visible=False)
        panel.set(ylim=(len(group) - 0.5, -0.5), xlim=(0, 1.18 * max(one.minutes for one in group)))
        panel.set_title(f"{published.paper()['data'][data]}, minutes for {EPOCHS} epochs")
    caption = f"From the images a second that runs logged, on {', '.join(sorted({one.device for one in found}))}."
    return Drawing("time", f"Training time for {EPOCHS} epochs", caption, figure)


def time_table(found: Sequence[Timed]) -> Table:
    """A row a data set and method."""
    rows: list[list[Cell]] = [
        [published.paper()["data"][one.data], one.method, one.minutes, round(one.speed), one.device] for one in found
    ]
    header = ["data", "method", f"minutes for {EPOCHS} epochs", "images/s", "device"]
    return Table(
        "time-comparison", "Training time: ours", header, rows, f"The paper: {published.paper()['claims']['time']}."
    )


# The paper's figures made of pictures: mask designs side by side, and example images of data sets.

PICTURES = 4


@styled
def mask_designs(runs: Mapping[str, Contents]) -> Drawing:
    """The same images under several masks: for each name a row of what the encoder sees and one of what it predicts."""
    first = next(iter(runs.values()))
    view = view_of(first.samples["original"], str(first.data.get("dtype", "")))
    image = view.pictures(first.samples["original"][:PICTURES])
    rows: dict[str, Array] = {"image": image}
    for name, run in runs.items():
        target = run.samples["target"][:PICTURES]
        rows[name] = visible_part(run, view.pictures(run.samples["visible"][:PICTURES]), target)
        if run.method == "MAE":
            rows[f"{name} target"] = np.where(hidden_pixels(target), image, 0.5)
        else:
            rows[f"{name} target"] = view.differences(target, view.scale(target))
    columns = {f"image {j + 1}": np.stack([row[j] for row in rows.values()]) for j in range(len(image))}
    figure, _ = gallery(columns, ["target" if label.endswith("target") else label for label in rows])
    caption = (
        "What the encoder sees under each mask, and below it the target. Hidden patches are grey; targets made of "
        f"components are differences around mid-grey. A random ratio is shown at its middle. {view.note}"
    )
    return Drawing("mask-designs", "Mask designs", caption.strip(), figure)


@styled
def examples(runs: Mapping[str, Contents]) -> Drawing:
    """Some images of each data set, one column a set, smaller images enlarged."""
    shown = {
        name: view_of(run.samples["original"], str(run.data.get("dtype", ""))).pictures(run.samples["original"])
        for name, run in runs.items()
    }
    height, width = (max(pictures.shape[axis] for pictures in shown.values()) for axis in (1, 2))
    columns = {name: _enlarged(pictures[: PICTURES - 1], height, width) for name, pictures in shown.items()}
    figure, _ = gallery(columns, None)
    return Drawing("examples", "Examples of the data", "Held-out images of each data set.", figure)


def _enlarged(pictures: Array, height: int, width: int) -> Array:
    """Pictures repeated pixel by pixel to a larger size."""
    rows, columns = np.arange(height) * pictures.shape[1] // height, np.arange(width) * pictures.shape[2] // width
    return pictures[:, rows][:, :, columns]
