"""Settings to and from JSON and text: what is written can be read back; a wrong key or type is refused by name."""

import ast
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pmae.config import Config
from pmae.errors import UserTypeError, require, unknown_name
from pmae.validation import RENAMED, check_names, check_not_renamed, hints_of

FREE = frozenset(
    {
        "data.root", "data.threads", "data.cache", "train.device", "train.kernels", "train.accumulate",
        "train.activation_checkpointing", "train.bf16_gradients", "train.shard", "train.log_every",
        "train.checkpoint_every", "train.keep", "train.track", "train.project",
    }
)  # fmt: skip
"""Settings that say where a run is made and what is kept of it, not what it learns: a resumed run may change them."""
USUAL = {"augment.extra": (), "objective.local_views": 0, "encoder.first_patch_size": 0, "optim.name": "adamw"}
"""What some settings are derived to be unless a GPU and the images call for something else."""
SETTLED = ("optim.base_lr", "train.epochs", "train.batch_size", "train.checkpoint_every", "train.log_every")
"""What the config.json of every run has, of whatever version, and hardly a file that somebody wrote."""
RETIRED = {"masking.whole_view": False, "space.landmark_choice": "random", "train.self_check": True}
"""Settings that were taken out again, and what they are in runs that did not use them."""


def is_settled(values: Mapping[str, Any]) -> bool:
    """Whether these are the settings of a run, in which nothing was left to follow from the data."""
    parts = (name.partition(".") for name in SETTLED)
    return all(_section(values, section).get(key) is not None for section, _, key in parts)


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dictionary, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: Any) -> Config:
    """The inverse of `to_dict`: unknown keys and wrong types are refused by name."""
    _require_object("config", values)
    check_names(Config, values)
    kinds, sections = hints_of(Config), {}
    for name, part in values.items():
        _require_object(name, part)
        sections[name] = kinds[name](**part)
    return Config(**sections)


def _require_object(name: str, values: Any) -> None:
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserTypeError(f"{name} must be an object of settings, got {values!r}")


def of_older_versions(values: Any) -> Any:
    """The content of a config.json with today's names; a run of before a setting existed did without it.

    In a file that somebody wrote, what is not named is to follow from the data, as on the command line.
    """
    if not isinstance(values, dict):
        return values
    values = {section: dict(part) if isinstance(part, dict) else part for section, part in values.items()}
    for old, new in RENAMED.items():
        (section, before), (_, after) = old.split("."), new.split(".")
        part = values.get(section)
        if isinstance(part, dict) and before in part:
            require(after not in part, old, f"left out, for it is called {new} now and that is there too", part[before])
            part[after] = part.pop(before)
    for name, unused in RETIRED.items():
        section, key = name.split(".")
        if isinstance(part := values.get(section), dict):
            found = part.pop(key, unused)
            require(found == unused, name, f"{unused}, as it was taken out again", found)
    return _with_what_was_usual(values) if is_settled(values) else values


def _with_what_was_usual(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run with what its version did where it had no setting for it."""
    data, encoder = _section(values, "data"), _section(values, "encoder")
    # Files were squashed, and given weights trained at the same rate as all others.
    before: dict[str, dict[str, Any]] = {
        "data": {"crop_mode": "squash"} if data.get("resize") else {},
        "objective": {"contrastive_weight": 0.0, "local_views": 0},
        "augment": {"extra": ()},
        "optim": {"name": "adamw"} | ({"encoder_rate": 1.0, "layer_decay": 1.0} if encoder.get("weights") else {}),
    }
    if encoder.get("patch_size"):
        encoder["first_patch_size"] = encoder.get("first_patch_size") or 0
    if (masking := _section(values, "masking")).get("enabled") is False:
        masking["masked_variance"] = None  # once noted where nothing was hidden
    return values | {name: {**usual, **part} for name, usual in before.items() if (part := _section(values, name))}


def settings_given(
    given: Sequence[str], options: Mapping[str, str] = MappingProxyType({})
) -> tuple[tuple[str, str], ...]:
    """`name=value` texts of a command line as pairs; what the command has `options` for would not be heard."""
    for text in given:
        require("=" in text, "--set", "settings as name=value, such as encoder.depth=1", text)
    pairs = tuple((name, value) for name, _, value in (text.partition("=") for text in given))
    for name, value in pairs:
        require(name not in options, name, f"given by {options.get(name)}", value)
    return pairs


def with_settings(config: Config, given: Mapping[str, str]) -> Config:
    """A copy with settings changed by dotted name, their values as text: `with_settings(c, {"train.epochs": "3"})`."""
    if not given:
        return config
    values, kinds = to_dict(config), hints_of(Config)
    for name, text in given.items():
        section, _, key = name.partition(".")
        if key not in values.get(section, {}):
            check_not_renamed(name)
            raise unknown_name("setting", name, flat(config))
        values[section][key] = _from_text(text, typing.get_type_hints(kinds[section])[key])
    return from_dict(values)


def _from_text(text: str, kind: Any) -> Any:
    """What text means for a declared type: itself, none, true, false or numbers; else it stays text, to be refused."""
    allowed, word = {kind, *typing.get_args(kind)}, text.capitalize()
    if str in allowed and not (word == "None" and type(None) in allowed):
        return text
    try:
        return ast.literal_eval(word if word in ("None", "True", "False") else text)
    except (ValueError, SyntaxError, TypeError):  # the last of {[]: 1}
        return text


def flat(config: Config) -> dict[str, Any]:
    """Settings by dotted name."""
    return {f"{room}.{key}": value for room, part in to_dict(config).items() for key, value in part.items()}


def describe(config: Config, reasons: dict[str, str], whole: bool = False) -> str:
    """What was given or derived as aligned lines, the derived with their reason; the rest too if `whole`."""
    lines, usual = [], flat(Config()) | USUAL
    for name, value in flat(config).items():
        shown = (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else value
        reason = f"   <- {reasons[name]}" if name in reasons else ""
        if whole or (value is not None and (reason or value != usual[name])):
            lines.append(f"  {name:<29} {shown}{reason}")
    rest = [] if whole else ["  all others have their defaults; config.json has them all"]
    return "\n".join([*lines, *rest])
