"""Values checked and coerced by their type hints: settings at construction, files of a run when they are read."""

import contextlib
import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Self

from pmae.errors import UserError, UserTypeError, require, unknown_name

WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
LARGEST = 2**63  # whole numbers stay below: beyond it they are no float, no tensor's and no file's
RENAMED = {"masking.ratio": "masking.ratio_schedule", "objective.contrast": "objective.contrastive_weight"}
"""Settings that had another name in earlier versions: refused with the new one, translated in files of old runs."""


class Rule(NamedTuple):
    """What holds beyond a type, in words and as a test: `Annotated[int, Rule("at least 1", lambda n: n >= 1)]`."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("at least 1", lambda n: n >= 1)]
WholeNumber = Annotated[int, Rule("at least 0", lambda n: n >= 0)]
Positive = Annotated[float, Rule("above 0", lambda x: x > 0)]
NonNegative = Annotated[float, Rule("at least 0", lambda x: x >= 0)]
BelowOne = Annotated[float, Rule("in [0, 1)", lambda x: 0 <= x < 1)]
UpToOne = Annotated[float, Rule("in [0, 1]", lambda x: 0 <= x <= 1)]
Proportion = Annotated[float, Rule("in (0, 1]", lambda x: 0 < x <= 1)]
Share = Annotated[float, Rule("a share between 0 and 1, both excluded", lambda x: 0 < x < 1)]


class Settings:
    """A section of settings: every value is checked and coerced by its type when one is made."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Look at the keywords before the dataclass does, whose error would be a plain TypeError."""
        check_names(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint, whole_name in _settings_of(kind):
            given = getattr(self, name)
            if (value := coerced(given, hint, whole_name)) is not given:
                object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other."""


def _section(kind: type) -> str:
    """`train` for TrainConfig, `knn` for KnnProtocol; nothing for the whole."""
    return kind.__name__.removesuffix("Config").removesuffix("Protocol").lower()


def check_not_renamed(name: str) -> None:
    if name in RENAMED:
        raise UserError(f"setting {name} is now called {RENAMED[name]}")


def check_names(kind: type, given: Iterable[str]) -> None:
    """Refuse names that are no settings of a section, or no sections of the whole."""
    known = hints_of(kind)
    for name in given:
        if name not in known:
            section = _section(kind)
            check_not_renamed(f"{section}.{name}")
            raise unknown_name(f"setting of {section}" if section else "section", name, known)


@functools.cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The declared type of every field, rules included."""
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _settings_of(kind: Any) -> tuple[tuple[str, Any, str], ...]:
    """Name, declared type and name with its section of every setting of a section."""
    section = _section(kind)
    return tuple((name, hint, f"{section}.{name}".lstrip(".")) for name, hint in hints_of(kind).items())


@functools.cache  # files of results have tens of thousands of values
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def coerced(value: Any, hint: Any, name: str) -> Any:
    """A value as the declared type, or an error that names the parameter, the rule and the value."""
    if type(value) is hint and _is_usual(value):
        return value
    origin, inner = _parts(hint)
    if hint is Any:
        return value
    if origin in (Annotated, NotRequired):
        value = coerced(value, inner[0], name)
        for rule in inner[1:]:
            require(rule.holds(value), name, rule.words, value)
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None and type(None) in inner else _one_of(value, inner, name)
    if origin is Literal:
        value = _plain(value)
        if not any(type(value) is type(choice) and value == choice for choice in inner):
            raise unknown_name(name, value, map(str, inner))
        return value
    if origin in (tuple, list):
        return _sequence(value, hint, name)
    if origin is dict or typing.is_typeddict(hint):
        return _object(value, hint, name)
    if dataclasses.is_dataclass(hint) and not issubclass(hint, Settings):  # type: ignore[arg-type]
        return _dataclass(value, hint, name)
    return _scalar(value, hint, name)


def _one_of(value: Any, kinds: Iterable[Any], name: str) -> Any:
    """As the first of several types that takes it; what is wrong with it is said by the last."""
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        with contextlib.suppress(UserTypeError):
            return coerced(value, kind, name)
    return coerced(value, last, name)


def _is_usual(value: Any) -> bool:
    """Whether a value of the declared type is one of the many that need no closer look; a section had its own."""
    kind = type(value)
    if kind is bool or isinstance(value, Settings):
        return True
    return (kind is str and value.isascii()) or (kind in (float, int) and abs(value) < LARGEST)


def _sequence(value: Any, hint: Any, name: str) -> Any:
    kind, inner = _parts(hint)
    items = value.tolist() if hasattr(value, "tolist") else value
    size = len(inner) if kind is tuple and ... not in inner else None
    if not isinstance(items, list | tuple) or size not in (None, len(items)):
        raise UserTypeError(f"{name} must be a list{f' of {size} values' if size else ''}, got {_shown(value)}")
    if size is None:
        return kind(coerced(item, inner[0], f"{name}[{n}]") for n, item in enumerate(items))
    return kind(coerced(item, of, name) for item, of in zip(items, inner, strict=True))


def _object(value: Any, hint: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserTypeError(f"{name} must be an object, got {_shown(value)}")
    if not typing.is_typeddict(hint):
        kind, keys = typing.get_args(hint)[1], [coerced(key, str, f"a key of {name}") for key in value]
        return {key: coerced(item, kind, f"{name}.{key}") for key, item in zip(keys, value.values(), strict=True)}
    _require_keys(value, hint.__required_keys__, name)
    return {key: coerced(item, hints_of(hint).get(key, Any), f"{name}.{key}") for key, item in value.items()}


def _dataclass(value: Any, kind: Any, name: str) -> Any:
    """One made of an object; keys that it does not know are passed over, for a later version may have them."""
    if not isinstance(value, dict):
        raise UserTypeError(f"{name} must be an object, got {_shown(value)}")
    fields = dataclasses.fields(kind)
    _require_keys(value, {f.name for f in fields if f.default is dataclasses.MISSING is f.default_factory}, name)
    hints, given = hints_of(kind), [f.name for f in fields if f.name in value]
    return kind(**{key: coerced(value[key], hints[key], f"{name}.{key}") for key in given})


def _require_keys(value: dict[str, Any], needed: Iterable[str], name: str) -> None:
    for key in sorted(set(needed) - value.keys()):
        raise UserError(f"{name} must have {key!r}, got {sorted(map(str, value))}")


def _scalar(value: Any, kind: Any, name: str) -> Any:
    plain = _plain(value)
    if kind is float and type(plain) is int and abs(plain) < LARGEST:
        plain = float(plain)
    if not isinstance(plain, kind) or (isinstance(plain, bool) and kind is not bool):
        raise UserTypeError(f"{name} must be {WORDS.get(kind, f'a {kind.__name__}')}, got {_shown(value)}")
    if kind is int and abs(plain) >= LARGEST:
        raise UserError(f"{name} must be below 2**63, got a number of {plain.bit_length()} bits")
    require(kind is not float or math.isfinite(plain), name, "a finite number", value)
    # Half of a surrogate pair is no text: neither a terminal nor a page can show it.
    require(kind is not str or plain == plain.encode("utf-8", "replace").decode(), name, "text", value)
    return plain


def _shown(value: Any) -> str:
    return "a number too large" if type(value) is int and abs(value) >= LARGEST else repr(value)[:200]


def _plain(value: Any) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if f"{type(value).__module__}.{type(value).__name__}" == "torch.device" else value
