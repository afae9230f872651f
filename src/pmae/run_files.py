"""What the JSON files of a run hold: typed, and checked when they are read, for they may be old, edited or damaged."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from pmae.errors import UserError, require
from pmae.files import read_object
from pmae.validation import Count, NonNegative, Rule, WholeNumber, coerced

LARGEST_IMAGE = 2**28
DTYPES = {"bool", "float16", "float32", "float64", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))}
Shape = Annotated[
    list[Count],
    Rule("channels, height and width of an image", lambda s: len(s) == 3 and math.prod(s) <= LARGEST_IMAGE),
]


class DataRecord(TypedDict):
    """The images of a run."""

    name: str
    shape: Shape
    dtype: Annotated[str, Rule(f"one of {', '.join(sorted(DTYPES))}", lambda name: name in DTYPES)]
    counts: Annotated[dict[str, Count], Rule("counts of the splits, train among them", lambda c: "train" in c)]
    classes: NotRequired[list[str]]
    notes: NotRequired[list[str]]


class Environment(TypedDict):
    """environment.json: where a run was made, and of what."""

    data: DataRecord
    device: NotRequired[str]
    python: NotRequired[str]
    system: NotRequired[str]
    packages: NotRequired[dict[str, str]]
    commit: NotRequired[str]
    start: NotRequired[list[str]]
    """What was done to make given weights fit."""
    fit_seconds: NotRequired[NonNegative]


class CheckpointState(TypedDict):
    """state.json of a checkpoint."""

    step: WholeNumber
    epoch: int | float
    files: NotRequired[dict[str, WholeNumber]]
    blake2b: NotRequired[dict[str, str]]
    seal: NotRequired[str]


class Results(TypedDict):
    """results.json: the end of pretraining, and evaluations, which `results_file` reads."""

    pretrain: NotRequired[dict[str, int | float | None]]
    held_out: NotRequired[list[str]]
    evaluations: NotRequired[list[Any]]
    evaluation: NotRequired[dict[str, Any]]
    """As older versions wrote them."""


def read_environment(path: Path) -> dict[str, Any]:
    """An environment.json; a device that is not recorded is unknown."""
    return {"device": "unknown", **_read(path, Environment)}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state.json of a checkpoint folder."""
    return _read(checkpoint / "state.json", CheckpointState)


def read_results(path: Path) -> dict[str, Any]:
    """A results.json; empty if there is none yet."""
    return _read(path, Results) if path.exists() else {}


def _read(path: Path, kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = coerced(read_object(path), kind, str(path))
    return found


def whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a metrics.jsonl, as text and as what they say; a last one without its end is not whole."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")[:-1]
        said = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"file must hold a JSON object a line, got {str(path)!r}: {error}") from error
    for number, value in enumerate(said, 1):
        where = f"{path}, line {number}"
        require(isinstance(value, dict), where, "a JSON object", value)
        for key, measured in value.items():
            if type(measured) is not float or key == "step":  # most are, and any will do: a run may diverge
                coerced(measured, WholeNumber if key == "step" else int | float | None, f"{where}: {key}")
        require("step" in value, where, "a JSON object with a step", sorted(value))
    return zip(lines, said, strict=True)
