"""Images that threads decode when they are asked for, each of its own size or all as one array."""

import copy
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from pmae.data.decode import Header, read_header
from pmae.errors import UserError

LOOKED_AT = 1024  # files whose headers are read to learn how large images are
SAMPLED, SAMPLE_BYTES = 64, 2**16  # files, and how much of each, that tell a set in a cache from another
TOGETHER = 8  # images that a thread decodes before it looks for the next piece of work
T = TypeVar("T")
Blocks = tuple[np.ndarray, int]
"""Where runs of images begin that the disk gives only as a whole, and how many runs fit in memory together."""


class Samples(ABC):
    """The samples of a split before they are decoded: what every format must tell of them."""

    labels: np.ndarray | None = None
    """Class numbers, or names, as the files have them."""
    classes: tuple[str, ...] | None = None
    """Names of the classes from 0 on, if the files have them."""
    without_image: Sequence[str] = ()
    """Samples that were left out because they hold no image, in words."""
    files: Iterable[Path]
    """The files that hold them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, position: int) -> tuple[str, Path | bytes | np.ndarray]:
        """The image's name, whose suffix tells its kind, and its file, the bytes of it, or its numbers."""

    def name(self, position: int) -> str:
        """The name alone; a number where it cannot be read."""
        try:
            return self.read(position)[0]
        except Exception:  # a broken file trips over anything
            return f"sample {position}"

    def blocks(self) -> Blocks | None:
        """Nothing where every sample can be read alone."""
        return None


def headers_of(samples: Samples, positions: Iterable[int]) -> list[Header]:
    """What the headers of these files say; none of those that Pillow cannot read."""
    found = []
    for position in positions:
        with suppress(Exception):  # broken files are named when they are read
            content = samples.read(int(position))[1]
            found += [] if isinstance(content, np.ndarray) else [read_header(content)]
    return found


def some_of(count: int, first: bool) -> list[int]:
    """Positions of images to look at: of shards the first few, for rows come in groups, else evenly spread ones."""
    if first:
        return list(range(min(count, LOOKED_AT // 256)))
    return [int(place) for place in np.linspace(0, count - 1, min(count, LOOKED_AT))]


class RaggedOnDemand:
    """Images (C, h, w), each of its own size, that threads decode when they are asked for."""

    def __init__(
        self, samples: Samples, decode: Callable[..., np.ndarray | None], threads: int, keeps: bool = False
    ) -> None:
        # `decode` gives the pixels of a sample, or None for one that cannot be read.
        self._samples, self._decode, self.threads = samples, decode, threads
        self.keeps = keeps
        """Whether what was decoded is worth keeping: files in a folder are read once, shards again and again."""
        self._pool = ThreadPoolExecutor(threads)
        self._positions: range | np.ndarray = range(len(samples))

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def names(self) -> Sequence[str]:
        """Names, each read from its file when it is asked for."""
        return _Names(self)

    def name(self, index: int) -> str:
        return self._samples.name(int(self._positions[index]))

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """Widths and heights by the headers of some files: of shards the first ones, which are read as a whole."""
        places = some_of(len(self), first=not self.keeps)
        return [header.size for header in headers_of(self._samples, (self._positions[i] for i in places))]

    def digest(self, settings: str) -> str:
        """A name for these images as they are decoded: other files, newer ones or other settings give another."""
        digest, every = hashlib.blake2b(settings.encode(), digest_size=12), max(1, len(self._samples) // SAMPLED)
        digest.update(np.asarray(self._positions).astype(np.int64).data)
        for number, path in enumerate(self._samples.files):
            state = path.stat()
            digest.update(f"{os.fsencode(path.name)!r} {state.st_size} {state.st_mtime_ns}".encode())
            if number % every == 0:  # of two sets all of that may be alike, as of bitmaps out of archives
                with path.open("rb") as file:
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()

    def capped(self, short: int) -> Self:
        """The same images, decoded so that the short side of none is longer than this."""
        part = copy.copy(self)
        part._decode = partial(self._decode, short=short)
        return part

    def ragged(self, places: np.ndarray) -> list[np.ndarray]:
        """The images at these places, each of its own size."""
        return self._map(self._replaced, places.tolist())

    def contents(self, places: np.ndarray) -> list[bytes]:
        """The files at these places, not decoded; empty where there is none or it cannot be read."""

        def read(place: int) -> bytes:
            with suppress(Exception):  # decoding will name it
                content = self._samples.read(int(self._positions[place]))[1]
                content = content.read_bytes() if isinstance(content, Path) else content
                return content if isinstance(content, bytes) else b""
            return b""

        return self._map(read, places.tolist())

    def subset(self, index: np.ndarray) -> Self:
        """The images at these positions, still not decoded."""
        part, before = copy.copy(self), self._positions
        part.__dict__.pop("sizes", None)
        part._positions = np.asarray(index) if isinstance(before, range) else before[index]
        return part

    def blocks(self) -> Blocks | None:
        """Those of the samples; a subset has what it has of them, if it is in order."""
        known, chosen = self._samples.blocks(), self._positions
        if known is None or isinstance(chosen, range):
            return known
        if not len(chosen) or (np.diff(chosen) < 0).any():
            return None
        starts = np.unique(np.searchsorted(chosen, known[0]))
        return np.union1d([0], starts[starts < len(chosen)]), known[1]

    def _map(self, read: Callable[[int], T], places: Sequence[int]) -> list[T]:
        """What `read` gives for each place, in order; a thread takes several at a time."""

        def read_some(start: int) -> list[T]:
            return [read(place) for place in places[start : start + TOGETHER]]

        return [one for some in self._pool.map(read_some, range(0, len(places), TOGETHER)) for one in some]

    def _replaced(self, index: int) -> np.ndarray:
        """One image; in place of a broken one the next of its class, so that a label stays true and a batch full."""
        labels, position = self._samples.labels, int(self._positions[index])
        for place in range(index, index + len(self)):
            other = int(self._positions[place % len(self)])
            pixels = self._decode(other) if labels is None or labels[other] == labels[position] else None
            if pixels is not None:
                return pixels
        raise UserError(f"data.source must have another readable image of the class of {self.name(index)!r}, got none")


class OnDemand(RaggedOnDemand):
    """Images (N, C, H, W) of one size: an array, as far as reading goes."""

    ndim = 4

    def __init__(
        self, samples: Samples, decode: Callable[..., np.ndarray | None], first: np.ndarray, threads: int
    ) -> None:
        super().__init__(samples, decode, threads)
        self._shape, self.dtype = first.shape, first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self._shape

    @property
    def nbytes(self) -> int:
        """What all of them would take in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(index, int):
            return self._replaced(range(len(self))[index])
        places = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        images = np.empty((len(places), *self.shape[1:]), self.dtype)

        def fill(row: int) -> None:
            images[row] = self._replaced(int(places[row]))

        self._map(fill, range(len(places)))
        return images

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """All images that can be read, and their positions."""
        images, there = np.empty(self.shape, self.dtype), np.zeros(len(self), np.bool_)

        def fill(row: int) -> None:
            pixels = self._decode(int(self._positions[row]))
            if pixels is not None:
                images[row], there[row] = pixels, True

        self._map(fill, range(len(self)))
        kept = np.flatnonzero(there)
        # Moved up in place: a second array might be more than memory holds.
        for new, old in enumerate(kept if len(kept) < len(self) else ()):
            images[new] = images[old]
        return images[: len(kept)], kept


class _Names(Sequence[str]):
    """The names of images by position."""

    def __init__(self, images: RaggedOnDemand) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        places = range(len(self))[index]
        return self._images.name(places) if isinstance(places, int) else tuple(map(self._images.name, places))
