"""What every reader returns and everything downstream takes: images channels first, in their own dtype."""

import copy
import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmae.errors import UserError, require

DTYPES = ("uint8", "uint16", "int16", "float16", "float32", "float64")
TOGETHER = 8  # images that a thread decodes before it looks for the next piece of work
Blocks = tuple[np.ndarray, int]
"""Where runs of images begin that the disk gives only as a whole, and how many runs fit in memory together."""


class Samples(ABC):
    """The samples of a split before they are decoded: what every format must tell of them."""

    labels: np.ndarray | None = None
    """Class numbers as the files have them."""
    classes: tuple[str, ...] | None = None
    """Names of the classes from 0 on, if the files have them."""
    without_image: Sequence[str] = ()
    """Samples that were left out because they hold no image, in words."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, position: int) -> tuple[str, Path | bytes | np.ndarray]:
        """The image's name, whose suffix tells its kind, and its file, the bytes of it, or its numbers."""

    def name(self, position: int) -> str:
        """The name alone; a number where it cannot be read."""
        try:
            return self.read(position)[0]
        except Exception:  # a broken file trips over anything
            return f"sample {position}"

    def blocks(self) -> Blocks | None:
        """Nothing where every sample can be read alone."""
        return None


class OnDemand:
    """Images (N, C, H, W) that threads decode when they are asked for: an array, as far as reading goes."""

    ndim = 4

    def __init__(
        self, samples: Samples, decode: Callable[[int], np.ndarray | None], first: np.ndarray, threads: int
    ) -> None:
        # `decode` gives the pixels of a sample, all like `first`, or None for one that cannot be read.
        self._samples, self._decode = samples, decode
        self._pool = ThreadPoolExecutor(threads)
        self._positions: range | np.ndarray = range(len(samples))
        self.shape, self.dtype = (len(samples), *first.shape), first.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    @property
    def nbytes(self) -> int:
        """What all of them would take in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def names(self) -> Sequence[str]:
        """Names, each read from its file when it is asked for."""
        return _Names(self)

    def name(self, index: int) -> str:
        """The name of one image."""
        return self._samples.name(int(self._positions[index]))

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(index, int):
            return self._replaced(range(len(self))[index])
        places = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        images = np.empty((len(places), *self.shape[1:]), self.dtype)

        def fill(row: int) -> None:
            images[row] = self._replaced(int(places[row]))

        self._each(fill, len(places))
        return images

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """All images that can be read, and their positions."""
        images, there = np.empty(self.shape, self.dtype), np.zeros(len(self), np.bool_)

        def fill(row: int) -> None:
            pixels = self._decode(int(self._positions[row]))
            if pixels is not None:
                images[row], there[row] = pixels, True

        self._each(fill, len(self))
        kept = np.flatnonzero(there)
        # Moved up in place: a second array might be more than memory holds.
        for new, old in enumerate(kept if len(kept) < len(self) else ()):
            images[new] = images[old]
        return images[: len(kept)], kept

    def subset(self, index: np.ndarray) -> "OnDemand":
        """The images at these positions, still not decoded."""
        part, before = copy.copy(self), self._positions
        part._positions = np.asarray(index) if isinstance(before, range) else before[index]
        part.shape = (len(part._positions), *self.shape[1:])
        return part

    def blocks(self) -> Blocks | None:
        """Those of the samples; a subset has what it has of them, if it is in order."""
        known, chosen = self._samples.blocks(), self._positions
        if known is None or isinstance(chosen, range):
            return known
        if not len(chosen) or (np.diff(chosen) < 0).any():
            return None
        starts = np.unique(np.searchsorted(chosen, known[0]))
        return np.union1d([0], starts[starts < len(chosen)]), known[1]

    def _each(self, fill: Callable[[int], None], rows: int) -> None:
        def fill_some(start: int) -> None:
            for row in range(start, min(start + TOGETHER, rows)):
                fill(row)

        for _ in self._pool.map(fill_some, range(0, rows, TOGETHER)):
            pass

    def _replaced(self, index: int) -> np.ndarray:
        """One image; in place of a broken one the next of its class, so that a label stays true and a batch full."""
        labels, position = self._samples.labels, int(self._positions[index])
        for place in range(index, index + len(self)):
            other = int(self._positions[place % len(self)])
            pixels = self._decode(other) if labels is None or labels[other] == labels[position] else None
            if pixels is not None:
                return pixels
        raise UserError(f"data.source must have another readable image of the class of {self.name(index)!r}, got none")


class _Names(Sequence[str]):
    """The names of images by position."""

    def __init__(self, images: OnDemand) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        places = range(len(self))[index]
        return self._images.name(places) if isinstance(places, int) else tuple(map(self._images.name, places))


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
            return replace(self, images=part, labels=labels, names=part.names)
        require_uncut(self.images)
        names = tuple(self.names[i] for i in index) if self.names else ()
        return replace(self, images=self.images[index], labels=labels, names=names)

    def loaded(self) -> "ImageSet":
        """The same set in memory, without the images that cannot be read."""
        if not isinstance(self.images, OnDemand):
            return self
        images, kept = self.images.readable()
        labels = None if self.labels is None else self.labels[kept]
        return replace(self, images=images, labels=labels, names=tuple(self.names[i] for i in kept))


@dataclass(frozen=True)
class Splits:
    """A data set: a training part and whatever held-out parts its files really have."""

    name: str
    train: ImageSet
    val: ImageSet | None = None
    test: ImageSet | None = None
    notes: tuple[str, ...] = ()
    """What a reader of results must know: skipped files, rebuilt pixels, missing splits."""

    @property
    def parts(self) -> dict[str, ImageSet]:
        """The splits that are there, by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


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
    narrower = {"float64": np.float32, "uint16": np.int32}.get(images.dtype.name, images.dtype)
    return torch.from_numpy(np.require(images, narrower, requirements=["C", "W"]))


FINGERPRINT_BYTES = 2**26  # how much of an array in memory a fingerprint covers: a tenth of a second
FINGERPRINT_IMAGES = 64  # how many images a fingerprint covers where they are on the disk


def fingerprint(data: ImageSet | Splits) -> str:
    """A checksum that tells whether a data set is still the one it was: shapes, labels, names and a sample of pixels.

    It takes tenths of a second whatever the number of images, so a change of single pixels may escape it; other images
    of the same shape do not. The name of the set does not count, so a folder may be moved.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in [data] if isinstance(data, ImageSet) else [data.train, data.val, data.test]:
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
