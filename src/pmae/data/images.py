"""What every reader returns and everything downstream takes: images in memory, channels first, in their own dtype."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pmae.errors import UserError, require

DTYPES = ("uint8", "uint16", "int16", "float16", "float32", "float64")


@dataclass(frozen=True)
class ImageSet:
    """The images of one split."""

    images: np.ndarray
    """(N, C, H, W), in memory or memory-mapped, never cast."""
    labels: np.ndarray | None = None
    """(N,) int64 class numbers, if there are any."""
    classes: tuple[str, ...] = ()
    """Name of each class number."""
    names: tuple[str, ...] = ()
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
        return ImageSet(
            self.images[index],
            None if self.labels is None else self.labels[index],
            self.classes,
            tuple(self.names[i] for i in index) if self.names else (),
            self.vectors,
        )


@dataclass(frozen=True)
class Splits:
    """A data set: a training part and whatever held-out parts its files really have."""

    name: str
    train: ImageSet
    val: ImageSet | None = None
    test: ImageSet | None = None
    notes: tuple[str, ...] = ()
    """What a reader of results must know: skipped files, rebuilt pixels, missing splits."""


def as_tensor(images: np.ndarray) -> Tensor:
    """A tensor of the same values; float64 becomes float32, uint16 int32 (torch cannot index uint16 everywhere)."""
    if images.dtype == np.float64:
        images = images.astype(np.float32)
    if images.dtype == np.uint16:
        images = images.astype(np.int32)
    return torch.from_numpy(np.require(images, requirements=["C", "W"]))
