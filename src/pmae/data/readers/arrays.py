"""Arrays and tensors, in memory or in .npy and .npz files."""

import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from torch import Tensor

from pmae.data.images import ImageSet, OnDemand, Splits
from pmae.data.memory import require_room
from pmae.errors import UserError, require

Layout = Literal["auto", "NHWC", "NCHW", "NCL", "ND"]
SHAPES = "of shape (N, H, W), (N, H, W, C) or (N, C, H, W), (N, C, L) for signals or (N, D) for vectors"
AXES = {"NCL": 3, "ND": 2}
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
PIECE = 2**20
"""Bytes that are unpacked at once."""


def from_arrays(
    images: np.ndarray | Tensor, labels: np.ndarray | Tensor | Sequence[int] | None = None, layout: Layout = "auto"
) -> ImageSet:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), signals (N, C, L) or vectors (N, D), with one class number each
    if there are labels.
    """
    (numbers,), classes = number_classes([labels])
    array = _as_numpy(images)
    return ImageSet(channels_first(array, layout), numbers, classes, vectors=array.ndim == 2)


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
    require_one_class(labels.shape, labels.dtype)
    return labels.reshape(len(labels))


def require_one_class(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuse labels that are not one whole number for each image."""
    if len(shape) == 2 and shape[1] > 1:
        raise UserError(f"labels must be one class per image, got several per image (shape {shape})")
    require(dtype.kind in "biu", "labels", "whole numbers", dtype)
    require(len(shape) in (1, 2), "labels", "of shape (N,) or (N, 1)", shape)


def read_npy(path: Path, layout: Layout = "auto") -> Splits:
    """One array of images, memory-mapped: it may be larger than memory."""
    with plain_numbers_only(path):
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    require(isinstance(images, np.ndarray), "data.source", "a .npy file of one array", str(path))
    return Splits(path.stem, from_arrays(images, None, layout), notes=("no labels and no held-out images in the file",))


def read_npz(path: Path, layout: Layout = "auto", on_demand: bool = False) -> Splits:
    """MedMNIST's keys (train_images, train_labels, val_*, test_*), or images and labels, optionally with test_*.

    `on_demand` leaves images in the file, compressed or not, until they are asked for; an array in Fortran's order has
    no images one after another and is read whole.
    """
    with plain_numbers_only(path), zipfile.ZipFile(path) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    members = {key: Member(path, key) for key in keys if key.endswith(("images", "labels"))}
    train = "train_" if "train_images" in members else ""
    if f"{train}images" not in members:
        found = ", ".join(keys)[:100] or "neither"
        raise UserError(f"data.source: {path} must hold the key 'train_images' or 'images', got {found}")
    prefixes = {"train": train, "val": "val_", "test": "test_"}
    present = {split: prefix for split, prefix in prefixes.items() if f"{prefix}images" in members}
    if not on_demand:
        require_room(sum(members[f"{prefix}images"].nbytes for prefix in present.values()), str(path))
    numbers, classes = number_classes([_npz_labels(members, prefix) for prefix in present.values()])
    sets = {}
    for (split, prefix), labels in zip(present.items(), numbers, strict=True):
        member = members[f"{prefix}images"]
        images = MemberImages(member, layout) if on_demand and not member.fortran else member.channels_first(layout)
        sets[split] = ImageSet(images, labels, classes if labels is not None else (), vectors=len(member.shape) == 2)
    _require_alike(sets, path)
    return Splits(path.stem, sets["train"], sets.get("val"), sets.get("test"))


def _npz_labels(members: dict[str, "Member"], prefix: str) -> np.ndarray | None:
    """Labels, read only if there is one for each image: a small file can claim more of them than memory holds."""
    images, labels = members[f"{prefix}images"], members.get(f"{prefix}labels")
    if labels is None:
        return None
    if labels.shape[:1] != images.shape[:1]:
        raise UserError(
            f"labels must be one per image: {labels.key} has shape {labels.shape} for {images.shape[:1]} images"
        )
    require_one_class(labels.shape, labels.dtype)
    require_room(4 * labels.nbytes, f"{labels.key} of {labels.path}, sorted to find the classes,")
    return labels.rows(0, labels.shape[0])


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


def array_of_npy(content: bytes) -> np.ndarray:
    """The array in the bytes of a .npy file, which must hold as many numbers as its header claims."""
    file = BytesIO(content)
    shape, fortran, dtype = _npy_header(file)
    count, offset = math.prod(shape), file.tell()
    if count * dtype.itemsize > len(content) - offset:
        raise ValueError(f"its header claims {count * dtype.itemsize:,} bytes, and {len(content) - offset:,} are there")
    return np.frombuffer(content, dtype, count, offset).reshape(shape, order="F" if fortran else "C")


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran's order, and dtype."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"it is of NumPy's format {version}")
    shape, fortran, dtype = HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("it holds objects")
    if any(length < 0 for length in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype


class Member:
    """One array of a .npz file: its shape, and its rows from front to back."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        with plain_numbers_only(path):
            self._rewind()
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])

    def _rewind(self) -> None:
        archive = zipfile.ZipFile(self.path)
        # The member holds its archive open and lets it go when it is itself let go.
        self._file = archive.open(f"{self.key}.npy")
        self.shape, self.fortran, self.dtype = _npy_header(self._file)
        self._at = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`; going back means reading from the beginning."""
        if self.fortran and (start, stop) != (0, self.shape[0]):
            return self.rows(0, self.shape[0])[start:stop]
        size, shape = (stop - start) * self._row_bytes, (stop - start, *self.shape[1:])
        require_room(size, f"{stop - start} images of {self.path}")
        with plain_numbers_only(self.path):
            if start < self._at:
                self._rewind()
            self._file.seek((start - self._at) * self._row_bytes, os.SEEK_CUR)
            data = np.empty(size, np.uint8)
            for at in range(0, size, PIECE):
                piece = self._file.read(min(PIECE, size - at))
                if len(piece) < min(PIECE, size - at):
                    raise ValueError(f"{self.key} ends early")
                data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            self._at = stop
            return data.view(self.dtype).reshape(shape, order="F" if self.fortran else "C")

    def channels_first(self, layout: Layout) -> np.ndarray:
        """All of it as images."""
        return channels_first(self.rows(0, self.shape[0] if self.shape else 0), layout)


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
