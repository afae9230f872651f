"""Arrays and tensors, in memory or in .npy and .npz files."""

import math
import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pmae.config import Layout
from pmae.data.decode import reading, require_room
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError, failing_as, require

SHAPES = "of shape (N, H, W), (N, H, W, C) or (N, C, H, W), (N, C, L) for signals or (N, D) for vectors"
AXES = {"NCL": 3, "ND": 2}
NUMBERS = " as arrays of numbers"
FEW = 4
"""So many channels colours have at most: an outer axis of no more is the channels', and no side of grey images."""
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def from_arrays(
    images: np.ndarray | Tensor, labels: np.ndarray | Tensor | Sequence[int] | None = None, layout: Layout = "auto"
) -> ImageSet:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), signals (N, C, L) or vectors (N, D), with one class number each
    if there are labels.
    """
    (numbers,), classes = number_classes([labels])
    array = as_numpy(images)
    return ImageSet(channels_first(array, layout), numbers, classes, vectors=array.ndim == 2)


def from_torch(data: "Dataset[Any] | DataLoader[Any]") -> ImageSet:
    """Every image of a torch data set or loader, and its class number where items are pairs; tensors are (C, H, W)."""
    images, labels, layouts = list[np.ndarray](), list[int](), set[Layout]()
    with failing_as("images cannot be read from the data set"):
        for item in _items(data):
            image, *label = item if isinstance(item, tuple | list) else (item,)
            layouts.add("NCHW" if isinstance(image, Tensor) and image.ndim == 3 else "auto")
            images.append(as_numpy(image))
            labels += [int(each) for each in label[:1]]
    require(len(images) > 0, "images", "a data set that is not empty", len(images))
    shapes = sorted({image.shape for image in images})
    require(len(shapes) == 1, "images", "of one shape (resize them in the data set's transform)", shapes[:3])
    return from_arrays(np.stack(images), labels or None, layouts.pop())


def _items(data: "Dataset[Any] | DataLoader[Any]") -> Iterator[Any]:
    """Single items; a loader has stacked them, and is taken apart again."""
    if not isinstance(data, DataLoader):
        yield from (data[index] for index in range(len(data)))  # type: ignore[arg-type]
        return
    for batch in data:
        yield from zip(*batch[:2], strict=True) if isinstance(batch, tuple | list) else batch


def channels_first(images: np.ndarray, layout: Layout = "auto") -> np.ndarray:
    """The same values as (N, C, H, W), signals as (N, C, 1, L), vectors as (N, 1, 1, D); a mapped file stays a view."""
    require(images.ndim in (2, 3, 4) and images.size > 0, "images", f"{SHAPES}, with nothing empty", images.shape)
    if layout in AXES:
        require(images.ndim == AXES[layout], "images", f"of {AXES[layout]} axes for data.layout {layout}", images.shape)
    elif images.ndim == 2 and (layout != "auto" or images.dtype.kind != "f"):
        # Rows of whole numbers are as likely one grey image.
        raise UserError(f"data.layout must be ND for {images.dtype} vectors of shape {images.shape}, got {layout}")
    if images.ndim == 2:
        images = images[:, None, None]
    elif images.ndim == 3:
        _require_grey(images.shape, layout)
        images = images[:, :, None] if layout == "NCL" else images[:, None]
    elif _channels_last(images.shape, layout):
        images = images.transpose(0, 3, 1, 2)
    if not images.dtype.isnative:
        # Another byte order is the same number; torch takes only the machine's own.
        images = images.astype(images.dtype.newbyteorder("="))
    return images if isinstance(images, np.memmap) else np.ascontiguousarray(images)


def _require_grey(shape: tuple[int, ...], layout: Layout) -> None:
    """Refuse to take an image in color for as many grey ones as it has rows, or signals for thin images."""
    if layout == "auto" and min(shape[1:]) <= FEW:
        told = "one image in color (then give array[None]) or signals (data.layout NCL)"
        grey = "NCHW says that it is grey images"
        raise UserError(f"images must be several, got an array of shape {shape}, which may be {told}; {grey}")


def _channels_last(shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether the last axis has the channels: the outer axis that is the smaller, unless that is in doubt."""
    if layout != "auto":
        return layout == "NHWC"
    _, first, middle, last = shape
    few, side = sorted((first, last))
    # Many channels are told from a side by the square that the other axes make, or by being far fewer.
    doubtful = few > FEW and (middle == few or (middle != side and 2 * few > side))
    if few == side or doubtful:
        why = f"axis 1 has {first} and the last axis {last}, so either could be the channels"
        raise UserError(f"data.layout must be NHWC or NCHW for images of shape {shape}: {why}")
    return last < first


def as_numpy(values: Any) -> np.ndarray:
    """An array, a tensor or a list as an array, if NumPy has its type."""
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asanyarray(values)
    except (TypeError, ValueError) as error:
        kind = getattr(values, "dtype", type(values).__name__)
        raise UserError(f"arrays must be of a kind that NumPy holds, got {kind}: {error}") from error


def number_classes(labels: Sequence[Any]) -> tuple[list[np.ndarray | None], tuple[str, ...]]:
    """Integer labels of several splits as int64 0..K-1, numbered together, and the name of each class."""
    columns = [as_numpy(values) for values in labels if values is not None]
    for column in columns:
        require_one_class(column.shape, column.dtype)
    joined = np.concatenate([column.ravel() for column in columns]) if columns else np.zeros(0, np.int64)
    # NumPy lets int64 and uint64 meet halfway, in floats.
    known, numbers = np.unique(joined.astype(np.int64) if joined.dtype.kind == "f" else joined, return_inverse=True)
    parts = iter(np.split(numbers.astype(np.int64), np.cumsum([len(column) for column in columns])))
    return [None if values is None else next(parts) for values in labels], tuple(map(str, known.tolist()))


def require_one_class(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuse labels that are not one whole number for each image."""
    if len(shape) == 2 and shape[1] > 1:
        raise UserError(f"labels must be one class per image, got several per image (shape {shape})")
    require(dtype.kind in "biu", "labels", "whole numbers", dtype)
    require(len(shape) in (1, 2), "labels", "of shape (N,) or (N, 1)", shape)


def read_npy(path: Path, layout: Layout = "auto") -> Splits:
    """One array of images, memory-mapped: it may be larger than memory."""
    with reading(path, NUMBERS):
        with path.open("rb") as file:
            _npy_header(file)
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    return Splits(path.stem, from_arrays(images, None, layout), notes=("no labels and no held-out images in the file",))


def read_npz(path: Path, layout: Layout = "auto") -> Splits:
    """MedMNIST's keys (train_images, train_labels, val_*, test_*), or images and labels, optionally with test_*."""
    # Headers first, because a small file can unpack to more than memory holds.
    with reading(path, NUMBERS), zipfile.ZipFile(path) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        headers = {key: _npy_header(archive.open(f"{key}.npy")) for key in keys if key.endswith(("images", "labels"))}
    prefix = "train_" if "train_images" in headers else ""
    if f"{prefix}images" not in headers:
        found = ", ".join(keys)[:100] or "neither"
        raise UserError(f"data.source: {path} must hold the key 'train_images' or 'images', got {found}")
    prefixes = {"train": prefix, "val": "val_", "test": "test_"}
    present = {split: prefix for split, prefix in prefixes.items() if f"{prefix}images" in headers}
    require_room(sum(headers[f"{prefix}images"].nbytes for prefix in present.values()), str(path))
    labelled = {prefix for prefix in present.values() if _has_labels(headers, prefix, path)}
    sets: dict[str, ImageSet] = {}
    # With its suffix a key is a member's name and nothing else: the array whose header was read.
    with reading(path, NUMBERS), np.load(path, allow_pickle=False) as file:
        numbers, classes = number_classes([file[f"{p}labels.npy"] if p in labelled else None for p in present.values()])
        for (split, prefix), labels in zip(present.items(), numbers, strict=True):
            array, named = file[f"{prefix}images.npy"], classes if labels is not None else ()
            sets[split] = ImageSet(channels_first(array, layout), labels, named, vectors=array.ndim == 2)
    kinds = {split: f"{part.shape} {part.images.dtype}" for split, part in sets.items()}
    if len(set(kinds.values())) > 1:
        found = " and ".join(f"{split} {kind}" for split, kind in kinds.items())
        raise UserError(f"data.source: {path} must hold images alike in all splits, got {found}")
    return Splits(path.stem, sets["train"], sets.get("val"), sets.get("test"))


def _has_labels(headers: dict[str, "NpyHeader"], prefix: str, path: Path) -> bool:
    key, images = f"{prefix}labels", headers[f"{prefix}images"].shape[:1]
    if key not in headers:
        return False
    labels = headers[key]
    if labels.shape[:1] != images:
        raise UserError(f"labels must be one per image: {key} has shape {labels.shape} for {images} images")
    require_one_class(labels.shape, labels.dtype)
    require_room(4 * labels.nbytes, f"{key} of {path}, sorted to find the classes,")
    return True


class NpyHeader(NamedTuple):
    """What the first bytes of a .npy file tell."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def _npy_header(file: IO[bytes]) -> NpyHeader:
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"it is of NumPy's format {version}")
    header = NpyHeader(*HEADERS[version](file))
    if header.dtype.hasobject:
        raise ValueError("it holds pickled Python objects, which are refused because reading them can run code")
    if any(length < 0 for length in header.shape):
        raise ValueError(f"its shape is {header.shape}")
    return header


def array_of_npy(content: bytes) -> np.ndarray:
    """The array in the bytes of a .npy file, which must hold as many numbers as its header claims."""
    file = BytesIO(content)
    header, offset = _npy_header(file), file.tell()
    if header.nbytes > len(content) - offset:
        raise ValueError(f"its header claims {header.nbytes:,} bytes, and {len(content) - offset:,} are there")
    array = np.frombuffer(content, header.dtype, math.prod(header.shape), offset)
    return array.reshape(header.shape, order="F" if header.fortran else "C")
