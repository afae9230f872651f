"""From `data.source` to images: a named set, a folder, a .npy or .npz file, or shards; whole, or in chunks."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pmae.config import DataConfig
from pmae.data import fetch
from pmae.data.arrays import read_npy, read_npz
from pmae.data.batches import Part, read_ahead
from pmae.data.download import checksum
from pmae.data.files import FileSamples, folder_samples, is_image, is_tinyimagenet, printable, tinyimagenet_samples
from pmae.data.images import ImageSet, Splits
from pmae.data.limit import limited
from pmae.data.named import cifar10_form, load_photos, read_cifar10
from pmae.data.shards import braces, shard_files, shard_samples
from pmae.data.streamed import SampleSet, Unreadable, open_images, read_samples, with_shape
from pmae.errors import UserError, unknown_name
from pmae.remote import is_remote, stage

HELD_OUT_DIGITS = 0.25
FILE_SETTINGS = ("resize", "channels", "labels")
LARGEST_KEPT = 256  # short side of files of one size that are trained on as they are unless a side is asked for
NO_LABEL = -1  # the label of an image that has none, in a set where others have one
FEWEST_TO_SPLIT, HELD_OUT, MOST_HELD_OUT = 20, 0.1, 1000
LARGEST = 2**30
"""Bytes of an array from which images are picked; a larger one may live on the disk, and picking would read it."""


def load(config: DataConfig) -> Splits:
    """The images that the settings name: in memory, in a mapped file, or, of shards, decoded when asked for."""
    return load_settled(config, largest=None)[1]


def load_settled(config: DataConfig, largest: int | None = LARGEST_KEPT) -> tuple[DataConfig, Splits]:
    """The settings with what makes files alike that differ, and large ones smaller, where not given; and the images."""
    place = here(config)
    if is_image(Path(place.source).expanduser()):
        raise UserError(f"data.source must be a set of images, such as a folder, got one image, {config.source!r}")
    found = _find(place)
    if isinstance(found, Splits):
        return config, found
    config = with_shape(config, found, largest) if converts(config) else config
    return config, read_samples(found, config)


def read_like(config: DataConfig, shape: Sequence[int]) -> DataConfig:
    """The settings with which image files become images of this shape; what converts files is for no other kind."""
    if not converts(config) and Path(config.source).suffix.lower() != ".csv":
        return replace(config, resize=None, channels=None, labels="none")
    channels, height, width = shape
    side = config.resize or (height if height == width else None)
    bands = config.channels or {1: 1, 3: 3}.get(channels)
    return replace(config, resize=side, channels=bands)  # type: ignore[arg-type]


def settled(config: DataConfig) -> DataConfig:
    """The settings with what `load_settled` finds for files that differ or are large, without reading the images."""
    found = _find(here(config)) if converts(config) else None
    return with_shape(config, found, LARGEST_KEPT) if isinstance(found, SampleSet) else config


class Chunks(NamedTuple):
    """The names of the splits that are read, and the chunks: a split's name and at most so many of its images."""

    splits: list[str]
    chunks: Iterator[tuple[str, ImageSet]]
    unreadable: Unreadable | None = None
    """The samples that could not be read, once all chunks were; whoever reads them tells of these."""


def read_chunks(config: DataConfig, size: int, split: str = "all", part: Part = (0, 1)) -> Chunks:
    """The images that `load` would give, in order, at most `size` at a time; several processes take them in turn."""
    # Image files, shards and .npy files may be more than memory holds; .npz files and named sets are read whole.
    found, unreadable = _find(here(config)), None
    own = found.parts if isinstance(found, Splits) else found.samples
    there = [name for name, images in own.items() if len(images)]
    if split != "all" and split not in there:
        raise unknown_name("split", split, ["all", *there])
    chosen = there if split == "all" else [split]
    if isinstance(found, Splits):
        sets = found.parts
    else:
        unreadable = Unreadable(config.max_unreadable, found, warn_at_once=False)
        sets = open_images(found, config, unreadable, chosen)
    return Chunks(chosen, _chunks({name: sets[name] for name in chosen}, size, part), unreadable)


def _chunks(sets: dict[str, ImageSet], size: int, part: Part) -> Iterator[tuple[str, ImageSet]]:
    """The next chunk is read while one is used; where some splits have labels, the others get `NO_LABEL`."""
    classes = next((images.classes for images in sets.values() if images.labels is not None), None)
    starts = [(name, start) for name, images in sets.items() for start in range(0, len(images), size)]
    number, parts = part

    def read(place: tuple[str, int]) -> tuple[str, ImageSet]:
        name, start = place
        chunk = sets[name].take(np.arange(start, min(start + size, len(sets[name])))).loaded()
        if classes is not None and chunk.labels is None:
            chunk = replace(chunk, labels=np.full(len(chunk), NO_LABEL, np.int64), classes=classes)
        return name, chunk

    yield from read_ahead(read, starts[number::parts], 1)


def here(config: DataConfig) -> DataConfig:
    """The settings with a source on this machine: one in a store is copied below data.root."""
    if not is_remote(config.source):
        return config
    return replace(config, source=stage(config.source, list(braces(config.source)), Path(config.root).expanduser()))


def is_sharded(config: DataConfig) -> bool:
    return shard_files(here(config).source) is not None


def converts(config: DataConfig) -> bool:
    """Whether a source is image files, one, in a folder or in shards, which can be resized."""
    config = here(config)
    path = Path(config.source).expanduser()
    if config.source in NAMED or cifar10_form(path) is not None or is_tinyimagenet(path):
        return False
    return os.path.isdir(path) or is_image(path) or shard_files(config.source) is not None


def tinyimagenet_folder(config: DataConfig) -> Path | None:
    """The tree of Tiny ImageNet that a source is, if it is one and is there."""
    named = config.source == "tinyimagenet"
    path = Path(config.root).expanduser() / fetch.TINYIMAGENET_FOLDER if named else Path(config.source).expanduser()
    return path if is_tinyimagenet(path) and (named or config.source not in NAMED) else None


def _find(config: DataConfig) -> SampleSet | Splits:
    """What a source is, with as many training images as asked for."""
    return limited(_find_all(config), config)  # type: ignore[type-var]  # either kind comes out as it goes in


def _find_all(config: DataConfig) -> SampleSet | Splits:
    """The samples of image files or shards, not yet decoded, or the images of a named set or a file of arrays."""
    if printable(config.source) != Path(config.source).as_posix():
        told = printable(config.source)
        raise UserError(f"data.source must be a path in UTF-8, got {told}; rename the folder or the file")
    tree, path = tinyimagenet_folder(config), Path(config.source).expanduser()
    if tree is not None:
        return tinyimagenet_samples(tree)
    if config.source in NAMED:
        _refuse_file_settings(config, () if config.source == "tinyimagenet" else FILE_SETTINGS)
        return NAMED[config.source](config)
    cifar10 = read_cifar10(path)
    if cifar10 is not None:
        _refuse_file_settings(config)
        return cifar10
    shards = shard_files(config.source)
    if shards is not None:
        _refuse_file_settings(config, ("labels",))
        return shard_samples(config.source, shards)
    if os.path.isdir(path):
        return folder_samples(path, config)
    if is_image(path):
        _refuse_file_settings(config, ("labels",))
        return SampleSet(printable(path.stem), {"train": FileSamples(path.parent, [path.name], None, ())})
    if os.path.isfile(path):
        if path.suffix.lower() == ".csv":
            raise UserError(f"data.source must be images, here the folder of those that a table names, got {path}")
        if path.suffix.lower() not in (".npy", ".npz"):
            known = "a name, a folder, an image to embed or predict, or a .npy, .npz, .tar, .parquet or .arrow file"
            raise UserError(f"data.source must be {known}, got {path}")
        _refuse_file_settings(config)
        return (read_npy if path.suffix.lower() == ".npy" else read_npz)(path, config.layout)
    if os.path.dirname(config.source) or path.suffix:
        raise UserError(f"data.source: there is no file or folder {path}")
    raise UserError(f"{unknown_name('data.source', config.source, NAMED)}; nor is there a file or folder of that name")


def _refuse_file_settings(config: DataConfig, settings: Sequence[str] = FILE_SETTINGS) -> None:
    for setting in settings:
        value = getattr(config, setting)
        if value not in (None, "none"):
            raise UserError(f"data.{setting} is for folders of image files, got {value!r} for {config.source!r}")


def _cifar10(config: DataConfig) -> Splits:
    root = Path(config.root).expanduser()
    for folder in (*(root / name for name in fetch.CIFAR10_FOLDERS), root):
        splits = read_cifar10(folder)
        if splits is not None:
            return splits
    raise _missing(config, [f"{name}/" for name in fetch.CIFAR10_FOLDERS])


def _medmnist(config: DataConfig) -> Splits:
    """The 64x64 file, or the 28x28 one where it is the only one there; with the published names of its classes."""
    name, root = config.source, Path(config.root).expanduser()
    official = {f"{name}_64.npz": fetch.MEDMNIST_64[name].digest, f"{name}.npz": fetch.MEDMNIST_28_MD5[name]}
    file = next((file for file in official if (root / file).is_file()), None)
    if file is None:
        raise _missing(config, list(official))
    notes = [f"read from {file}" + ("" if "_64" in file else f"; {name}_64.npz is not there")]
    if checksum(root / file, "MD5") != official[file]:
        notes.append(f"{file} is not the file that MedMNIST published: report results on it as rebuilt")
    splits, classes = read_npz(root / file, "NHWC"), fetch.MEDMNIST_CLASSES[name]
    renamed = {k: replace(p, classes=classes) for k, p in splits.parts.items() if len(p.classes) == len(classes)}
    return replace(splits, name=name, notes=tuple(notes), **renamed)


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


def _no_tinyimagenet(config: DataConfig) -> Splits:
    folder = fetch.TINYIMAGENET_FOLDER
    raise _missing(config, [f"{folder}/train/", f"{folder}/val/val_annotations.txt"])


def _missing(config: DataConfig, looked_for: list[str]) -> UserError:
    told = f"data.source {config.source!r}: found no {' or '.join(looked_for)} in data.root {config.root!r}"
    return UserError(f"{told}; `pmae data {config.source} --root {config.root}` fetches it")


NAMED: dict[str, Callable[[DataConfig], Splits]] = {
    **dict.fromkeys(fetch.MEDMNIST_64, _medmnist),
    "cifar10": _cifar10,
    "digits": _digits,
    "photos": lambda _: load_photos(),
    "tinyimagenet": _no_tinyimagenet,
}
"""Sets that are asked for by name; Tiny ImageNet's tree is looked for before, so its entry says that it is missing."""


def with_held_out(splits: Splits) -> Splits:
    """The set with a tenth of its images, at most 1,000, as val; sets with a held-out part of their own are left alone.

    Which images they are follows from the number of images alone, so that runs of every seed share them. They carry no
    labels: probes have a rule of their own for what they hold out.
    """
    train = splits.train
    own = splits.val is not None or splits.test is not None
    large = isinstance(train.images, np.ndarray) and train.images.nbytes > LARGEST
    if own or large or len(train) < FEWEST_TO_SPLIT:
        return splits
    order = np.random.default_rng(0).permutation(len(train))
    held, kept = (np.sort(part) for part in np.split(order, [min(MOST_HELD_OUT, round(HELD_OUT * len(train)))]))
    names = tuple(train.names[i] if train.names else f"#{i}" for i in held)
    chosen = f"{len(held)} of the {len(train)} images are held out as val, by a fixed rule"
    val = replace(train.take(held), labels=None, classes=(), names=names)
    notes = (*splits.notes, f"{chosen}: nothing is trained or fitted on them")
    return replace(splits, train=train.take(kept), val=val, notes=notes)
