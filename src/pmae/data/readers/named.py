"""Published sets in the files they come in: CIFAR-10 (Python batches, binary batches, PNG sheets) and Tiny ImageNet."""

import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from pmae.data.images import ImageSet, Splits
from pmae.data.readers.files import FileSamples, printable, walk_images
from pmae.data.readers.samples import SampleSet
from pmae.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
BATCHES = (*TRAIN_BATCHES, "test_batch")
PIXELS = 3 * 32 * 32
HASHING = (pickle.DICT, pickle.EMPTY_SET, pickle.FROZENSET)

Batch = tuple[np.ndarray, np.ndarray]


def read_cifar10(folder: Path) -> Splits | None:
    """The data set in this folder, whichever form it has; None if it has none of them."""
    for suffix, read in FORMS.items():
        if os.path.isfile(folder / f"{BATCHES[0]}{suffix}"):
            return _splits(folder, suffix, read)
    return None


def is_cifar10(folder: Path) -> bool:
    """Whether the folder has the first batch of one of the forms."""
    return any(os.path.isfile(folder / f"{BATCHES[0]}{suffix}") for suffix in FORMS)


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
    batch = read_batch_pickle(path.read_bytes(), str(path))
    if not {"data", "labels"} <= batch.keys():
        found = ", ".join(batch)[:100] or "nothing"
        raise UserError(f"data.source: {path} must hold 'data' and 'labels', got {found}")
    data = bytes_array(batch["data"], f"{path}, 'data',")
    if data.ndim != 2 or data.shape[1] != PIXELS:
        raise UserError(f"data.source: {path} must hold rows of {PIXELS} bytes, got shape {data.shape}")
    return _checked(path, data.reshape(-1, 3, 32, 32), _numbers(path, batch["labels"]))


class Inert:
    """What stands for a function in an unpickled batch: called, it notes the arguments and does nothing."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> "Inert":
        return Inert(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TextKeys(dict[str, Any]):
    """A dictionary of text alone: the hash of nested tuples can take for ever."""

    __slots__ = ()

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise pickle.UnpicklingError(f"a key is of type {type(key).__name__}")
        super().__setitem__(key, value)


class BatchUnpickler(pickle._Unpickler):
    """Reads the names that an array of bytes is pickled with, as inert stand-ins, and refuses every other name.

    Python's own implementation, because C's reserves as much memory as a number in the file says. Sets and the
    dictionaries of protocol 0 are left out: they hash whatever the file puts in them.
    """

    ALLOWED = (
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *("numpy.ndarray", "numpy.dtype", "_codecs.encode"),
    )
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in HASHING},
        pickle.EMPTY_DICT[0]: lambda self: self.append(TextKeys()),
    }

    def find_class(self, module: str, name: str) -> Inert:
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'[:80]!r}")
        return Inert(name)


def read_batch_pickle(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, without running it; arrays in it are inert until `bytes_array` is asked for them."""
    try:
        found = BatchUnpickler(BytesIO(data), encoding="latin1").load()
    # A damaged pickle trips over anything: KeyError for an unknown operation, IndexError for an empty stack, ...
    except Exception as error:
        raise UserError(
            f"{where} is not a pickle of arrays of bytes, and no other is read: {str(error)[:200]}"
        ) from error
    if not isinstance(found, TextKeys):
        raise UserError(f"{where} must be a pickled dictionary, got {type(found).__name__}")
    return found


def bytes_array(value: object, where: str) -> np.ndarray:
    """The uint8 array that NumPy's way of pickling describes."""
    try:
        if not isinstance(value, Inert) or value.name != "_reconstruct":
            raise ValueError(f"it is of type {type(value).__name__}")
        _, shape, dtype, fortran, raw = value.state
        if dtype.name != "dtype" or dtype.arguments[0] != "u1":
            raise ValueError("its elements are not bytes")
        # As Python 3 pickles bytes, as Python 2 did, or as Python 3 does for Python 2: encode(text, "latin1").
        raw = raw.arguments[0] if isinstance(raw, Inert) and raw.name == "encode" else raw
        pixels = np.frombuffer(raw if isinstance(raw, bytes) else raw.encode("latin-1"), np.uint8)
        return pixels.reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(f"{where} does not hold an array of bytes: {error}") from error


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


ANNOTATIONS = Path("val", "val_annotations.txt")
NOTE = "the published test images carry no labels and are not read; the validation images are the test split"


def is_tinyimagenet(folder: Path) -> bool:
    """Whether the folder has the two landmarks of the tiny-imagenet-200 tree."""
    return os.path.isdir(folder / "train") and os.path.isfile(folder / ANNOTATIONS)


def tinyimagenet_samples(folder: Path) -> SampleSet:
    """Labelled training folders, and validation images with their own table of labels.

    The published test images carry no labels, so the validation images are what everybody tests on: they are `test`
    here. Classes are in the order of their WordNet identifiers and named by words.txt.
    """
    identifiers = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    number = {identifier: index for index, identifier in enumerate(identifiers)}
    files = {"train": _train_files(folder, number), "test": _val_files(folder, number)}
    if not any(files.values()):
        raise UserError(f"data.source: the Tiny ImageNet folder {folder} holds no images")
    classes = _class_names(folder, identifiers)
    samples = {
        split: FileSamples(folder, [path for path, _ in pairs], [label for _, label in pairs], classes)
        for split, pairs in files.items()
    }
    return SampleSet("tinyimagenet", samples, (NOTE,))


def _train_files(folder: Path, number: dict[str, int]) -> list[tuple[str, int]]:
    return [
        (str(path.relative_to(folder)), label)
        for identifier, label in number.items()
        for path in walk_images(folder / "train" / identifier)
    ]


def _val_files(folder: Path, number: dict[str, int]) -> list[tuple[str, int]]:
    files = []
    for line in filter(str.strip, _lines(folder / ANNOTATIONS)):
        name, identifier = [*line.split("\t"), ""][:2]
        if identifier not in number:
            raise UserError(f"data.source: {folder / ANNOTATIONS} names the class {identifier!r}, which train/ lacks")
        if name in ("", "..") or "/" in name or "\0" in name:
            raise UserError(f"data.source: {folder / ANNOTATIONS} must hold names of files, got {name!r}")
        files.append((str(Path("val", "images", name)), number[identifier]))
    return files


def _class_names(folder: Path, identifiers: list[str]) -> tuple[str, ...]:
    """The first word of each class; identifiers stand in where words.txt has nothing."""
    lines = _lines(folder / "words.txt") if (folder / "words.txt").is_file() else []
    names = {line.split("\t")[0]: line.split("\t")[1].split(",")[0] for line in lines if "\t" in line}
    return tuple(names.get(identifier, printable(identifier)) for identifier in identifiers)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.source: {path} cannot be read: {error}") from error
