"""CIFAR-10 in the files it comes in, and `photos`, which needs no download.

`photos` is 32x32 crops of photographs that the scikit-image and scikit-learn wheels carry, labelled by photograph. The
pictures stay in their packages; the terms that those packages state for them are, in our words:

- astronaut, hubble_deep_field (NASA), rocket (SpaceX), clock_motion (Stefan van der Walt): public domain;
- brick, gravel (CC0 Textures), grass (DeviantArt), camera (Lav Varshney), chelsea (Stefan van der Walt),
  coffee (Rachel Michetti), retina (Wikimedia Commons): CC0;
- coins, ihc (immunohistochemistry of colon tissue): no known restriction of copyright;
- moon, motorcycle_left (Middlebury stereo benchmark of 2014): no statement beyond the package's own licence;
- china, flower (Flickr, scikit-learn): CC BY 2.0, attribution in that package's README.
"""

import importlib.util
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

from pmae.data.decode import reading
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
BATCHES = (*TRAIN_BATCHES, "test_batch")
PIXELS = 3 * 32 * 32
HASHING = (pickle.DICT, pickle.EMPTY_SET, pickle.FROZENSET)

Batch = tuple[np.ndarray, np.ndarray]


def cifar10_form(folder: Path) -> str | None:
    """The suffix of the batches in this folder, which tells their form; None if there are none."""
    return next((suffix for suffix in FORMS if os.path.isfile(folder / f"{BATCHES[0]}{suffix}")), None)


def read_cifar10(folder: Path) -> Splits | None:
    """The data set in this folder, as Python batches, binary batches or PNG sheets; None if it has none of them."""
    suffix = cifar10_form(folder)
    if suffix is None:
        return None
    paths = [folder / f"{name}{suffix}" for name in BATCHES]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"data.source: CIFAR-10 in {folder} lacks {', '.join(missing)}")
    with ThreadPoolExecutor() as pool:
        batches = list(pool.map(FORMS[suffix], paths))
    return Splits("cifar10", _join(batches[:-1]), test=_join(batches[-1:]))


def _join(batches: list[Batch]) -> ImageSet:
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return ImageSet(images, labels, CLASSES)


def _batch(path: Path, images: np.ndarray, labels: object) -> Batch:
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < len(CLASSES) for label in labels):
        raise UserError(f"data.source: {path} must have labels that are whole numbers from 0 to {len(CLASSES) - 1}")
    if len(images) != len(labels) or not labels:
        raise UserError(f"data.source: {path} must have one whole-number label for each of its {len(images)} images")
    return images, np.array(labels, dtype=np.int64)


def _read_python(path: Path) -> Batch:
    batch = read_batch_pickle(path.read_bytes(), str(path))
    if not {"data", "labels"} <= batch.keys():
        found = ", ".join(batch)[:100] or "nothing"
        raise UserError(f"data.source: {path} must hold 'data' and 'labels', got {found}")
    data = bytes_array(batch["data"], f"{path}, 'data',")
    if data.ndim != 2 or data.shape[1] != PIXELS:
        raise UserError(f"data.source: {path} must hold rows of {PIXELS} bytes, got shape {data.shape}")
    return _batch(path, data.reshape(-1, 3, 32, 32), batch["labels"])


def _read_binary(path: Path) -> Batch:
    """Records of one label byte and the pixels, plane by plane."""
    data = np.fromfile(path, np.uint8)
    if data.size % (1 + PIXELS):
        raise UserError(f"data.source: {path} must hold records of {1 + PIXELS} bytes, got {data.size} bytes")
    records = data.reshape(-1, 1 + PIXELS)
    return _batch(path, records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].tolist())


def _read_sheet(path: Path) -> Batch:
    """A PNG 1024 wide, each row one image of 32 x 32 RGB pixels; a JSON file has the labels of all training sheets."""
    train = path.stem in TRAIN_BATCHES
    labels = path.parent / ("train_lables.json" if train else "test_lables.json")
    with reading(path), Image.open(path, formats=["PNG"]) as sheet:
        pixels = np.asarray(sheet)
    with reading(labels):
        numbers = json.loads(labels.read_text())
    if pixels.shape[1:] != (32 * 32, 3):
        raise UserError(f"data.source: {path} must be an RGB image 1024 wide, got shape {pixels.shape}")
    images = np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
    # Training sheets are equally long.
    start = TRAIN_BATCHES.index(path.stem) * len(images) if train else 0
    return _batch(path, images, numbers[start : start + len(images)] if isinstance(numbers, list) else numbers)


FORMS: dict[str, Callable[[Path], Batch]] = {"": _read_python, ".bin": _read_binary, ".png": _read_sheet}


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
        told = f"{where} is not a pickle of arrays of bytes, and no other is read"
        raise UserError(f"{told}: {str(error)[:200]}") from error
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


SIDE = 32
SHORTER_SIDE = 160
BOXES = {"train": (0.0, 0.0, 0.7, 0.8), "val": (0.0, 0.8, 0.7, 1.0), "test": (0.7, 0.0, 1.0, 1.0)}
"""Left, top, right and bottom of each split in a picture, as shares of its sides."""
GRIDS = {"train": (17, 18), "val": (1, 40), "test": (16, 5)}
"""Rows and columns of crop positions in each."""
PHOTOS = {
    "skimage/data": (
        *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "clock_motion.png", "coffee.png", "coins.png"),
        *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png"),
        *("retina.jpg", "rocket.jpg"),
    ),
    "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
}


def load_photos() -> Splits:
    """5,202 training, 680 validation and 1,360 test crops of 17 photographs, the same on every machine."""
    paths = photo_paths()
    classes = tuple(path.stem for path in paths)
    pieces = [_pieces(path) for path in paths]
    train, val, test = (_labelled([_crops(cut[name], GRIDS[name]) for cut in pieces], classes) for name in BOXES)
    return Splits("photos", train, val, test, notes=("crops of 17 photographs, labelled by photograph",))


def photo_paths() -> list[Path]:
    """Where the installed packages keep the pictures; the packages are not imported, so nothing can be downloaded."""
    paths = []
    for folder, names in PHOTOS.items():
        package, _, inside = folder.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"data.source 'photos' needs the package {package}, which is not installed")
        paths += [Path(spec.submodule_search_locations[0], inside, name) for name in names]
    for path in paths:
        if not path.is_file():
            raise UserError(f"data.source 'photos' needs {path}, which this version of its package does not carry")
    return paths


def _pieces(path: Path) -> dict[str, np.ndarray]:
    with Image.open(path) as image:
        picture = image.convert("RGB")
    (width, height), scale, pieces = picture.size, SHORTER_SIDE / min(picture.size), {}
    # Cut apart before anything is resized, so that they share no pixel of the original.
    for name, (left, top, right, bottom) in BOXES.items():
        box = round(left * width), round(top * height), round(right * width), round(bottom * height)
        part = picture.crop(box)
        size = max(SIDE, round(part.width * scale)), max(SIDE, round(part.height * scale))
        pieces[name] = np.asarray(part.resize(size, Image.Resampling.BICUBIC))
    return pieces


def _crops(picture: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    height, width = picture.shape[:2]
    rows = np.linspace(0, height - SIDE, grid[0]).round().astype(int)
    columns = np.linspace(0, width - SIDE, grid[1]).round().astype(int)
    windows = np.lib.stride_tricks.sliding_window_view(picture, (SIDE, SIDE), axis=(0, 1))
    return windows[rows[:, None], columns[None]].reshape(-1, 3, SIDE, SIDE)


def _labelled(crops: list[np.ndarray], classes: tuple[str, ...]) -> ImageSet:
    labels = np.repeat(np.arange(len(crops), dtype=np.int64), [len(c) for c in crops])
    return ImageSet(np.ascontiguousarray(np.concatenate(crops)), labels, classes)
