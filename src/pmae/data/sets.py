"""From `data.source` to images: a named set, a folder, a .npy or .npz file, or shards; whole, or in chunks."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.config import DataConfig
from pmae.data.batches import Part, read_ahead
from pmae.data.fetch import (
    CIFAR10_FOLDERS,
    MEDMNIST_28_MD5,
    MEDMNIST_64,
    MEDMNIST_CLASSES,
    TINYIMAGENET_FOLDER,
    checksum,
)
from pmae.data.images import ImageSet, Splits
from pmae.data.photos import load_photos
from pmae.data.readers.arrays import read_npy, read_npz
from pmae.data.readers.files import folder_samples, printable, shard_files, shard_samples
from pmae.data.readers.named import is_cifar10, is_tinyimagenet, read_cifar10, tinyimagenet_samples
from pmae.data.readers.samples import SPLITS, SampleSet, Unreadable
from pmae.data.readers.streamed import open_images, read_samples
from pmae.errors import UserError, unknown_name

HELD_OUT_DIGITS = 0.25
NO_LABEL = -1
"""The label of an image that has none, in a set where others have one."""


def load(config: DataConfig) -> Splits:
    """The images that the settings name: in memory, in a mapped file, or, of shards, decoded when asked for."""
    _refuse_odd_bytes(config.source)
    found = _samples(config)
    if found is None:
        return _load_arrays(config, on_demand=False)
    return read_samples(found, _converted(config), in_memory=not found.sharded)


class Chunks(NamedTuple):
    """The names of the splits that are read, and the chunks: a split's name and at most so many of its images."""

    splits: list[str]
    chunks: Iterator[tuple[str, ImageSet]]


def read_chunks(config: DataConfig, size: int, split: str = "all", part: Part = (0, 1)) -> Chunks:
    """The images that `load` would give, in order, at most `size` at a time; of several processes, those of one.

    Image files, shards, .npy and .npz files and MedMNIST may be more than memory holds. The other named sets, of which
    CIFAR-10 is the largest with 180 MB, and a .npz file in Fortran's order are read whole, as `load` does.
    """
    _refuse_odd_bytes(config.source)
    found = _samples(config)
    if found is None:
        whole = _load_arrays(config, on_demand=True)
        sets = {name: images for name in SPLITS if (images := getattr(whole, name)) is not None}
        chosen = _chosen(list(sets), split)
        return Chunks(chosen, _chunks({name: sets[name] for name in chosen}, size, part))
    left_out = [words for own in found.samples.values() for words in own.without_image]
    unreadable = Unreadable(config, left_out, warn_at_once=False)
    chosen = _chosen([name for name, own in found.samples.items() if len(own)], split)
    sets = open_images(found.samples, _converted(config), unreadable, chosen)
    return Chunks(chosen, _chunks(sets, size, part, unreadable))


def _chosen(there: list[str], split: str) -> list[str]:
    if split != "all" and split not in there:
        raise unknown_name("split", split, ["all", *there])
    return there if split == "all" else [split]


def _chunks(
    sets: dict[str, ImageSet], size: int, part: Part, unreadable: Unreadable | None = None
) -> Iterator[tuple[str, ImageSet]]:
    """The next chunk is read while one is used; where some splits have labels, the others get `NO_LABEL`."""
    classes = next((images.classes for images in sets.values() if images.labels is not None), None)
    starts = [(name, start) for name, images in sets.items() for start in range(0, len(images), size)]
    number, parts = part
    mine = starts[-(-len(starts) * number // parts) : -(-len(starts) * (number + 1) // parts)]

    def read(place: tuple[str, int]) -> tuple[str, ImageSet]:
        name, start = place
        chunk = sets[name].take(np.arange(start, min(start + size, len(sets[name])))).loaded()
        if classes is not None and chunk.labels is None:
            chunk = replace(chunk, labels=np.full(len(chunk), NO_LABEL, np.int64), classes=classes)
        return name, chunk

    yield from (chunk for chunk in read_ahead(read, mine, 1) if len(chunk[1]))
    if unreadable is not None:
        unreadable.warn()


def converts(config: DataConfig) -> bool:
    """Whether a source is image files, in a folder or in shards, which can be resized."""
    path = Path(config.source).expanduser()
    if config.source in NAMED or is_cifar10(path) or is_tinyimagenet(path):
        return False
    return os.path.isdir(path) or shard_files(config.source) is not None


def _samples(config: DataConfig) -> SampleSet | None:
    """The samples of Tiny ImageNet, of shards or of a folder of image files; None where a source is arrays."""
    tree, path = tinyimagenet_folder(config), Path(config.source).expanduser()
    if tree is not None:
        return tinyimagenet_samples(tree)
    if config.source in NAMED or is_cifar10(path):
        return None
    shards = shard_files(config.source)
    if shards is not None:
        _refuse_file_settings(config, ("labels",))
        return shard_samples(config.source, shards)
    return folder_samples(path, config) if os.path.isdir(path) else None


def tinyimagenet_folder(config: DataConfig) -> Path | None:
    """The tree of Tiny ImageNet that a source is, if it is one and is there."""
    named = config.source == "tinyimagenet"
    path = Path(config.root).expanduser() / TINYIMAGENET_FOLDER if named else Path(config.source).expanduser()
    return path if is_tinyimagenet(path) and (named or config.source not in NAMED) else None


def _converted(config: DataConfig) -> DataConfig:
    """Some files of Tiny ImageNet are saved as grey; the set is meant to be RGB."""
    return config if tinyimagenet_folder(config) is None else replace(config, channels=config.channels or 3)


def _load_arrays(config: DataConfig, on_demand: bool) -> Splits:
    """A named set, CIFAR-10's folder or a file of arrays; `on_demand` leaves images in a .npz file."""
    path = Path(config.source).expanduser()
    if config.source in NAMED:
        if config.source != "tinyimagenet":
            _refuse_file_settings(config)
        return _medmnist(config, on_demand) if config.source in MEDMNIST_64 else NAMED[config.source](config)
    if os.path.isfile(path):
        return _load_file(path, config, on_demand)
    cifar10 = read_cifar10(path)
    if cifar10 is not None:
        _refuse_file_settings(config)
        return cifar10
    if os.path.dirname(config.source) or path.suffix:
        raise UserError(f"data.source: there is no file or folder {path}")
    raise unknown_name("data.source", config.source, NAMED)


def _load_file(path: Path, config: DataConfig, on_demand: bool) -> Splits:
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz"):
        raise UserError(
            f"data.source must be a name, a folder, a .npy, .npz, .tar, .parquet or .arrow file, got {path}"
        )
    _refuse_file_settings(config)
    return read_npy(path, config.layout) if suffix == ".npy" else read_npz(path, config.layout, on_demand)


def _refuse_odd_bytes(source: str) -> None:
    """Refuse a path that could be read but not be written down with the run."""
    if printable(source) != Path(source).as_posix():
        raise UserError(f"data.source must be a path in UTF-8, got {printable(source)}; rename the folder or the file")


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


def _no_tinyimagenet(config: DataConfig) -> Splits:
    """Asked only where its tree is not there."""
    raise _missing(config, [f"{TINYIMAGENET_FOLDER}/train/", f"{TINYIMAGENET_FOLDER}/val/val_annotations.txt"])


def _medmnist(config: DataConfig, on_demand: bool = False) -> Splits:
    """The 64x64 file, or the 28x28 one where it is the only one there."""
    name, root = config.source, Path(config.root).expanduser()
    official = {f"{name}_64.npz": MEDMNIST_64[name].md5, f"{name}.npz": MEDMNIST_28_MD5[name]}
    file = next((file for file in official if (root / file).is_file()), None)
    if file is None:
        raise _missing(config, list(official))
    splits = read_npz(root / file, "NHWC", on_demand)
    notes = [f"read from {file}" + ("" if "_64" in file else f"; {name}_64.npz is not there")]
    if checksum(root / file, "md5") != official[file]:
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
    places = np.arange(len(labels))
    train, test = train_test_split(places, test_size=HELD_OUT_DIGITS, random_state=0, stratify=labels)
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
    "tinyimagenet": _no_tinyimagenet,
}
"""Sets that are asked for by name; Tiny ImageNet's tree is looked for before, so its entry says that it is missing."""
