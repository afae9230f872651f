"""Tables of images through pyarrow (extra `stream`): Arrow files, mapped, and parquet, of which row groups are kept."""

import json
import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.data.decode import reading, require_room
from pmae.data.images import DTYPES
from pmae.data.ondemand import Blocks, Samples
from pmae.errors import UserError, optional, require

TABLE = " as a table"
KEPT_BYTES = 2**27  # how much of a parquet file is shuffled as one; twice as much is kept in memory


class Columns(NamedTuple):
    """Where a table has its images and classes; `shape` and `dtype` where images are arrays, not files."""

    image: str
    stored_as: Any
    shape: tuple[int, ...] | None
    dtype: str | None
    label: str | None
    classes: tuple[str, ...] | None


class TableSamples(Samples):
    """The rows of many files by position, found in chunks."""

    def __init__(self, columns: Columns, counts: Sequence[int], labels: Sequence[Any], what: Path) -> None:
        if not sum(counts):
            raise UserError(f"data.source: {what} holds no rows")
        self._columns, self.classes = columns, columns.classes
        self._ends = np.cumsum(counts, dtype=np.int64)
        if labels:
            with reading(what, TABLE):
                joined = np.concatenate([column.to_numpy(zero_copy_only=False) for column in labels])
            text = joined.dtype.kind == "O" and all(isinstance(label, str) for label in joined)
            told, rule = f"data.source: the labels of {what}", "whole numbers or text, one for each image"
            require(text or joined.dtype.kind in "biu", told, rule, str(joined.dtype))
            self.labels = joined.astype(np.str_ if text else np.int64)

    @abstractmethod
    def chunk(self, number: int) -> Any:
        """The image column of one chunk."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, position: int) -> tuple[str, bytes | np.ndarray]:
        number = int(np.searchsorted(self._ends, position, side="right"))
        begin = int(self._ends[number - 1]) if number else 0
        cell = self.chunk(number).slice(position - begin, 1)
        if self._columns.shape is not None:
            return f"row {position}", _numbers(cell, self._columns)
        value = cell[0].as_py()
        fields: dict[str, Any] = value if isinstance(value, dict) else {"bytes": value}
        content, path = fields.get("bytes"), fields.get("path") or f"row {position}"
        # A row that only names a file is not followed: it could name any file of the machine.
        if not isinstance(path, str) or not isinstance(content, bytes):
            raise ValueError("this row does not hold the bytes of an image; datasets' save_to_disk puts them in")
        return path, content


class ArrowSamples(TableSamples):
    """Files of the Arrow stream format, mapped: the disk is read where a row is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        arrow, self.files = _pyarrow(), paths
        tables: list[Any] = []
        columns: Any = None
        for path in paths:
            with reading(path, TABLE):
                table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
                columns = _columns_of(table.schema, path, columns)
                tables.append(table.select([name for name in (columns.image, columns.label) if name]))
                # An offset beyond the file's end would end the process without a message.
                tables[-1].validate(full=True)
        self._chunks = [chunk for table in tables for chunk in table.column(columns.image).chunks if len(chunk)]
        labels = [] if columns.label is None else [table.column(columns.label) for table in tables]
        super().__init__(columns, [len(chunk) for chunk in self._chunks], labels, paths[0])

    def chunk(self, number: int) -> Any:
        return self._chunks[number]


class ParquetSamples(TableSamples):
    """Parquet files, of which the row groups read last are kept."""

    def __init__(self, paths: Sequence[Path]) -> None:
        parquet, self.files = _pyarrow().parquet, paths
        files: list[Any] = []
        columns: Any = None
        for path in paths:
            with reading(path, TABLE):
                files.append(parquet.ParquetFile(path))
                columns = _columns_of(files[-1].schema_arrow, path, columns)
        groups = [(file, i, file.metadata.row_group(i)) for file in files for i in range(file.metadata.num_row_groups)]
        self._groups = [(file, i) for file, i, group in groups if group.num_rows]
        largest = max((group.total_byte_size for _, _, group in groups), default=0)
        self._window = max(1, KEPT_BYTES // max(1, largest))
        read = lru_cache(2 * self._window)
        self._kept = read(lambda file, i: file.read_row_group(i, [columns.image]).column(0).combine_chunks())
        self._lock = threading.Lock()
        counts = [group.num_rows for _, _, group in groups if group.num_rows]
        require_room(max(largest, 8 * sum(counts)), f"a row group or the labels of {paths[0]}")
        labels = []
        for path, file in zip(paths, files, strict=True):
            with reading(path, TABLE):
                labels += [] if columns.label is None else [file.read([columns.label]).column(0)]
        super().__init__(columns, counts, labels, paths[0])

    def chunk(self, number: int) -> Any:
        with self._lock:
            return self._kept(*self._groups[number])

    def blocks(self) -> Blocks:
        return np.concatenate([[0], self._ends[:-1]]), self._window


def _columns_of(schema: Any, path: Path, before: Columns | None) -> Columns:
    """The columns by the features that `datasets` notes in a file, else by what they hold; the same in all files."""
    if len(set(schema.names)) < len(schema.names):
        raise UserError(f"data.source: {path} must have columns of different names, got {', '.join(schema.names)}")
    noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (noted.get("info") or {}).get("features") or {}
    features = {name: feature if isinstance(feature, dict) else {} for name, feature in features.items()}
    kinds = {name: str(features.get(name, {}).get("_type", "")) for name in schema.names}
    image = next((name for name in schema.names if _holds_images(schema.field(name).type, kinds[name])), None)
    if image is None:
        raise UserError(f"data.source: {path} must have a column of images, got {', '.join(schema.names) or 'none'}")
    label = next((name for name in schema.names if kinds[name] == "ClassLabel" or name == "label"), None)
    shape, dtype = None, None
    if kinds[image].startswith("Array"):
        shape, dtype = features[image].get("shape"), features[image].get("dtype")
        if not _are(int, shape) or dtype not in DTYPES:
            raise UserError(f"data.source: the arrays of {path} must have a shape and a dtype, got {shape}, {dtype}")
    classes = features.get(label, {}).get("names") if label else None
    if classes is not None and not _are(str, classes):
        raise UserError(f"data.source: the class names of {path} must be a list of text, got {str(classes)[:50]}")
    shape, classes = (tuple(values) if values else None for values in (shape, classes))
    found = Columns(image, schema.field(image).type, shape, dtype, label, classes)
    if before not in (None, found):
        raise UserError(f"data.source: tables must have the same columns, and {path} differs from the one before it")
    return found


def _holds_images(stored: Any, kind: str) -> bool:
    types = _pyarrow().types
    files = types.is_struct(stored) and stored.get_field_index("bytes") >= 0
    return kind in ("Image", "Array2D", "Array3D") or files or types.is_binary(stored)


def _are(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _numbers(cell: Any, columns: Columns) -> np.ndarray:
    values = getattr(cell, "storage", cell)
    while hasattr(values, "flatten") and values.type.num_fields:
        values = values.flatten()
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False).astype(columns.dtype)
    return numbers.reshape(columns.shape)


def _pyarrow() -> Any:
    return optional("a table of images", "stream", "pyarrow.parquet", "pyarrow")
