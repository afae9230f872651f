"""Accuracy, balanced accuracy, macro AUC and macro F1 with bootstrap intervals; per-class table and confusion matrix.

Every number is computed from how often each held-out image counts: once for the point estimate, as often as it was
drawn for a bootstrap resample. All metrics of all resamples so come from the same few GEMMs.
"""

import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from pmae.intervals import Interval, wilson
from pmae.results import METRICS, ClassScore, Score, SeedScore

CELLS = 2**20  # weights that are held at once, so that they stay in the cache


class SeedPredictions(NamedTuple):
    """Class scores (N, C) of the held-out images from one seed of the heads, and the settings behind them."""

    seed: int
    scores: np.ndarray
    chosen: dict[str, Any]


def score_of(
    by_seed: Sequence[SeedPredictions],
    labels: np.ndarray,
    classes: Sequence[str],
    resamples: int,
    groups: np.ndarray | None = None,
    **named: Any,
) -> Score:
    """A protocol's score over the seeds of its heads, the class table from the first finite one; `named` as is.

    Where images are of `groups`, intervals are over these, since images of one say much the same.
    """
    finite = [one for one in by_seed if np.isfinite(one.scores).all()]
    measured = {one.seed: evaluate_scores(one.scores, labels, resamples, groups=groups) for one in finite}
    table = confusion(finite[0].scores.argmax(1), labels, len(classes)) if finite else None
    return Score(
        images=len(labels),
        metrics={name: _over_seeds([found[name] for found in measured.values()]) for name in METRICS},
        by_seed=tuple(SeedScore(one.seed, one.chosen, measured.get(one.seed)) for one in by_seed),
        per_class=() if table is None else per_class(table, classes),
        confusion=None if table is None else tuple(map(tuple, table.tolist())),
        notes=tuple(_notes(len(by_seed), finite, labels)),
        **named,
    )


def _notes(count: int, finite: Sequence[SeedPredictions], labels: np.ndarray) -> Iterator[str]:
    if len(finite) < count:
        yield f"training diverged for {count - len(finite)} of {count} seeds, which have no metrics"
    dead = sum(np.ptp(one.scores, axis=0).max() == 0 for one in finite)
    if dead and len(np.unique(labels)) > 1:
        yield f"for {dead} of {count} seeds the classifier gives every image the same scores: its training died"


def _over_seeds(found: Sequence[Interval]) -> Interval:
    """Value and interval averaged over the seeds, with the standard deviation of the value between them."""
    parts = ("value", "low", "high")
    values, lows, highs = ([x for one in found if (x := getattr(one, part)) is not None] for part in parts)
    value, low, high = (statistics.fmean(part) if part else None for part in (values, lows, highs))
    return Interval(value, low, high, statistics.stdev(values) if len(values) > 1 else None)


def evaluate_scores(
    scores: np.ndarray, labels: np.ndarray, resamples: int = 1000, seed: int = 0, groups: np.ndarray | None = None
) -> dict[str, Interval]:
    """Each metric's value and 95% interval from finite class scores (N, C); undefined ones are None.

    Resamples draw images, or all images of each of the `groups` (N,) that they draw.
    """
    predicted = scores.argmax(1)
    rankings = [_ranking(scores[:, c], labels == c) for c in range(scores.shape[1])]
    point = weighted_metrics(predicted, labels, rankings, np.ones((len(labels), 1), np.int32))
    found = {}
    for name, drawn in _bootstrap(predicted, labels, rankings, resamples, seed, groups).items():
        defined = drawn[~np.isnan(drawn)]
        low, high = np.percentile(defined, [2.5, 97.5]) if len(defined) else (np.nan, np.nan)
        found[name] = Interval(_or_none(point[name][0]), _or_none(low), _or_none(high))
    if point["accuracy"][0] in (0, 1):  # no resample of answers that are all right has a wrong one
        units = len(labels) if groups is None else len(np.unique(groups))
        found["accuracy"] = wilson(int(point["accuracy"][0]) * units, units)
    return found


def share_of(right: np.ndarray, groups: np.ndarray | None = None) -> Interval:
    """How many of (N,) are right, with Wilson's interval, for their effective number where images are of `groups`."""
    share, number = right.mean() if len(right) else 0.0, effective_number(right, groups)
    return wilson(share * number, number)


def effective_number(right: np.ndarray, groups: np.ndarray | None = None) -> float:
    """As how many images these (N,) count, of which some are right.

    Images of a group say much the same, so they count for fewer, the more the groups differ (Kish 1965). Where all or
    none are right nothing tells how alike they are, and each group counts for one.
    """
    count = len(right)
    if groups is None or not count:
        return count
    own = np.unique(groups, return_inverse=True)[1].reshape(-1)
    share, number = right.mean(), int(own.max()) + 1
    if share in (0, 1) or number == 1:
        return number
    variance = number / (number - 1) * (np.bincount(own, right - share) ** 2).sum() / count**2
    return float(min(count, share * (1 - share) / variance)) if variance else count


class Ranking(NamedTuple):
    """The images in the order of their score for one class, and where the class's own stand in it."""

    order: np.ndarray
    positive: np.ndarray
    first: np.ndarray  # how many images score lower than each positive one
    last: np.ndarray  # how many score no higher


def _ranking(score: np.ndarray, positive: np.ndarray) -> Ranking:
    order = np.argsort(score, kind="stable")
    ranked, own = score[order], score[positive]
    return Ranking(order, positive, np.searchsorted(ranked, own), np.searchsorted(ranked, own, side="right"))


def _bootstrap(
    predicted: np.ndarray,
    labels: np.ndarray,
    rankings: list[Ranking],
    resamples: int,
    seed: int,
    groups: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Each metric over the resamples, in chunks, each on a thread and a stream of its own."""
    units = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1].reshape(-1)
    count, chunk = units.max() + 1, max(1, CELLS // len(labels))
    sizes = [min(chunk, resamples - start) for start in range(0, resamples, chunk)]

    def part(size: int, stream: np.random.SeedSequence) -> dict[str, np.ndarray]:
        draws = np.random.default_rng(stream).integers(count, size=(size, count))
        weights = np.stack([np.bincount(row, minlength=count) for row in draws], axis=1)[units].astype(np.int32)
        return weighted_metrics(predicted, labels, rankings, weights)

    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(part, sizes, np.random.SeedSequence(seed).spawn(len(sizes))))
    return {name: np.concatenate([found[name] for found in parts]) for name in METRICS}


def weighted_metrics(
    predicted: np.ndarray, labels: np.ndarray, rankings: list[Ranking], weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Each metric (R,) of R weightings (N, R) of the images; NaN where it is undefined."""
    count = len(rankings)
    support = _per_class(labels, count, weights)
    chosen = _per_class(predicted, count, weights)
    hits = _per_class(np.where(predicted == labels, labels, count), count, weights)
    return {
        "accuracy": hits.sum(0) / weights.sum(0),
        "balanced_accuracy": _mean_defined(_ratio(hits, support)),
        "macro_auc": _mean_defined(np.stack([_auc(ranking, weights) for ranking in rankings])),
        "macro_f1": _mean_defined(_ratio(2 * hits, support + chosen)),
    }


def _per_class(classes: np.ndarray, count: int, weights: np.ndarray) -> np.ndarray:
    """(C, R) weight of the images of each class; a class number of C stands for none."""
    member = (classes[None, :] == np.arange(count)[:, None]).astype(np.float32)
    # float32 counts are exact below 2^24, far above what a chunk of images weighs.
    total: np.ndarray = member @ weights.astype(np.float32)
    return total.astype(np.float64)


def _auc(ranking: Ranking, weights: np.ndarray) -> np.ndarray:
    """(R,) area under the ROC curve of one class against the rest, by weighted midranks; NaN without both sides."""
    below = np.zeros((len(weights) + 1, weights.shape[1]), np.int32)
    np.cumsum(weights[ranking.order], axis=0, out=below[1:])
    mass = weights[ranking.positive].astype(np.float64)
    total, hits = below[-1].astype(np.float64), mass.sum(0)
    ranks = ((below[ranking.first] + below[ranking.last]) * mass).sum(0) / 2
    return _ratio(ranks - hits**2 / 2, hits * (total - hits))


def confusion(predicted: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """(C, C) counts: rows are the true classes, columns the predicted ones."""
    return np.bincount(labels * count + predicted, minlength=count * count).reshape(count, count)


def per_class(table: np.ndarray, names: Sequence[str]) -> tuple[ClassScore, ...]:
    """Precision, recall and support of each class of a confusion matrix; None where there is nothing to divide by."""
    hits, support, chosen = np.diag(table), table.sum(1), table.sum(0)
    rows = zip(names, _ratio(hits, chosen), _ratio(hits, support), support.tolist(), strict=True)
    return tuple(ClassScore(name, _or_none(precision), _or_none(recall), n) for name, precision, recall, n in rows)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    quotient = np.full(np.shape(above), np.nan)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


def _mean_defined(values: np.ndarray) -> np.ndarray:
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0.0).sum(0), defined.sum(0))


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def harder(score: Score, name: str) -> list[str]:
    """Whether k-NN on the representation of this name is worse on the images that are scored than on held-out training
    images, by more than chance."""
    for one in score.by_k:
        count, high = one.images or 0, score.accuracy.high
        chosen = one.k == score.by_seed[0].chosen["k"]
        if chosen and high is not None and high < 100 * (wilson(round(one.validation * count), count).low or 0.0):
            shares = f"{100 * one.validation:.1f}% of held-out training images and {score.accuracy.value:.1f}%"
            why = "they are of another kind, or the encoder knows its training images by heart"
            return [f"k-NN on {name} is right for {shares} of {score.split}: {why}"]
    return []
