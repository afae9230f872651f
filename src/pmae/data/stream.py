"""Any source in chunks: image files are decoded as they are asked for, so they may be more than memory holds."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pmae.config import DataConfig
from pmae.data.datasets import NAMED, load
from pmae.data.images import ImageSet, Splits
from pmae.data.readers.cifar import is_cifar10
from pmae.data.readers.decode import SUFFIXES
from pmae.data.readers.files import SPLITS, stream_files
from pmae.data.readers.folder import folder_classes, folder_files, split_folders
from pmae.data.readers.tinyimagenet import is_tinyimagenet
from pmae.errors import UserError, unknown_name

NO_LABEL = -1
"""The label of an image that has none, in a set where others have one."""


class Stream(NamedTuple):
    """The names of the splits that are read, and the chunks: a split's name and at most so many of its images."""

    splits: list[str]
    chunks: Iterator[tuple[str, ImageSet]]


def stream(config: DataConfig, size: int, split: str = "all") -> Stream:
    """The images that `load` would give, in order, at most `size` at a time.

    A .npy file is read from the disk as well. Archives and named sets are read whole, as `load` does.
    """
    folder = plain_folder(config)
    return _slices(load(config), size, split) if folder is None else _stream_folder(folder, config, size, split)


def plain_folder(config: DataConfig) -> Path | None:
    """The folder of image files that a source is, if it is one and not the folder of a known set."""
    path = Path(config.source).expanduser()
    known = config.source in NAMED or not path.is_dir() or is_cifar10(path) or is_tinyimagenet(path)
    return None if known else path


def _stream_folder(folder: Path, config: DataConfig, size: int, split: str) -> Stream:
    roots = split_folders(folder)
    splits, classes = _chosen(list(roots), split), folder_classes(roots, config)
    files = folder_files(folder, {name: roots[name] for name in splits}, classes)
    # One file ahead, to tell a folder without images from one whose images are broken.
    first = next(files, None)
    if first is None:
        raise UserError(f"data.source: the folder {folder} holds no images ({', '.join(SUFFIXES)})")
    return Stream(splits, stream_files(chain([first], files), classes, config, size))


def _slices(splits: Splits, size: int, split: str) -> Stream:
    parts = {name: part for name in SPLITS if (part := getattr(splits, name)) is not None}
    chosen = {name: parts[name] for name in _chosen(list(parts), split)}
    classes = next((part.classes for part in chosen.values() if part.labels is not None), None)
    if classes is not None:
        chosen = {name: _labelled(part, classes) for name, part in chosen.items()}
    chunks = (
        (name, part.take(np.arange(start, min(start + size, len(part)))))
        for name, part in chosen.items()
        for start in range(0, len(part), size)
    )
    return Stream(list(chosen), chunks)


def _chosen(there: list[str], split: str) -> list[str]:
    if split != "all" and split not in there:
        raise unknown_name("split", split, ["all", *there])
    return there if split == "all" else [split]


def _labelled(part: ImageSet, classes: tuple[str, ...]) -> ImageSet:
    if part.labels is not None:
        return part
    return replace(part, labels=np.full(len(part), NO_LABEL, np.int64), classes=classes)
