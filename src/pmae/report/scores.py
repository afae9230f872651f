"""The accuracies in results.json as flat records."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BASELINES = ("random weights", "raw pixels", "pca features", "from scratch")
PROTOCOLS = {"linear": "linear probe", "mlp": "MLP probe", "knn": "k-NN", "finetune": "fine-tuning"}
POOLINGS = {"cls": "CLS", "mean": "patch mean", "pixels": "", "pca": ""}
METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_auc": "macro AUC",
    "macro_f1": "macro F1",
}


@dataclass(frozen=True)
class Interval:
    """A percentage with its 95% interval; None where it is undefined."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def overlaps(self, other: "Interval") -> bool:
        """Whether the two intervals share a number; unknown bounds count as shared."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Score:
    """One protocol on one representation and split."""

    label: str
    """Which representation: `pmae epoch 100`, or one of the baselines."""
    protocol: str
    pooling: str
    split: str
    images: int
    metrics: dict[str, Interval]
    preset: str
    data: str
    seeds: int
    spread: float | None = None
    """Deviation of the accuracy between the seeds, in points."""
    confusion: list[list[int]] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    per_class: list[dict[str, Any]] = field(default_factory=list)
    chance: float | None = None
    """Percentage that always answering the commonest class gets."""

    @property
    def accuracy(self) -> Interval:
        """The accuracy in percent."""
        return self.metrics["accuracy"]

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was pretrained."""
        return self.label in BASELINES

    @property
    def epoch(self) -> int:
        """The epoch at the end of the label; 0 if it has none."""
        found = re.search(r"(\d+)$", self.label)
        return int(found[1]) if found else 0

    @property
    def representation(self) -> str:
        """The label, with the pooling where there is a choice."""
        pooling = POOLINGS.get(self.pooling, self.pooling)
        return f"{self.label} ({pooling})" if pooling else self.label


def scores_of(evaluation: dict[str, Any]) -> list[Score]:
    """Every entry of every evaluated representation, pretrained ones first, baselines in their usual order.

    A key is a label, followed by its preset in brackets: `pmae epoch 100 [strong]`.
    """
    suites = [(re.sub(r"\s*\[.*\]$", "", key), suite) for key, suite in evaluation.items()]
    found = [_score(label, suite, entry) for label, suite in suites for entry in suite["results"]]
    return sorted(found, key=lambda s: BASELINES.index(s.label) if s.is_baseline else -1)


def primary(scores: Sequence[Score], order: Sequence[str] = ("mean", "cls")) -> list[Score]:
    """For each label, preset, protocol and split the pooling that counts, fixed beforehand: no test set chose it.

    The mean of the patch tokens, the better in every run measured so far; published numbers are of [CLS].
    """
    kept: dict[tuple[str, ...], Score] = {}
    for score in sorted(scores, key=lambda s: order.index(s.pooling) if s.pooling in order else len(order)):
        kept.setdefault((score.label, score.preset, score.protocol, score.split), score)
    return [s for s in scores if s is kept[s.label, s.preset, s.protocol, s.split]]


def pretrained(scores: Sequence[Score]) -> list[Score]:
    """Scores of the latest evaluated epoch of every pretrained encoder."""
    latest: dict[str, int] = {}
    for score in scores:
        if not score.is_baseline:
            latest[_family(score)] = max(latest.get(_family(score), 0), score.epoch)
    return [score for score in scores if not score.is_baseline and score.epoch == latest[_family(score)]]


def _score(label: str, suite: dict[str, Any], entry: dict[str, Any]) -> Score:
    metrics = {name: _interval(entry["metrics"].get(name) or {}) for name in METRICS}
    spread, majority = (entry["metrics"]["accuracy"] or {}).get("std"), suite["data"].get("majority", {})
    return Score(
        label=label,
        protocol=entry["protocol"],
        pooling=entry["pooling"],
        split=entry["split"],
        images=int(entry["images"]),
        metrics=metrics,
        preset=str(suite["preset"]),
        data=str(suite["data"]["name"]),
        seeds=len(entry["runs"]),
        spread=_percent(spread),
        confusion=entry.get("confusion") or [],
        classes=tuple(map(str, suite["data"]["classes"])),
        per_class=entry.get("per_class") or [],
        chance=_percent(majority.get(entry["split"])),
    )


def _interval(metric: dict[str, float | None]) -> Interval:
    return Interval(*(_percent(metric.get(key)) for key in ("value", "low", "high")))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _family(score: Score) -> str:
    """The label without its epoch."""
    return re.sub(r"\s*(epoch)?\s*\d+$", "", score.label)
