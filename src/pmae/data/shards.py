"""Which files a source of shards is, by split, and the data set they make: tar, Arrow and parquet."""

import glob
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pmae.config import DataConfig
from pmae.data.images import ImageSet, Splits
from pmae.data.readers.arrays import number_classes
from pmae.data.readers.folder import SPLITS, walk_images
from pmae.data.readers.tables import ArrowSamples, ParquetSamples
from pmae.data.readers.webdataset import TarSamples
from pmae.data.streamed import Samples, Streamed, Unreadable
from pmae.errors import UserError

READERS: dict[str, Callable[[Sequence[Path]], Samples]] = {
    ".tar": TarSamples,
    ".arrow": ArrowSamples,
    ".parquet": ParquetSamples,
}
SHOWN = 5
_NAMED = re.compile(r"(train|val|test)(?:id|idation|ing)?(?![a-z])", re.IGNORECASE)
Shards = dict[str, list[Path]]
"""Files by split; train is always there."""


def shard_files(source: str) -> Shards | None:
    """The shards of a folder, a file or a pattern (`*`, `{000..007}`, `{a,b}`); None where a source is no shards."""
    path = Path(source).expanduser()
    if os.path.isdir(path):
        return _by_split(_in_folder(path), path)
    if os.path.isfile(path):
        return {"train": [path]} if path.suffix.lower() in READERS else None
    if not re.search(r"[*?\[{]", source):
        return None
    return _by_split(_matching(str(path)), path.parent)


def read_shards(shards: Shards, config: DataConfig) -> Splits:
    """A data set whose images stay in their files until they are asked for."""
    kinds = sorted({path.suffix.lower() for paths in shards.values() for path in paths})
    if len(kinds) > 1 or kinds[0] not in READERS:
        raise UserError(f"data.source must be shards of one kind among {', '.join(READERS)}, got {', '.join(kinds)}")
    samples = {split: READERS[kinds[0]](paths) for split, paths in shards.items()}
    bare = [name for one in samples.values() for name in one.without_image]
    unreadable, first = Unreadable(config, bare), None
    numbers, classes = _classes(samples)
    sets = {}
    for (split, one), labels in zip(samples.items(), numbers, strict=True):
        images = Streamed(one, config, unreadable, first)
        first = first or images.first
        sets[split] = ImageSet(images, labels, classes if labels is not None else (), images.names, first.vector)
    notes = _notes(shards, bare)
    return Splits(_name(config.source), sets["train"], sets.get("val"), sets.get("test"), notes)


def _in_folder(folder: Path) -> list[Path]:
    """What `datasets` saved there, else tar or parquet files in it and in subfolders named for a split, or data/."""
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        return sorted([*folder.glob("*.arrow"), *folder.glob("*/*.arrow")])
    places = [folder, folder / "data", *(place for place in sorted(folder.iterdir()) if _split_of(place.name))]
    found = [path for place in places for kind in (".tar", ".parquet") for path in sorted(place.glob(f"[!.]*{kind}"))]
    # Pictures beside an archive are a folder of pictures.
    return found if found and next(walk_images(folder), None) is None else []


def _matching(pattern: str) -> list[Path]:
    found: list[Path] = []
    for one in braces(pattern):
        paths = [Path(path) for path in sorted(glob.glob(one))]
        if not paths:
            raise UserError(f"data.source: there is no file {one}")
        found += paths
    return found


def braces(pattern: str) -> list[str]:
    """All that a shell makes of `{000..007}` and `{a,b}`."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if ends:
        low, high = int(ends[1]), int(ends[2])
        words = [str(number).zfill(len(ends[1])) for number in range(low, high + 1)]
    else:
        words = found[1].split(",")
    return [whole for word in words for whole in braces(pattern[: found.start()] + word + pattern[found.end() :])]


def _by_split(paths: list[Path], folder: Path) -> Shards | None:
    """By the file's or its folder's name, where there are several splits; files that name none are for training."""
    found: Shards = {}
    for path in paths:
        inner = path.parent.name if path.parent != folder else ""
        found.setdefault(_split_of(path.name) or _split_of(inner) or "train", []).append(path)
    if len(found) == 1:
        return {"train": paths}
    if found and "train" not in found:
        raise UserError(
            f"data.source must have shards for training, got {', '.join(path.name for path in paths[:SHOWN])}"
        )
    return {split: found[split] for split in SPLITS if split in found} or None


def _split_of(name: str) -> str | None:
    found = _NAMED.match(name)
    return found[1].lower() if found else None


def _classes(samples: dict[str, Samples]) -> tuple[list[np.ndarray | None], tuple[str, ...]]:
    """Class numbers of all splits: those of the names that the files have, else whatever numbers occur, from 0 on."""
    named = next((one.classes for one in samples.values() if one.classes), None)
    labels = [one.labels for one in samples.values()]
    # Hugging Face writes -1 where the class is kept secret, as in many test splits.
    labels = [None if one is None or (named and (one < 0).all()) else one for one in labels]
    if named is None:
        return number_classes(labels)
    for one in labels:
        if one is not None and (one.min() < 0 or one.max() >= len(named)):
            raise UserError(f"data.source must have labels from 0 to {len(named) - 1}, got {one.min()} to {one.max()}")
    return labels, named


def _notes(shards: Shards, bare: list[str]) -> tuple[str, ...]:
    notes = [] if len(shards) > 1 else ["no held-out images: no shards are named val or test"]
    if bare:
        notes.append(f"skipped {len(bare)} samples without an image: {', '.join(bare[:SHOWN])}")
    return tuple(notes)


def _name(source: str) -> str:
    path = Path(os.path.expanduser(source))
    return path.stem if path.is_file() else path.resolve().name if path.is_dir() else path.resolve().parent.name
