"""`data.max_images`: some of the training images, for a quick try on a large set, drawn before any is decoded.

Which images they are follows from their number alone, so that runs of every seed share them. Held-out parts stay whole.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np

from pmae.config import DataConfig
from pmae.data.decode import require_room
from pmae.data.files import FileSamples
from pmae.data.images import Splits
from pmae.data.streamed import SampleSet
from pmae.errors import UserError, require

T = TypeVar("T", SampleSet, Splits)


def limited(found: T, config: DataConfig) -> T:
    """A set with as many images to train on as asked for; those of arrays, without names, keep their numbers."""
    most, train = config.max_images, found.samples["train"] if isinstance(found, SampleSet) else found.train
    if most is None or most == len(train):
        return found
    if isinstance(found, SampleSet) and not isinstance(train, FileSamples):
        raise UserError(f"data.max_images must be left unset for shards, got {most}; name fewer of them as data.source")
    require(most <= len(train), "data.max_images", f"at most the number of training images ({len(train):,})", most)
    # Sorted positions; a smaller number draws a part of what a larger one does.
    places = np.sort(np.random.default_rng(0).permutation(len(train))[:most])
    note = f"{most:,} of the {len(train):,} training images are used (data.max_images), drawn by a fixed rule"
    if isinstance(train, FileSamples):
        return found._replace(samples={**found.samples, "train": train.take(places)}, notes=(*found.notes, note))
    # One may be a file larger than memory.
    require_room(most * (train.images.nbytes // len(train)), f"{most:,} images of an array")
    picked = train.take(places)
    picked = picked if train.names else replace(picked, names=tuple(f"#{place}" for place in places))
    return replace(found, train=picked, notes=(*found.notes, note))
