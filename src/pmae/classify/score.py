"""How good a classifier is, and how far its probabilities can be trusted, for results.json."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

from pmae.classify.calibrate import calibration_error, nll, probabilities
from pmae.classify.fit import features_of
from pmae.classify.labels import Labelled
from pmae.classify.model import CHANCE, ImageClassifier
from pmae.evaluate.metrics import SeedPredictions, score_of
from pmae.files import read_object

RESAMPLES = 1000


def score(classifier: ImageClassifier, part: Labelled, split: str) -> dict[str, Any]:
    """Metrics, confusion and calibration on one split, with and without the temperature."""
    features = features_of(classifier.embedder, part)
    logits, multi = classifier.logits(features), classifier.card.multi_label
    found, raw = probabilities(logits, multi), logits * classifier.card.temperature
    metrics = _several(found, part.targets, classifier.classes) if multi else _one(found, part.targets, classifier)
    drifted = float((classifier.reference.distances(features) > classifier.reference.threshold).mean())
    sure = {
        "nll": nll(logits, part.targets),
        "nll_uncalibrated": nll(raw, part.targets),
        "calibration_error": calibration_error(found, part.targets),
        "calibration_error_uncalibrated": calibration_error(probabilities(raw, multi), part.targets),
    }
    return {"split": split, "images": len(part.targets), **metrics, "calibration": sure, "drifted": drifted}


def _one(found: np.ndarray, targets: np.ndarray, classifier: ImageClassifier) -> dict[str, Any]:
    """Of one label an image: metrics with bootstrap intervals, each class's, and the confusion matrix."""
    named = {"protocol": "finetune", "pooling": classifier.card.pooling, "split": ""}
    measured = asdict(score_of([SeedPredictions(0, found, {})], targets, classifier.classes, RESAMPLES, **named))
    return {key: measured[key] for key in ("metrics", "per_class", "confusion", "notes")}


def _several(found: np.ndarray, targets: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    """Of several labels an image: average precision and area under the ROC curve of each class, and their means."""
    answers, rows = found >= CHANCE, []
    for number, name in enumerate(classes):
        truth, both = targets[:, number], 0 < targets[:, number].sum() < len(targets)
        precision = float(average_precision_score(truth, found[:, number])) if both else None
        auc = float(roc_auc_score(truth, found[:, number])) if both else None
        right = float((answers[:, number] == truth).mean())
        row = {"name": name, "average_precision": precision, "auc": auc, "accuracy": right, "support": int(truth.sum())}
        rows.append(row)
    exact = float((answers == targets).all(1).mean())
    means = {key: _mean([row[key] for row in rows]) for key in ("average_precision", "auc", "accuracy")}
    return {
        "metrics": {"exact_match": exact, **{f"mean_{key}": mean for key, mean in means.items()}},
        "per_class": rows,
    }


def _mean(values: list[Any]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def in_words(folder: Path | str) -> str:
    """The scores of a classifier's results.json as aligned lines."""
    lines = []
    for found in read_object(Path(folder).expanduser() / "results.json")["scores"]:
        values = {
            name: value["value"] if isinstance(value, dict) else value for name, value in found["metrics"].items()
        }
        values["calibration_error"] = found["calibration"]["calibration_error"]
        told = "   ".join(f"{name} {value:.3f}" for name, value in values.items() if value is not None)
        lines.append(f"  {found['split']:<5} {found['images']:>6} images   {told}")
    return "\n".join(lines)
