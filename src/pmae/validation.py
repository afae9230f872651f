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
LARGEST = 2**63
"""Whole numbers stay below: beyond it they are no float, no tensor's and no file's."""


class Rule(NamedTuple):
    """What holds beyond a type, in words and as a test: `Annotated[int, Rule("at least 1", lambda n: n >= 1)]`."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("at least 1", lambda n: n >= 1)]
WholeNumber = Annotated[int, Rule("at least 0", lambda n: n >= 0)]
Positive = Annotated[float, Rule("above 0", lambda x: x > 0)]
NonNegative = Annotated[float, Rule("at least 0", lambda x: x >= 0)]
Share = Annotated[float, Rule("a share between 0 and 1, both excluded", lambda x: 0 < x < 1)]


class Settings:
    """A section of settings: every value is checked and coerced by its type when one is made."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Look at the keywords before the dataclass does, whose error would be a plain TypeError."""
        check_names(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        section = _section(kind)
        for name, hint in hints_of(kind).items():
            value = coerced(getattr(self, name), hint, f"{section}.{name}".lstrip("."))
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other."""


def _section(kind: type) -> str:
    """`train` for TrainConfig; nothing for the whole."""
    return kind.__name__.removesuffix("Config").lower()


def check_names(kind: type, given: Iterable[str]) -> None:
    """Refuse names that are no settings of a section, or no sections of the whole."""
    section = _section(kind)
    known = [entry.name for entry in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            raise unknown_name(f"setting of {section}" if section else "section", name, known)


@functools.cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The declared type of every field, rules included."""
    return typing.get_type_hints(kind, include_extras=True)


def coerced(value: Any, hint: Any, name: str) -> Any:
    """A value as the declared type, or an error that names the parameter, the rule and the value."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Annotated, NotRequired):
        value = coerced(value, inner[0], name)
        for rule in inner[1:]:
            require(rule.holds(value), name, rule.words, value)
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None and type(None) in inner else _first_that_fits(value, inner, name)
    if origin is Literal:
        value = _plain(value)
        if not any(type(value) is type(choice) and value == choice for choice in inner):
            raise unknown_name(name, value, map(str, inner))
        return value
    if origin in (tuple, list):
        return _sequence(value, hint, name)
    if origin is dict or typing.is_typeddict(hint):
        return _object(value, hint, name)
    return _scalar(value, hint, name)


def _first_that_fits(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        with contextlib.suppress(UserTypeError):
            return coerced(value, kind, name)
    return coerced(value, last, name)


def _sequence(value: Any, hint: Any, name: str) -> Any:
    """A tuple of so many, or a list of any length."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    items = value.tolist() if hasattr(value, "tolist") else value
    many = f" of {len(inner)} values" if kind is tuple else ""
    if not isinstance(items, list | tuple) or (kind is tuple and len(items) != len(inner)):
        raise UserTypeError(f"{name} must be a list{many}, got {value!r}")
    kinds = inner if kind is tuple else inner * len(items)
    return kind(coerced(item, of, name) for item, of in zip(items, kinds, strict=True))


def _object(value: Any, hint: Any, name: str) -> dict[str, Any]:
    """A dictionary of one type, or with at least the keys that a TypedDict requires."""
    if not isinstance(value, dict):
        raise UserTypeError(f"{name} must be an object, got {value!r}")
    if not typing.is_typeddict(hint):
        kind = typing.get_args(hint)[1]
        return {str(key): coerced(item, kind, f"{name}.{key}") for key, item in value.items()}
    for key in sorted(hint.__required_keys__ - value.keys()):
        raise UserError(f"{name} must have {key!r}, got {sorted(map(str, value))}")
    return {key: coerced(item, hints_of(hint).get(key, Any), f"{name}.{key}") for key, item in value.items()}


def _scalar(value: Any, kind: Any, name: str) -> Any:
    plain = _plain(value)
    large = type(plain) is int and abs(plain) >= LARGEST
    if kind is float and type(plain) is int and not large:
        plain = float(plain)
    if not isinstance(plain, kind) or (isinstance(plain, bool) and kind is not bool):
        # No page of digits or of a dictionary.
        shown = "a number too large" if large else repr(value)[:200]
        raise UserTypeError(f"{name} must be {WORDS.get(kind, f'a {kind.__name__}')}, got {shown}")
    if large:
        raise UserError(f"{name} must be below 2**63, got a number of {plain.bit_length()} bits")
    require(kind is not float or math.isfinite(plain), name, "a finite number", value)
    # Half of a surrogate pair is no text: neither a terminal nor a page can show it.
    require(kind is not str or plain == plain.encode("utf-8", "replace").decode(), name, "text", value)
    return plain


def _plain(value: Any) -> Any:
    """Scalars of NumPy and torch as Python's; paths and devices as text."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if f"{type(value).__module__}.{type(value).__name__}" == "torch.device" else value
