"""How good a classifier is, and how far its probabilities can be trusted, for results.json."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

from pmae.classify.calibrate import calibration_error, judged, nll, probabilities, reliability
from pmae.classify.labels import Labelled
from pmae.classify.model import CHANCE, ImageClassifier
from pmae.evaluate.metrics import SeedPredictions, score_of, share_of
from pmae.files import read_object

RESAMPLES = 1000
LEAST, MISTAKES = (0.5, 0.8, 0.9, 0.95, 0.99), 12
"""Probabilities that a user may ask of an answer, and wrong answers that are named."""


def score(classifier: ImageClassifier, part: Labelled, split: str) -> dict[str, Any]:
    """Metrics, confusion and calibration on one split, with and without the temperature."""
    features = classifier.embedder(part.images.images)
    logits, multi = classifier.logits(features), classifier.card.multi_label
    found, raw = probabilities(logits, multi), logits * classifier.card.temperature
    groups = part.images.groups
    if multi:
        metrics = _several(found, part.targets, classifier.classes, groups)
    else:  # with bootstrap intervals, each class's, and the confusion matrix
        named = {"protocol": "finetune", "pooling": classifier.card.pooling, "split": ""}
        predictions = [SeedPredictions(0, found, {})]
        measured = asdict(score_of(predictions, part.targets, classifier.classes, RESAMPLES, groups, **named))
        metrics = {key: measured[key] for key in ("metrics", "per_class", "confusion", "notes")}
        for number, row in enumerate(metrics["per_class"]):
            own = part.targets == number
            recall = share_of(found[own].argmax(1) == number, None if groups is None else groups[own])
            row |= {"recall_low": recall.low, "recall_high": recall.high}
    drifted = float((classifier.reference.distances(features) > classifier.reference.threshold).mean())
    bins, before = (reliability(claimed, part.targets) for claimed in (found, probabilities(raw, multi)))
    sure = {
        "nll": nll(logits, part.targets),
        "nll_uncalibrated": nll(raw, part.targets),
        "calibration_error": calibration_error(bins),
        "calibration_error_uncalibrated": calibration_error(before),
        "reliability": [b._asdict() for b in bins],
        "reliability_uncalibrated": [b._asdict() for b in before],
    }
    told = {"split": split, "images": len(part.targets), **metrics, "calibration": sure, "drifted": drifted}
    if groups is not None:
        told |= {"groups": len(np.unique(groups)), "over_groups": True}
    if multi:
        return told
    return told | {
        "coverage": coverage(found, part.targets, groups),
        "mistakes": mistakes(found, part, classifier.classes),
    }


def coverage(found: np.ndarray, targets: np.ndarray, groups: np.ndarray | None) -> list[dict[str, Any]]:
    """How many images are left, and how often they are right, if only answers of a least probability are taken."""
    sure, right = judged(found, targets)
    rows = list[dict[str, Any]]()
    for least in LEAST:
        own = sure >= least
        share = share_of(right[own], None if groups is None else groups[own])
        row = {"probability": least, "images": int(own.sum()), "right": int(right[own].sum())}
        rows.append({**row, "low": share.low, "high": share.high})
    return rows


def mistakes(found: np.ndarray, part: Labelled, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The wrong answers that are surest of themselves, by file."""
    sure, right = judged(found, part.targets)
    wrong = np.flatnonzero(right == 0)
    surest = wrong[np.argsort(-sure[wrong], kind="stable")][:MISTAKES].tolist()
    names, answers = part.images.names, found.argmax(1)
    return [
        {
            "file": names[i] if names else f"#{i}",
            "label": classes[part.targets[i]],
            "answer": classes[answers[i]],
            "probability": float(sure[i]),
        }
        for i in surest
    ]


def _several(
    found: np.ndarray, targets: np.ndarray, classes: tuple[str, ...], groups: np.ndarray | None
) -> dict[str, Any]:
    """Of several labels an image: average precision and area under the ROC curve of each class, and their means."""
    answers, rows = found >= CHANCE, []
    for number, name in enumerate(classes):
        truth, both = targets[:, number], 0 < targets[:, number].sum() < len(targets)
        precision = float(average_precision_score(truth, found[:, number])) if both else None
        auc = float(roc_auc_score(truth, found[:, number])) if both else None
        right = float((answers[:, number] == truth).mean())
        row = {"name": name, "average_precision": precision, "auc": auc, "accuracy": right, "support": int(truth.sum())}
        rows.append(row)
    exact = asdict(share_of((answers == targets).all(1), groups))
    means = {key: _mean([row[key] for row in rows]) for key in ("average_precision", "auc", "accuracy")}
    metrics = {"exact_match": exact, **{f"mean_{key}": mean for key, mean in means.items()}}
    return {"metrics": metrics, "per_class": rows}


def _mean(values: list[Any]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def in_words(folder: Path | str) -> str:
    """The scores of a classifier's results.json as aligned lines, the accuracy with its interval."""
    lines = []
    scores = read_object(Path(folder).expanduser() / "results.json")["scores"]
    for found in scores:
        values = {**found["metrics"], "calibration_error": found["calibration"]["calibration_error"]}
        told = "   ".join(f"{name} {shown}" for name, value in values.items() if (shown := _shown(name, value)))
        lines.append(f"  {found['split']:<5} {found['images']:>6} images   {told}")
    if {found["split"] for found in scores} == {"val"}:
        lines.append("  val was used to choose, so its numbers are a little too good; a test part (--test) would tell")
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    """A metric in words, nothing where it is undefined."""
    interval = value if isinstance(value, dict) else {}
    value = interval.get("value") if interval else value
    if value is None or name not in ("accuracy", "exact_match") or interval.get("low") is None:
        return "" if value is None else f"{value:.3f}"
    return f"{value:.3f} (95% interval {interval['low']:.3f} to {interval['high']:.3f})"
