"""What every reader returns and everything downstream takes: images channels first, in their own dtype."""

import hashlib
import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmae.data.ondemand import OnDemand, RaggedOnDemand
from pmae.errors import UserError, require

FILL = "fill missing values first, such as by the mean of their channel"
DTYPES = ("uint8", "uint16", "int16", "float16", "float32", "float64")
FINGERPRINT_BYTES = 2**26  # how much of an array in memory a fingerprint covers: a tenth of a second
FINGERPRINT_IMAGES = 64  # how many images a fingerprint covers where they are on the disk


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
    originals: RaggedOnDemand | None = None
    """The files of images that were made square, to be decoded whole: training cuts its crops from them."""
    groups: np.ndarray | None = None
    """(N,) numbers: images of one, such as those of a patient, are held out together or not at all."""

    def __post_init__(self) -> None:
        require(self.images.ndim == 4, "images", "an array of shape (N, C, H, W)", self.images.shape)
        require(self.images.dtype.name in DTYPES, "images", f"of a dtype among {', '.join(DTYPES)}", self.images.dtype)
        if self.labels is not None and len(self.labels) != len(self.images):
            raise UserError(f"labels must be one per image: {len(self.labels)} labels for {len(self.images)} images")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return int(channels), int(height), int(width)

    def take(self, index: np.ndarray) -> "ImageSet":
        """The images at these positions, as a set of their own."""
        about = self._about(index)
        if isinstance(self.images, OnDemand):
            part = self.images.subset(index)
            return replace(self, images=part, names=part.names, **about)
        require_uncut(self.images)
        names = tuple(self.names[i] for i in index) if self.names else ()
        return replace(self, images=self.images[index], names=names, **about)

    def loaded(self) -> "ImageSet":
        """The same set in memory, without the images that cannot be read."""
        if not isinstance(self.images, OnDemand):
            return self
        images, kept = self.images.readable()
        return replace(self, images=images, names=tuple(self.names[i] for i in kept), **self._about(kept))

    def _about(self, index: np.ndarray) -> dict[str, Any]:
        """What is known of the images at these positions beside their pixels and names."""
        labels, groups = (None if of is None else of[index] for of in (self.labels, self.groups))
        return {"labels": labels, "groups": groups, "originals": self.originals and self.originals.subset(index)}


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
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


def require_like(parameter: str, images: ImageSet, shape: Sequence[int], dtype: str) -> None:
    """Refuse images of another shape than an encoder's, with what to give instead; warn where their depth is another.

    Values are not scaled from one depth to another: 12 bits of 16 are common, and units as those of a CT.
    """
    if images.shape != tuple(shape):
        instead = "give arrays of that shape, or image files without resize and channels, which are converted to it"
        if shape[1] != shape[2]:
            instead = "give images of that shape: files of other sizes can only become squares"
        rule = f"{parameter} must have images of the shape that the run was trained on, {_size(shape)}"
        raise UserError(f"{rule}, got {_size(images.shape)}; {instead}")
    if str(images.images.dtype) != dtype:
        told = f"the images are {images.images.dtype} and the run was trained on {dtype}"
        warnings.warn(f"{told}: features mean something only if the values are in the same units", stacklevel=3)


def warn_of_units(images: np.ndarray, dtype: str, stacklevel: int) -> None:
    """Floats from 0 to 1 are the usual mistake where whole numbers were trained on; nothing else would tell of it."""
    if dtype.startswith("uint") and images.dtype.kind == "f" and images.size and images.max() <= 1:
        told = f"the images are {images.dtype} of at most 1, and those trained on were {dtype}"
        warnings.warn(f"{told}: give them in the same units", stacklevel=stacklevel)


def require_finite(parameter: str, images: np.ndarray | OnDemand) -> None:
    """Refuse arrays with NaN or infinity, which would come out as an answer; in files NaN has been filled."""
    if not isinstance(images, np.ndarray) or images.dtype.kind != "f":
        return
    bad = sum(not np.isfinite(image).all() for image in images)
    rule = f"{parameter} must be finite numbers, got NaN or infinity"
    if bad:
        raise UserError(f"{rule} in {bad:,} of {len(images):,} images; {FILL}")


def _size(shape: Sequence[int]) -> str:
    channels, height, width = shape
    return f"{channels} channel{'s' * (channels > 1)} of {height}x{width}"


def require_uncut(images: np.ndarray | OnDemand) -> None:
    """Refuse a mapped file that was cut short since: reading what is gone would end the process without a message."""
    base: Any = images
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and base.size() < len(base):
        told = f"it had {len(base):,} bytes and has {base.size():,} now"
        raise UserError(f"data.source: the file must stay as it is while it is read; {told}")


def as_tensor(images: np.ndarray) -> Tensor:
    """A tensor of the same values; float64 becomes float32, uint16 int32 (torch cannot index uint16 everywhere)."""
    narrower = {"float64": np.float32, "uint16": np.int32}.get(images.dtype.name, images.dtype)
    return torch.from_numpy(np.require(images, narrower, requirements=["C", "W"]))


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
