"""Images decoded from samples (files in a folder, members of tar files, rows of tables) when they are asked for.

Decoding by threads, replacing what cannot be read, and reading all of it into memory are the same for every format.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pmae.config import DataConfig
from pmae.data.images import DTYPES, ImageSet, OnDemand, Splits
from pmae.data.memory import require_room
from pmae.data.readers.arrays import array_of_npy, channels_first
from pmae.data.readers.decode import convert, decode
from pmae.data.readers.samples import SPLITS, Content, Samples, SampleSet, Unreadable, class_numbers, shown
from pmae.errors import UserError

TOGETHER = 8
"""Images that a thread decodes before it looks for the next piece of work."""


class Picture(NamedTuple):
    """One decoded sample."""

    name: str
    pixels: np.ndarray
    vector: bool


class StreamedImages(OnDemand):
    """The images of a split, decoded by threads; every one must be like the data set's `first`."""

    def __init__(
        self, split: str, samples: Samples, config: DataConfig, unreadable: Unreadable, first: Picture | None = None
    ) -> None:
        self._split, self._samples, self._config = split, samples, config
        self._unreadable = unreadable
        self._positions: np.ndarray | None = None
        self._pool = ThreadPoolExecutor(config.threads or _cores())
        self.first = first or self._first_readable()
        self.shape = (len(samples), *self.first.pixels.shape)
        self.dtype = self.first.pixels.dtype

    @property
    def names(self) -> Sequence[str]:
        """Names, each read from its file when it is asked for."""
        return _Names(self)

    def name(self, index: int) -> str:
        """The name of one image."""
        return self._samples.name(self._at(index))

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(index, int):
            return self._replaced(range(len(self))[index])
        places = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        images = np.empty((len(places), *self.shape[1:]), self.dtype)

        def fill(row: int) -> None:
            images[row] = self._replaced(int(places[row]))

        self._each(fill, len(places))
        return images

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """All images that can be read, and their positions."""
        images = np.empty(self.shape, self.dtype)
        there = np.zeros(len(self), np.bool_)

        def fill(row: int) -> None:
            pixels = self._alike(row)
            if pixels is not None:
                images[row], there[row] = pixels, True

        self._each(fill, len(self))
        kept = np.flatnonzero(there)
        # Moved up in place: a second array might be more than memory holds.
        for new, old in enumerate(kept if len(kept) < len(self) else ()):
            images[new] = images[old]
        return images[: len(kept)], kept

    def subset(self, index: np.ndarray) -> "StreamedImages":
        """The images at these positions, still not decoded."""
        part = copy.copy(self)
        part._positions = np.asarray(index) if self._positions is None else self._positions[index]
        part.shape = (len(part._positions), *self.shape[1:])
        return part

    def blocks(self) -> tuple[np.ndarray, int] | None:
        """Those of the samples; a subset has what it has of them, if it is in order."""
        known, chosen = self._samples.blocks(), self._positions
        if known is None or chosen is None:
            return known
        if not len(chosen) or (np.diff(chosen) < 0).any():
            return None
        starts = np.unique(np.searchsorted(chosen, known[0]))
        return np.union1d([0], starts[starts < len(chosen)]), known[1]

    def _each(self, fill: Callable[[int], None], rows: int) -> None:
        """Call `fill` for every row, in threads."""

        def fill_some(start: int) -> None:
            for row in range(start, min(start + TOGETHER, rows)):
                fill(row)

        for _ in self._pool.map(fill_some, range(0, rows, TOGETHER)):
            pass

    def _replaced(self, index: int) -> np.ndarray:
        """One image; in place of a broken one the next of its class, so that a label stays true and a batch full."""
        for other in self._alternatives(index):
            pixels = self._alike(other)
            if pixels is not None:
                return pixels
        raise UserError(f"data.source must have another readable image of the class of {self.name(index)!r}, got none")

    def _alternatives(self, index: int) -> Iterator[int]:
        labels, count = self._samples.labels, len(self)
        for other in (place % count for place in range(index, index + count)):
            if labels is None or labels[self._at(other)] == labels[self._at(index)]:
                yield other

    def _alike(self, index: int) -> np.ndarray | None:
        """One image, refused if it is not like the first; None if it cannot be read."""
        picture = self._try(self._at(index))
        if picture is None:
            return None
        _require_alike(self.first, picture)
        return picture.pixels

    def _try(self, position: int) -> Picture | None:
        name, content = f"sample {position}", None
        try:
            name, content = self._samples.read(position)
            picture = _decoded(name, content, self._config)
            if picture.pixels.dtype.name not in DTYPES:
                raise ValueError(f"unsupported depth {picture.pixels.dtype}")
            return picture
        # Decoders raise whatever a broken file trips over (OSError, SyntaxError, struct.error, MemoryError, ...).
        except Exception as error:
            words = str(error).replace(repr(str(content)), "the file")
            words = re.sub(r"<_io.BytesIO[^>]*>", "the file", f"{type(error).__name__}: {words}")
            self._unreadable.add(self._split, position, name, " ".join(words.split()))
            return None

    def _first_readable(self) -> Picture:
        for position in range(len(self._samples)):
            picture = self._try(position)
            if picture is not None:
                return picture
        raise UserError(f"data.source must have at least one readable image, got none: {self._unreadable}")

    def _at(self, index: int) -> int:
        return index if self._positions is None else int(self._positions[index])


class _Names(Sequence[str]):
    """Names by position."""

    def __init__(self, images: StreamedImages) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        places = range(len(self))[index]
        return self._images.name(places) if isinstance(places, int) else tuple(map(self._images.name, places))


def _decoded(name: str, content: Content, config: DataConfig) -> Picture:
    if isinstance(content, bytes) and name.lower().endswith(".npy"):
        content = array_of_npy(content)
    if isinstance(content, np.ndarray):
        pixels = convert(channels_first(content[None], config.layout)[0], config)
        return Picture(name, pixels, vector=content.ndim == 1)
    file, data = (content, None) if isinstance(content, Path) else (Path(name), content)
    return Picture(name, decode(file, config, data), vector=False)


def _require_alike(first: Picture, other: Picture) -> None:
    """Name two images that differ, and the setting that would make them alike."""
    a, b = first.pixels, other.pixels
    if a.shape == b.shape and a.dtype == b.dtype:
        return
    if a.shape[1:] != b.shape[1:]:
        setting = "data.resize must be given when sizes differ"
        one, two = (f"{x.shape[2]}x{x.shape[1]}" for x in (a, b))
    elif a.shape[0] != b.shape[0]:
        setting = "data.channels must be given when channels differ"
        one, two = (f"{len(x)}-channel" for x in (a, b))
    else:
        setting, one, two = "images must be saved in one depth", str(a.dtype), str(b.dtype)
    raise UserError(f"{setting}: {first.name!r} is {one} and {other.name!r} is {two}")


def _cores() -> int:
    """The cores that this process may use, divided among those that `torchrun` started on the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def open_images(
    samples: Mapping[str, Samples], config: DataConfig, unreadable: Unreadable, only: Sequence[str] = SPLITS
) -> dict[str, ImageSet]:
    """The splits as images that are decoded on demand; classes are numbered over all splits, `only` some opened."""
    numbers, classes = class_numbers(samples)
    first: Picture | None = None
    sets = {}
    for (split, own), labels in zip(samples.items(), numbers, strict=True):
        if split in only and len(own):
            images = StreamedImages(split, own, config, unreadable, first)
            first = first or images.first
            sets[split] = ImageSet(images, labels, classes if labels is not None else (), images.names, first.vector)
    return sets


def read_samples(found: SampleSet, config: DataConfig, in_memory: bool) -> Splits:
    """A data set whose images are decoded now, all of them, or stay in their files until they are asked for."""
    left_out = [words for own in found.samples.values() for words in own.without_image]
    unreadable = Unreadable(config, left_out, warn_at_once=not in_memory)
    sets = open_images(found.samples, config, unreadable)
    notes = found.notes
    if "train" not in sets:
        raise UserError(f"data.source {found.name!r} must have at least one training image, got none")
    if in_memory:
        count, (channels, height, width) = sum(map(len, sets.values())), sets["train"].shape
        need = sum(part.images.nbytes for part in sets.values())
        require_room(need, f"{count:,} images of {width}x{height} pixels and {channels} channels")
        sets = {split: part.loaded() for split, part in sets.items()}
        notes = (*notes, *unreadable.warn())
    elif left_out:
        notes = (*notes, f"skipped {len(left_out)} samples without an image: {shown(left_out)}")
    return Splits(found.name, sets["train"], sets.get("val"), sets.get("test"), notes)
