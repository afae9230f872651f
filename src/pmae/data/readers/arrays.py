"""Arrays and tensors, in memory or in .npy and .npz files."""

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from torch import Tensor

from pmae.data.images import ImageSet, OnDemand, Splits
from pmae.data.readers.decode import require_room
from pmae.errors import UserError, require

Layout = Literal["auto", "NHWC", "NCHW", "NCL", "ND"]
SHAPES = "of shape (N, H, W), (N, H, W, C) or (N, C, H, W), (N, C, L) for signals or (N, D) for vectors"
AXES = {"NCL": 3, "ND": 2}


def from_arrays(
    images: np.ndarray | Tensor, labels: np.ndarray | Tensor | Sequence[int] | None = None, layout: Layout = "auto"
) -> ImageSet:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), signals (N, C, L) or vectors (N, D), with one class number each
    if there are labels.
    """
    (numbers,), classes = number_classes([labels])
    return _image_set(_as_numpy(images), numbers, classes, layout)


def _image_set(images: np.ndarray, labels: np.ndarray | None, classes: tuple[str, ...], layout: Layout) -> ImageSet:
    return ImageSet(channels_first(images, layout), labels, classes, vectors=images.ndim == 2)


def channels_first(images: np.ndarray, layout: Layout = "auto") -> np.ndarray:
    """The same values as (N, C, H, W): contiguous in memory, or still a view of the file when memory-mapped.

    Signals are images of one row, (N, C, 1, L), and vectors of one channel as well, (N, 1, 1, D).
    """
    _require_axes(images, layout)
    if images.ndim == 2:
        images = images[:, None, None]
    elif images.ndim == 3:
        images = images[:, :, None] if layout == "NCL" else images[:, None]
    elif _channels_last(images.shape, layout):
        images = images.transpose(0, 3, 1, 2)
    if not images.dtype.isnative:
        # Another byte order is the same number; torch takes only the machine's own.
        images = images.astype(images.dtype.newbyteorder("="))
    return images if isinstance(images, np.memmap) else np.ascontiguousarray(images)


def _require_axes(images: np.ndarray, layout: Layout) -> None:
    """Refuse what is no array of images, signals or vectors, or could be more than one of them."""
    require(images.ndim in (2, 3, 4) and images.size > 0, "images", f"{SHAPES}, with nothing empty", images.shape)
    if layout in AXES:
        require(images.ndim == AXES[layout], "images", f"of {AXES[layout]} axes for data.layout {layout}", images.shape)
    elif images.ndim == 2 and (layout != "auto" or images.dtype.kind != "f"):
        # Rows of whole numbers are as likely one grey image.
        raise UserError(f"data.layout must be ND for {images.dtype} vectors of shape {images.shape}, got {layout}")


def _channels_last(shape: tuple[int, ...], layout: Layout) -> bool:
    if layout != "auto":
        return layout == "NHWC"
    if shape[1] == shape[3]:
        raise UserError(
            f"data.layout must be NHWC or NCHW for images of shape {shape}: "
            f"axis 1 and the last axis are both {shape[1]}, so either could be the channels"
        )
    return shape[3] < shape[1]


def _as_numpy(values: Any) -> np.ndarray:
    """Any array or tensor as NumPy's, without a copy where there need be none."""
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asanyarray(values)
    except (TypeError, ValueError) as error:
        kind = getattr(values, "dtype", type(values).__name__)
        raise UserError(f"arrays must be of a kind that NumPy holds, got {kind}: {error}") from error


def number_classes(labels: Sequence[Any]) -> tuple[list[np.ndarray | None], tuple[str, ...]]:
    """Integer labels of several splits as int64 0..K-1, numbered together, and the name of each class."""
    columns = [None if values is None else _one_per_image(_as_numpy(values)) for values in labels]
    # Python integers, because NumPy would meet int64 and uint64 halfway, in floats.
    known = sorted(set().union(*(np.unique(column).tolist() for column in columns if column is not None)))
    number = {value: index for index, value in enumerate(known)}
    return [None if column is None else _renumber(column, number) for column in columns], tuple(map(str, known))


def _renumber(column: np.ndarray, number: dict[int, int]) -> np.ndarray:
    values, inverse = np.unique(column, return_inverse=True)
    return np.array([number[value] for value in values.tolist()], dtype=np.int64)[inverse]


def _one_per_image(labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise UserError(f"labels must be one class per image, got several per image (shape {labels.shape})")
    require(labels.dtype.kind in "biu", "labels", "whole numbers", labels.dtype)
    require(labels.ndim in (1, 2), "labels", "of shape (N,) or (N, 1)", labels.shape)
    return labels.reshape(len(labels))


def read_npy(path: Path, layout: Layout = "auto") -> Splits:
    """One array of images, memory-mapped: it may be larger than memory."""
    with plain_numbers_only(path):
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    require(isinstance(images, np.ndarray), "data.source", "a .npy file of one array", str(path))
    return Splits(path.stem, from_arrays(images, None, layout), notes=("no labels and no held-out images in the file",))


def read_npz(path: Path, layout: Layout = "auto") -> Splits:
    """MedMNIST's keys (train_images, train_labels, val_*, test_*), or images and labels, optionally with test_*."""
    return npz_splits(path, _npz_arrays(path), lambda x, y, names: _image_set(x, y, names, layout))


def npz_splits(path: Path, arrays: dict[str, Any], make: Callable[..., ImageSet]) -> Splits:
    """The splits that the keys name; `make` takes images, labels and classes."""
    train = "train_" if "train_images" in arrays else ""
    if f"{train}images" not in arrays:
        found = ", ".join(arrays) or "neither"
        raise UserError(f"data.source: {path} must hold the key 'train_images' or 'images', got {found}")
    prefixes = {"train": train, "val": "val_", "test": "test_"}
    present = {split: prefix for split, prefix in prefixes.items() if f"{prefix}images" in arrays}
    numbers, classes = number_classes([arrays.get(f"{prefix}labels") for prefix in present.values()])
    sets = {}
    for (split, prefix), labels in zip(present.items(), numbers, strict=True):
        # Taken out one by one, so that at most one split is held in both axis orders.
        images = arrays.pop(f"{prefix}images")
        sets[split] = make(images, labels, classes if labels is not None else ())
    _require_alike(sets, path)
    return Splits(path.stem, sets["train"], sets.get("val"), sets.get("test"))


def _npz_arrays(path: Path) -> dict[str, np.ndarray]:
    with plain_numbers_only(path):
        with zipfile.ZipFile(path) as archive:
            require_room(sum(member.file_size for member in archive.infolist()), str(path))
        with np.load(path, allow_pickle=False) as archive:
            keys = [key for key in archive.files if key.endswith(("images", "labels"))]
            return {key: archive[key] for key in keys}


def _require_alike(sets: dict[str, ImageSet], path: Path) -> None:
    train = sets["train"]
    for split, images in sets.items():
        if images.shape != train.shape or images.images.dtype != train.images.dtype:
            raise UserError(
                f"data.source: {path} must hold images alike in all splits, got train {train.shape} "
                f"{train.images.dtype} and {split} {images.shape} {images.images.dtype}"
            )


@contextmanager
def plain_numbers_only(path: Path) -> Iterator[None]:
    """Whatever NumPy says of a broken file or of pickled objects, as one sentence with the file's name."""
    try:
        yield
    except UserError:
        raise
    # NumPy's parsers raise whatever a broken file trips over (tokenize.TokenError, MemoryError, zlib.error, ...).
    except Exception as error:
        if "pickle" in str(error) or "object" in str(error).lower():
            reason = "it holds pickled Python objects, which are refused because reading them can run code"
        else:
            reason = str(error)
        raise UserError(f"data.source: {path} cannot be read as arrays of numbers: {reason}") from error


# Images inside a .npz file, read forward as they are asked for: compressed or not, they are never in memory whole.

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_npz(path: Path, layout: Layout = "auto") -> Splits:
    """The same as `read_npz`, with images that are read on demand; only labels are read at once.

    An array in Fortran's order has no images one after another, so such a file is read whole.
    """
    with plain_numbers_only(path), zipfile.ZipFile(path) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist()]
    members = {key: Member(path, key) for key in keys if key.endswith("images")}
    if any(member.fortran for member in members.values()):
        return read_npz(path, layout)
    with plain_numbers_only(path), np.load(path, allow_pickle=False) as archive:
        labels = {key: archive[key] for key in keys if key.endswith("labels")}
    images = {key: MemberImages(member, layout) for key, member in members.items()}
    return npz_splits(path, {**images, **labels}, _image_set_members)


def _image_set_members(images: "MemberImages", labels: np.ndarray | None, classes: tuple[str, ...]) -> ImageSet:
    return ImageSet(images, labels, classes, vectors=len(images.member.shape) == 2)


def _opened(path: Path, key: str) -> IO[bytes]:
    """A member, which holds its archive open and lets it go when it is itself let go."""
    return zipfile.ZipFile(path).open(f"{key}.npy")


class Member:
    """One array of an archive: its shape, and its rows from front to back."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        with plain_numbers_only(path):
            self._rewind()

    def _rewind(self) -> None:
        self._file = _opened(self.path, self.key)
        version = np.lib.format.read_magic(self._file)
        if version not in HEADERS:
            raise ValueError(f"{self.key} is of NumPy's format {version}")
        self.shape, self.fortran, self.dtype = HEADERS[version](self._file)
        if self.dtype.hasobject:
            raise ValueError("it holds objects")
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        require_room(self._row_bytes, f"one image of {self.path}")
        self._at = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`; going back means reading from the beginning."""
        require_room((stop - start) * self._row_bytes, f"{stop - start} images of {self.path}")
        with plain_numbers_only(self.path):
            if start < self._at:
                self._rewind()
            self._file.seek((start - self._at) * self._row_bytes, os.SEEK_CUR)
            data = self._file.read((stop - start) * self._row_bytes)
            if len(data) < (stop - start) * self._row_bytes:
                raise ValueError(f"{self.key} ends early")
            self._at = stop
            return np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])


class MemberImages(OnDemand):
    """Some images of a member, channels first."""

    names: Sequence[str] = ()

    def __init__(self, member: Member, layout: Layout, positions: np.ndarray | None = None) -> None:
        self.member, self.layout = member, layout
        self._positions = np.arange(member.shape[0] if member.shape else 0) if positions is None else positions
        # The layout is told by the axes of one image; without any image that is refused here.
        like = channels_first(np.zeros((min(1, len(self._positions)), *member.shape[1:]), member.dtype), layout)
        self.shape, self.dtype = (len(self._positions), *like.shape[1:]), like.dtype

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        wanted = np.atleast_1d(self._positions[index])
        first = int(wanted.min())
        images = channels_first(self.member.rows(first, int(wanted.max()) + 1)[wanted - first], self.layout)
        return images[0] if np.ndim(self._positions[index]) == 0 else images

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        return self[:], np.arange(len(self))

    def subset(self, index: np.ndarray) -> "MemberImages":
        return MemberImages(self.member, self.layout, self._positions[index])

    def blocks(self) -> None:
        return None
