"""A classifier that is kept: labelled images in, a folder out that predicts; here its settings, and nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from pmae.errors import require
from pmae.validation import Count, Positive, Settings, Share, WholeNumber


@dataclass(frozen=True)
class FinetuneConfig(Settings):
    """How a classifier is trained: the options of `pmae finetune`."""

    method: Literal["full", "linear", "lora"] = "full"
    """full: every weight; linear: a head on frozen features; lora: low-rank adapters (extra `lora`)."""
    epochs: Count | None = None
    """Passes over the training images at most; what makes 2,000 steps, from 20 to 200, if not given."""
    batch_size: Count = 256
    """Images in a step; a set of fewer than ten such batches takes a tenth of its size, at least 16."""
    lr: Positive | None = None
    """Peak rate; 5e-4 for full, 2e-3 for lora if not given."""
    pooling: Literal["mean", "cls"] = "mean"
    """What the head sees: the mean of the patch tokens, or [CLS]."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: rare classes count as much as common ones."""
    augment: Literal["crops", "strong", "none"] = "strong"
    """strong: crops, flips, RandAugment, erasing, mixup and CutMix, as the preset; crops: crops and flips; or none."""
    validation: Share = 0.15
    """Share of the training images to stop and to calibrate on, where the data has no val part."""
    test: Share | None = None
    """Share of the training images to score on at the end, where the data has no test part; none if not given."""
    patience: Count | None = None
    """Epochs without a lower validation loss after which training stops; a fifth of all, at least 5, if not given."""
    rank: Count = 8
    """Of the adapters, for lora."""
    seed: WholeNumber = 0
    """Of everything random."""

    def check(self) -> None:
        for name in ("epochs", "lr", "patience") if self.method == "linear" else ():
            given = getattr(self, name)
            require(given is None, f"finetune.{name}", "left out for a linear head, whose fit has no epochs", given)
        own = self.method == "lora" or self.rank == FinetuneConfig.rank
        require(own, "finetune.rank", "left out but for method lora", self.rank)
