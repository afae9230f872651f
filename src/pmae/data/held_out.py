"""Images that pretraining never sees, chosen by rule where a set brings no held-out part of its own."""

from dataclasses import replace

import numpy as np

from pmae.data.images import Splits

FEWEST, SHARE, MOST = 20, 0.1, 1000
LARGEST = 2**30
"""Bytes of an array from which images are picked; a larger one may live on the disk, and picking would read it."""


def with_held_out(splits: Splits) -> Splits:
    """The set with a tenth of its images, at most 1,000, as val; sets with a held-out part of their own are left alone.

    Which images they are follows from the number of images alone, so that runs of every seed share them. They carry no
    labels: probes have a rule of their own for what they hold out.
    """
    train = splits.train
    own = splits.val is not None or splits.test is not None
    large = isinstance(train.images, np.ndarray) and train.images.nbytes > LARGEST
    if own or large or len(train) < FEWEST:
        return splits
    order = np.random.default_rng(0).permutation(len(train))
    held, kept = (np.sort(part) for part in np.split(order, [min(MOST, round(SHARE * len(train)))]))
    names = tuple(train.names[i] if train.names else f"#{i}" for i in held)
    chosen = f"{len(held)} of the {len(train)} images are held out as val, by a fixed rule"
    note = f"{chosen}: nothing is trained or fitted on them"
    val = replace(train.take(held), labels=None, classes=(), names=names)
    return replace(splits, train=train.take(kept), val=val, notes=(*splits.notes, note))
