"""The paper's figures: accuracy against masking ratio and epochs, bars over ratios and of time, masks and examples."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmae.paper import comparisons
from pmae.paper.comparisons import AUGMENTED, EPOCHS, SHORT, Measured, best_by_validation, grouped, over_ratios, title
from pmae.report.contents import Contents
from pmae.report.pictures import enlarged, masked_pictures, view_for
from pmae.report.published import published_accuracy
from pmae.report.style import INK, NEUTRAL, PALETTE, Array, Drawing, gallery, legend, panels, styled
from pmae.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {
    "mae_std": {"color": PALETTE[4], "marker": "D"},
    "mae_oracle": {"color": PALETTE[1], "marker": "s"},
    "pmae_oracle_components": {"color": PALETTE[0], "marker": "o"},
    "pmae_oracle_pixels": {"color": PALETTE[2], "marker": "^"},
}
"""How a family of runs is drawn, by its key among the published methods."""
RANDOM = 101  # where a ratio that is drawn anew for each batch stands on the axis of shares in percent
PICTURES, EXAMPLES = 4, 3


@styled
def epoch_curves(cells: Sequence[Measured]) -> Drawing:
    """Accuracy at the checkpoints of pretraining, one panel a data set."""
    from matplotlib.ticker import MaxNLocator

    groups = grouped(cells, "data")
    figure, axes = panels([2.3] * len(groups))
    for panel, (data, found) in zip(axes, groups.items(), strict=True):
        panel.set_title(f"{title('data', data)}, linear probe, test accuracy (%)")
        for method, line in grouped(found, "method").items():
            points = [(cell.epoch, cell.value, cell.std or 0.0) for cell in line if cell.value is not None]
            _plot(panel, points, label=comparisons.with_ratio(method), **LOOKS[method])
        _published_levels(panel, found)
        panel.margins(y=0.12)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes[-1].set_xlabel("epoch of pretraining")
    legend(figure, axes)
    caption = "Linear probe at the checkpoints of pretraining; a dotted line is the paper's number after 800 epochs."
    return Drawing("epochs", "Accuracy against the epochs of pretraining", caption, figure)


@styled
def ratio_curves(cells: Sequence[Measured]) -> list[Drawing]:
    """Linear probes against the masked share: a panel a data set and preset, a line a method; none without a number."""
    cells = [cell for cell in cells if cell.protocol == "linear" and cell.value is not None]
    if not cells:
        return []
    in_order = [cell for found in grouped(cells, "data").values() for cell in found]
    groups = grouped(in_order, "data", "preset")
    figure, axes = panels([2.2] * len(groups))
    for panel, ((data, preset), found) in zip(axes, groups.items(), strict=True):
        for family, line in grouped(found, "family").items():
            _ratio_line(panel, family, line)
        if preset.startswith(AUGMENTED):
            _published_levels(panel, [cell for cell in found if cell.ratio is not None])
        kind = f"{preset}, {'' if preset.startswith(AUGMENTED) else 'not '}augmented"
        panel.set(title=f"{title('data', data)} (%): {kind}", xlim=(6, RANDOM + 5))
        panel.set_xticks([*range(10, 100, 10), RANDOM], labels=[*map(str, range(10, 100, 10)), "random"])
        panel.margins(y=0.12)
    axes[-1].set_xlabel("hidden: % of patches (MAE), % of variance (PMAE)")
    legend(figure, axes)
    caption = (
        "Test accuracy of a linear probe, by data set and preset, against the share that is hidden; on the right a "
        "share drawn anew for each batch. A ring is the ratio that is best on validation images, which are no test "
        "images; a dotted line is the paper's best (oracle) in the colour of its method, whose probes are augmented. "
        "Bars are standard deviations between runs, or between the probe heads of one."
    )
    caption += f" {comparisons.features_of(cells)}"
    return [Drawing("ratio", "Accuracy against the masking ratio", caption, figure)]


def _ratio_line(axes: "Axes", family: str, line: Sequence[Measured]) -> None:
    look = LOOKS[family]
    points = {cell.ratio: (cell.value or 0.0, cell.std or 0.0) for cell in line}
    fixed = [(100 * ratio, *point) for ratio, point in points.items() if ratio is not None]
    _plot(axes, fixed, label=SHORT[family], **look)
    _plot(axes, [(RANDOM, *points[None])] if None in points else [], **look, linestyle="none")
    best = best_by_validation(line) if len(fixed) > 1 else None  # a single ratio is no choice
    if best is not None and best.ratio is not None and best.value is not None:
        ring: dict[str, Any] = {"markersize": 10, "markerfacecolor": "none", "markeredgecolor": look["color"]}
        axes.plot(100 * best.ratio, best.value, "o", **ring)


def _plot(axes: "Axes", points: Sequence[tuple[float, float, float]], **look: Any) -> None:
    x, y, deviations = zip(*sorted(points), strict=True) if points else ((), (), ())
    axes.errorbar(x, y, deviations if any(deviations) else None, markersize=4, elinewidth=1, **look)


def _published_levels(axes: "Axes", cells: Sequence[Measured]) -> None:
    """A dotted line at the published accuracy of each method that was measured and has one on this data."""
    for method in dict.fromkeys(cell.method for cell in cells if cell.value is not None):
        level = published_accuracy("linear", method, cells[0].data)
        if level is not None:
            axes.axhline(level, color=LOOKS[method]["color"], linestyle=":", linewidth=1.1)
            # Named once, in grey, for all colours; a legend has error bars, which the methods are, after plain lines.
            axes.errorbar([], [], color=NEUTRAL, linestyle=":", linewidth=1.1, label="published, 800 epochs")


@styled
def spread_bars(cells: Sequence[Measured], preset: str) -> list[Drawing]:
    """Mean over ratios as bars, standard errors as lines, MAE beside PMAE for each data set, under one preset."""
    over = list(over_ratios([cell for cell in cells if cell.preset == preset]))
    if not over:
        return []
    datasets = list(dict.fromkeys(data for data, *_ in over))
    figure, (axes,) = panels([0.7 + 0.55 * len(datasets)])
    for data, method, _, values, error in over:
        mean, place = float(np.mean(values)), datasets.index(data) + (-0.19 if method.startswith("mae") else 0.19)
        axes.barh(place, mean, height=0.34, color=LOOKS[method]["color"], label=SHORT[method])
        if error is not None:
            axes.errorbar(mean, place, xerr=error, color=INK, capsize=2.5, linewidth=1.2)
        said = f"{mean:.1f}, one ratio" if error is None else f"{mean:.1f} ± {error:.1f}"
        axes.text(mean + (error or 0.0) + 1.5, place, said, va="center", fontsize=8)
    _name_rows(axes, [title("data", data) for data in datasets])
    axes.set(xlim=(0, 128), xticks=range(0, 101, 20), title="Linear probe, mean over masking ratios (%)")
    legend(figure, [axes])
    caption = f"Mean of the test accuracy over masking ratios, with its standard error; preset {preset}."
    return [Drawing("spread", "Accuracy over masking ratios", caption, figure)]


@styled
def time_bars(table: Table) -> list[Drawing]:
    """The minutes of a table of training times, one panel a data set; none without a row."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for data, method, minutes, *_ in table.rows:
        groups.setdefault(str(data), []).append((str(method), float(str(minutes))))
    if not groups:
        return []
    figure, axes = panels([0.6 + 0.24 * len(group) for group in groups.values()])
    for panel, (data, group) in zip(axes, groups.items(), strict=True):
        for place, (method, minutes) in enumerate(group):
            panel.barh(place, minutes, height=0.7, color=PALETTE[1] if method.startswith("MAE") else PALETTE[0])
            panel.annotate(f" {minutes:,.1f}", (minutes, place), va="center", fontsize=8)
        _name_rows(panel, [method for method, _ in group])
        panel.set(xlim=(0, 1.18 * max(minutes for _, minutes in group)), title=f"{data}, {table.header[2]}")
    machines = ", ".join(sorted({str(row[-1]) for row in table.rows}))
    caption = f"From the images a second that runs logged, on {machines}."
    return [Drawing("time", f"Training time for {EPOCHS} epochs", caption, figure)]


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), labels=names)
    axes.grid(axis="y", visible=False)
    axes.set(ylim=(len(names) - 0.5, -0.5))


@styled
def mask_designs(runs: Mapping[str, Contents]) -> Drawing:
    """The same images under several masks: for each name a row of what the encoder sees and one of what it predicts."""
    view = view_for(next(iter(runs.values())))
    rows: dict[str, Array] = {}
    for name, run in runs.items():
        shown = masked_pictures(run, PICTURES, view)
        rows = {"image": shown["image"], **rows, name: shown["visible"], f"{name} target": shown["hidden"]}
    columns = {f"image {j + 1}": np.stack([row[j] for row in rows.values()]) for j in range(len(rows["image"]))}
    figure, _ = gallery(columns, ["target" if label.endswith("target") else label for label in rows])
    caption = "What the encoder sees under each mask, and below it the target. Hidden patches are grey; targets made "
    caption += f"of components are differences around mid-grey. A random ratio is shown at its middle. {view.note}"
    return Drawing("mask-designs", "Mask designs", caption.strip(), figure)


@styled
def examples(runs: Mapping[str, Contents]) -> Drawing:
    """Some images of each data set, one column a set, smaller images enlarged."""
    shown = {name: view_for(run).pictures(run.samples["original"][:EXAMPLES]) for name, run in runs.items()}
    height, width = (max(pictures.shape[axis] for pictures in shown.values()) for axis in (1, 2))
    figure, _ = gallery({name: enlarged(pictures, (height, width)) for name, pictures in shown.items()})
    return Drawing("examples", "Examples of the data", "Held-out images of each data set.", figure)
