"""A look at the encoder while it learns: effective rank always; k-NN and a linear probe where there are labels.

Labels are looked at here and nowhere else in pretraining. The test split is never used: scores come from the val split,
or from a fifth of the training images that the probes do not fit on.
"""

from collections.abc import Callable

import numpy as np
import torch

from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits
from pmae.evaluate.features import Representation, effective_rank, extract
from pmae.evaluate.quick import quick_scores
from pmae.evaluate.splits import hold_out

MOST_IMAGES = {"cuda": 50_000, "cpu": 4_000}


def watch_with(splits: Splits) -> Callable[[Representation, Standardize, torch.device], dict[str, float]]:
    """A function that scores an encoder on these images; without labels it measures the effective rank alone."""
    fit, score = _parts(splits)

    def watch(encoder: Representation, standardize: Standardize, device: torch.device) -> dict[str, float]:
        most = MOST_IMAGES.get(device.type, MOST_IMAGES["cpu"])
        fitted, scored = _first(fit, most), _first(score, most // 4)
        features = extract(encoder, Batches(fitted.images, device), standardize, compile=False)
        pooling = "mean"
        values = {"effective_rank": effective_rank(features[pooling])}
        if fitted.labels is None or scored.labels is None:
            return values
        others = extract(encoder, Batches(scored.images, device), standardize, compile=False)
        labels = [torch.from_numpy(part.labels).to(device) for part in (fitted, scored)]
        return values | quick_scores(features[pooling], labels[0], others[pooling], labels[1])

    return watch


def _parts(splits: Splits) -> tuple[ImageSet, ImageSet]:
    """The images to fit probes on and those to score them on."""
    train, val = splits.train, splits.val
    if train.labels is None or (val is not None and val.labels is not None):
        return train, val or train
    kept, held = hold_out(train.labels, 0.2)
    return train.take(kept), train.take(held)


def _first(part: ImageSet, most: int) -> ImageSet:
    """At most so many images, evenly spread over the set so that every class has its share."""
    return part if len(part) <= most else part.take(np.linspace(0, len(part) - 1, most).astype(np.int64))
