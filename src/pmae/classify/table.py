"""A table of image files (.csv or .parquet): its columns, the label or labels of each row, and who each row is of."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.errors import UserError, failing_as, optional, require, require_known

SEPARATOR = ";"
"""Between the labels of one image."""
TABLES = (".csv", ".parquet")
WHOLE = re.compile(r"[+-]?\d+")
Rows = list[dict[str, Any]]


class Columns(NamedTuple):
    """What the columns of a table are called."""

    file: str = "file"
    label: str = "label"
    split: str = "split"
    group: str = ""
    """What images have in common that keeps them in one split, such as the patient; no column unless it is named."""

    @classmethod
    def named(cls, given: Mapping[str, str]) -> "Columns":
        """The usual names but for those given, such as {"label": "diagnosis"}."""
        require_known("columns", given, cls._fields)
        return cls(**given)

    @classmethod
    def typed(cls, words: Sequence[str]) -> "Columns":
        """The same from a command line: `label=diagnosis`."""
        for word in words:
            require("=" in word, "columns", "given as WHAT=NAME, such as label=diagnosis", word)
        return cls.named(dict(word.split("=", 1) for word in words))

    @property
    def renamed(self) -> dict[str, str]:
        """Those that are not called as usual."""
        return {what: name for what, name in self._asdict().items() if name != self._field_defaults[what]}


USUAL = Columns()


class Table(NamedTuple):
    """The rows that have a label, with the targets and classes in them, and what must be said of the others."""

    rows: Rows
    targets: np.ndarray
    """Class numbers (N,), or 0 and 1 for every class (N, C)."""
    classes: tuple[str, ...]
    numbers: Sequence[int]
    """Of the rows in the file, whose header is the first."""
    notes: tuple[str, ...] = ()


def is_table(source: Path | str, file: str = USUAL.file) -> bool:
    """Whether a path is a table of file names; a Parquet file may also hold the images themselves."""
    path = Path(source).expanduser()
    if not path.is_file() or path.suffix.lower() not in TABLES:
        return False
    if path.suffix.lower() == ".csv":
        return True
    with failing_as(f"data.source: {path} cannot be read as a table"):
        return file in _parquet().read_schema(path).names


def read_table(path: Path, columns: Columns) -> Table:
    """The labelled rows of a table; one without a label is left out, as it can be neither learned nor scored."""
    rows = _read_rows(path, columns)
    numbers = range(2, len(rows) + 2)
    cells = cells_of(columns.label, USUAL.label, rows, path)
    if cells is None:
        return Table(rows, *_class_columns(rows, path, columns), numbers)
    for number, cell in zip(numbers, cells, strict=True):
        require(not _is_float(cell), f"{columns.label} in row {number} of {path}", "a name or a whole number", cell)
    several = [[part.strip() for part in str("" if c is None else c).split(SEPARATOR) if part.strip()] for c in cells]
    if any(SEPARATOR in str(cell) for cell in cells):
        classes = tuple(sorted(set().union(*several), key=_in_order))
        targets = np.array([[float(name in labels) for name in classes] for labels in several], np.float32)
        return Table(rows, targets, classes, numbers)
    there = [number for number, labels in enumerate(several) if labels]
    require(bool(there), f"{columns.label} in {path}", "a class in some of the rows", "nothing in all of them")
    classes = tuple(sorted({several[i][0] for i in there}, key=_in_order))
    left = len(rows) - len(there)
    told = f"{left:,} of the {len(rows):,} rows of {path.name} have no {columns.label} and are left out"
    targets = np.array([classes.index(several[i][0]) for i in there], np.int64)
    return Table([rows[i] for i in there], targets, classes, [numbers[i] for i in there], (told,) if left else ())


def groups_of(table: Table, path: Path, columns: Columns) -> list[str] | None:
    """The group of every row; None where no column is named that tells."""
    cells = cells_of(columns.group, USUAL.group, table.rows, path)
    if cells is None:
        return None
    found = ["" if cell is None else str(cell).strip() for cell in cells]
    for number, name in zip(table.numbers, found, strict=True):
        require(name != "", f"{columns.group} in row {number} of {path}", "a name or a number", "nothing")
    return found


def cells_of(name: str, usual: str, rows: Rows, path: Path) -> list[Any] | None:
    """A column, or None where it is not there; one that was asked for by name must be."""
    if name in rows[0]:
        return [row[name] for row in rows]
    require(name == usual, "columns", f"among those of {path} ({', '.join(map(str, rows[0]))})", name)
    return None


def _parquet() -> Any:
    return optional("a .parquet file", "stream", "pyarrow.parquet")


def _read_rows(path: Path, columns: Columns) -> Rows:
    """The rows of a table, each a dictionary by column."""
    if path.suffix.lower() not in TABLES or path.is_dir():
        raise UserError(f"labels must be a .csv or .parquet file, got {str(path)!r}")
    if not path.is_file():
        raise UserError(f"labels: there is no file {str(path)!r}")
    with failing_as(f"labels: {path} cannot be read as a table"):
        if path.suffix.lower() == ".parquet":
            table = _parquet().read_table(path)
            names, rows = table.column_names, table.to_pylist()
        else:
            with path.open(newline="", encoding="utf-8-sig") as file:
                # Where decimals have a comma, spreadsheets write semicolons between cells.
                cells = ";" if "," not in file.readline() else ","
                file.seek(0)
                reader = csv.DictReader(file, delimiter=cells, strict=True, skipinitialspace=True)
                names, rows = list(reader.fieldnames or ()), list(reader)
    require(bool(rows), f"labels: {path}", "a table with rows", "none")
    named = list(filter(None, names))  # spreadsheets add columns without a name
    require(len(set(named)) == len(named), f"labels: {path}", "a table whose columns have different names", names)
    for number, row in enumerate(rows, 2):
        require(None not in row, f"row {number} of {path}", f"of {len(names)} cells, as its header", list(row.values()))
    rule = f"a table with a column {columns.file!r}, and {columns.label!r} or one for each class"
    if columns.file not in rows[0]:
        said = f"labels: {path} must be {rule}, got {sorted(map(str, rows[0]))}"
        raise UserError(f"{said}; columns, as in label=NAME, say what they are called")
    return rows


def _class_columns(rows: Rows, path: Path, columns: Columns) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets and classes of a column of 0 and 1 for each class."""
    classes = tuple(name for name in rows[0] if name not in (columns.file, columns.split, columns.group))
    rule = f"a table with a column {columns.label!r}, or one for each class"
    require(bool(classes), f"labels: {path}", rule, sorted(rows[0]))
    for number, row in enumerate(rows, 2):
        for name in classes:
            rule = "0 or 1, as every column is a class where none is called 'label' (columns label=NAME)"
            require(str(row[name]) in ("0", "1"), f"{name} in row {number} of {path}", rule, row[name])
    return np.array([[float(row[name]) for name in classes] for row in rows], np.float32), classes


def _is_float(cell: object) -> bool:
    """Whether a label is a measurement, not a class: 0.5, and also 1.0."""
    if isinstance(cell, str):
        try:
            float(cell)
        except ValueError:
            return False
        # To Python 1_2, inf and nan are numbers, to others the names of classes.
        return "_" not in cell and any(map(str.isdigit, cell)) and not WHOLE.fullmatch(cell.strip())
    return isinstance(cell, float)


def _in_order(label: str) -> tuple[int, str]:
    """Numbers by value, before names; 07 and 7 are two labels."""
    return (int(label), label) if WHOLE.fullmatch(label) else (2**63, label)
