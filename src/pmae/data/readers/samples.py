"""Samples of a data set before they are decoded: what every format tells of them, and which cannot be read."""

import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pmae.config import DataConfig
from pmae.data.readers.arrays import number_classes
from pmae.errors import UserError

SPLITS = ("train", "val", "test")
SHOWN = 5

Content = Path | bytes | np.ndarray
"""An image file, its bytes, or numbers."""


class Samples(Protocol):
    """What a format must tell of the samples of one split."""

    labels: np.ndarray | None
    """Class numbers as the files have them."""
    classes: tuple[str, ...] | None
    """Names of the classes from 0 on, if the files have them."""
    without_image: Sequence[str]
    """Samples that were left out because they hold no image, in words."""

    def __len__(self) -> int: ...

    def read(self, position: int) -> tuple[str, Content]:
        """The image's name, whose suffix tells its kind, and its content."""

    def name(self, position: int) -> str:
        """The name alone."""

    def blocks(self) -> tuple[np.ndarray, int] | None:
        """Where runs of samples begin that are read as a whole, and how many of them are kept together."""


class SampleSet(NamedTuple):
    """A data set before anything is decoded: the samples of each split, and what must be said of it."""

    name: str
    samples: Mapping[str, Samples]
    notes: tuple[str, ...]
    sharded: bool = False
    """Whether the images are in shards, and stay there."""


class Unreadable:
    """The samples of all splits that cannot be read, each counted once; too many are refused."""

    def __init__(self, config: DataConfig, left_out: Sequence[str] = (), warn_at_once: bool = True) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], str] = {("", i): words for i, words in enumerate(left_out)}
        self._warn_at_once = warn_at_once
        self._refuse_too_many()

    def add(self, split: str, position: int, name: str, words: str) -> None:
        """Count one more, unless it is known by its split and place; names may occur twice."""
        with self._lock:
            if (split, position) in self._found:
                return
            self._found[split, position] = f"{name!r} ({words})"
            self._refuse_too_many()
        if self._warn_at_once:
            warnings.warn(f"skipped an unreadable sample: {self._found[split, position]}", stacklevel=2)

    def warn(self) -> tuple[str, ...]:
        """One warning of all of them, and the note that names each; nothing where all could be read."""
        found = self._in_order()
        if not found:
            return ()
        warnings.warn(f"skipped {len(found)} unreadable files: {shown(found)}", stacklevel=3)
        return (f"skipped {len(found)} unreadable files: {', '.join(found)}",)

    def __str__(self) -> str:
        return shown(self._in_order())

    def _in_order(self) -> list[str]:
        places = sorted(self._found, key=lambda place: (SPLITS.index(place[0]) if place[0] else -1, place[1]))
        return [self._found[place] for place in places]

    def _refuse_too_many(self) -> None:
        cap = self._config.max_unreadable
        if len(self._found) > cap:
            raise UserError(f"data.max_unreadable is {cap}, and more files than that cannot be read: {self}")


def shown(words: list[str]) -> str:
    return ", ".join(words[:SHOWN]) + (", ..." if len(words) > SHOWN else "")


def class_numbers(samples: Mapping[str, Samples]) -> tuple[list[np.ndarray | None], tuple[str, ...]]:
    """Class numbers of all splits: those of the names that the files have, else whatever numbers occur, from 0 on."""
    named = next((own.classes for own in samples.values() if own.classes), None)
    labels = [own.labels for own in samples.values()]
    # Hugging Face writes -1 where the class is kept secret, as in many test splits.
    labels = [None if one is None or (named and (one < 0).all()) else one for one in labels]
    if named is None:
        return number_classes(labels)
    for one in labels:
        if one is not None and (one.min() < 0 or one.max() >= len(named)):
            raise UserError(f"data.source must have labels from 0 to {len(named) - 1}, got {one.min()} to {one.max()}")
    return labels, named
