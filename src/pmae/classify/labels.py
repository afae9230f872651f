"""Images with labels: from subfolders, a table of files (.csv or .parquet), an .npz file, shards or a named set."""

import csv
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.config import DataConfig
from pmae.data.files import FileSamples, split_called
from pmae.data.images import ImageSet, Splits, require_finite
from pmae.data.sets import LARGEST_KEPT, converts, is_sharded, load_settled
from pmae.data.streamed import SPLITS, SampleSet, read_samples, shown, with_shape
from pmae.errors import UserError, failing_as, optional, require
from pmae.evaluate.features import hold_out

SEPARATOR = ";"
"""Between the labels of one image, in a table."""
TABLES = (".csv", ".parquet")
WHOLE = re.compile(r"[+-]?\d+")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Labelled:
    """Images with their targets: class numbers (N,), or 0 and 1 for every class (N, C) where they may have several."""

    images: ImageSet
    targets: np.ndarray

    def take(self, index: np.ndarray) -> "Labelled":
        """Those at these positions."""
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
        """The splits that are there, by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels, or none."""
        return self.train.targets.ndim == 2


def read_labelled(config: DataConfig, labels: Path | str | None = None) -> tuple[DataConfig, LabelledData]:
    """The images of a source and their labels, checked, and the settings that they were read with.

    `labels` is a table of the files below `config.source`, with a column `file`, `label` (several are `a;b`) or a
    column of 0 and 1 for each class, and maybe `split`. Without one, or by `folders`, subfolders are the classes.
    """
    source, labels = Path(config.source).expanduser(), None if labels == "folders" else labels
    if labels is None and is_table(source):
        labels, source = source, source.parent
    if labels is not None:
        config, found = _from_table(Path(labels).expanduser(), source, config)
    else:
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
    if data.val is not None:
        return data
    # Of images with several labels, each combination is a class here.
    strata = np.unique(data.train.targets, axis=0, return_inverse=True)[1].reshape(-1)
    kept, held = hold_out(strata, share, seed)
    told = f"{len(held)} of {len(data.train.targets)} training images are held out to stop and to calibrate on"
    return data._replace(train=data.train.take(kept), val=data.train.take(held), notes=(*data.notes, told))


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
    """How many images each class has."""
    targets = part.targets
    return targets.sum(0).astype(int) if targets.ndim == 2 else np.bincount(targets, minlength=classes)


def is_table(source: Path | str) -> bool:
    """Whether a path is a table of file names; a Parquet file may also hold the images themselves."""
    path = Path(source).expanduser()
    if not path.is_file() or path.suffix.lower() not in TABLES:
        return False
    if path.suffix.lower() == ".csv":
        return True
    with failing_as(f"data.source: {path} cannot be read as a table"):
        return "file" in _parquet().read_schema(path).names


def _parquet() -> Any:
    return optional("a .parquet file", "stream", "pyarrow.parquet")


def _read_rows(path: Path) -> Rows:
    """The rows of a table, each a dictionary by column."""
    if path.suffix.lower() not in TABLES or path.is_dir():
        raise UserError(f"labels must be a .csv or .parquet file, got {str(path)!r}")
    if not path.is_file():
        raise UserError(f"labels: there is no file {str(path)!r}")
    with failing_as(f"labels: {path} cannot be read as a table"):
        if path.suffix.lower() == ".parquet":
            rows: Rows = _parquet().read_table(path).to_pylist()
        else:
            with path.open(newline="", encoding="utf-8-sig") as file:
                # Where decimals have a comma, spreadsheets write semicolons between cells.
                cells = ";" if "," not in file.readline() else ","
                file.seek(0)
                rows = list(csv.DictReader(file, delimiter=cells, strict=True, skipinitialspace=True))
    require(bool(rows), f"labels: {path}", "a table with rows", "none")
    columns = len([name for name in rows[0] if name is not None])
    for number, row in enumerate(rows, 2):
        require(None not in row, f"row {number} of {path}", f"of {columns} cells, as its header", list(row.values()))
    rule = "a table with a column 'file', and 'label' or one for each class"
    require("file" in rows[0], f"labels: {path}", rule, sorted(map(str, rows[0])))
    return rows


def _from_table(path: Path, folder: Path, config: DataConfig) -> tuple[DataConfig, LabelledData]:
    require(config.max_images is None, "data.max_images", "left unset for a table of files", config.max_images)
    rows = _read_rows(path)
    targets, classes = _targets(rows, path)
    files, splits = [str(row["file"]) for row in rows], [_split_of(row.get("split") or "train", path) for row in rows]
    _check_files(files, splits, folder, path)
    # The number of a sample is its row, so that a file that cannot be read takes its row with it.
    places = {split: [i for i, own in enumerate(splits) if own == split] for split in SPLITS if split in splits}
    samples = {s: FileSamples(folder, [files[i] for i in own], own, ()) for s, own in places.items()}
    named = SampleSet(path.stem, samples)
    config = with_shape(replace(config, labels="none"), named, LARGEST_KEPT)
    read = from_splits(read_samples(named, config))
    parts = {split: getattr(read, split) for split in places}
    kept = {
        split: Labelled(replace(p.images, labels=None, classes=()), targets[p.targets]) for split, p in parts.items()
    }
    return config, LabelledData(path.stem, classes, notes=read.notes, **kept)


def _split_of(cell: object, path: Path) -> str:
    split = split_called(str(cell))
    if split is None:
        raise UserError(f"split in {path} must be one of {', '.join(SPLITS)}, got {str(cell)!r}")
    return split


def _check_files(files: list[str], splits: list[str], folder: Path, path: Path) -> None:
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        rule = f"{path} must name files below {folder}, got {len(missing)} that are not: {shown(missing)}"
        raise UserError(f"{rule}{_where_they_are(missing, folder, path)}")
    real = [os.path.realpath(folder / name) for name in files]
    twice = next((place for place, count in Counter(real).items() if count > 1), None)
    if twice is not None:
        rows = [i for i, place in enumerate(real) if place == twice][:2]
        where = " and ".join(f"row {i + 2} ({splits[i]})" for i in rows)
        raise UserError(f"{path} must name every file once, got {files[rows[0]]!r} in {where}")


def _where_they_are(missing: list[str], folder: Path, path: Path) -> str:
    """What to do about names of a table that are no files below the folder, where that can be told."""
    if not any(Path(name).suffix for name in missing):
        return "; file names have their suffix, as in a.tif"
    if folder == path.parent:
        return "; where the table is elsewhere, data is the folder and labels the table"
    below = all((path.parent / name).is_file() for name in missing)
    return "; they lie below the folder of the table, which can be given as data, alone" * below


def _targets(rows: Rows, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets and classes: of the column `label`, or of a column for each class."""
    if "label" not in rows[0]:
        return _class_columns(rows, path)
    cells = [row["label"] for row in rows]
    for number, cell in enumerate(cells, 2):
        require(not _is_float(cell), f"label in row {number} of {path}", "a name or a whole number", cell)
    several = [[part.strip() for part in str("" if c is None else c).split(SEPARATOR) if part.strip()] for c in cells]
    classes = tuple(sorted(set().union(*several), key=_in_order))
    if all(len(labels) == 1 for labels in several):
        return np.array([classes.index(label) for (label,) in several], np.int64), classes
    if not any(SEPARATOR in str(cell) for cell in cells):
        row = next(number for number, labels in enumerate(several, 2) if not labels)
        raise UserError(f"label in row {row} of {path} must be a class, got nothing")
    table = [[float(name in labels) for name in classes] for labels in several]
    return np.array(table, np.float32), classes


def _class_columns(rows: Rows, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    classes = tuple(name for name in rows[0] if name not in ("file", "split"))
    require(bool(classes), f"labels: {path}", "a table with a column 'label', or one for each class", sorted(rows[0]))
    for number, row in enumerate(rows, 2):
        for name in classes:
            rule = "0 or 1, as every column is a class where none is called 'label'"
            require(str(row[name]) in ("0", "1"), f"{name} in row {number} of {path}", rule, row[name])
    return np.array([[float(row[name]) for name in classes] for row in rows], np.float32), classes


def _is_float(cell: object) -> bool:
    """Whether a label is a measurement, not a class: 0.5, and also 1.0."""
    if isinstance(cell, str):
        try:
            float(cell)
        except ValueError:
            return False
        # To Python 1_2 is a number, to others the name of a class.
        return "_" not in cell and not WHOLE.fullmatch(cell.strip())
    return isinstance(cell, float)


def _in_order(label: str) -> tuple[int, str]:
    """Numbers by value, before names; 07 and 7 are two labels."""
    return (int(label), label) if WHOLE.fullmatch(label) else (2**63, label)
