"""Images inside a .npz file, read forward as they are asked for: compressed or not, they are never in memory whole."""

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from pmae.data.images import ImageSet, OnDemand, Splits
from pmae.data.readers.arrays import Layout, channels_first, npz_splits, plain_numbers_only, read_npz
from pmae.data.readers.memory import require_room

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_npz(path: Path, layout: Layout = "auto") -> Splits:
    """The same as `read_npz`, with images that are read on demand; only labels are read at once.

    An array in Fortran's order has no images one after another, so such a file is read whole.
    """
    with plain_numbers_only(path), zipfile.ZipFile(path) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist()]
    members = {key: Member(path, key) for key in keys if key.endswith("images")}
    if any(member.fortran for member in members.values()):
        return read_npz(path, layout)
    with plain_numbers_only(path), np.load(path, allow_pickle=False) as archive:
        labels = {key: archive[key] for key in keys if key.endswith("labels")}
    images = {key: MemberImages(member, layout) for key, member in members.items()}
    return npz_splits(path, {**images, **labels}, _image_set)


def _image_set(images: "MemberImages", labels: np.ndarray | None, classes: tuple[str, ...]) -> ImageSet:
    return ImageSet(images, labels, classes, vectors=len(images.member.shape) == 2)


def _opened(path: Path, key: str) -> IO[bytes]:
    """A member, which holds its archive open and lets it go when it is itself let go."""
    return zipfile.ZipFile(path).open(f"{key}.npy")


class Member:
    """One array of an archive: its shape, and its rows from front to back."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        with plain_numbers_only(path):
            self._rewind()

    def _rewind(self) -> None:
        self._file = _opened(self.path, self.key)
        version = np.lib.format.read_magic(self._file)
        if version not in HEADERS:
            raise ValueError(f"{self.key} is of NumPy's format {version}")
        self.shape, self.fortran, self.dtype = HEADERS[version](self._file)
        if self.dtype.hasobject:
            raise ValueError("it holds objects")
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        require_room(self._row_bytes, f"one image of {self.path}")
        self._at = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`; going back means reading from the beginning."""
        require_room((stop - start) * self._row_bytes, f"{stop - start} images of {self.path}")
        with plain_numbers_only(self.path):
            if start < self._at:
                self._rewind()
            self._file.seek((start - self._at) * self._row_bytes, os.SEEK_CUR)
            data = self._file.read((stop - start) * self._row_bytes)
            if len(data) < (stop - start) * self._row_bytes:
                raise ValueError(f"{self.key} ends early")
            self._at = stop
            return np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])


class MemberImages(OnDemand):
    """Some images of a member, channels first."""

    names: Sequence[str] = ()

    def __init__(self, member: Member, layout: Layout, positions: np.ndarray | None = None) -> None:
        self.member, self.layout = member, layout
        self._positions = np.arange(member.shape[0] if member.shape else 0) if positions is None else positions
        # The layout is told by the axes of one image; without any image that is refused here.
        like = channels_first(np.zeros((min(1, len(self._positions)), *member.shape[1:]), member.dtype), layout)
        self.shape, self.dtype = (len(self._positions), *like.shape[1:]), like.dtype

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        wanted = np.atleast_1d(self._positions[index])
        first = int(wanted.min())
        images = channels_first(self.member.rows(first, int(wanted.max()) + 1)[wanted - first], self.layout)
        return images[0] if np.ndim(self._positions[index]) == 0 else images

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        return self[:], np.arange(len(self))

    def subset(self, index: np.ndarray) -> "MemberImages":
        return MemberImages(self.member, self.layout, self._positions[index])

    def blocks(self) -> None:
        return None
