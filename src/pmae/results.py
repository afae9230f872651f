"""Evaluations as results.json keeps them: typed, validated when they are read, added to and never overwritten.

One `Evaluation` is one call of the suite on one representation, with everything it says of itself; a `Score` in it is
one protocol, pooling and split. Which of them stand is said in `pmae.standing`; the others stay in the file.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pmae.errors import failing_as, require
from pmae.intervals import Fraction, Interval
from pmae.validation import Count, coerced

FORMAT = 2
BASELINES = ("random weights", "raw pixels", "pca features", "from scratch")
PROTOCOLS = {"linear": "linear probe", "mlp": "MLP probe", "knn": "k-NN", "finetune": "fine-tuning"}
LAST = "last_"
"""Before the number of a ViT's last blocks whose mean tokens were read side by side."""
POOLINGS = {"cls": "CLS", "mean": "patch mean", "pixels": "", "pca": ""}
PRIMARY = "mean"
"""The pooling that stands for a representation where none was chosen: the mean of the patch tokens, the better in every
run measured so far; published numbers are of [CLS]."""
METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy"}
METRICS |= {"macro_auc": "macro AUC", "macro_f1": "macro F1"}
FORMERLY = {"randaugment": "distort", "random_erasing": "blank", "ema_decay": "average"}
"""What older versions called settings of fine-tuning."""


@dataclass(frozen=True)
class SeedScore:
    """One seed of the heads: the settings chosen for it (rate and decay, or k) and its metrics; None if it diverged."""

    seed: int
    chosen: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Interval] | None = None


@dataclass(frozen=True)
class ClassScore:
    """Precision and recall of one class, None where there is nothing to divide by, and its number of images."""

    name: str
    precision: Fraction | None
    recall: Fraction | None
    support: int


@dataclass(frozen=True)
class KAccuracy:
    """Accuracy of k-NN at one k: on the split that is scored, and on the part of train on which k is chosen."""

    k: int
    accuracy: Fraction
    validation: Fraction
    images: Count | None = None
    """How many that part of train has, or as how many images of groups count; not told by older versions."""


@dataclass(frozen=True)
class Score:
    """One protocol on one representation, pooling and split; metrics are shares of 1."""

    protocol: str
    pooling: str
    split: str
    images: int
    metrics: dict[str, Interval]
    chosen_on: str = ""
    """How the settings of the heads were chosen."""
    by_seed: tuple[SeedScore, ...] = ()
    per_class: tuple[ClassScore, ...] = ()
    confusion: tuple[tuple[int, ...], ...] | None = None
    """Rows are true classes, columns predicted ones; of the first seed, as `per_class`."""
    notes: tuple[str, ...] = ()
    by_k: tuple[KAccuracy, ...] = ()
    losses: tuple[tuple[float | None, ...], ...] = ()
    """Of fine-tuning: mean training loss of each epoch, for each seed."""
    # What follows is what the evaluation says of all its scores: it fills them in, and the file has them once.
    method: str = ""
    epoch: int = 0
    preset: str = ""
    data: str = ""
    fingerprint: str = field(default="", compare=False)
    classes: tuple[str, ...] = ()
    chance: float | None = None
    """Percentage that always answering the commonest class gets."""
    answers: Any = field(default=None, compare=False, repr=False)
    """(1 + seeds, images): true classes, then those predicted (-1 if diverged). Kept beside results.json by `key`."""
    groups: Any = field(default=None, compare=False, repr=False)
    """(images,) numbers: images of one, such as those of a patient, say much the same. Kept there by `groups_key`."""

    @property
    def measured(self) -> tuple[object, ...]:
        """What it is of: of scores of the same thing the newest stands."""
        return self.method, self.epoch, self.preset, self.data, self.protocol, self.pooling, self.split

    def same_images(self, other: "Score") -> bool:
        """Whether both are of one data set: two may share a name. Older versions noted no fingerprint."""
        known = {score.fingerprint for score in (self, other) if score.fingerprint}
        return self.data == other.data and len(known) < 2

    @property
    def key(self) -> str:
        return "|".join(map(str, self.measured))

    @property
    def groups_key(self) -> str:
        return f"{self.key}|groups"

    def with_kept(self, kept: Mapping[str, Any]) -> "Score":
        """The same with what was kept of every image beside results.json, where that is there."""
        return dataclasses.replace(self, answers=kept.get(self.key), groups=kept.get(self.groups_key))

    @property
    def label(self) -> str:
        """The representation for display: `pmae epoch 100`, or one of the baselines."""
        return f"{self.method} epoch {self.epoch}" if self.epoch else self.method

    @property
    def pooling_name(self) -> str:
        """The pooling for display; empty where there is no choice."""
        last = self.pooling.removeprefix(LAST)
        return f"last {last} blocks" if last != self.pooling else POOLINGS.get(self.pooling, self.pooling)

    @property
    def representation(self) -> str:
        """The label, with the pooling where there is a choice."""
        return f"{self.label} ({self.pooling_name})" if self.pooling_name else self.label

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was pretrained."""
        return self.method in BASELINES

    @property
    def accuracy(self) -> Interval:
        """The accuracy in percent."""
        return self.percent("accuracy")

    def percent(self, metric: str) -> Interval:
        """A metric in percent; undefined if it was not measured."""
        return self.metrics.get(metric, Interval()).percent


@dataclass(frozen=True)
class DuplicatePair:
    """A held-out image and the training image that is the same, or nearly, by name."""

    train: str
    held_out: str


@dataclass(frozen=True)
class Duplicates:
    """How many held-out images train holds too, byte for byte and nearly, and the first of them."""

    count: int
    pairs: tuple[DuplicatePair, ...] = ()
    near: int | None = None
    """Images beside those `count` that look nearly like one of train; None where nobody looked."""
    near_of: int | None = None
    """How many held-out images were compared for that: all, or some of very many."""
    near_pairs: tuple[DuplicatePair, ...] = ()

    def in_words(self, split: str) -> Iterator[str]:
        """A sentence about images that train holds byte for byte, and one about those it nearly holds."""
        near = (self.near or 0, "nearly unchanged", f" ({self.near_of} were compared)", "~", self.near_pairs)
        for count, how, remark, sign, pairs in ((self.count, "byte for byte", "", "=", self.pairs), near):
            named = ", ".join(f"{pair.held_out} {sign} {pair.train}" for pair in pairs[:3])
            examples = f", for example {named}" if named else ""
            if count:
                images = f"{count} image{'s' * (count > 1)} of {split}"
                yield f"{images} can be found {how} in the training part as well{remark}{examples}"


@dataclass(frozen=True)
class EvaluatedData:
    """The labelled images: how many in each split (None if absent), and what a reader must know of them."""

    name: str
    classes: tuple[str, ...]
    train: int | None = None
    val: int | None = None
    test: int | None = None
    notes: tuple[str, ...] = ()
    duplicates: dict[str, Duplicates] = field(default_factory=dict)
    majority: dict[str, Fraction] = field(default_factory=dict)
    """By split: accuracy of always answering the commonest training class."""
    fingerprint: str = ""
    """Of images and labels; older versions noted none."""


@dataclass(frozen=True)
class FeatureShape:
    """Width and effective rank (None where it is too wide to measure) of the training features of a pooling."""

    width: int
    effective_rank: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """One call of the suite: the representation, the settings, the data, and the scores."""

    method: str
    """pmae or mae, weights that were given, or one of the baselines."""
    preset: str
    data: EvaluatedData
    scores: tuple[Score, ...]
    epoch: int = 0
    """Epochs of pretraining; 0 for a baseline and for given weights."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Every setting of the protocols."""
    seeds: tuple[int, ...] = ()
    features: dict[str, FeatureShape] = field(default_factory=dict)
    """By pooling."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Spent on features, probes, knn and finetune, each with its metrics."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shared: dict[str, Any] = {"method": self.method, "epoch": self.epoch, "preset": self.preset}
        shared |= {"data": self.data.name, "fingerprint": self.data.fingerprint, "classes": self.data.classes}
        chances = {split: 100 * share for split, share in self.data.majority.items()}
        filled = (dataclasses.replace(one, **shared, chance=chances.get(one.split)) for one in self.scores)
        object.__setattr__(self, "scores", tuple(filled))

    def answers_to(self, method: str, epoch: int, data: str, settings: dict[str, Any], seeds: Sequence[int]) -> bool:
        """Whether it is of this representation and these images, by these protocols."""
        asked = json.loads(json.dumps([method, epoch, data, settings, list(seeds)]))
        own = [self.method, self.epoch, self.data.name, self.settings, list(self.seeds)]
        return bool(asked == json.loads(json.dumps(own)))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, from which `read_evaluations` makes an equal evaluation."""
        plain = [dataclasses.replace(score, answers=None, groups=None) for score in self.scores]
        values = dataclasses.asdict(dataclasses.replace(self, scores=tuple(plain)))
        for score in values["scores"]:
            # What a score has from its evaluation, and what is kept beside the file.
            for key in ("method", "epoch", "preset", "data", "fingerprint", "classes", "chance", "answers", "groups"):
                del score[key]
        return {"format": FORMAT, **values}


@dataclass(frozen=True)
class SegmentationScore:
    """Intersection over union: of each class (None where it does not occur), and their mean with its interval."""

    miou: Interval
    accuracy: Fraction
    iou: dict[str, Fraction | None]
    images: int

    def in_words(self) -> str:
        mean = self.miou.percent
        each = "  ".join(f"{name}: {'none' if iou is None else f'{100 * iou:.1f}'}" for name, iou in self.iou.items())
        right = f"pixels right {100 * self.accuracy:.1f}"
        sure = "no interval" if mean.low is None else f"95% interval {mean.low:.1f} to {mean.high:.1f}"
        return f"{mean.value:.1f} ({sure})   {right}   {each}"


@dataclass(frozen=True)
class Segmentation:
    """A linear segmentation probe on one folder of masks: its classes, and the score of each representation."""

    data: str
    counts: dict[str, int]
    classes: tuple[int, ...]
    scores: dict[str, SegmentationScore]
    notes: tuple[str, ...] = ()


def read_evaluations(results: Mapping[str, Any], file: Path | str) -> list[Evaluation]:
    """Every evaluation in the content of a results.json, oldest first; what cannot be shown is refused by its key."""
    # Python writes NaN and Infinity into JSON: they are no number to show.
    known = {key: results[key] for key in ("evaluation", "evaluations") if key in results}
    known = json.loads(json.dumps(known), parse_constant=lambda name: None)
    with failing_as(f"{file}: evaluation must be as an older version wrote it"):
        translated = [_translated(label, old) for label, old in known.get("evaluation", {}).items()]
    found = coerced(translated, tuple[Evaluation, ...], f"{file}: evaluation")
    found += coerced(known.get("evaluations", []), tuple[Evaluation, ...], f"{file}: evaluations")
    for evaluation in found:
        if isinstance(own := evaluation.settings.get("finetune"), dict):
            own |= {name: own.pop(before) for name, before in FORMERLY.items() if before in own}
    for score in (score for evaluation in found for score in evaluation.scores):
        table, rule = score.confusion, "a row and a column for each of data.classes"
        fits = table is None or {len(table), *map(len, table)} == {len(score.classes)}
        require(fits, f"{file}: {score.label}: confusion", rule, table)
    return list(found)


def _translated(label: str, old: dict[str, Any]) -> dict[str, Any]:
    """An evaluation of format 1, which stood under a label: `pmae epoch 100 [strong]`."""
    name = re.sub(r"\s*\[.*\]$", "", label)
    told = re.fullmatch(r"(.*) epoch ([0-9]{1,9})", name, re.DOTALL)
    method, epoch = (told[1], int(told[2])) if told else (name, 0)
    scores = [
        {
            **score,
            "metrics": {name: metric or {} for name, metric in score["metrics"].items()},
            "by_seed": score["runs"],
            "per_class": [{**row, "name": row.get("class")} for row in score.get("per_class", [])],
        }
        for score in old["results"]
    ]
    return {**old, "method": method, "epoch": epoch, "scores": scores}
