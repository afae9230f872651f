"""One score: the metrics of one protocol, pooling and split over the seeds of its heads."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pmae.evaluate.metrics import confusion, evaluate_scores, per_class
from pmae.results import METRICS, Interval, Score, SeedScore


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
