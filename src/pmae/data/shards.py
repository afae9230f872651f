"""Shards (tar, Arrow, parquet), by split: those of a folder, a file or a pattern."""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pmae.data.files import printable, split_called, walk_images
from pmae.data.ondemand import Samples
from pmae.data.streamed import SPLITS, SampleSet, shown
from pmae.data.tables import ArrowSamples, ParquetSamples
from pmae.data.webdataset import TarSamples
from pmae.errors import UserError

SHARD_READERS: dict[str, Callable[[Sequence[Path]], Samples]] = {
    ".tar": TarSamples,
    ".arrow": ArrowSamples,
    ".parquet": ParquetSamples,
}
MOST_SHARDS = 100_000
Shards = dict[str, list[Path]]
"""Files by split; train is always there."""


def shard_files(source: str) -> Shards | None:
    """The shards of a folder, a file or a pattern (`*`, `{000..007}`, `{a,b}`); None where a source is no shards."""
    path = Path(source).expanduser()
    if os.path.isdir(path):
        return _by_split(_in_folder(path), path)
    if os.path.isfile(path):
        return {"train": [path]} if path.suffix.lower() in SHARD_READERS else None
    if not re.search(r"[*?\[{]", source):
        return None
    return _by_split(_matching(str(path)), path.parent)


def shard_samples(source: str, shards: Shards) -> SampleSet:
    """The samples of all shards, none of them decoded."""
    kinds = sorted({path.suffix.lower() for paths in shards.values() for path in paths})
    if len(kinds) > 1 or kinds[0] not in SHARD_READERS:
        known = ", ".join(SHARD_READERS)
        raise UserError(f"data.source must be shards of one kind among {known}, got {', '.join(kinds)}")
    irregular = next((path for paths in shards.values() for path in paths if not path.is_file()), None)
    if irregular is not None:
        raise UserError(f"data.source: the shard {irregular} must be a regular file")
    path = Path(source).expanduser()
    name = path.stem if path.is_file() else path.resolve().name if path.is_dir() else path.resolve().parent.name
    samples = {split: SHARD_READERS[kinds[0]](paths) for split, paths in shards.items()}
    notes = () if len(shards) > 1 else ("no shards are named val or test",)
    return SampleSet(printable(name), samples, notes, sharded=True)


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
        if len(found) > MOST_SHARDS:
            raise UserError(f"data.source must be at most {MOST_SHARDS:,} shards, got more in {pattern!r}")
    return found


def braces(pattern: str) -> Iterator[str]:
    """All that a shell makes of `{000..007}` and `{a,b}`."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        yield pattern
        return
    ends = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", found[1], re.ASCII)
    numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
    for word in (str(number).zfill(len(ends[1])) for number in numbers) if ends else found[1].split(","):
        yield from braces(pattern[: found.start()] + word + pattern[found.end() :])


def _by_split(paths: list[Path], folder: Path) -> Shards | None:
    """By the file's or its folder's name, where there are several splits; files that name none are for training."""
    found: Shards = {}
    for path in paths:
        inner = path.parent.name if path.parent != folder else ""
        found.setdefault(_split_of(path.name) or _split_of(inner) or "train", []).append(path)
    if len(found) == 1:
        return {"train": paths}
    if found and "train" not in found:
        raise UserError(f"data.source must have shards for training, got {shown([path.name for path in paths])}")
    return {split: found[split] for split in SPLITS if split in found} or None


def _split_of(name: str) -> str | None:
    return split_called(name, whole=False)
