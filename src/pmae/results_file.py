"""The evaluations in a results.json: whatever it holds becomes typed and fit to show, or one sentence naming the key.

The file may have been edited, damaged, or written by a version before this one, whose format is translated.
"""

import dataclasses
import functools
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pmae.errors import UserError
from pmae.results import Evaluation

LARGEST = 2**53
"""No count, share or time that was measured is larger."""


def read_evaluations(results: Mapping[str, Any], file: Path | str) -> list[Evaluation]:
    """Every evaluation in the content of a results.json, oldest first; those of older versions are translated."""
    older = _object(results.get("evaluation", {}), f"{file}: evaluation")
    found = [_translated(label, suite, f"{file}: evaluation.{label}") for label, suite in older.items()]
    newer = _items(results.get("evaluations", []), f"{file}: evaluations")
    return found + [_evaluation(value, f"{file}: evaluations[{n}]") for n, value in enumerate(newer)]


def _evaluation(value: Any, where: str) -> Evaluation:
    read: Evaluation = _reader(Evaluation)(value, where)
    for n, score in enumerate(read.scores):
        counts = score.confusion
        if counts is not None and {len(counts), *map(len, counts)} != {len(score.classes)}:
            raise _refusal(f"{where}.scores[{n}].confusion", "a row and a column for each of data.classes", counts)
    for name, share in _shares(read):
        if share is not None and not 0 <= share <= 1:
            raise _refusal(f"{where}.{name}", "a share between 0 and 1", share)
    return read


def _shares(evaluation: Evaluation) -> Iterator[tuple[str, float | None]]:
    """Everything that pages show in percent, and its place."""
    yield from ((f"data.majority.{split}", share) for split, share in evaluation.data.majority.items())
    for n, score in enumerate(evaluation.scores):
        for name, metric in score.metrics.items():
            yield from ((f"scores[{n}].metrics.{name}", share) for share in dataclasses.astuple(metric))
        for row in score.per_class:
            yield from ((f"scores[{n}].per_class", share) for share in (row.precision, row.recall))


def _translated(label: str, value: Any, where: str) -> Evaluation:
    """An evaluation of the format before: `{"pmae epoch 100 [strong]": {"preset": "strong", "results": [...]}}`."""
    suite = _object(value, where)
    name = re.sub(r"\s*\[.*\]$", "", label)
    told = re.fullmatch(r"(.*) epoch ([0-9]{1,9})", name, re.DOTALL)
    method, epoch = (told[1], int(told[2])) if told else (name, 0)
    entries = _items(suite.get("results"), f"{where}.results")
    scores = [_translated_score(entry, f"{where}.results[{n}]") for n, entry in enumerate(entries)]
    return _evaluation({**suite, "method": method, "epoch": epoch, "scores": scores}, where)


def _translated_score(value: Any, where: str) -> dict[str, Any]:
    entry = _object(value, where)
    metrics = _object(entry.get("metrics"), f"{where}.metrics")
    classes = [_object(row, f"{where}.per_class") for row in _items(entry.get("per_class", []), f"{where}.per_class")]
    return {
        **entry,
        "metrics": {name: {} if metric is None else metric for name, metric in metrics.items()},
        "by_seed": entry.get("runs"),
        "per_class": [{**row, "name": row.get("class")} for row in classes],
    }


Reader = Callable[[Any, str], Any]
"""A JSON value and its place as the declared type, or an error that names the place."""


@functools.cache
def _reader(kind: Any) -> Reader:
    """How values of a type are read; made once, as files have thousands of them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if dataclasses.is_dataclass(kind):
        return functools.partial(_dataclass, kind, _fields(kind))
    if origin is types.UnionType:
        return functools.partial(_optional, _reader(arguments[0]))
    if origin is tuple:
        return functools.partial(_tuple, _reader(arguments[0]))
    if origin is dict:
        return functools.partial(_dict, _reader(arguments[1]))
    return _text if kind is str else functools.partial(_number, kind)


def _fields(kind: Any) -> list[tuple[str, Reader, bool]]:
    """Name and reader of each field of a dataclass, and whether it must be there."""
    hints, none = typing.get_type_hints(kind), dataclasses.MISSING
    found = dataclasses.fields(kind)
    return [(one.name, _reader(hints[one.name]), one.default is none is one.default_factory) for one in found]


def _dataclass(kind: Any, fields: list[tuple[str, Reader, bool]], value: Any, where: str) -> Any:
    """Keys that are not known are passed over: a later version may have them."""
    values, found = _object(value, where), {}
    for name, read, needed in fields:
        if name in values:
            found[name] = read(values[name], f"{where}.{name}")
        elif needed:
            raise _refusal(f"{where}.{name}", "there", "nothing")
    return kind(**found)


def _optional(read: Reader, value: Any, where: str) -> Any:
    """Python writes NaN and Infinity into JSON: they are no number to show."""
    undefined = value is None or (isinstance(value, float) and not abs(value) <= LARGEST)
    return None if undefined else read(value, where)


def _tuple(read: Reader, value: Any, where: str) -> tuple[Any, ...]:
    return tuple([read(each, f"{where}[{n}]") for n, each in enumerate(_items(value, where))])


def _dict(read: Reader, value: Any, where: str) -> dict[str, Any]:
    return {_text(key, where): read(each, f"{where}.{key}") for key, each in _object(value, where).items()}


def _number(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | kind) or not abs(value) <= LARGEST:
        raise _refusal(where, f"a {'whole ' * (kind is int)}number of at most {LARGEST}", value)
    return kind(value)


def _text(value: Any, where: str) -> str:
    # Half of a surrogate pair can stand in JSON, but in no page.
    if not isinstance(value, str) or value != value.encode("utf-8", "replace").decode("utf-8"):
        raise _refusal(where, "text", value)
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(where, "an object", value)
    return value


def _items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _refusal(where, "a list", value)
    return value


def _refusal(where: str, rule: str, value: object) -> UserError:
    """The error for a key; what stands in the file may be too long, or no text at all, to be shown as it is."""
    key = where.encode("utf-8", "backslashreplace").decode("utf-8")
    return UserError(f"{key[:300]} must be {rule}, got {reprlib.repr(value)}")
