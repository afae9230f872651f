"""Images decoded from samples, whatever their format: files in a folder, members of tar files, rows of tables."""

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from pmae.config import DataConfig
from pmae.data.arrays import array_of_npy, channels_first, number_classes
from pmae.data.decode import JPEG_SUFFIXES, decode, require_room
from pmae.data.images import DTYPES, ImageSet, Splits
from pmae.data.jpeg import decode_plain
from pmae.data.ondemand import OnDemand, RaggedOnDemand, Samples, headers_of, some_of
from pmae.data.resize import convert
from pmae.errors import UserError
from pmae.system import cores

SPLITS = ("train", "val", "test")
SHOWN = 5
LARGEST_SIDE, STEP, SMALL = 224, 16, 64
"""Of squares that are not asked for: the largest side, what divides it, and below which side half of that does."""


class SampleSet(NamedTuple):
    """A data set before anything is decoded: the samples of each split, and what must be said of it."""

    name: str
    samples: Mapping[str, Samples]
    notes: tuple[str, ...] = ()
    sharded: bool = False
    """Whether the images are in shards, and stay there."""
    channels: Literal[3] | None = None
    """What images are converted to unless the settings say otherwise."""


class Picture(NamedTuple):
    """One decoded sample."""

    name: str
    pixels: np.ndarray
    vector: bool


_warned: set[str] = set()
"""Notes that this process has told as warnings; Python tells no warning twice either."""


class Unreadable:
    """The samples of all splits that cannot be read, each counted once; more than `most` are refused."""

    def __init__(self, most: int, found: SampleSet, warn_at_once: bool) -> None:
        self._most, self._warn_at_once = most, warn_at_once
        self._lock = threading.Lock()
        self.left_out = [words for own in found.samples.values() for words in own.without_image]
        self._found = {("", i): (words, "") for i, words in enumerate(self.left_out)}
        self._refuse_too_many()

    def add(self, split: str, position: int, name: str, words: str) -> None:
        """Count one more, unless it is known by its split and place; names may occur twice."""
        with self._lock:
            if (split, position) in self._found:
                return
            self._found[split, position] = repr(name), words
            self._refuse_too_many()
        if self._warn_at_once:
            warnings.warn(f"skipped an unreadable sample: {name!r} ({words})", stacklevel=2)

    def warn(self) -> tuple[str, ...]:
        """One warning of all of them, and the note that names each; nothing where all could be read."""
        found = self.found
        if not found:
            return ()
        told = f"skipped {len(found)} unreadable file{'s' * (len(found) > 1)}"
        warnings.warn(f"{told}: {self}", stacklevel=3)
        note = f"{told}: {', '.join(found)}"
        _warned.add(note)
        return (note,)

    @property
    def found(self) -> list[str]:
        return [f"{name} ({words})" if words else name for name, words in self._in_order]

    @property
    def _in_order(self) -> list[tuple[str, str]]:
        return [self._found[place] for place in sorted(self._found)]

    def __str__(self) -> str:
        names, reasons = zip(*self._in_order, strict=True) if self._found else ((), ())
        # Files that one program wrote have one reason, which is told once.
        alike = len(names) > 1 and len(set(reasons)) == 1 and reasons[0]
        return f"{shown(list(names))} (each: {reasons[0]})" if alike else shown(self.found)

    def _refuse_too_many(self) -> None:
        if len(self._found) > self._most:
            raise UserError(f"data.max_unreadable is {self._most}, and more files than that cannot be read: {self}")


def untold(notes: Iterable[str]) -> list[str]:
    """The notes on a data set that were no warnings when it was read."""
    return [note for note in notes if note not in _warned]


def shown(words: list[str]) -> str:
    """The first few, and whether there are more."""
    return ", ".join(words[:SHOWN]) + (", ..." if len(words) > SHOWN else "")


def read_samples(found: SampleSet, config: DataConfig) -> Splits:
    """A data set whose images are decoded now, all of them, or stay in their shards until they are asked for."""
    unreadable = Unreadable(config.max_unreadable, found, warn_at_once=found.sharded)
    sets, notes = open_images(found, config, unreadable), found.notes
    if "train" not in sets:
        told = f": {unreadable}" if unreadable.found else ""
        raise UserError(f"data.source {found.name!r} must have at least one training image, got none{told}")
    if not found.sharded:
        count, (channels, height, width) = sum(map(len, sets.values())), sets["train"].shape
        need = sum(part.images.nbytes for part in sets.values())
        require_room(need, f"{count:,} images of {width}x{height} pixels and {channels} channels")
        sets = {split: part.loaded() for split, part in sets.items()}
        empty = [split for split, part in sets.items() if not len(part)]
        if empty:
            told = f"none in {' and '.join(empty)}: {unreadable}"
            raise UserError(f"data.source must have a readable image in every split, got {told}")
        notes += unreadable.warn()
    elif unreadable.left_out:
        without = unreadable.left_out
        notes += (f"skipped {len(without)} samples without an image: {shown(without)}",)
    return Splits(found.name, sets["train"], sets.get("val"), sets.get("test"), notes)


def with_shape(config: DataConfig, found: SampleSet, largest: int | None = None) -> DataConfig:
    """The settings, with what makes files alike where they differ and none is given: a side, or colors without alpha.

    Files of several sizes become squares, and so do files of one size whose short side is longer than `largest`. The
    side is at most 224, and no more than nine in ten images have, so that few are enlarged.
    """
    if config.resize is not None and config.channels is not None:
        return config
    samples = found.samples.values()
    headers = [header for own in samples for header in headers_of(own, some_of(len(own), found.sharded))]
    colors = {header.channels - header.transparent for header in headers}
    if config.channels is None and len({header.channels for header in headers}) > 1 and colors <= {1, 3}:
        config = replace(config, channels=3 if 3 in colors else 1)
    sizes = [header.size for header in headers]
    alike = len(set(sizes)) == 1 and (largest is None or min(sizes[0]) <= largest)
    if config.resize is not None or not sizes or alike:
        return config
    short = int(np.percentile([min(size) for size in sizes], 10))
    step = STEP if short >= SMALL else STEP // 2
    return replace(config, resize=min(LARGEST_SIDE, short - short % step if short > STEP else short))


def open_images(
    found: SampleSet, config: DataConfig, unreadable: Unreadable, only: Sequence[str] = SPLITS
) -> dict[str, ImageSet]:
    """The splits as images that are decoded on demand; classes are numbered over all splits, `only` some opened."""
    config = replace(config, channels=config.channels or found.channels)
    numbers, classes = _class_numbers(found.samples)
    # The cores that this process may use, divided among those that `torchrun` started on the machine.
    threads = config.threads or max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    first: Picture | None = None
    sets = {}
    for (split, samples), labels in zip(found.samples.items(), numbers, strict=True):
        if split in only and len(samples):
            read = partial(_read, split, samples, config, unreadable)
            first = first or next(filter(None, map(read, range(len(samples)))), None)
            if first is None:
                raise UserError(f"data.source must have at least one readable image, got none: {unreadable}")
            decode = partial(_pixels, read, first)
            images, originals = OnDemand(samples, decode, first.pixels, threads), None
            if config.resize is not None and config.crop_mode == "center":
                originals = RaggedOnDemand(samples, decode, threads, keeps=not found.sharded)
            own = classes if labels is not None else ()
            sets[split] = ImageSet(images, labels, own, images.names, first.vector, originals)
    return sets


def _class_numbers(samples: Mapping[str, Samples]) -> tuple[list[np.ndarray | None], tuple[str, ...]]:
    """Class numbers of all splits: those of the names that the files have, else the labels that occur, in order."""
    named = next((own.classes for own in samples.values() if own.classes), None)
    labels = [own.labels for own in samples.values()]
    # Hugging Face writes -1 where the class is kept secret, as in many test splits.
    labels = [None if one is None or (named and (one < 0).all()) else one for one in labels]
    labelled = [one for one in labels if one is not None]
    if labelled and all(one.dtype.kind == "U" for one in labelled):
        known = np.unique(np.concatenate(labelled))
        return [None if one is None else np.searchsorted(known, one) for one in labels], tuple(known.tolist())
    if named is None:
        return number_classes(labels)
    for one in labels:
        if one is not None and (one.min() < 0 or one.max() >= len(named)):
            raise UserError(f"data.source must have labels from 0 to {len(named) - 1}, got {one.min()} to {one.max()}")
    return labels, named


def _read(
    split: str, samples: Samples, config: DataConfig, unreadable: Unreadable, position: int, short: int | None = None
) -> Picture | None:
    """One sample, decoded, whole if its short side may have so many pixels; None if it cannot be read."""
    name, content = f"sample {position}", None
    try:
        name, content = samples.read(position)
        if isinstance(content, bytes) and name.lower().endswith(".npy"):
            content = array_of_npy(content)
        if isinstance(content, np.ndarray):
            pixels = convert(channels_first(content[None], config.layout)[0], config, short)
        else:
            pixels = _decoded(content if isinstance(content, Path) else Path(name), content, config, short)
        if pixels.dtype.name not in DTYPES:
            raise ValueError(f"unsupported depth {pixels.dtype}")
        if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
            raise ValueError("NaN or infinity among its values")
        return Picture(name, pixels, vector=isinstance(content, np.ndarray) and content.ndim == 1)
    # Decoders raise whatever a broken file trips over (OSError, SyntaxError, struct.error, MemoryError, ...).
    except Exception as error:
        words = re.sub(r"<_io\..*>", "the file", f"{type(error).__name__}: {error}")
        words = words.replace("image file the file", "the image file")  # as Pillow says it
        unreadable.add(split, position, name, " ".join(words.split()))
        return None


def _decoded(path: Path, content: Path | bytes, config: DataConfig, short: int | None) -> np.ndarray:
    """Pixels of a file: by torchvision of a JPEG that keeps its size, else by what reads its format."""
    if isinstance(content, Path) and (short is not None or path.suffix.lower() in JPEG_SUFFIXES):
        content = content.read_bytes()
    if isinstance(content, Path):
        return decode(path, config)
    plain = decode_plain(content, config, short)
    return decode(path, config, content, short) if plain is None else plain


def _pixels(
    read: Callable[..., Picture | None], first: Picture, position: int, short: int | None = None
) -> np.ndarray | None:
    """One image; one that is unlike the first is refused, with the setting that would make them alike."""
    other = read(position, short=short)
    if other is None:
        return None
    a, b = first.pixels, other.pixels
    same_size = short is not None or a.shape[1:] == b.shape[1:]
    if same_size and len(a) == len(b) and a.dtype == b.dtype:
        return b
    if not same_size:
        setting = "data.resize must be given when sizes differ"
        one, two = (f"{x.shape[2]}x{x.shape[1]}" for x in (a, b))
    elif a.shape[0] != b.shape[0]:
        setting = "data.channels must be given when channels differ"
        one, two = (f"{len(x)}-channel" for x in (a, b))
    else:
        setting = "images must be saved in one depth (skimage.util.img_as_ubyte makes 8 bits of 16)"
        one, two = str(a.dtype), str(b.dtype)
    raise UserError(f"{setting}: {first.name!r} is {one} and {other.name!r} is {two}")
