"""The features of a run in two dimensions: a figure, and for the page one whose points open their pictures."""

import functools
import hashlib
from typing import Any

import numpy as np

from pmae.report import style
from pmae.report.charts import MOST_NAMED
from pmae.report.compare import main_score
from pmae.report.contents import Contents
from pmae.report.pictures import view_of
from pmae.report.style import Drawing, color, data_url, marker, panels, short, styled

MOST_POINTS, NEAREST = 1000, 5
SHAPES = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "m-3-3h6v6h-6z",
    "m0-4l4 7h-8z",
    "m0-4l4 4-4 4-4-4z",
    "m0 4l4-7h-8z",
    "m-1-4h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
)
"""Markers of the page's map, in the units of its 560 x 400 drawing."""


def classes_of(run: Contents) -> list[str]:
    """The names of the classes, as evaluation or the data has them."""
    return list(next((score.classes for score in run.scores), ())) or list(map(str, run.data.get("classes", [])))


@functools.lru_cache(maxsize=1)  # a figure and the page's map of one run, drawn one after the other
def _placed(run: Contents) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Which features are shown, where (N, 2), their labels, and by which method."""
    features = run.features["features"].astype(np.float64)
    labels = run.features.get("labels", np.zeros(len(features), np.int64))
    chosen = np.arange(len(features))
    if len(features) > MOST_POINTS:
        chosen = np.sort(np.random.default_rng(0).choice(len(features), MOST_POINTS, replace=False))
    points, how = _flatten(features[chosen])
    return chosen, points, labels[chosen], how


@styled
def feature_map(run: Contents) -> Drawing:
    """The features saved with the run in two dimensions, coloured by class."""
    _, points, labels, how = _placed(run)
    x, y = points.T
    classes, names = np.unique(labels), classes_of(run)
    named = 1 < len(classes) <= MOST_NAMED
    room = 0.1 * len(classes) if named else 0.0
    figure, (axes,) = panels((float(np.clip(style.WIDTH * np.ptp(y) / max(np.ptp(x), 1e-9), 2, 5)) + room,))
    if named:
        for position, label in enumerate(classes):
            kind = marker(position + position // len(style.PALETTE))
            look: dict[str, Any] = {"color": color(position), "marker": kind}
            name = short(names[label] if 0 <= label < len(names) else str(label), 18)
            axes.scatter(x[labels == label], y[labels == label], s=11, label=name, linewidths=0, alpha=0.85, **look)
        figure.legend(loc="outside lower center", ncols=2, handletextpad=0.1, columnspacing=1.0, markerscale=1.6)
    elif len(classes) == 1:
        axes.scatter(x, y, s=9, linewidths=0, color=style.PALETTE[0])
    else:
        axes.scatter(x, y, s=9, linewidths=0, c=labels, cmap="viridis")
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    coloured = "" if named or len(classes) == 1 else f" The {len(classes)} classes are coloured by number."
    return Drawing("feature-map", "Map of the features", _caption(len(points), how) + coloured, figure)


def _caption(count: int, how: str) -> str:
    return f"{count:,} images by {how} of their features: neighbours are alike to the encoder. No axis has a unit."


class InteractiveMap:
    """The same as markup, its points grouped by class, and the numbers that the page's script needs of it."""

    def __init__(self, run: Contents, name: str, most: int, side: int) -> None:
        chosen, points, labels, how = _placed(run)
        kept = np.linspace(0, len(chosen) - 1, min(most, len(chosen))).round().astype(np.int64)
        chosen, points, labels = chosen[kept], points[kept], labels[kept]
        self.name, self.caption, self.classes = name, _caption(len(chosen), how), classes_of(run)
        names = dict(enumerate(self.classes))
        self.legend = [(label, names.get(label, str(label))) for label in np.unique(labels).tolist()]
        # In the units of the drawing, as large as fits, upwards being less.
        span = np.maximum(np.ptp(points, axis=0), 1e-9)
        scale = min(540 / span[0], 380 / span[1])
        places = np.array([280, 200]) + (points - points.min(0) - span / 2) * scale * np.array([1, -1])
        self.points = {label: [(i, *places[i]) for i in np.flatnonzero(labels == label)] for label, _ in self.legend}
        self.sprite = _sprite(run.features["pictures"][chosen], str(run.data.get("dtype", "")), side)
        self.sprite_key = hashlib.blake2b(self.sprite["url"].encode(), digest_size=8).hexdigest()
        self.data = self._numbers(run, chosen, labels) | {"sprite": self.sprite_key, "classes": self.classes}

    @staticmethod
    def shape(position: int) -> str:
        """The marker of a class, by its place in the legend."""
        return SHAPES[(position + position // len(style.PALETTE)) % len(SHAPES)]

    def _numbers(self, run: Contents, chosen: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        """Positions, labels, predicted classes and neighbours; those that are not shown are left out."""
        place = np.full(len(run.features["features"]), -1)
        place[chosen] = np.arange(len(chosen))
        score, places = main_score(run, with_classes=True), run.features["places"][chosen]
        answers = None if score is None or score.answers is None else score.answers[1]
        known = answers is not None and len(answers) > places.max()
        near = {
            ours: [[int(j) for j in place[row] if j >= 0][:NEAREST] for row in run.features[theirs][chosen]]
            for ours, theirs in (("neighbours", "neighbours"), ("random", "random_neighbours"))
        }
        predicted = answers[places].tolist() if known and answers is not None else None
        return {"places": places.tolist(), "labels": labels.tolist(), "predicted": predicted, **near}


def has_map(run: Contents) -> bool:
    """Whether a run keeps what the interactive map needs; those of older versions do not."""
    needed = ("features", "labels", "places", "pictures", "neighbours", "random_neighbours")
    return all(len(run.features.get(name, ())) == len(run.features.get("features", ())) > 0 for name in needed)


def _sprite(pictures: np.ndarray, dtype: str, side: int) -> dict[str, Any]:
    """All pictures on one sheet, as an address that needs no other file."""
    from PIL import Image

    shown = (255 * view_of(pictures.astype(np.float64), dtype).pictures(pictures.astype(np.float64))).round()
    count, height, width, _ = shown.shape
    scale = side / max(height, width)
    if scale < 1:
        height, width = max(1, round(height * scale)), max(1, round(width * scale))
        made = [np.asarray(Image.fromarray(one.astype(np.uint8)).resize((width, height))) for one in shown]
        shown = np.stack(made)
    columns = int(np.ceil(count**0.5))
    sheet = np.zeros((int(np.ceil(count / columns)) * columns, height, width, 3), np.uint8)
    sheet[:count] = shown
    rows = sheet.reshape(-1, columns, height, width, 3).swapaxes(1, 2).reshape(-1, columns * width, 3)
    url = data_url(Image.fromarray(rows), "webp", quality=70)
    return {"url": url, "columns": columns, "width": width, "height": height, "side": max(width, height)}


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
