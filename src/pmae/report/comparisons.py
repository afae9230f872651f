"""Figures of what was evaluated: accuracies with intervals, the confusion matrix and a map of the features."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmae.report.contents import Contents
from pmae.report.lineup import Entrant, epochs_of, lineup
from pmae.report.published import for_score
from pmae.report.scores import PROTOCOLS, Score
from pmae.report.style import INK, NEUTRAL, PALETTE, WIDTH, Drawing, color, panels, short, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 1000
MOST_NAMED = 24
MARKERS = "os^DvPX*"


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
            _bar(panel, position, entrant)
        for level in {entrant.score.chance for entrant in found} - {None}:
            panel.axvline(level or 0, color=NEUTRAL, linewidth=1, linestyle=":", zorder=0.9)
        panel.set(xlim=(0, 113), xticks=(0, 20, 40, 60, 80, 100), ylim=(len(found) - 0.5, -0.75), yticks=[])
        panel.spines["left"].set_visible(False)
    with_paper = any(for_score(entrant.score, entrant.run.config) for entrant in every)
    diamonds = " A diamond is the paper's number for this data and kind of method." if with_paper else ""
    caption = (
        "Bars are accuracies with their 95% bootstrap intervals: pretrained encoders in colour, what was not "
        f"pretrained in grey. The dotted line is always answering the commonest class.{diamonds}"
    )
    return Drawing(f"accuracy-{split}", f"Accuracy on {split}", caption, figure)


@styled
def epoch_curves(runs: Sequence[Contents], split: str) -> Drawing:
    """Accuracy over the epochs of pretraining, one panel a protocol."""
    curves = {name: _curves(runs, name, split) for name in PROTOCOLS}
    curves = {name: found for name, found in curves.items() if any(len(scores) > 1 for scores in found.values())}
    figure, axes = panels([2.0] * len(curves))
    order = list(dict.fromkeys(label for found in curves.values() for label in found))
    for panel, (protocol, found) in zip(axes, curves.items(), strict=True):
        panel.set_title(f"{_capital(PROTOCOLS[protocol])}, accuracy on {split} (%)")
        for label, scores in found.items():
            position = order.index(label)
            _curve(panel, scores, color=color(position), marker=MARKERS[position % len(MARKERS)], label=label)
    axes[-1].set_xlabel("epoch of pretraining")
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), [short(label, 44) for label in handles], loc="outside lower center", ncols=1)
    caption = "Accuracy over the epochs of pretraining; bars are 95% bootstrap intervals."
    return Drawing(f"accuracy-by-epoch-{split}", f"Accuracy by epoch on {split}", caption, figure)


@styled
def confusion(run: Contents, score: Score) -> Drawing:
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
    if names:
        axes.set_xticks(range(len(counts)), labels=names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(counts)), labels=names, fontsize=8)
    axes.set(xlabel="predicted", ylabel="true")
    if not few:
        figure.colorbar(image, ax=axes, shrink=0.7, label="% of the true class")
    caption = (
        f"{_capital(PROTOCOLS[score.protocol])} on {score.representation}, {score.images:,} images of {score.split}: "
        "percent of each true class (row) that was given each answer (column)."
    )
    return Drawing("confusion", "Confusion matrix", caption, figure)


@styled
def feature_map(run: Contents) -> Drawing:
    """The features saved with the run in two dimensions, coloured by class."""
    features, labels = run.features["features"].astype(np.float64), run.features.get("labels")
    if len(features) > MOST_POINTS:
        chosen = np.sort(np.random.default_rng(0).choice(len(features), MOST_POINTS, replace=False))
        features, labels = features[chosen], None if labels is None else labels[chosen]
    points, how = _flatten(features)
    width, height = np.ptp(points, axis=0)
    classes = np.unique(labels) if labels is not None else np.empty(0, np.int64)
    named = 1 < len(classes) <= MOST_NAMED
    legend = 0.1 * len(classes) if named else 0.0
    figure, (axes,) = panels((float(np.clip(WIDTH * height / max(width, 1e-9), 2, 5)) + legend,))
    if labels is None or not named:
        shades = None if labels is None or len(classes) < 2 else labels
        colours = {"color": PALETTE[0]} if shades is None else {"c": shades, "cmap": "viridis"}
        axes.scatter(points[:, 0], points[:, 1], s=9, linewidths=0, **colours)
    else:
        _scatter_classes(axes, points, labels, _class_names(run))
        figure.legend(loc="outside lower center", ncols=2, handletextpad=0.1, columnspacing=1.0, markerscale=1.6)
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.grid(False)
    for side in axes.spines.values():
        side.set_visible(False)
    caption = (
        f"{len(points):,} images by {how} of their features: neighbours are alike to the encoder. No axis has a unit."
    )
    if len(classes) > MOST_NAMED:
        caption += f" The {len(classes)} classes are coloured by number."
    return Drawing("feature-map", "Map of the features", caption, figure)


def _curves(runs: Sequence[Contents], protocol: str, split: str) -> dict[str, list[Score]]:
    """Scores over epochs by name, with the run's name where there are several."""
    found = {}
    for run in runs:
        for name, scores in epochs_of(run, protocol, split).items():
            found[f"{run.name}: {name}" if len(runs) > 1 else name] = scores
    return found


def _curve(axes: "Axes", scores: Sequence[Score], **look: Any) -> None:
    known = [score for score in scores if score.accuracy.value is not None]
    values = np.array([[s.accuracy.value, s.accuracy.low, s.accuracy.high] for s in known], dtype=np.float64).reshape(
        -1, 3
    )
    spread = np.nan_to_num(np.abs(values[:, 1:] - values[:, :1])).T
    axes.errorbar([score.epoch for score in known], values[:, 0], spread, markersize=4, elinewidth=1, **look)


def _bar(axes: "Axes", position: int, entrant: Entrant) -> None:
    score, accuracy = entrant.score, entrant.score.accuracy
    own = PALETTE[1] if score.label.startswith("mae") else PALETTE[0]
    axes.text(0, position - 0.27, short(entrant.name, 48), va="bottom", fontsize=8)
    if accuracy.value is None:
        axes.text(1, position, "no number: training diverged", va="center", fontsize=8)
        return
    axes.barh(position, accuracy.value, height=0.4, color=NEUTRAL if score.is_baseline else own)
    if accuracy.low is not None and accuracy.high is not None:
        axes.plot([accuracy.low, accuracy.high], [position] * 2, color=INK, linewidth=1.2, solid_capstyle="butt")
    axes.text(113, position, f"{accuracy.value:.1f}", va="center", ha="right")
    if paper := for_score(score, entrant.run.config):
        axes.plot(paper[0], position, "D", color=INK, markersize=4.5, markerfacecolor="none", zorder=4)


def _flatten(features: np.ndarray) -> tuple[np.ndarray, str]:
    """Two dimensions by t-SNE, or by PCA where there are too few points or no spread for it."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    features = features[:, features.std(0) > 0]
    if min(features.shape) < 3:
        # So few numbers are shown as they are.
        return np.pad(features, ((0, 0), (0, 2)))[:, :2], "the values"
    reduced = PCA(min(50, *features.shape), svd_solver="full").fit_transform(features)
    if len(features) < 30:
        return reduced[:, :2], "PCA"
    flat = TSNE(2, perplexity=min(30, len(features) / 4), init="pca", random_state=0).fit_transform(reduced)
    return np.asarray(flat), "t-SNE"


def _scatter_classes(axes: "Axes", points: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> None:
    for position, label in enumerate(np.unique(labels)):
        name = names[label] if 0 <= label < len(names) else str(label)
        marker = MARKERS[(position + position // len(PALETTE)) % len(MARKERS)]
        x, y = points[labels == label].T
        axes.scatter(x, y, s=11, color=color(position), marker=marker, label=short(name, 18), linewidths=0, alpha=0.85)


def _class_names(run: Contents) -> Sequence[str]:
    evaluated = next((score.classes for score in run.scores), ())
    return evaluated or [str(name) for name in run.data.get("classes", [])]


def _capital(text: str) -> str:
    return text if text.startswith("k-") else text[0].upper() + text[1:]
