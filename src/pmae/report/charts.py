"""Learning curves, as figures and as numbers for the pages, and figures of accuracies and the confusion matrix."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmae.report import style
from pmae.report.compare import Entrant, epochs_of, lineup
from pmae.report.contents import Contents
from pmae.report.published import published_for
from pmae.report.style import Drawing, color, dash, legend, marker, minus, panels, short, styled
from pmae.results import PROTOCOLS, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST_R2 = -20  # percent
PROBES = {"linear": "Linear probe", "knn": "k-NN"}
LOGGED = {"epoch", "step", "loss", "r2", "masked_share", "lr", "images_per_second", "held_out_r2", "train_r2"}
MOST_NAMED = 24
MOST_POINTS = 150  # of a curve: more than a panel has room for


def curve_data(runs: Sequence[Contents]) -> dict[str, Any]:
    """Runs with their colours and dashes, and panels with one series a run, for the scripts of the pages."""
    looks = [{"name": run.name, "color": color(i), "dash": style.DASHES.index(dash(i))} for i, run in enumerate(runs)]
    speed = {"title": "Images a second", "series": [_series(run, run.training, "images_per_second") for run in runs]}
    made = [*_panels(runs), speed]
    return {"runs": looks, "panels": [one for one in made if any(series["x"] for series in one["series"])]}


def _panels(runs: Sequence[Contents]) -> list[dict[str, Any]]:
    """Loss, R2 while training and between epochs, and what else was measured; percentages where they are shares."""
    loss = [_series(run, run.training, "loss") for run in runs]
    values = [value for one in loss for value in one["y"]]
    steep = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    r2 = [_series(run, run.training, "r2", faint=True) for run in runs]
    r2 += [_series(run, run.signals, run.r2_name) for run in runs]
    images = " or ".join(sorted({run.measured_on for run in runs}))
    made = [
        {"title": "Training loss", "log": steep, "series": loss},
        {"title": f"R² on {images} (%; thin: in training)", "least": LOWEST_R2, "series": r2},
    ]
    lines = [line for run in runs for line in run.signals]
    kinds = {key for line in lines for key, value in line.items() if isinstance(value, int | float)} - LOGGED
    probed = " or ".join(sorted({probed_on(run) for run in runs}))
    for key in sorted(kinds, key=lambda key: (key not in PROBES, key)):
        title = f"{PROBES[key]} on {probed} (%)" if key in PROBES else key.replace("_", " ").capitalize()
        if not key.startswith("r2_band_"):
            made.append({"title": title, "series": [_series(run, run.signals, key) for run in runs]})
    return made


def _series(run: Contents, lines: Sequence[dict[str, Any]], key: str, faint: bool = False) -> dict[str, Any]:
    times = 100 if key in PROBES or "r2" in key else 1
    known = [(line["epoch"], times * line[key]) for line in lines if line.get(key) is not None]
    known = [pair for pair in known if np.isfinite(pair).all()]
    kept = [known[i] for i in np.linspace(0, len(known) - 1, min(MOST_POINTS, len(known))).round().astype(int)]
    values = {"x": [round(x, 3) for x, _ in kept], "y": [float(f"{y:.4g}") for _, y in kept]}
    return {"run": run.name, **values, **({"faint": True} if faint else {})}


@styled
def learning_curves(runs: Sequence[Contents]) -> Drawing:
    """The panels of `curve_data`, but for the speed, below each other."""
    made = _panels(runs)
    figure, axes = panels([2.0] * len(made))
    for panel, told in zip(axes, made, strict=True):
        for place, one in enumerate(told["series"]):
            position = place % len(runs)  # R2 has two series a run
            look: dict[str, Any] = {"color": color(position), "linestyle": dash(position)}
            look |= {"alpha": 0.4, "linewidth": 1} if one.get("faint") else {}
            name = short(one["run"], 44 if len(runs) > 2 else 20)
            panel.plot(one["x"], one["y"], **look, marker="" if len(one["x"]) > 12 else ".", label=name)
        panel.set_title("\n".join(textwrap.wrap(told["title"], 48)))
        panel.set(xlim=(0, 1.02 * max(run.epoch for run in runs)), yscale="log" if told.get("log") else "linear")
    _cut_r2(axes[1])
    axes[-1].set_xlabel("epoch")
    if len(runs) > 1:
        legend(figure, axes, ncols=1 if len(runs) > 2 else 2)
    caption = "R² is the share of the hidden variance that is predicted: 0 is no better than predicting the mean; "
    caption += f"values under {minus(str(LOWEST_R2))}% are cut off."
    if len({(run.method, run.config.objective) for run in runs}) > 1:
        caption += " The runs minimize different objectives, so their losses and R² do not compare with each other."
    return Drawing("learning-curves", "Learning curves", caption, figure)


@styled
def band_curves(run: Contents) -> Drawing:
    """R2 within each band of the spectrum."""
    keys = {key for line in run.signals for key in line if key.startswith("r2_band_")}
    figure, (axes,) = panels((2.5,))
    for position, key in enumerate(sorted(keys, key=lambda key: int(key.split("_")[2]))):
        curve = _series(run, run.signals, key)
        last = minus(f"{curve['y'][-1]:.0f}")
        label = f"{' to '.join(key.split('_')[2:])}%: R² {last}%"
        axes.plot(curve["x"], curve["y"], color=color(position), marker=marker(position), markersize=4, label=label)
    title = f"R² by band of the spectrum, {run.measured_on} (%)"
    axes.set(xlabel="epoch", title=title, xlim=(0, 1.02 * max(run.epoch, 1)))
    _cut_r2(axes)
    figure.legend(loc="outside lower center", ncols=2, title=f"{run.units} by cumulated variance")
    caption = f"How much of the hidden variance is predicted in each band: the first holds the largest {run.units}."
    return Drawing("r2-by-band", "R² by band of the spectrum", caption, figure)


def probed_on(run: Contents) -> str:
    """The images that the quick probes of training are scored on: never the test images."""
    if run.config.probe.data:
        return f"validation images of {run.config.probe.data}"
    unlabelled = "val" in run.data.get("unlabelled", ()) or run.held_out  # older versions note the latter at the end
    own = "val" in run.data.get("counts", {}) and not unlabelled
    return "validation images" if own else "validation part of the training images"


def _cut_r2(axes: "Axes") -> None:
    """A line at 0; the first steps are far below it and would flatten the rest."""
    axes.axhline(0, color=style.INK, linewidth=0.8, linestyle=":")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, LOWEST_R2), max(min(high, 100), 10))


@styled
def accuracy_bars(runs: Sequence[Contents], split: str) -> Drawing:
    """Accuracy of every representation of all runs with its interval, one panel a protocol."""
    every = lineup(runs, split)
    groups = {name: [entrant for entrant in every if entrant.score.protocol == name] for name in PROTOCOLS}
    groups = {name: found for name, found in groups.items() if found}
    figure, axes = panels([0.42 + 0.36 * len(found) for found in groups.values()])
    for panel, (protocol, found) in zip(axes, groups.items(), strict=True):
        panel.set_title(f"{_capital(PROTOCOLS[protocol])}, accuracy on {split} (%)", pad=8)
        for position, entrant in enumerate(found):
            _draw_bar(panel, position, entrant)
        panel.set(xlim=(0, 113), xticks=(0, 20, 40, 60, 80, 100), ylim=(len(found) - 0.5, -0.75), yticks=[])
        panel.spines["left"].set_visible(False)
    with_paper = any(published_for(entrant.score, entrant.run.config) for entrant in every)
    diamonds = " A diamond is the paper's number for this data and kind of method." if with_paper else ""
    caption = "Bars are accuracies with their 95% bootstrap intervals: pretrained encoders in colour, what was not "
    caption += f"pretrained in grey. The dotted line is always answering the commonest class.{diamonds}"
    return Drawing(f"accuracy-{split}", f"Accuracy on {split}", caption, figure)


def _draw_bar(axes: "Axes", position: int, entrant: Entrant) -> None:
    score, accuracy = entrant.score, entrant.score.accuracy
    own = style.PALETTE[{"mae": 1, "weights": 2}.get(score.method, 0)]
    axes.text(0, position - 0.27, short(entrant.name, 48), va="bottom", fontsize=8)
    if accuracy.value is None:
        axes.text(1, position, "no number: training diverged", va="center", fontsize=8)
        return
    axes.barh(position, accuracy.value, height=0.4, color=style.NEUTRAL if score.is_baseline else own)
    if score.chance is not None:
        # As high as the bar: a line through all of them would strike through their names.
        axes.vlines(score.chance, position - 0.2, position + 0.2, color=style.INK, linewidth=1, linestyle=":")
    if accuracy.low is not None and accuracy.high is not None:
        axes.plot([accuracy.low, accuracy.high], [position] * 2, color=style.INK, linewidth=1.2, solid_capstyle="butt")
    axes.text(113, position, f"{accuracy.value:.1f}", va="center", ha="right")
    if paper := published_for(score, entrant.run.config):
        axes.plot(paper[0], position, "D", color=style.INK, markersize=4.5, markerfacecolor="none", zorder=4)


@styled
def epoch_curves(runs: Sequence[Contents], split: str) -> list[Drawing]:
    """Accuracy over the epochs of pretraining, one panel a protocol; none where one epoch was evaluated."""
    curves: dict[str, dict[str, list[Score]]] = {}
    for protocol in PROTOCOLS:
        found = [(run, name, scores) for run in runs for name, scores in epochs_of(run, protocol, split).items()]
        if any(len(scores) > 1 for _, _, scores in found):
            curves[protocol] = {f"{r.name}: {name}" if len(runs) > 1 else name: scores for r, name, scores in found}
    if not curves:
        return []
    figure, axes = panels([2.0] * len(curves))
    order = list(dict.fromkeys(label for found in curves.values() for label in found))
    for panel, (protocol, lines) in zip(axes, curves.items(), strict=True):
        panel.set_title(f"{_capital(PROTOCOLS[protocol])}, accuracy on {split} (%)")
        for label, scores in lines.items():
            position = order.index(label)
            bounds = [(s.epoch, s.accuracy.value, s.accuracy.low, s.accuracy.high) for s in scores]
            known = np.array([row for row in bounds if row[1] is not None], dtype=np.float64).reshape(-1, 4)
            reach = np.nan_to_num(np.abs(known[:, 2:] - known[:, 1:2])).T
            look: dict[str, Any] = {"color": color(position), "marker": marker(position), "markersize": 4}
            panel.errorbar(known[:, 0], known[:, 1], reach, elinewidth=1, **look, label=short(label, 44))
    axes[-1].set_xlabel("epoch of pretraining")
    legend(figure, axes, ncols=1)
    caption = "Accuracy over the epochs of pretraining; bars are 95% bootstrap intervals."
    return [Drawing(f"accuracy-by-epoch-{split}", f"Accuracy by epoch on {split}", caption, figure)]


@styled
def confusion(score: Score) -> Drawing:
    """Which classes are taken for which: every row is one true class and sums to 100%."""
    counts = np.array(score.confusion, dtype=np.float64)
    rows = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    few = len(counts) <= 12
    names = [short(name, 18) for name in score.classes] if len(counts) <= MOST_NAMED else []
    # As high as wide inside, once the names have taken their place on both sides.
    figure, (axes,) = panels((3.9 if names else 3.4,))
    image = axes.imshow(rows, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    axes.grid(False)
    if few:
        for i, j in np.ndindex(rows.shape):
            ink = "#ffffff" if rows[i, j] > 55 else "#111418"
            axes.text(j, i, f"{rows[i, j]:.0f}", ha="center", va="center", fontsize=8, color=ink)
    else:
        figure.colorbar(image, ax=axes, shrink=0.7, label="% of the true class")
    if names:
        axes.set_xticks(range(len(counts)), labels=names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(counts)), labels=names, fontsize=8)
    axes.set(xlabel="predicted", ylabel="true")
    caption = f"{_capital(PROTOCOLS[score.protocol])} on {score.representation}, {score.images:,} images of "
    caption += f"{score.split}: percent of each true class (row) that was given each answer (column)."
    return Drawing("confusion", "Confusion matrix", caption, figure)


def _capital(text: str) -> str:
    return text if text.startswith("k-") else text[0].upper() + text[1:]
