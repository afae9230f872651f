"""Tables of images through pyarrow (extra `stream`): Arrow files as `datasets` saves them, and parquet files.

Arrow files are mapped and give any row at once. Parquet gives whole row groups, of which a few are kept.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.errors import UserError, missing_extra

KEPT_BYTES = 2**27
"""How much of a parquet file is shuffled as one; twice as much is kept in memory."""


class Columns(NamedTuple):
    """Where a table has its images and classes; `shape` and `dtype` where images are arrays, not files."""

    image: str
    shape: tuple[int, ...] | None
    dtype: str | None
    label: str | None
    classes: tuple[str, ...] | None


class TableSamples(ABC):
    """The rows of many files by position, found in chunks."""

    without_image: Sequence[str] = ()

    def __init__(self, paths: Sequence[Path], schema: Any, counts: Sequence[int], labels: Sequence[Any]) -> None:
        self._columns = columns_of(schema, str(paths[0]))
        self.classes = self._columns.classes
        self._ends = np.cumsum(counts, dtype=np.int64)
        joined = [column.to_numpy(zero_copy_only=False) for column in labels]
        self.labels = _whole_numbers(np.concatenate(joined), str(paths[0])) if joined else None

    @abstractmethod
    def chunk(self, number: int) -> Any:
        """The image column of one chunk."""

    @abstractmethod
    def blocks(self) -> tuple[np.ndarray, int] | None:
        """Where runs of rows begin that are read as a whole, and how many of them are kept together."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, position: int) -> tuple[str, bytes | np.ndarray]:
        """The image's name and the bytes of its file, or its numbers."""
        cell = self._cell(position)
        if self._columns.shape is not None:
            return f"row {position}", _numbers(cell, self._columns)
        value = cell[0].as_py()
        fields: dict[str, Any] = value if isinstance(value, dict) else {"bytes": value}
        content, path = fields.get("bytes"), fields.get("path") or ""
        if content is None and not path:
            raise ValueError("no image in this row")
        return path or f"row {position}", Path(path).read_bytes() if content is None else content

    def name(self, position: int) -> str:
        """The path in the row, or its number."""
        cell = self._cell(position)
        # Only this field: the bytes beside it are an image.
        has_path = hasattr(cell, "field") and cell.type.get_field_index("path") >= 0
        return (cell.field("path")[0].as_py() if has_path else None) or f"row {position}"

    def _cell(self, position: int) -> Any:
        number = int(np.searchsorted(self._ends, position, side="right"))
        begin = int(self._ends[number - 1]) if number else 0
        return self.chunk(number).slice(position - begin, 1)


class ArrowSamples(TableSamples):
    """Files of the Arrow stream format, mapped: the disk is read where a row is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        arrow, _ = _pyarrow()
        tables = [
            _opened(path, lambda path: arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()) for path in paths
        ]
        columns = columns_of(tables[0].schema, str(paths[0]))
        self._chunks = [chunk for table in tables for chunk in table.column(columns.image).chunks if len(chunk)]
        labels = [] if columns.label is None else [table.column(columns.label) for table in tables]
        _require_rows(len(self._chunks), paths)
        super().__init__(paths, tables[0].schema, [len(chunk) for chunk in self._chunks], labels)

    def chunk(self, number: int) -> Any:
        """A view of the file."""
        return self._chunks[number]

    def blocks(self) -> None:
        """Every row can be read alone."""


class ParquetSamples(TableSamples):
    """Parquet files, of which the row groups read last are kept."""

    def __init__(self, paths: Sequence[Path]) -> None:
        _, parquet = _pyarrow()
        files = [_opened(path, parquet.ParquetFile) for path in paths]
        columns = columns_of(files[0].schema_arrow, str(paths[0]))
        sizes = [(file, i, file.metadata.row_group(i)) for file in files for i in range(file.metadata.num_row_groups)]
        self._groups = [(file, i) for file, i, group in sizes if group.num_rows]
        _require_rows(len(self._groups), paths)
        self._window = max(1, KEPT_BYTES // max(group.total_byte_size for _, _, group in sizes))
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        counts = [group.num_rows for _, _, group in sizes if group.num_rows]
        labels = [] if columns.label is None else [file.read([columns.label]).column(0) for file in files]
        super().__init__(paths, files[0].schema_arrow, counts, labels)

    def chunk(self, number: int) -> Any:
        """A row group, from the disk if it was not among the last ones."""
        with self._lock:
            if number not in self._kept:
                file, group = self._groups[number]
                self._kept[number] = file.read_row_group(group, [self._columns.image]).column(0).combine_chunks()
            self._kept.move_to_end(number)
            if len(self._kept) > 2 * self._window:
                self._kept.popitem(last=False)
            return self._kept[number]

    def blocks(self) -> tuple[np.ndarray, int]:
        """Row groups."""
        return np.concatenate([[0], self._ends[:-1]]), self._window


def columns_of(schema: Any, what: str) -> Columns:
    """The columns by the features that `datasets` notes in a file, else by the kind of their values."""
    noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = noted.get("info", {}).get("features") or {}
    kinds = {name: (features.get(name) or {}).get("_type", "") for name in schema.names}
    image = next((name for name in schema.names if _is_image(kinds[name], schema.field(name).type)), None)
    if image is None:
        raise UserError(f"data.source: {what} must have a column of images, got {', '.join(schema.names) or 'none'}")
    label = next((name for name in schema.names if kinds[name] == "ClassLabel" or name == "label"), None)
    array = features[image] if kinds[image].startswith("Array") else {}
    classes = (features.get(label) or {}).get("names") if label else None
    shape = tuple(array["shape"]) if array else None
    return Columns(image, shape, array.get("dtype"), label, tuple(classes) if classes else None)


def _is_image(kind: str, stored: Any) -> bool:
    arrow, _ = _pyarrow()
    files = arrow.types.is_struct(stored) and stored.get_field_index("bytes") >= 0
    return kind in ("Image", "Array2D", "Array3D") or files or arrow.types.is_binary(stored)


def _numbers(cell: Any, columns: Columns) -> np.ndarray:
    """The numbers of one array, out of lists in lists."""
    values = getattr(cell, "storage", cell)
    while hasattr(values, "flatten") and values.type.num_fields:
        values = values.flatten()
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False).astype(columns.dtype)
    return numbers.reshape(columns.shape)


def _whole_numbers(labels: np.ndarray, what: str) -> np.ndarray:
    if labels.dtype.kind not in "biu":
        raise UserError(
            f"data.source: the labels of {what} must be whole numbers, one for each image, got {labels.dtype}"
        )
    return labels.astype(np.int64)


def _require_rows(count: int, paths: Sequence[Path]) -> None:
    if not count:
        raise UserError(f"data.source: {paths[0]} holds no rows")


def _opened(path: Path, opened: Any) -> Any:
    arrow, _ = _pyarrow()
    try:
        return opened(path)
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"data.source: {path} cannot be read as a table: {str(error).splitlines()[0]}") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing_extra("a table of images", "stream", error) from error
