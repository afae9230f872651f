"""Images with labels: from subfolders, a table of files (.csv or .parquet), an .npz file, shards or a named set."""

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.classify.table import USUAL, Columns, Table, cells_of, groups_of, is_table, read_table
from pmae.config import DataConfig
from pmae.data.files import FileSamples, split_called
from pmae.data.images import ImageSet, Splits, require_finite
from pmae.data.sets import LARGEST_KEPT, converts, is_sharded, load_settled
from pmae.data.streamed import SPLITS, SampleSet, read_samples, shown, with_shape
from pmae.errors import UserError, require
from pmae.evaluate.features import hold_out


@dataclass(frozen=True)
class Labelled:
    """Images with their targets: class numbers (N,), or 0 and 1 for every class (N, C) where they may have several."""

    images: ImageSet
    targets: np.ndarray

    def take(self, index: np.ndarray) -> "Labelled":
        return Labelled(self.images.take(index), self.targets[index])


class LabelledData(NamedTuple):
    """A labelled data set, by split."""

    name: str
    classes: tuple[str, ...]
    train: Labelled
    val: Labelled | None = None
    test: Labelled | None = None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, Labelled]:
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels, or none."""
        return self.train.targets.ndim == 2


def read_labelled(
    config: DataConfig, labels: Path | str | None = None, columns: Columns = USUAL
) -> tuple[DataConfig, LabelledData]:
    """The images of a source and their labels, checked, and the settings that they were read with.

    `labels` is a table of the files below `config.source`, with a column `file`, `label` (several are `a;b`) or a
    column of 0 and 1 for each class, and maybe `split`, under these names or those of `columns`, which may name one of
    groups too. Without a table, or by `folders`, subfolders are the classes.
    """
    source, labels = Path(config.source).expanduser(), None if labels == "folders" else labels
    if labels is None and is_table(source, columns.file):
        labels, source = source, source.parent
    if labels is not None:
        config, found = _from_table(Path(labels).expanduser(), source, config, columns)
    else:
        require(columns == USUAL, "columns", "left out but for labels in a table", columns)
        folder = converts(config) and not is_sharded(config)
        config, splits = load_settled(replace(config, labels="folders") if folder else config)
        found = from_splits(splits)
    _check(found)
    return config, found


def from_splits(splits: Splits) -> LabelledData:
    """A data set whose images have class numbers of their own; a held-out part without them is left out."""
    numbers = splits.train.labels
    if numbers is None:
        raise UserError(f"data {splits.name!r} must have labels, got none")
    sets = {s: Labelled(part, part.labels) for s, part in splits.parts.items() if part.labels is not None}
    return LabelledData(splits.name, splits.train.classes, notes=splits.notes, **sets)


def as_splits(data: LabelledData) -> Splits:
    """The data set with a class number for each image, to be evaluated on."""
    require(not data.multi_label, "labels", "of one class an image to be evaluated", "several, or none")
    sets = {s: replace(p.images, labels=p.targets, classes=data.classes) for s, p in data.parts.items()}
    return Splits(data.name, **sets, notes=data.notes)


def with_validation(data: LabelledData, share: float, seed: int) -> LabelledData:
    """The set with a part of its training images, the same share of every class, as val where it has none."""
    return _with_part(data, "val", share, seed, "to stop and to calibrate on")


def with_test(data: LabelledData, share: float | None, seed: int) -> LabelledData:
    """The same of test, if a share is given; nothing in it stops training or calibrates."""
    return data if share is None else _with_part(data, "test", share, seed, "to score on")


def _with_part(data: LabelledData, name: str, share: float, seed: int, use: str) -> LabelledData:
    if getattr(data, name) is not None:
        return data
    groups = data.train.images.groups
    kept, held = hold_out(_strata(data.train.targets), share, seed, groups)
    whole = "" if groups is None else f", all of {len(np.unique(groups[held]))} groups,"
    told = f"{len(held)} of {len(data.train.targets)} training images{whole} are held out {use}"
    parts: dict[str, Any] = {"train": data.train.take(kept), name: data.train.take(held)}
    return data._replace(**parts, notes=(*data.notes, told))


def _strata(targets: np.ndarray) -> np.ndarray:
    """The class of each image; of several labels the rarest, as combinations may be as many as images; -1 for none."""
    if targets.ndim == 1:
        return targets
    rarest = np.where(targets > 0, targets.sum(0), np.inf).argmin(1)
    return np.where(targets.any(1), rarest, -1)


def _check(data: LabelledData) -> None:
    """Refuse what cannot be learned: NaN, too few images of a class, or a class that only a held-out part has."""
    for name, part in data.parts.items():
        require_finite(f"the {name} images", part.images.images)
    require(len(set(data.classes)) == len(data.classes), "classes", "names of which no two are alike", data.classes)
    require(len(data.classes) >= 2 or data.multi_label, "labels", "of two classes or more", data.classes)
    counts = per_class(data.train, len(data.classes))
    for name, part in data.parts.items():
        there = per_class(part, len(data.classes))
        only = [label for label, here, train in zip(data.classes, there, counts, strict=True) if here and not train]
        if only:
            known = shown([label for label, count in zip(data.classes, counts, strict=True) if count])
            raise UserError(f"labels of {name} must be classes of train ({known}), got {only[0]!r}")
    for label, count in zip(data.classes, counts.tolist(), strict=True):
        require(count >= 2, f"class {label!r}", "of at least 2 training images", count)


def per_class(part: Labelled, classes: int) -> np.ndarray:
    targets = part.targets
    return targets.sum(0).astype(int) if targets.ndim == 2 else np.bincount(targets, minlength=classes)


def _from_table(path: Path, folder: Path, config: DataConfig, columns: Columns) -> tuple[DataConfig, LabelledData]:
    require(config.max_images is None, "data.max_images", "left unset for a table of files", config.max_images)
    table = read_table(path, columns)
    files = [str(row[columns.file]) for row in table.rows]
    given = cells_of(columns.split, USUAL.split, table.rows, path) or [""] * len(files)
    splits = [_split_of(cell or "train", path) for cell in given]
    groups = groups_of(table, path, columns)
    _check_files(files, splits, folder, path, table)
    _check_groups(groups, splits, path, columns)
    # The number of a sample is its row, so that a file that cannot be read takes its row with it.
    places = {split: [i for i, own in enumerate(splits) if own == split] for split in SPLITS if split in splits}
    samples = {s: FileSamples(folder, [files[i] for i in own], own, ()) for s, own in places.items()}
    named = SampleSet(path.stem, samples, table.notes)
    config = with_shape(replace(config, labels="none"), named, LARGEST_KEPT)
    read = from_splits(read_samples(named, config))
    numbers = None if groups is None else np.unique(groups, return_inverse=True)[1].reshape(-1)
    kept = {split: _labelled(getattr(read, split), table.targets, numbers) for split in places}
    return config, LabelledData(path.stem, table.classes, notes=read.notes, **kept)


def _labelled(part: Labelled, targets: np.ndarray, groups: np.ndarray | None) -> Labelled:
    """Images whose numbers are rows of a table, with what it says of them."""
    own, rows = None if groups is None else groups[part.targets], part.targets
    return Labelled(replace(part.images, labels=None, classes=(), groups=own), targets[rows])


def _split_of(cell: object, path: Path) -> str:
    split = split_called(str(cell))
    if split is None:
        raise UserError(f"split in {path} must be one of {', '.join(SPLITS)}, got {str(cell)!r}")
    return split


def _check_groups(groups: list[str] | None, splits: list[str], path: Path, columns: Columns) -> None:
    """Refuse a group of which a part is trained on and another scored: images of one patient know each other."""
    first: dict[str, str] = {}
    for group, split in zip(groups, splits, strict=True) if groups else ():
        rule = f"of one split, as its images are alike ({columns.group} in {path})"
        require(first.setdefault(group, split) == split, f"group {group!r}", rule, f"{first[group]} and {split}")


def _check_files(files: list[str], splits: list[str], folder: Path, path: Path, table: Table) -> None:
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        rule = f"{path} must name files below {folder}, got {len(missing)} that are not: {shown(missing)}"
        raise UserError(f"{rule}{_where_they_are(missing, folder, path)}")
    real = [os.path.realpath(folder / name) for name in files]
    twice = next((place for place, count in Counter(real).items() if count > 1), None)
    if twice is not None:
        rows = [i for i, place in enumerate(real) if place == twice][:2]
        where = " and ".join(f"row {table.numbers[i]} ({splits[i]})" for i in rows)
        raise UserError(f"{path} must name every file once, got {files[rows[0]]!r} in {where}")


def _where_they_are(missing: list[str], folder: Path, path: Path) -> str:
    """What to do about names of a table that are no files below the folder, where that can be told."""
    if not any(Path(name).suffix for name in missing):
        return "; file names have their suffix, as in a.tif"
    if folder == path.parent:
        return "; where the table is elsewhere, data is the folder and labels the table"
    below = all((path.parent / name).is_file() for name in missing)
    return "; they lie below the folder of the table, which can be given as data, alone" * below
