"""A classifier's folder as its page reads it: classifier.json and results.json, typed and checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmae.errors import UserError
from pmae.files import read_object
from pmae.intervals import Fraction, Interval, wilson
from pmae.runs import CLASSIFIER
from pmae.validation import Count, Positive, WholeNumber, coerced

SPLITS = ("test", "val")
"""Which held-out part stands for a classifier: val chose when to stop, so test comes first."""


@dataclass(frozen=True)
class Bin:
    """One bar of the reliability diagram."""

    claimed: Fraction
    right: Fraction
    images: Count


@dataclass(frozen=True)
class Calibration:
    """How far probabilities are from frequencies, with the temperature and without."""

    calibration_error: Fraction
    calibration_error_uncalibrated: Fraction
    reliability: tuple[Bin, ...] = ()
    reliability_uncalibrated: tuple[Bin, ...] = ()


@dataclass(frozen=True)
class Covered:
    """Images left, and right, where answers below a probability are not taken."""

    probability: Fraction
    images: WholeNumber
    right: WholeNumber
    low: Fraction | None = None
    high: Fraction | None = None

    @property
    def share(self) -> Interval:
        """How often they are right; older versions had no interval here."""
        plain = wilson(self.right, self.images)
        return plain if self.low is None else Interval(plain.value, self.low, self.high)


@dataclass(frozen=True)
class Mistake:
    """A wrong answer."""

    file: str
    label: str
    answer: str
    probability: Fraction


@dataclass(frozen=True)
class HeldOut:
    """What results.json says of one held-out part."""

    split: str
    images: Count
    metrics: dict[str, Interval]
    per_class: tuple[dict[str, Any], ...]
    calibration: Calibration
    drifted: Fraction
    confusion: tuple[tuple[WholeNumber, ...], ...] | None = None
    notes: tuple[str, ...] = ()
    coverage: tuple[Covered, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    groups: Count | None = None
    """That its images are of, such as patients."""
    over_groups: bool = False
    """Whether all intervals are over these, as those of older versions were not."""

    @property
    def caution(self) -> str:
        """What intervals are over, where images are of groups."""
        if not self.groups:
            return ""
        narrow = f"Intervals are over images, not over their {self.groups:,} groups: too narrow."
        return f"Intervals are over its {self.groups:,} groups." if self.over_groups else narrow


@dataclass(frozen=True)
class ClassifierContents:
    """A classifier as its page sees it."""

    name: str
    path: Path
    classes: tuple[str, ...]
    card: dict[str, Any]
    data: dict[str, Any]
    parts: tuple[HeldOut, ...]
    temperature: Positive

    @property
    def main(self) -> HeldOut:
        """The part that stands for it."""
        return min(self.parts, key=lambda part: SPLITS.index(part.split))

    @property
    def accuracy(self) -> Interval:
        """The share of images whose label, or whose every label, is right; in percent."""
        metrics = self.main.metrics
        return metrics.get("accuracy", metrics.get("exact_match", Interval())).percent

    @property
    def settings(self) -> dict[str, Any]:
        """Of the fine-tuning."""
        return dict(self.card.get("settings", {}))


def load(path: Path | str, name: str) -> ClassifierContents:
    """Read a classifier's two JSON files, or say what is wrong with them."""
    folder = Path(path).expanduser()
    card, results = read_object(folder / CLASSIFIER), read_object(folder / "results.json")
    where = str(folder / "results.json")
    try:
        told = [_as_intervals(score) for score in results["scores"]]
        parts: tuple[HeldOut, ...] = coerced(told, tuple[HeldOut, ...], f"scores in {where}")
        parts = tuple(part for part in parts if part.split in SPLITS)
        data, classes = dict(results["data"]), tuple(map(str, card["classes"]))
        temperature = coerced(card.get("temperature", 1.0), Positive, f"temperature in {folder / CLASSIFIER}")
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} must be as `pmae finetune` wrote it, but {error!r} is missing or wrong") from error
    if not parts:
        raise UserError(f"scores in {where} must be of val or test, got none")
    return ClassifierContents(name, folder, classes, card, data, parts, temperature)


def _as_intervals(score: dict[str, Any]) -> dict[str, Any]:
    metrics = {key: value if isinstance(value, dict) else {"value": value} for key, value in score["metrics"].items()}
    return {**score, "metrics": metrics}
