"""Any source in chunks: image files are decoded as they are asked for, so they may be more than memory holds."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pmae.config import DataConfig
from pmae.data.batches import Share
from pmae.data.images import ImageSet, Splits
from pmae.data.readers.decode import SUFFIXES
from pmae.data.readers.folder import SPLITS, folder_classes, folder_files, split_folders, stream_files
from pmae.data.readers.named import is_cifar10, is_tinyimagenet, tinyimagenet_files
from pmae.data.sets import NAMED, load, shards_of, tinyimagenet_folder
from pmae.errors import UserError, unknown_name

NO_LABEL = -1
"""The label of an image that has none, in a set where others have one."""


class Stream(NamedTuple):
    """The names of the splits that are read, and the chunks: a split's name and at most so many of its images."""

    splits: list[str]
    chunks: Iterator[tuple[str, ImageSet]]


def stream(config: DataConfig, size: int, split: str = "all", share: Share = (0, 1)) -> Stream:
    """The images that `load` would give, in order, at most `size` at a time; of a share, all that belongs to it.

    Tiny ImageNet, .npy and .npz files, MedMNIST and shards are read from the disk as well. The other named sets, of
    which CIFAR-10 is the largest with 180 MB, and a .npz file in Fortran's order are read whole, as `load` does.
    """
    tree, folder = tinyimagenet_folder(config), plain_folder(config)
    if tree is not None:
        return _stream_tinyimagenet(tree, config, size, split, share)
    if folder is None:
        return _slices(load(config, on_demand=True), size, split, share)
    return _stream_folder(folder, config, size, split, share)


def plain_folder(config: DataConfig) -> Path | None:
    """The folder of image files that a source is, if it is one and not the folder of a known set."""
    path = Path(config.source).expanduser()
    known = config.source in NAMED or not path.is_dir() or is_cifar10(path) or is_tinyimagenet(path)
    return None if known or shards_of(config) is not None else path


def converts(config: DataConfig) -> bool:
    """Whether a source is image files, in a folder or in shards, which can be resized."""
    return plain_folder(config) is not None or shards_of(config) is not None


def _stream_folder(folder: Path, config: DataConfig, size: int, split: str, share: Share) -> Stream:
    roots = split_folders(folder)
    splits, classes = _chosen(list(roots), split), folder_classes(roots, config)
    chosen = {name: roots[name] for name in splits}
    files = folder_files(folder, chosen, classes)
    # One file ahead, to tell a folder without images from one whose images are broken.
    first = next(files, None)
    if first is None:
        raise UserError(f"data.source: the folder {folder} holds no images ({', '.join(SUFFIXES)})")
    files = chain([first], files)
    if share != (0, 1):
        chunks = -(-sum(1 for _ in folder_files(folder, chosen, classes)) // size)
        mine = _of_share(chunks, share)
        files = islice(files, size * mine.start, size * mine.stop)
        if not mine:
            return Stream(splits, iter(()))
    return Stream(splits, stream_files(files, classes, config, size))


def _stream_tinyimagenet(folder: Path, config: DataConfig, size: int, split: str, share: Share) -> Stream:
    classes, files = tinyimagenet_files(folder)
    splits = _chosen([name for name in SPLITS if any(file.split == name for file in files)], split)
    files = [file for file in files if file.split in splits]
    mine = _of_share(-(-len(files) // size), share)
    if not mine:
        return Stream(splits, iter(()))
    rgb = replace(config, channels=config.channels or 3)
    return Stream(splits, stream_files(files[size * mine.start : size * mine.stop], classes, rgb, size))


def _of_share(chunks: int, share: Share) -> range:
    """The numbers of the chunks that are a share's: neighbours, and the first share has some."""
    part, parts = share
    return range(-(-chunks * part // parts), -(-chunks * (part + 1) // parts))


def _slices(splits: Splits, size: int, split: str, share: Share) -> Stream:
    parts = {name: part for name in SPLITS if (part := getattr(splits, name)) is not None}
    chosen = {name: parts[name] for name in _chosen(list(parts), split)}
    classes = next((part.classes for part in chosen.values() if part.labels is not None), None)
    if classes is not None:
        chosen = {name: _labelled(part, classes) for name, part in chosen.items()}
    starts = [(name, start) for name, part in chosen.items() for start in range(0, len(part), size)]
    chunks = (
        (name, chosen[name].take(np.arange(start, min(start + size, len(chosen[name])))).loaded())
        for name, start in (starts[number] for number in _of_share(len(starts), share))
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
