"""Figures of what training did: the spectrum of the data and the curves of the runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pmae.errors import unknown_name
from pmae.report import comparisons, galleries, traces
from pmae.report.contents import BROKEN, Contents, load
from pmae.report.lineup import has_epochs, splits_of
from pmae.report.style import INK, PALETTE, Drawing, as_bytes, color, dash, panels, short, styled
from pmae.results import Score, pretrained, primary
from pmae.runs import Run, disk_errors, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = (0.5, 0.8, 0.95)
LOWEST_R2 = -0.2
PROBES = {"linear": "Linear probe, held-out accuracy", "knn": "k-NN, held-out accuracy"}
LOGGED = {"epoch", "step", "loss", "r2", "masked_share", "lr", "images_per_second", "held_out_r2", "train_r2"}


@styled
def spectrum(run: Contents) -> Drawing:
    """Share of the variance per component and cumulated, with the components that 50, 80 and 95% take."""
    share = run.samples["variance"].astype(np.float64)
    share = share / max(share.sum(), 1e-300)
    number, cumulated = np.arange(1, len(share) + 1), share.cumsum()
    figure, (each, summed) = panels((2.3, 2.5))
    shown = share > 1e-10
    each.loglog(number[shown], share[shown], color=PALETTE[0])
    each.set(title=f"Share of the variance, each of the {run.units}", ylabel="share", xlim=(0.9, len(share) * 1.1))
    summed.semilogx(number, 100 * cumulated, color=PALETTE[0])
    for mark in MARKS:
        count = int(np.searchsorted(cumulated, mark)) + 1
        summed.plot([0.9, count, count], [100 * mark, 100 * mark, 0], color=PALETTE[1], linewidth=1, linestyle=":")
        summed.plot(count, 100 * mark, "o", color=PALETTE[1], markersize=4)
        # Text stands where the curve is not: above it on the left, under it where the curve leaves no room.
        left = count > len(share) ** 0.5
        place: dict[str, Any] = {"ha": "right", "va": "bottom"} if left else {"ha": "left", "va": "top"}
        place |= {"xytext": (-5, 2) if left else (6, -3), "textcoords": "offset points"}
        summed.annotate(f"{mark:.0%}: {count:,}", (count, 100 * mark), **place)
    summed.set(title="Cumulated share (%)", xlabel=f"{run.units}, largest first", ylabel="%", ylim=(0, 106))
    summed.set_xlim(0.9, len(share) * 1.1)
    plain_log_ticks(each, summed)
    first = f"The first of {len(share):,} {run.units} holds {share[0]:.1%} of the variance of the training images"
    counts = ", ".join(f"{int(np.searchsorted(cumulated, m)) + 1:,} hold {m:.0%}" for m in MARKS)
    leading = run.config.space.name == "pca" and run.config.space.components is not None
    rest = " One of them is all that the leading ones leave of an image." if leading else ""
    return Drawing("spectrum", "Spectrum of the data", f"{first}; {counts}.{rest}", figure)


@styled
def learning_curves(runs: Sequence[Contents]) -> Drawing:
    """Loss, R2 while training and between epochs, and probes where there are any, of all runs."""
    probes = sorted({key for run in runs for key in _probe_keys(run)}, key=lambda key: (key not in PROBES, key))
    figure, axes = panels([2.1, 2.1, *[1.8] * len(probes)])
    for position, run in enumerate(runs):
        look = {"color": color(position), "linestyle": dash(position)}
        _draw_run(axes, run, [run.r2_name, *probes], look, short(run.name, 44 if len(runs) > 2 else 20))
    _scale_loss(axes[0], runs)
    axes[1].axhline(0, color=INK, linewidth=0.8, linestyle=":")
    measured = " or ".join(sorted({run.measured_on for run in runs}))
    axes[1].set(title=f"R² on {measured} (faint: in training)")
    _cut_r2(axes[1])
    for panel, key in zip(axes[2:], probes, strict=True):
        panel.set(title=PROBES.get(key, key.replace("_", " ").capitalize()))
    for panel in axes:
        panel.set_xlim(0, 1.02 * max(run.epoch for run in runs))
    axes[-1].set_xlabel("epoch")
    if len(runs) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 if len(runs) > 2 else 2)
    caption = (
        "R² is the share of the hidden variance that is predicted: 0 is no better than predicting the mean, "
        f"1 is perfect; values under {LOWEST_R2} are cut off."
    ).replace("-", "−")
    if len({(run.method, run.config.objective) for run in runs}) > 1:
        caption += " The runs minimize different objectives, so their losses and R² do not compare with each other."
    return Drawing("learning-curves", "Learning curves", caption, figure)


@styled
def band_curves(run: Contents) -> Drawing:
    """R2 within each band of the spectrum."""
    bands = sorted({key for line in run.signals for key in line if key.startswith("r2_band_")}, key=_band_start)
    figure, (axes,) = panels((2.5,))
    for position, key in enumerate(bands):
        known = [(line["epoch"], line[key]) for line in run.signals if line.get(key) is not None]
        label = f"{' to '.join(key.split('_')[2:])}%: {known[-1][1]:.2f}".replace("-", "−")
        marker = "os^Dv"[position % 5]
        axes.plot(*_two_columns(known), color=color(position), marker=marker, markersize=4, label=label)
    axes.axhline(0, color=INK, linewidth=0.8, linestyle=":")
    axes.set(xlabel="epoch", title=f"R² by band of the spectrum, {run.measured_on}")
    _cut_r2(axes)
    figure.legend(loc="outside lower center", ncols=2, title=f"{run.units} by cumulated variance, last R²")
    caption = f"How much of the hidden variance is predicted in each band: the first holds the largest {run.units}."
    return Drawing("r2-by-band", "R² by band of the spectrum", caption, figure)


def _draw_run(axes: "Sequence[Axes]", run: Contents, keys: Sequence[str], look: dict[str, Any], label: str) -> None:
    """One run's loss, its R2 in training, and each of its signals in a panel of its own."""
    epochs = [step["epoch"] for step in run.training]
    line = {**look, "marker": "o" if len(epochs) == 1 else ""}
    axes[0].plot(epochs, [step["loss"] for step in run.training], **line, label=label)
    axes[1].plot(epochs, [step["r2"] for step in run.training], **line, alpha=0.4)
    for panel, key in zip(axes[1:], keys, strict=True):
        known = [(signal["epoch"], signal[key]) for signal in run.signals if signal.get(key) is not None]
        panel.plot(*_two_columns(known), **look, marker="o", markersize=3.5)


def has_bands(run: Contents) -> bool:
    """Whether R2 was measured by band."""
    return any(key.startswith("r2_band_") for line in run.signals for key in line)


def _probe_keys(run: Contents) -> set[str]:
    """Numbers in the signals that are neither R2 nor bookkeeping: probes and whatever else was watched."""
    keys = {key for line in run.signals for key, value in line.items() if isinstance(value, int | float)}
    return {key for key in keys - LOGGED if not key.startswith("r2_band_")}


def _two_columns(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _scale_loss(axes: "Axes", runs: Sequence[Contents]) -> None:
    values = [step["loss"] for run in runs for step in run.training]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    axes.set(title="Training loss")


def _cut_r2(axes: "Axes") -> None:
    """The first steps are far below 0 and would flatten the rest."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, LOWEST_R2), max(min(high, 1.0), 0.1))


def plain_log_ticks(*axes: "Axes") -> None:
    """Write the powers of ten along x as whole numbers."""
    from matplotlib.ticker import FuncFormatter

    for one in axes:
        one.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _band_start(key: str) -> int:
    return int(key.split("_")[2])


# Every figure that a run folder has the material for, and writing them into it.

FORMATS = ("png", "svg", "pdf")


def save_figures(run: Run, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw all figures of a run into its `figures` folder, each file whole or not at all."""
    for kind in formats:
        if kind not in FORMATS:
            raise unknown_name("formats", kind, FORMATS)
    contents = load(run.path)
    folder = run.path / "figures"
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
    drawings = [*figures_across([contents]), *figures_of(contents)]
    return [save_drawing(drawing, folder / f"{drawing.name}.{kind}") for drawing in drawings for kind in formats]


def save_drawing(drawing: Drawing, path: Path) -> Path:
    """Write one figure in the format that the file's suffix names."""
    content = as_bytes(drawing.figure, path.suffix.removeprefix("."))
    write_whole(path, lambda temporary: temporary.write_bytes(content))
    return path


def figures_across(runs: Sequence[Contents]) -> list[Drawing]:
    """Figures that show several runs together: accuracies, last and by epoch, and learning curves."""
    drawn = []
    for split in splits_of(runs):
        drawn.append(comparisons.accuracy_bars(runs, split))
        drawn += [comparisons.epoch_curves(runs, split)] if any(map(has_epochs, runs)) else []
    begun = [run for run in runs if run.training]
    return drawn + ([learning_curves(begun)] if begun else [])


def figures_of(run: Contents) -> list[Drawing]:
    """Figures of one run alone; one whose material cannot be drawn is named among the run's problems."""
    drawn: list[Drawing] = []
    for what, wanted, draw in _plan(run):
        try:
            drawn += [draw()] if wanted else []
        except BROKEN as error:
            run.problems.append(f"the figure of {what} could not be drawn: {error}")
    return drawn


def _plan(run: Contents) -> list[tuple[str, bool, Callable[[], Any]]]:
    pictures, spectral = "original" in run.samples, "variance" in run.samples
    confused, shown = headline(run), traces if traces.is_one_row(run) else galleries
    return [
        ("reconstructions", pictures, lambda: shown.reconstructions(run)),
        ("masks", pictures, lambda: shown.masks(run)),
        ("the spectrum", spectral, lambda: spectrum(run)),
        ("parts of the spectrum", spectral and "top" in run.samples, lambda: shown.spectrum_parts(run)),
        ("R2 by band", has_bands(run), lambda: band_curves(run)),
        ("confusion", bool(confused), lambda: comparisons.confusion(run, confused[0])),
        ("the feature map", "features" in run.features, lambda: comparisons.feature_map(run)),
    ]


def headline(run: Contents) -> list[Score]:
    """The pretrained encoder's score with a confusion matrix that stands for the run, if there is one."""
    order = ["linear", "knn", "mlp", "finetune"]
    found = [s for s in primary(pretrained(run.scores)) if s.confusion and s.protocol in order]
    return sorted(found, key=lambda s: (s.split != "test", order.index(s.protocol)))[:1]
