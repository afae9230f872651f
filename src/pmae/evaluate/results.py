"""One entry of the results: the scores of one protocol, pooling and split, over the seeds, as plain JSON values."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pmae.evaluate.metrics import METRICS, confusion, evaluate_scores, per_class


@dataclass(frozen=True)
class Run:
    """Class scores (N, C) of the held-out images from one seed, and the settings behind them."""

    seed: int
    scores: np.ndarray
    chosen: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """All the seeds of one protocol and pooling on one split."""

    protocol: str
    pooling: str
    split: str
    chosen_on: str
    runs: Sequence[Run]
    extra: dict[str, Any] = field(default_factory=dict)


def entry(measured: Measured, labels: np.ndarray, classes: Sequence[str], resamples: int) -> dict[str, Any]:
    """The JSON entry: metrics averaged over the seeds, each seed's own, and the first seed's table and confusion."""
    runs = [_run(run, labels, resamples) for run in measured.runs]
    finite = [(run, made) for run, made in zip(measured.runs, runs, strict=True) if made["metrics"] is not None]
    lost = len(runs) - len(finite)
    table = confusion(finite[0][0].scores.argmax(1), labels, len(classes)) if finite else None
    rows = per_class(table) if table is not None else []
    return {
        "protocol": measured.protocol,
        "pooling": measured.pooling,
        "split": measured.split,
        "images": len(labels),
        "metrics": {name: _over_seeds([made["metrics"][name] for _, made in finite]) for name in METRICS},
        "chosen_on": measured.chosen_on,
        "runs": runs,
        "per_class": [{"class": name, **row} for name, row in zip(classes, rows, strict=False)],
        "confusion": None if table is None else table.tolist(),
        "notes": _notes(measured, labels, lost),
        **measured.extra,
    }


def _notes(measured: Measured, labels: np.ndarray, lost: int) -> list[str]:
    """What would otherwise pass for a bad representation: heads that diverged, or died to a constant."""
    notes, count = [], len(measured.runs)
    if lost:
        notes.append(f"training diverged for {lost} of {count} seeds, which have no metrics")
    dead = sum(bool(np.isfinite(run.scores).all()) and np.ptp(run.scores, axis=0).max() == 0 for run in measured.runs)
    if dead and len(np.unique(labels)) > 1:
        notes.append(f"for {dead} of {count} seeds the classifier gives every image the same scores: its training died")
    return notes


def _run(run: Run, labels: np.ndarray, resamples: int) -> dict[str, Any]:
    diverged = not np.isfinite(run.scores).all()
    metrics = None if diverged else evaluate_scores(run.scores, labels, resamples)
    return {"seed": run.seed, "chosen": run.chosen, "metrics": metrics}


def _over_seeds(found: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Value and interval averaged over the seeds, with the deviation of the value between them."""
    merged = {key: _mean([one[key] for one in found]) for key in ("value", "low", "high")}
    values = [one["value"] for one in found if one["value"] is not None]
    return {**merged, "std": statistics.stdev(values) if len(values) > 1 else None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
