"""Features and what belongs to them as one .npz, .csv or .parquet file, written row by row in bounded memory."""

import csv
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from pmae.errors import UserError, missing_extra

GROUP = 8192
"""Rows in a row group of a Parquet file: large enough to compress, small enough to hold."""


@dataclass(frozen=True)
class Rows:
    """Some images in a row: their features (n, D) or (n, tokens, D), and further columns by name, (n,) each."""

    features: np.ndarray
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.features)


Write = Callable[[Path, Iterable[Rows], list[str]], None]


def writer_for(path: Path, flat: bool) -> Write:
    """The function that writes what the suffix asks for: to a path, rows, and the names of the features."""
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"out must end in {', '.join(WRITERS)}, got {str(path)!r}")
    if path.suffix.lower() != ".npz" and not flat:
        raise UserError(f"out must end in .npz to hold several tokens an image, got {str(path)!r}")
    if path.is_dir():
        raise UserError(f"out must be a file, got the folder {str(path)!r}")
    if path.suffix.lower() == ".parquet":
        _pyarrow()
    return WRITERS[path.suffix.lower()]


def write_npz(path: Path, rows: Iterable[Rows], names: list[str]) -> None:
    """Arrays by name, `features` among them, for `numpy.load`."""
    # Named as a temporary file of this process, so that it is cleared like one if the process is killed.
    stem = path.name.rsplit(".", 2)[0]
    with tempfile.TemporaryDirectory(f".{os.getpid()}.part", stem, path.parent) as folder:
        spools: dict[str, Spool] = {}
        for part in rows:
            for name, values in {"features": part.features, **part.columns}.items():
                spools.setdefault(name, Spool(Path(folder) / f"{len(spools)}")).add(values)
        with zipfile.ZipFile(path, "w") as archive:
            for name, spool in spools.items():
                # A fixed date, so that the same features make the same file; only words are worth compressing.
                member = zipfile.ZipInfo(f"{name}.npy")
                member.compress_type = zipfile.ZIP_DEFLATED if spool.dtype.kind == "U" else zipfile.ZIP_STORED
                with archive.open(member, "w", force_zip64=True) as file:
                    spool.copy_to(file)


class Spool:
    """An array that grows on the disk: its length, and how wide its words are, is known when the last row is there."""

    def __init__(self, path: Path) -> None:
        self.path, self.dtype, self.shape = path, np.dtype("U1"), (0,)
        self._parts: list[tuple[np.dtype[Any], int]] = []

    def add(self, rows: np.ndarray) -> None:
        """Append rows."""
        self.dtype = rows.dtype if not self._parts else np.promote_types(self.dtype, rows.dtype)
        self.shape = (self.shape[0] + len(rows), *rows.shape[1:])
        self._parts.append((rows.dtype, rows.size))
        with self.path.open("ab") as file:
            file.write(np.ascontiguousarray(rows).tobytes())

    def copy_to(self, file: IO[bytes]) -> None:
        """Write the whole array in NumPy's format."""
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(file, header)
        with self.path.open("rb") as rows:
            for dtype, size in self._parts:
                part = np.frombuffer(rows.read(dtype.itemsize * size), dtype)
                file.write(part.astype(self.dtype, copy=False).tobytes())


def write_csv(path: Path, rows: Iterable[Rows], names: list[str]) -> None:
    """One line an image; nine digits, from which a float32 comes back exactly."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for number, part in enumerate(rows):
            if number == 0:
                writer.writerow([*part.columns, *names])
            words = zip(*(values.tolist() for values in part.columns.values()), strict=True)
            for start, row in zip(words if part.columns else [()] * len(part), part.features, strict=True):
                writer.writerow([*start, *map("{:.9g}".format, row)])


def write_parquet(path: Path, rows: Iterable[Rows], names: list[str]) -> None:
    """One column a feature, in row groups."""
    pyarrow, parquet = _pyarrow()
    waiting: list[Any] = []
    writer = None
    for part in rows:
        features = {name: part.features[:, i] for i, name in enumerate(names)}
        waiting.append(pyarrow.table({**{k: v.tolist() for k, v in part.columns.items()}, **features}))
        writer = writer or parquet.ParquetWriter(path, waiting[0].schema)
        if sum(map(len, waiting)) >= GROUP:
            writer.write_table(pyarrow.concat_tables(waiting))
            waiting = []
    if writer and waiting:
        writer.write_table(pyarrow.concat_tables(waiting))
    if writer:
        writer.close()


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing_extra("a .parquet file", "embed", error) from error


WRITERS: dict[str, Write] = {".npz": write_npz, ".csv": write_csv, ".parquet": write_parquet}
