"""Features of images as files, a few rows at a time: .npz, .csv or .parquet."""

import csv
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmae.errors import UserError, optional

GROUP = 8192  # rows in a row group of a Parquet file: large enough to compress, small enough to hold
PARQUET = ("a .parquet file", "embed", "pyarrow.parquet", "pyarrow")


class Rows(NamedTuple):
    """Some images in a row: their features (n, D) or (n, tokens, D), and further columns by name, (n,) each."""

    features: np.ndarray
    columns: dict[str, np.ndarray]


Write = Callable[[Path, Iterable[Rows], list[str]], None]


def writer_for(path: Path, flat: bool) -> Write:
    """The function that writes what the suffix asks for: to a path, rows, and the names of the features."""
    suffix = path.suffix.lower()
    if suffix not in WRITERS:
        raise UserError(f"out must end in {', '.join(WRITERS)}, got {str(path)!r}")
    if suffix != ".npz" and not flat:
        raise UserError(f"out must end in .npz to hold several tokens an image, got {str(path)!r}")
    if path.is_dir():
        raise UserError(f"out must be a file, got the folder {str(path)!r}")
    if suffix == ".parquet":
        optional(*PARQUET)
    return WRITERS[suffix]


def write_npz(path: Path, rows: Iterable[Rows], names: list[str]) -> None:
    """Arrays by name, `features` among them, for `numpy.load`."""
    count, width, columns = 0, (0,), dict[str, list[np.ndarray]]()
    # How many rows there are is in the header and known at the end; a file without a name goes with the process.
    with tempfile.TemporaryFile(dir=path.parent) as spool, zipfile.ZipFile(path, "w") as archive:
        for part in rows:
            count, width = count + len(part.features), part.features.shape[1:]
            spool.write(np.ascontiguousarray(part.features, np.float32).tobytes())
            for name, values in part.columns.items():
                columns.setdefault(name, []).append(values)
        spool.seek(0)
        # ZipInfo has a fixed date, so that the same features make the same file.
        with archive.open(zipfile.ZipInfo("features.npy"), "w", force_zip64=True) as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (count, *width)}
            np.lib.format.write_array_header_1_0(file, header)
            shutil.copyfileobj(spool, file)
        for name, parts in columns.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.concatenate(parts))


def write_csv(path: Path, rows: Iterable[Rows], names: list[str]) -> None:
    """One line an image; nine digits, from which a float32 comes back exactly."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for number, part in enumerate(rows):
            if number == 0:
                writer.writerow([*part.columns, *names])
            columns = [values.tolist() for values in part.columns.values()]
            digits = ([format(x, ".9g") for x in values] for values in part.features.T.tolist())
            writer.writerows(zip(*columns, *digits, strict=True))


def write_parquet(path: Path, rows: Iterable[Rows], names: list[str]) -> None:
    """One column a feature, in row groups."""
    pyarrow = optional(*PARQUET)
    waiting: list[Any] = []
    writer = None
    for part in rows:
        features = {name: part.features[:, i] for i, name in enumerate(names)}
        waiting.append(pyarrow.table({**{k: v.tolist() for k, v in part.columns.items()}, **features}))
        writer = writer or pyarrow.parquet.ParquetWriter(path, waiting[0].schema)
        if sum(map(len, waiting)) >= GROUP:
            writer.write_table(pyarrow.concat_tables(waiting))
            waiting = []
    if writer and waiting:
        writer.write_table(pyarrow.concat_tables(waiting))
    if writer:
        writer.close()


WRITERS: dict[str, Write] = {".npz": write_npz, ".csv": write_csv, ".parquet": write_parquet}
