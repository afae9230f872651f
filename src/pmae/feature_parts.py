"""Features of one process on their way to another: rows in a file beside the one that is being written."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pmae.feature_files import Rows

LENGTH = 8
"""Bytes that say how long the next rows are."""


def part_of(out: Path, rank: int) -> Path:
    """Where a process leaves its rows for the first one."""
    return out.with_name(f".{out.name}.of-process-{rank}")


def write_rows(path: Path, rows: Iterable[Rows]) -> None:
    """Rows one after another, so that they can be read back one after another."""
    with path.open("wb") as file:
        for part in rows:
            packed = io.BytesIO()
            columns: dict[str, Any] = {f"column {name}": values for name, values in part.columns.items()}
            np.savez(packed, features=part.features, **columns)
            file.write(len(packed.getbuffer()).to_bytes(LENGTH, "big") + packed.getvalue())


def read_rows(path: Path) -> Iterator[Rows]:
    """What `write_rows` wrote."""
    with path.open("rb") as file:
        while length := int.from_bytes(file.read(LENGTH), "big"):
            with np.load(io.BytesIO(file.read(length)), allow_pickle=False) as found:
                columns = {key.removeprefix("column "): found[key] for key in found.files if key != "features"}
                yield Rows(found["features"], columns)
