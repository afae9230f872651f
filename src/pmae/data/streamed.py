"""Samples in shards as images: decoded by threads when they are asked for, in any order, whatever their number."""

import copy
import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pmae.config import DataConfig
from pmae.data.images import DTYPES, OnDemand
from pmae.data.readers.arrays import channels_first
from pmae.data.readers.decode import convert, decode
from pmae.data.readers.folder import refuse_too_many, require_alike
from pmae.errors import UserError

TOGETHER = 8
"""Images that a thread decodes before it looks for the next piece of work."""


class Samples(Protocol):
    """What a format must tell of its samples."""

    labels: np.ndarray | None
    """Class numbers as the files have them."""
    classes: tuple[str, ...] | None
    """Names of the classes from 0 on, if the files have them."""
    without_image: Sequence[str]
    """Samples that were left out because they hold no image, in words."""

    def __len__(self) -> int: ...

    def read(self, position: int) -> tuple[str, bytes | np.ndarray]:
        """The image's name, whose suffix tells its kind, and the bytes of its file, or its numbers."""

    def name(self, position: int) -> str:
        """The name alone."""

    def blocks(self) -> tuple[np.ndarray, int] | None:
        """Where runs of samples begin that are read as a whole, and how many of them are kept together."""


class Unreadable:
    """The samples of all splits that cannot be read, each counted once; too many are refused."""

    def __init__(self, config: DataConfig, found: Sequence[str] = ()) -> None:
        self.config, self._lock = config, threading.Lock()
        self._found: dict[object, str] = dict(enumerate(found))
        refuse_too_many(list(found), config)

    def add(self, sample: tuple[int, int], name: str, error: Exception) -> None:
        """Count one more, with a warning, unless it is known by its split and place; names may occur twice."""
        words = re.sub(r"<_io.BytesIO[^>]*>", "the file", f"{type(error).__name__}: {error}")
        with self._lock:
            if sample in self._found:
                return
            self._found[sample] = f"{name!r} ({' '.join(words.split())})"
            refuse_too_many(list(self._found.values()), self.config)
        warnings.warn(f"skipped an unreadable sample: {self._found[sample]}", stacklevel=2)


class Picture(NamedTuple):
    """One decoded sample."""

    name: str
    pixels: np.ndarray
    vector: bool


class Streamed(OnDemand):
    """Images decoded from samples; every one must be like the data set's `first`."""

    def __init__(
        self, samples: Samples, config: DataConfig, unreadable: Unreadable, first: Picture | None = None
    ) -> None:
        self._samples, self._config, self._unreadable = samples, config, unreadable
        self._positions: np.ndarray | None = None
        self._pool = ThreadPoolExecutor(config.threads or _threads())
        self.first = first or self._first_readable()
        channels, height, width = self.first.pixels.shape
        self.shape, self.dtype = (len(samples), channels, height, width), self.first.pixels.dtype

    @property
    def names(self) -> Sequence[str]:
        """Names, each read from its file when it is asked for."""
        return _Names(self)

    def name(self, index: int) -> str:
        """The name of one image."""
        return self._samples.name(self._at(index))

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(index, int):
            return self._pixels(range(len(self))[index])
        places = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        images = np.empty((len(places), *self.shape[1:]), self.dtype)

        def fill(start: int) -> None:
            for row in range(start, min(start + TOGETHER, len(places))):
                images[row] = self._pixels(int(places[row]))

        for _ in self._pool.map(fill, range(0, len(places), TOGETHER)):
            pass
        return images

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """All images that can be read, and their positions."""
        found = enumerate(self._pool.map(self._alike, range(len(self))))
        kept = {index: pixels for index, pixels in found if pixels is not None}
        images = np.stack(list(kept.values())) if kept else np.empty((0, *self.shape[1:]), self.dtype)
        return images, np.array(list(kept), np.int64)

    def subset(self, index: np.ndarray) -> "Streamed":
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

    def _pixels(self, index: int) -> np.ndarray:
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
        require_alike(self.first.name, self.first.pixels, picture.name, picture.pixels)
        return picture.pixels

    def _try(self, position: int) -> Picture | None:
        name = f"sample {position}"
        try:
            name, content = self._samples.read(position)
            picture = _decoded(name, content, self._config)
            if picture.pixels.dtype.name not in DTYPES:
                raise ValueError(f"unsupported depth {picture.pixels.dtype}")
            return picture
        except MemoryError:
            raise
        # Decoders raise whatever a broken file trips over.
        except Exception as error:
            self._unreadable.add((id(self._samples), position), name, error)
            return None

    def _first_readable(self) -> Picture:
        for position in range(len(self._samples)):
            picture = self._try(position)
            if picture is not None:
                return picture
        raise UserError("data.source must have at least one readable image, got none")

    def _at(self, index: int) -> int:
        return index if self._positions is None else int(self._positions[index])


class _Names(Sequence[str]):
    """Names by position."""

    def __init__(self, images: Streamed) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        places = range(len(self))[index]
        return self._images.name(places) if isinstance(places, int) else tuple(map(self._images.name, places))


def _decoded(name: str, content: bytes | np.ndarray, config: DataConfig) -> Picture:
    if isinstance(content, bytes) and name.lower().endswith(".npy"):
        content = np.lib.format.read_array(BytesIO(content), allow_pickle=False)
    if isinstance(content, bytes):
        return Picture(name, decode(Path(name), config, content), vector=False)
    pixels = convert(channels_first(content[None], config.layout)[0], config)
    return Picture(name, pixels, vector=content.ndim == 1)


def _threads() -> int:
    """The cores that this process may use, shared with the others that `torchrun` started on the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
