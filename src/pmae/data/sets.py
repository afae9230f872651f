"""From `data.source` to images: a named set, a folder, a .npy or .npz file, or shards."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pmae.config import DataConfig
from pmae.data.fetch import (
    CIFAR10_FOLDERS,
    MEDMNIST_28_MD5,
    MEDMNIST_64,
    MEDMNIST_CLASSES,
    TINYIMAGENET_FOLDER,
    file_md5,
)
from pmae.data.images import ImageSet, Splits
from pmae.data.photos import load_photos
from pmae.data.readers.arrays import Layout, open_npz, read_npy, read_npz
from pmae.data.readers.folder import read_folder
from pmae.data.readers.named import is_cifar10, is_tinyimagenet, read_cifar10, read_tinyimagenet
from pmae.data.shards import Shards, read_shards, shard_files
from pmae.errors import UserError, unknown_name

TEST_DIGITS = 0.25
ReadArchive = Callable[[Path, Layout], Splits]


def load(config: DataConfig, on_demand: bool = False) -> Splits:
    """The images that the settings name; `on_demand` leaves those of a .npz file there until they are asked for."""
    if config.source in NAMED:
        if config.source != "tinyimagenet":
            _refuse_file_settings(config)
        if on_demand and config.source in MEDMNIST_64:
            return _medmnist(config, open_npz)
        return NAMED[config.source](config)
    path = Path(config.source).expanduser()
    shards = shards_of(config)
    if shards is not None:
        _refuse_file_settings(config, ("labels",))
        return read_shards(shards, config)
    if os.path.isdir(path):
        return _load_folder(path, config)
    if os.path.isfile(path):
        return _load_file(path, config, open_npz if on_demand else read_npz)
    if os.path.dirname(config.source) or path.suffix:
        raise UserError(f"data.source: there is no file or folder {path}")
    raise unknown_name("data.source", config.source, NAMED)


def shards_of(config: DataConfig) -> Shards | None:
    """The shards that a source is, if it is no known set nor something else."""
    path = Path(config.source).expanduser()
    known = config.source in NAMED or (os.path.isdir(path) and (is_cifar10(path) or is_tinyimagenet(path)))
    return None if known else shard_files(config.source)


def tinyimagenet_folder(config: DataConfig) -> Path | None:
    """The tree of Tiny ImageNet that a source is, if it is one and is there."""
    named = config.source == "tinyimagenet"
    path = Path(config.root).expanduser() / TINYIMAGENET_FOLDER if named else Path(config.source).expanduser()
    return path if is_tinyimagenet(path) and (named or config.source not in NAMED) else None


def _load_folder(path: Path, config: DataConfig) -> Splits:
    """A folder that has the shape of a known set is read as that set."""
    cifar10 = read_cifar10(path)
    if cifar10 is not None:
        _refuse_file_settings(config)
        return cifar10
    return _read_tinyimagenet(path, config) if is_tinyimagenet(path) else read_folder(path, config)


def _load_file(path: Path, config: DataConfig, read_archive: ReadArchive) -> Splits:
    readers = {".npy": read_npy, ".npz": read_archive}
    if path.suffix.lower() not in readers:
        raise UserError(
            f"data.source must be a name, a folder, a .npy, .npz, .tar, .parquet or .arrow file, got {path}"
        )
    _refuse_file_settings(config)
    return readers[path.suffix.lower()](path, config.layout)


def _refuse_file_settings(config: DataConfig, settings: Sequence[str] = ("resize", "channels", "labels")) -> None:
    """Settings that only a folder of image files can honour are not silently dropped."""
    for setting in settings:
        value = getattr(config, setting)
        if value not in (None, "none"):
            raise UserError(f"data.{setting} is for folders of image files, got {value!r} for {config.source!r}")


def _cifar10(config: DataConfig) -> Splits:
    root = Path(config.root).expanduser()
    for folder in (*(root / name for name in CIFAR10_FOLDERS), root):
        splits = read_cifar10(folder)
        if splits is not None:
            return splits
    raise _missing(config, [f"{name}/" for name in CIFAR10_FOLDERS])


def _tinyimagenet(config: DataConfig) -> Splits:
    folder = Path(config.root).expanduser() / TINYIMAGENET_FOLDER
    if not is_tinyimagenet(folder):
        raise _missing(config, [f"{TINYIMAGENET_FOLDER}/train/", f"{TINYIMAGENET_FOLDER}/val/val_annotations.txt"])
    return _read_tinyimagenet(folder, config)


def _read_tinyimagenet(folder: Path, config: DataConfig) -> Splits:
    # Some of its files are saved as grey; the set is meant to be RGB.
    return read_tinyimagenet(folder, replace(config, channels=config.channels or 3))


def _medmnist(config: DataConfig, read_archive: ReadArchive = read_npz) -> Splits:
    """The 64x64 file, or the 28x28 one where it is the only one there."""
    name, root = config.source, Path(config.root).expanduser()
    official = {f"{name}_64.npz": MEDMNIST_64[name].md5, f"{name}.npz": MEDMNIST_28_MD5[name]}
    file = next((file for file in official if (root / file).is_file()), None)
    if file is None:
        raise _missing(config, list(official))
    splits = read_archive(root / file, "NHWC")
    notes = [f"read from {file}" + ("" if "_64" in file else f"; {name}_64.npz is not there")]
    if file_md5(root / file) != official[file]:
        notes.append(f"{file} is not the file that MedMNIST published: report results on it as rebuilt")
    return _renamed(splits, name, tuple(notes))


def _renamed(splits: Splits, name: str, notes: tuple[str, ...]) -> Splits:
    """The published class names, unless the file has other classes."""
    classes = MEDMNIST_CLASSES[name]
    parts = {"train": splits.train, "val": splits.val, "test": splits.test}
    fitting = {key: part for key, part in parts.items() if part is not None and len(part.classes) == len(classes)}
    renamed: dict[str, Any] = {key: replace(part, classes=classes) for key, part in fitting.items()}
    return replace(splits, name=name, notes=notes, **renamed)


def _digits(_: DataConfig) -> Splits:
    """Scikit-learn's 8x8 digits, values 0 to 16, a quarter of each class held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 1, 8, 8).astype(np.uint8)
    whole = ImageSet(images, labels.astype(np.int64), tuple("0123456789"))
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_DIGITS, random_state=0, stratify=labels)
    return Splits("digits", whole.take(np.sort(train)), test=whole.take(np.sort(test)))


def _missing(config: DataConfig, looked_for: list[str]) -> UserError:
    return UserError(
        f"data.source {config.source!r}: found no {' or '.join(looked_for)} in data.root {config.root!r}; "
        f"`pmae data {config.source} --root {config.root}` fetches it"
    )


NAMED: dict[str, Callable[[DataConfig], Splits]] = {
    "bloodmnist": _medmnist,
    "cifar10": _cifar10,
    "dermamnist": _medmnist,
    "digits": _digits,
    "pathmnist": _medmnist,
    "photos": lambda _: load_photos(),
    "tinyimagenet": _tinyimagenet,
}
