"""`data.max_images`: some of the training images, for a quick try on a large set, drawn before any is decoded.

Which images they are follows from their number alone, so that runs of every seed share them. Held-out parts stay whole.
"""

from dataclasses import replace

import numpy as np

from pmae.config import DataConfig
from pmae.data.decode import require_room
from pmae.data.files import FileSamples
from pmae.data.images import Splits
from pmae.data.streamed import SampleSet
from pmae.errors import UserError, require


def limited_samples(found: SampleSet, config: DataConfig) -> SampleSet:
    """A set of files with as many of them to train on as asked for."""
    most, train = config.max_images, found.samples["train"]
    if most is None or most == len(train):
        return found
    if not isinstance(train, FileSamples):
        raise UserError(f"data.max_images must be left unset for shards, got {most}; name fewer of them as data.source")
    samples = {**found.samples, "train": train.take(_drawn(most, len(train)))}
    return found._replace(samples=samples, notes=(*found.notes, _note(most, len(train))))


def limited_images(found: Splits, config: DataConfig) -> Splits:
    """The same of arrays, of which one may be a file larger than memory; without names they keep their numbers."""
    most, train = config.max_images, found.train
    if most is None or most == len(train):
        return found
    places = _drawn(most, len(train))
    require_room(most * (train.images.nbytes // len(train)), f"{most:,} images of an array")
    picked = train.take(places)
    picked = picked if train.names else replace(picked, names=tuple(f"#{place}" for place in places))
    return replace(found, train=picked, notes=(*found.notes, _note(most, len(train))))


def _drawn(most: int, count: int) -> np.ndarray:
    """Sorted positions; a smaller number draws a part of what a larger one does."""
    require(most <= count, "data.max_images", f"at most the number of training images ({count:,})", most)
    return np.sort(np.random.default_rng(0).permutation(count)[:most])


def _note(most: int, count: int) -> str:
    return f"{most:,} of the {count:,} training images are used (data.max_images), drawn by a fixed rule"
