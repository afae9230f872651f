"""Settings of the images: where they come from and how they are cropped."""

from dataclasses import dataclass
from typing import Literal

from pmae.config.checks import at_least
from pmae.errors import require


@dataclass(frozen=True)
class DataConfig:
    """Where the images come from and how they are laid out."""

    source: str = "photos"
    """A named set, or the path of a folder, .npy or .npz file, or shards: tar, parquet or Arrow files, or a pattern."""
    root: str = "data"
    """Folder that holds the files of named sets."""
    layout: Literal["auto", "NHWC", "NCHW", "NCL", "ND"] = "auto"
    """Axis order of arrays: images, signals (NCL) or vectors (ND). auto takes two axes of floats as vectors, three as
    grey images, and of four the smaller of the outer candidates as channels; it refuses a tie."""
    labels: Literal["none", "folders"] = "none"
    """For a folder of images: whether its subfolders are classes."""
    resize: int | None = None
    """Resize every image of a folder or of shards to this side; without it, sizes must agree."""
    channels: Literal[1, 3] | None = None
    """Convert every image of a folder or of shards to this many channels; without it, channels must agree."""
    max_unreadable: int = 10
    """How many unreadable files may be skipped before the run is refused."""
    standardize: Literal["channel", "pixel"] = "channel"
    """One mean and deviation per channel, or per pixel and channel (as the released code)."""
    keep_on: Literal["auto", "device", "host"] = "auto"
    """Where the images wait; auto puts them on the device when they fit in half of its free memory, and leaves shards
    on the disk."""
    threads: int | None = None
    """How many threads decode shards; as many as there are cores if not given. The batches do not depend on it."""

    def __post_init__(self) -> None:
        require(bool(self.source), "data.source", "a name or a path", self.source)
        at_least("data.resize", 1, self.resize)
        at_least("data.max_unreadable", 0, self.max_unreadable)
        at_least("data.threads", 1, self.threads)


@dataclass(frozen=True)
class AugmentConfig:
    """Random resized crop and flip, one box per image, in whole batches on the device; vectors are left as they are."""

    crop: bool = True
    """Whether to crop at all."""
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Smallest and largest share of the image's area, or of a signal's length, that a crop keeps."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How a crop is resized back to the full size."""
    flip: bool = True
    """Mirror half of the images left to right; never signals, which are rarely natural backwards."""

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        require(0 < low <= high <= 1, "augment.crop_scale", "two increasing shares in (0, 1]", self.crop_scale)
