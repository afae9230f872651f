"""Settings to and from JSON: what is written can be read back; a misspelt key or a wrong type is refused by name."""

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pmae.config import RENAMED, Config, check_names, check_not_renamed
from pmae.errors import UserError, require, unknown_name


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dictionary, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: Any, kind: type[Any] = Config, where: str = "") -> Any:
    """The inverse of `to_dict`: unknown keys and wrong types are refused by name."""
    if not isinstance(values, dict):
        raise UserError(f"{where or 'config'} must be an object of settings, got {values!r}")
    hints = typing.get_type_hints(kind)
    check_names(kind, values)
    return kind(**{key: _read(value, hints[key], f"{where}.{key}".lstrip(".")) for key, value in values.items()})


def of_older_versions(values: Any) -> Any:
    """The content of a config.json with today's names; what was written before a setting existed leaves it out."""
    if not isinstance(values, dict):
        return values
    values = {section: dict(part) if isinstance(part, dict) else part for section, part in values.items()}
    for old, new in RENAMED.items():
        (section, before), (_, after) = old.split("."), new.split(".")
        part = values.get(section)
        if isinstance(part, dict) and before in part:
            require(after not in part, old, f"left out, for it is called {new} now and that is there too", part[before])
            part[after] = part.pop(before)
    if isinstance(values.get("objective"), dict):
        values["objective"].setdefault("contrastive_weight", 0.0)
    return values


def settings_given(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`name=value` texts of a command line as pairs."""
    for text in given:
        require("=" in text, "--set", "settings as name=value, such as encoder.depth=1", text)
    return tuple((name, value) for name, _, value in (text.partition("=") for text in given))


def with_settings(config: Config, given: Mapping[str, str]) -> Config:
    """A copy with settings changed by dotted name, their values as text: `with_settings(c, {"train.epochs": "3"})`."""
    values = to_dict(config)
    hints = {section: typing.get_type_hints(kind) for section, kind in typing.get_type_hints(Config).items()}
    for name, text in given.items():
        section, _, key = name.partition(".")
        if key not in values.get(section, {}):
            check_not_renamed(name)
            raise unknown_name("setting", name, [f"{room}.{known}" for room, part in values.items() for known in part])
        values[section][key] = _from_text(text, hints[section][key])
    changed: Config = from_dict(values)
    return changed


def _from_text(text: str, kind: Any) -> Any:
    """What text means for a declared type: itself, `none`, or JSON; if nothing, it stays text and will be refused."""
    if typing.get_origin(kind) is tuple:
        return [_from_text(part, typing.get_args(kind)[0]) for part in re.split(r",\s*", text.strip("[]"))]
    allowed = {kind, *typing.get_args(kind)}
    if text.lower() == "none" and type(None) in allowed:
        return None
    if str in allowed:
        return text
    for read in (json.loads, float):  # JSON has no .5 and no nan
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _read(value: Any, kind: Any, where: str) -> Any:
    """One JSON value as the declared type, or an error that names both."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return from_dict(value, typing.cast(type[Any], kind), where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _read(value, next(a for a in arguments if a is not type(None)), where)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool) != any(isinstance(a, bool) for a in arguments):
            raise unknown_name(where, value, map(str, arguments))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise UserError(f"{where} must be a list of {len(arguments)} values, got {value!r}")
        return tuple(_read(v, a, where) for v, a in zip(value, arguments, strict=True))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise UserError(f"{where} must be a float, got a whole number too large for one")
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise UserError(f"{where} must be {kind.__name__}, got {value!r}")
    return value
