"""Which files a source is, by split: images below a folder, or shards (tar, Arrow, parquet) in one or by a pattern."""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pmae.config import DataConfig
from pmae.data.readers.decode import SUFFIXES
from pmae.data.readers.samples import SHOWN, SPLITS, Samples, SampleSet, shown
from pmae.data.readers.tables import ArrowSamples, ParquetSamples
from pmae.data.readers.webdataset import TarSamples
from pmae.errors import UserError

RUN_FILES = {"config.json", "environment.json"}
"""What tells the folder of a run: its figures are no images to train on."""
SHARD_READERS: dict[str, Callable[[Sequence[Path], Path], Samples]] = {
    ".tar": TarSamples,
    ".arrow": ArrowSamples,
    ".parquet": ParquetSamples,
}
MOST_SHARDS = 100_000
_NAMED = re.compile(r"(train|val|test)(?:id|idation|ing)?(?![a-z])", re.IGNORECASE)
Shards = dict[str, list[Path]]
"""Files by split; train is always there."""


class FileSamples:
    """Image files below a folder by position; of each only its path is kept."""

    without_image: Sequence[str] = ()

    def __init__(
        self, folder: Path, paths: Sequence[str], labels: Sequence[int] | None, classes: tuple[str, ...]
    ) -> None:
        self._folder, self._paths = folder, paths
        self.labels = None if labels is None else np.array(labels, np.int64)
        self.classes = classes or None

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, position: int) -> tuple[str, Path]:
        """The file's name, and the file."""
        return self.name(position), self._folder / self._paths[position]

    def name(self, position: int) -> str:
        """Its path below the folder."""
        return printable(self._paths[position])

    def blocks(self) -> None:
        """Every file can be read alone."""


def folder_samples(folder: Path, config: DataConfig) -> SampleSet:
    """The image files of each split in order, none of them opened."""
    roots = {split: folder / split for split in SPLITS if (folder / split).is_dir()}
    if "train" not in roots or len(roots) == 1:
        roots = {"train": folder}
    passed_over = PassedOver()
    found = {s: [str(path.relative_to(folder)) for path in walk_images(root, passed_over)] for s, root in roots.items()}
    used = sum(map(len, found.values()))
    if not used:
        raise UserError(f"data.source: the folder {folder} holds no images ({', '.join(SUFFIXES)})")
    depth = 0 if roots["train"] == folder else 1
    named = {s: [_class_of(path, depth) for path in paths if config.labels == "folders"] for s, paths in found.items()}
    classes = tuple(sorted(set().union(*named.values())))
    number = {name: index for index, name in enumerate(classes)}
    samples = {
        split: FileSamples(folder, paths, [number[name] for name in named[split]] if classes else None, classes)
        for split, paths in found.items()
    }
    return SampleSet(printable(folder.resolve().name), samples, _notes(folder, roots, used, passed_over))


class PassedOver:
    """Folders that were not looked into."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.links = 0


def walk_images(folder: Path, passed_over: PassedOver | None = None) -> Iterator[Path]:
    """Image files below a folder in sorted order, with no more in memory than the names in one folder a level.

    Hidden ones are skipped, links to folders (which may loop) not followed, and the folders of runs passed over.
    """
    passed_over = passed_over or PassedOver()
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"data.source: the folder {folder} cannot be listed: {error.strerror}") from error
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            if all(os.path.isfile(os.path.join(entry, file)) for file in RUN_FILES):
                passed_over.runs.append(printable(entry.name))
            elif not entry.name.startswith((".", "__MACOSX")):
                yield from walk_images(folder / entry.name, passed_over)
        elif entry.is_symlink() and os.path.isdir(entry):
            passed_over.links += 1
        elif entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".") and os.path.isfile(entry):
            yield folder / entry.name


def printable(path: str | Path) -> str:
    """A name with forward slashes; bytes that are not UTF-8 are escaped, so that it can be printed and saved."""
    return os.fsencode(Path(path).as_posix()).decode("utf-8", "backslashreplace")


def _class_of(path: str, depth: int) -> str:
    """The folder that an image lies in, at so many levels below the data's."""
    folders = path.split(os.sep)[:-1]
    if len(folders) <= depth:
        raise UserError(f"data.labels 'folders' needs every image in a class folder; {printable(path)!r} is in none")
    return printable(folders[depth])


def _notes(folder: Path, roots: dict[str, Path], used: int, passed_over: PassedOver) -> tuple[str, ...]:
    """What was left out, in words."""
    notes = [] if len(roots) > 1 else ["no held-out images: the folder has no train/ and test/ (or val/)"]
    outside = sum(1 for _ in walk_images(folder)) - used if len(roots) > 1 else 0
    if outside:
        notes.append(f"{outside} images outside {', '.join(f'{split}/' for split in roots)} were left out")
    if passed_over.links:
        notes.append(f"{passed_over.links} linked folders were not followed")
    if passed_over.runs:
        notes.append(f"the folders of runs were passed over: {shown(passed_over.runs)}")
    return tuple(notes)


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
    whole = path if path.is_dir() else shards["train"][0].parent
    name = path.stem if path.is_file() else path.resolve().name if path.is_dir() else path.resolve().parent.name
    samples = {split: SHARD_READERS[kinds[0]](paths, whole) for split, paths in shards.items()}
    notes = () if len(shards) > 1 else ("no held-out images: no shards are named val or test",)
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
        raise UserError(
            f"data.source must have shards for training, got {', '.join(path.name for path in paths[:SHOWN])}"
        )
    return {split: found[split] for split in SPLITS if split in found} or None


def _split_of(name: str) -> str | None:
    found = _NAMED.match(name)
    return found[1].lower() if found else None
