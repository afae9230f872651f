"""The paper's figures: accuracy against masking ratio and epochs, bars over ratios and of time, masks and examples."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmae.paper.cells import Measured, augmented, best_by_validation, by_data, by_family, by_method, data_title, grouped
from pmae.paper.comparisons import EPOCHS, SHORT, OverRatios, TrainingTime, features_of, with_ratio
from pmae.report import published
from pmae.report.contents import Contents
from pmae.report.pictures import Array, gallery, view_of
from pmae.report.samples import hidden_pixels, visible_part
from pmae.report.style import INK, NEUTRAL, PALETTE, Drawing, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "mae_std": {"color": PALETTE[4], "marker": "D"},
    "mae_oracle": {"color": PALETTE[1], "marker": "s"},
    "pmae_oracle_components": {"color": PALETTE[0], "marker": "o"},
    "pmae_oracle_pixels": {"color": PALETTE[2], "marker": "^"},
}
"""How a family of runs is drawn, by its key among the published methods."""
PUBLISHED = "published, 800 epochs"
RANDOM = 101
"""Where a ratio that is drawn anew for each batch stands on the axis of shares in percent."""
PICTURES = 4


@styled
def epoch_curves(cells: Sequence[Measured]) -> Drawing:
    """Accuracy at the checkpoints of pretraining, one panel a data set."""
    from matplotlib.ticker import MaxNLocator

    groups = by_data(cells)
    figure, axes = panels([2.3] * len(groups))
    for panel, (data, found) in zip(axes, groups.items(), strict=True):
        panel.set_title(f"{data_title(data)}, linear probe, test accuracy (%)")
        for (method, _), line in by_method(found).items():
            points = [(cell.epoch, cell.value, cell.spread or 0.0) for cell in line if cell.value is not None]
            _plot(panel, points, label=with_ratio(method), **LOOKS[method])
        _published_levels(panel, found)
        panel.margins(y=0.12)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes[-1].set_xlabel("epoch of pretraining")
    _legend(figure, axes)
    caption = "Linear probe at the checkpoints of pretraining; a dotted line is the paper's number after 800 epochs."
    return Drawing("epochs", "Accuracy against the epochs of pretraining", caption, figure)


@styled
def ratio_curves(cells: Sequence[Measured]) -> list[Drawing]:
    """Linear probes against the masked share: a panel a data set and preset, a line a method; none without a number."""
    cells = [cell for cell in cells if cell.protocol == "linear" and cell.value is not None]
    if not cells:
        return []
    in_order = [cell for found in by_data(cells).values() for cell in found]
    groups = grouped(in_order, lambda cell: (cell.data, cell.preset))
    figure, axes = panels([2.2] * len(groups))
    for panel, ((data, preset), found) in zip(axes, groups.items(), strict=True):
        for (family, _), line in by_family(found).items():
            _ratio_line(panel, family, line)
        if augmented(preset):
            _published_levels(panel, [cell for cell in found if cell.ratio is not None])
        kind = f"{preset}, {'' if augmented(preset) else 'not '}augmented"
        panel.set(title=f"{data_title(data)} (%): {kind}", xlim=(6, RANDOM + 5))
        panel.set_xticks([*range(10, 100, 10), RANDOM], labels=[*map(str, range(10, 100, 10)), "random"])
        panel.margins(y=0.12)
    axes[-1].set_xlabel("hidden: % of patches (MAE), % of variance (PMAE)")
    _legend(figure, axes)
    caption = (
        "Test accuracy of a linear probe, by data set and preset, against the share that is hidden; on the right a "
        "share drawn anew for each batch. A ring is the ratio that is best on validation images, which are no test "
        "images; a dotted line is the paper's best (oracle) in the colour of its method, whose probes are augmented. "
        f"Bars are standard deviations between runs, or between the probe heads of one. {features_of(cells)}"
    )
    return [Drawing("ratio", "Accuracy against the masking ratio", caption, figure)]


def _ratio_line(axes: "Axes", family: str, line: Sequence[Measured]) -> None:
    """A line through the fixed ratios, a point beside it for the random one, a ring around what validation chooses."""
    look = LOOKS[family]
    points = {cell.ratio: (cell.value or 0.0, cell.spread or 0.0) for cell in line}
    fixed = [(100 * ratio, *point) for ratio, point in points.items() if ratio is not None]
    _plot(axes, fixed, label=SHORT[family], **look)
    _plot(axes, [(RANDOM, *points[None])] if None in points else [], **look, linestyle="none")
    best = best_by_validation(line) if len(fixed) > 1 else None  # a single ratio is no choice
    if best is not None and best.ratio is not None and best.value is not None:
        ring: dict[str, Any] = {"markersize": 10, "markerfacecolor": "none", "markeredgecolor": look["color"]}
        axes.plot(100 * best.ratio, best.value, "o", **ring)


def _plot(axes: "Axes", points: Sequence[tuple[float, float, float]], **look: Any) -> None:
    """Points (x, y, standard deviation) in the order of x, with a bar for each deviation that there is."""
    x, y, deviations = zip(*sorted(points), strict=True) if points else ((), (), ())
    axes.errorbar(x, y, deviations if any(deviations) else None, markersize=4, elinewidth=1, **look)


def _published_levels(axes: "Axes", cells: Sequence[Measured]) -> None:
    """A dotted line at the published accuracy of each method that was measured and has one on this data."""
    for method in dict.fromkeys(cell.method for cell in cells if cell.value is not None):
        level = published.accuracy("linear", method, cells[0].data)
        if level is not None:
            axes.axhline(level, color=LOOKS[method]["color"], linestyle=":", linewidth=1.1)
            # Named once, in grey, for all colours.
            axes.plot([], [], color=NEUTRAL, linestyle=":", linewidth=1.1, label=PUBLISHED)


def _legend(figure: "Figure", axes: "Sequence[Axes]") -> None:
    """One legend under all panels, each name once, the published last."""
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    handles |= {PUBLISHED: handles.pop(PUBLISHED)} if PUBLISHED in handles else {}
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2)


@styled
def spread_bars(over: Sequence[OverRatios], preset: str) -> list[Drawing]:
    """Mean over ratios as bars, standard errors as lines, MAE beside PMAE for each data set, under one preset."""
    over = [one for one in over if one.preset == preset and one.mean is not None]
    if not over:
        return []
    datasets = list(dict.fromkeys(one.data for one in over))
    figure, (axes,) = panels([0.7 + 0.55 * len(datasets)])
    for one in over:
        mean, error = one.mean or 0.0, one.error
        place = datasets.index(one.data) + (-0.19 if one.method.startswith("mae") else 0.19)
        axes.barh(place, mean, height=0.34, color=LOOKS[one.method]["color"], label=SHORT[one.method])
        if error is not None:
            axes.errorbar(mean, place, xerr=error, color=INK, capsize=2.5, linewidth=1.2)
        said = f"{mean:.1f}, one ratio" if error is None else f"{mean:.1f} ± {error:.1f}"
        axes.text(mean + (error or 0.0) + 1.5, place, said, va="center", fontsize=8)
    _name_rows(axes, [data_title(data) for data in datasets])
    axes.set(xlim=(0, 128), xticks=range(0, 101, 20), title="Linear probe, mean over masking ratios (%)")
    _legend(figure, [axes])
    caption = f"Mean of the test accuracy over masking ratios, with its standard error; preset {preset}."
    return [Drawing("spread", "Accuracy over masking ratios", caption, figure)]


@styled
def time_bars(times: Sequence[TrainingTime]) -> Drawing:
    """Minutes for the paper's epochs, one panel a data set."""
    groups = {data: [one for one in times if one.data == data] for data in dict.fromkeys(one.data for one in times)}
    figure, axes = panels([0.6 + 0.24 * len(group) for group in groups.values()])
    for panel, (data, group) in zip(axes, groups.items(), strict=True):
        for place, one in enumerate(group):
            panel.barh(place, one.minutes, height=0.7, color=PALETTE[1] if one.method.startswith("MAE") else PALETTE[0])
            panel.annotate(f" {one.minutes:,.1f}", (one.minutes, place), va="center", fontsize=8)
        _name_rows(panel, [one.method for one in group])
        panel.set(xlim=(0, 1.18 * max(one.minutes for one in group)))
        panel.set_title(f"{data_title(data)}, minutes for {EPOCHS} epochs")
    caption = f"From the images a second that runs logged, on {', '.join(sorted({one.device for one in times}))}."
    return Drawing("time", f"Training time for {EPOCHS} epochs", caption, figure)


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Horizontal bars from the top down, each row with its name."""
    axes.set_yticks(range(len(names)), labels=names)
    axes.grid(axis="y", visible=False)
    axes.set(ylim=(len(names) - 0.5, -0.5))


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
    rows = np.arange(height) * pictures.shape[1] // height
    columns = np.arange(width) * pictures.shape[2] // width
    return pictures[:, rows][:, :, columns]
