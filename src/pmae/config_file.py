"""Settings to and from JSON: what is written can be read back; a misspelt key or a wrong type is refused by name."""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pmae.config import Config
from pmae.errors import UserTypeError, require, unknown_name
from pmae.validation import RENAMED, check_names, check_not_renamed


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dictionary, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: Any) -> Config:
    """The inverse of `to_dict`: unknown keys and wrong types are refused by name."""
    kinds = typing.get_type_hints(Config)
    sections = {}
    for name, part in _object("config", values).items():
        check_names(Config, [name])
        known = _object(name, part)
        check_names(kinds[name], known)
        sections[name] = kinds[name](**known)
    return Config(**sections)


def _object(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserTypeError(f"{name} must be an object of settings, got {values!r}")
    return values


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
    return from_dict(values)


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


def describe(config: Config, reasons: dict[str, str]) -> str:
    """The resolved settings as aligned lines, derived ones with their reason."""
    lines = []
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for entry in dataclasses.fields(part):
            name, value = f"{section.name}.{entry.name}", getattr(part, entry.name)
            reason = f"   <- {reasons[name]}" if name in reasons else ""
            if value is not None:
                lines.append(f"  {name:<29} {_plain(value)}{reason}")
    return "\n".join(lines)


def _plain(value: object) -> str:
    return " to ".join(map(str, value)) if isinstance(value, tuple) else str(value)
