"""Accuracy, balanced accuracy, macro AUC and macro F1 with bootstrap intervals; per-class table and confusion matrix.

`score_of` turns the predictions of one protocol, from all seeds of its heads, into a `Score`.

Every number is computed from how often each held-out image counts: once for the point estimate, as often as it was
drawn for a bootstrap resample. All metrics of all resamples so come from the same few products.
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pmae.errors import UserError, require
from pmae.results import METRICS, ClassScore, Interval, Score, SeedScore

CELLS = 2**20


@dataclass(frozen=True)
class SeedPredictions:
    """Class scores (N, C) of the held-out images from one seed of the heads, and the settings behind them."""

    seed: int
    scores: np.ndarray
    chosen: dict[str, Any]


@dataclass(frozen=True)
class Predictions:
    """All the seeds of one protocol and pooling on one split, with what else its score is to keep."""

    protocol: str
    pooling: str
    split: str
    chosen_on: str
    by_seed: Sequence[SeedPredictions]
    more: dict[str, Any] = field(default_factory=dict)


def score_of(made: Predictions, labels: np.ndarray, classes: Sequence[str], resamples: int) -> Score:
    """Metrics averaged over the seeds, each seed's own, and the first finite seed's per-class table and confusion."""
    by_seed = [_seed_score(one, labels, resamples) for one in made.by_seed]
    finite = [one.scores for one in made.by_seed if np.isfinite(one.scores).all()]
    table = confusion(finite[0].argmax(1), labels, len(classes)) if finite else None
    metrics = [one.metrics for one in by_seed if one.metrics is not None]
    return Score(
        made.protocol,
        made.pooling,
        made.split,
        len(labels),
        {name: _over_seeds([found[name] for found in metrics]) for name in METRICS},
        made.chosen_on,
        tuple(by_seed),
        per_class=() if table is None else per_class(table, classes),
        confusion=None if table is None else tuple(map(tuple, table.tolist())),
        notes=tuple(_notes(made, labels, len(by_seed) - len(metrics))),
        **made.more,
    )


def evaluate_scores(
    scores: np.ndarray, labels: np.ndarray, resamples: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """Each metric's value and 95% interval from class scores (N, C); undefined ones are None."""
    scores, labels = _checked(scores, labels)
    rankings = [_ranking(scores[:, c], labels == c) for c in range(scores.shape[1])]
    point = weighted_metrics(scores.argmax(1), labels, rankings, np.ones((len(labels), 1), np.int32))
    drawn = _bootstrap(scores.argmax(1), labels, rankings, resamples, seed)
    return {name: _interval(point[name][0], drawn[name]) for name in METRICS}


class Ranking(NamedTuple):
    """The images in the order of their score for one class, and where the class's own stand in it."""

    order: np.ndarray
    positive: np.ndarray
    first: np.ndarray
    """How many images score lower than each positive one."""
    last: np.ndarray
    """How many score no higher."""


def weighted_metrics(
    predicted: np.ndarray, labels: np.ndarray, rankings: list[Ranking], weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Each metric (R,) of R weightings (N, R) of the images; NaN where it is undefined."""
    count = len(rankings)
    support = _per_class(labels, count, weights)
    chosen = _per_class(predicted, count, weights)
    hits = _per_class(np.where(predicted == labels, labels, count), count, weights)
    f1 = _ratio(2 * hits, support + chosen)
    return {
        "accuracy": hits.sum(0) / weights.sum(0),
        "balanced_accuracy": _mean_defined(_ratio(hits, support)),
        "macro_auc": _mean_defined(np.stack([_auc(ranking, weights) for ranking in rankings])),
        "macro_f1": _mean_defined(f1),
    }


def confusion(predicted: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """(C, C) counts: rows are the true classes, columns the predicted ones."""
    return np.bincount(labels * count + predicted, minlength=count * count).reshape(count, count)


def per_class(table: np.ndarray, names: Sequence[str]) -> tuple[ClassScore, ...]:
    """Precision, recall and support of each class of a confusion matrix; None where there is nothing to divide by."""
    hits, support, chosen = np.diag(table), table.sum(1), table.sum(0)
    precision, recall = _ratio(hits, chosen), _ratio(hits, support)
    return tuple(
        ClassScore(name, _or_none(precision[c]), _or_none(recall[c]), int(support[c])) for c, name in enumerate(names)
    )


def _checked(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    require(scores.ndim == 2, "scores", "of shape (images, classes)", scores.shape)
    require(
        len(scores) == len(labels) > 0, "labels", f"one per row of scores ({len(scores)}), at least one", len(labels)
    )
    if not np.isfinite(scores).all():
        raise UserError("scores must be finite, got NaN or infinity (a head that diverged has no metrics)")
    inside = labels.min() >= 0 and labels.max() < scores.shape[1]
    require(bool(inside), "labels", f"class numbers from 0 to {scores.shape[1] - 1}", (labels.min(), labels.max()))
    return scores.astype(np.float64, copy=False), labels.astype(np.int64, copy=False)


def _bootstrap(
    predicted: np.ndarray, labels: np.ndarray, rankings: list[Ranking], resamples: int, seed: int
) -> dict[str, np.ndarray]:
    """Each metric over the resamples, in chunks that stay in the cache, each on a thread and a stream of its own."""
    count = len(labels)
    chunk = max(1, CELLS // count)
    sizes = [min(chunk, resamples - start) for start in range(0, resamples, chunk)]

    def part(size: int, stream: np.random.SeedSequence) -> dict[str, np.ndarray]:
        draws = np.random.default_rng(stream).integers(count, size=(size, count))
        weights = np.stack([np.bincount(row, minlength=count) for row in draws], axis=1).astype(np.int32)
        return weighted_metrics(predicted, labels, rankings, weights)

    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(part, sizes, np.random.SeedSequence(seed).spawn(len(sizes))))
    return {name: np.concatenate([found[name] for found in parts]) for name in METRICS}


def _ranking(score: np.ndarray, positive: np.ndarray) -> Ranking:
    order = np.argsort(score, kind="stable")
    ranked, own = score[order], score[positive]
    return Ranking(order, positive, np.searchsorted(ranked, own), np.searchsorted(ranked, own, side="right"))


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


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    quotient = np.full(np.shape(above), np.nan)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


def _mean_defined(values: np.ndarray) -> np.ndarray:
    """Mean over the classes for which the value is defined; NaN if there is none."""
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0.0).sum(0), defined.sum(0))


def _interval(value: float, drawn: np.ndarray) -> Interval:
    defined = drawn[~np.isnan(drawn)]
    low, high = np.percentile(defined, [2.5, 97.5]) if len(defined) else (np.nan, np.nan)
    return Interval(_or_none(value), _or_none(low), _or_none(high))


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _notes(made: Predictions, labels: np.ndarray, lost: int) -> list[str]:
    """What would otherwise pass for a bad representation: heads that diverged, or died to a constant."""
    notes, count = [], len(made.by_seed)
    if lost:
        notes.append(f"training diverged for {lost} of {count} seeds, which have no metrics")
    dead = sum(bool(np.isfinite(one.scores).all()) and np.ptp(one.scores, axis=0).max() == 0 for one in made.by_seed)
    if dead and len(np.unique(labels)) > 1:
        notes.append(f"for {dead} of {count} seeds the classifier gives every image the same scores: its training died")
    return notes


def _seed_score(one: SeedPredictions, labels: np.ndarray, resamples: int) -> SeedScore:
    finite = bool(np.isfinite(one.scores).all())
    return SeedScore(one.seed, one.chosen, evaluate_scores(one.scores, labels, resamples) if finite else None)


def _over_seeds(found: Sequence[Interval]) -> Interval:
    """Value and interval averaged over the seeds, with the standard deviation of the value between them."""
    values = [one.value for one in found if one.value is not None]
    std = statistics.stdev(values) if len(values) > 1 else None
    return Interval(_mean(values), _mean([one.low for one in found]), _mean([one.high for one in found]), std)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
