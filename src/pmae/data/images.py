"""What every reader returns and everything downstream takes: images channels first, in their own dtype."""

import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmae.errors import UserError, require

CHUNK = 256
DTYPES = ("uint8", "uint16", "int16", "float16", "float32", "float64")


class OnDemand(ABC):
    """Images (N, C, H, W) that are decoded when they are asked for: an array, as far as reading goes."""

    shape: tuple[int, int, int, int]
    dtype: np.dtype

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """Name of each image, read when it is asked for."""

    @abstractmethod
    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        """The images at these positions; one that cannot be read is replaced by the next of its class."""

    @abstractmethod
    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """All images that can be read, and their positions."""

    @abstractmethod
    def subset(self, index: np.ndarray) -> "OnDemand":
        """The images at these positions, still not decoded."""

    @abstractmethod
    def blocks(self) -> tuple[np.ndarray, int] | None:
        """Where runs of images begin that the disk gives only as a whole, and how many runs fit in memory together."""

    @property
    def ndim(self) -> int:
        """Four axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """What all of them would take in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), CHUNK):
            yield from self[start : start + CHUNK]


@dataclass(frozen=True)
class ImageSet:
    """The images of one split."""

    images: np.ndarray | OnDemand
    """(N, C, H, W), in memory, memory-mapped or decoded on demand, never cast."""
    labels: np.ndarray | None = None
    """(N,) int64 class numbers, if there are any."""
    classes: tuple[str, ...] = ()
    """Name of each class number."""
    names: Sequence[str] = ()
    """File name of each image, where it had one."""
    vectors: bool = False
    """Whether images are rows of a table: one line of numbers without an order or a unit in common."""

    def __post_init__(self) -> None:
        require(self.images.ndim == 4, "images", "an array of shape (N, C, H, W)", self.images.shape)
        require(self.images.dtype.name in DTYPES, "images", f"of a dtype among {', '.join(DTYPES)}", self.images.dtype)
        if self.labels is not None and len(self.labels) != len(self.images):
            raise UserError(f"labels must be one per image: {len(self.labels)} labels for {len(self.images)} images")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images.shape[1:]
        return int(channels), int(height), int(width)

    def take(self, index: np.ndarray) -> "ImageSet":
        """The images at these positions, as a set of their own."""
        labels = None if self.labels is None else self.labels[index]
        if isinstance(self.images, OnDemand):
            part = self.images.subset(index)
            return ImageSet(part, labels, self.classes, part.names, self.vectors)
        require_uncut(self.images)
        names = tuple(self.names[i] for i in index) if self.names else ()
        return ImageSet(self.images[index], labels, self.classes, names, self.vectors)

    def loaded(self) -> "ImageSet":
        """The same set in memory, without the images that cannot be read."""
        if not isinstance(self.images, OnDemand):
            return self
        images, kept = self.images.readable()
        labels = None if self.labels is None else self.labels[kept]
        return ImageSet(images, labels, self.classes, tuple(self.names[i] for i in kept if self.names), self.vectors)


@dataclass(frozen=True)
class Splits:
    """A data set: a training part and whatever held-out parts its files really have."""

    name: str
    train: ImageSet
    val: ImageSet | None = None
    test: ImageSet | None = None
    notes: tuple[str, ...] = ()
    """What a reader of results must know: skipped files, rebuilt pixels, missing splits."""


def require_uncut(images: np.ndarray | OnDemand) -> None:
    """Refuse a mapped file that was cut short since: reading what is gone would end the process without a message."""
    base: Any = images
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and base.size() < len(base):
        raise UserError(
            f"data.source: the file must stay as it is while it is read; it had {len(base):,} bytes and has "
            f"{base.size():,} now"
        )


def as_tensor(images: np.ndarray) -> Tensor:
    """A tensor of the same values; float64 becomes float32, uint16 int32 (torch cannot index uint16 everywhere)."""
    if images.dtype == np.float64:
        images = images.astype(np.float32)
    if images.dtype == np.uint16:
        images = images.astype(np.int32)
    return torch.from_numpy(np.require(images, requirements=["C", "W"]))


FINGERPRINT_BYTES = 2**26
"""How much of an array in memory a fingerprint covers: a tenth of a second."""
FINGERPRINT_IMAGES = 64
"""How many images a fingerprint covers where they are on the disk."""


def fingerprint(data: ImageSet | Splits) -> str:
    """A checksum that tells whether a data set is still the one it was: shapes, labels, names and a sample of pixels.

    It takes tenths of a second whatever the number of images, so a change of single pixels may escape it; other images
    of the same shape do not. The name of the set does not count, so a folder may be moved.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts = [data] if isinstance(data, ImageSet) else [data.train, data.val, data.test]
    for part in parts:
        if part is not None:
            _add_to_fingerprint(digest, part)
        digest.update(b"end of split")
    return digest.hexdigest()


def _add_to_fingerprint(digest: "hashlib.blake2b", part: ImageSet) -> None:
    images = part.images
    digest.update(f"{tuple(map(int, images.shape))} {images.dtype.name} {part.classes}".encode("utf-8", "replace"))
    if part.labels is not None:
        digest.update(np.ascontiguousarray(part.labels).data)
    stored = isinstance(images, OnDemand | np.memmap)
    sampled = FINGERPRINT_IMAGES if stored else max(1, FINGERPRINT_BYTES * len(part) // max(1, images.nbytes))
    if isinstance(images, OnDemand) and images.blocks() is not None:
        sampled = FINGERPRINT_IMAGES // 8  # each may cost the reading of a whole block
    places = np.unique(np.linspace(0, len(part) - 1, min(sampled, len(part))).astype(np.int64))
    for place in places:
        digest.update(np.ascontiguousarray(images[int(place)]).data)
    named = places if isinstance(images, OnDemand) else range(len(part.names))
    digest.update("\n".join(part.names[int(i)] for i in named if part.names).encode("utf-8", "replace"))


FEWEST_TO_SPLIT, HELD_OUT, MOST_HELD_OUT = 20, 0.1, 1000
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
    if own or large or len(train) < FEWEST_TO_SPLIT:
        return splits
    order = np.random.default_rng(0).permutation(len(train))
    held, kept = (np.sort(part) for part in np.split(order, [min(MOST_HELD_OUT, round(HELD_OUT * len(train)))]))
    names = tuple(train.names[i] if train.names else f"#{i}" for i in held)
    chosen = f"{len(held)} of the {len(train)} images are held out as val, by a fixed rule"
    note = f"{chosen}: nothing is trained or fitted on them"
    val = replace(train.take(held), labels=None, classes=(), names=names)
    return replace(splits, train=train.take(kept), val=val, notes=(*splits.notes, note))
