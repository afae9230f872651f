"""The one exception a user's mistake raises: parameter, rule, value and, where there are some, the choices."""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class UserError(ValueError):
    """A mistake in the input, told in one sentence; the command line prints it and leaves with exit code 2."""


class UserTypeError(UserError, TypeError):
    """A value of the wrong type, which Python's users expect to be a TypeError."""


def unknown_name(parameter: str, value: object, choices: Iterable[str]) -> UserError:
    """The error for a name that is not among the choices, with the nearest ones first."""
    known = sorted(choices)
    near = difflib.get_close_matches(str(value), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return UserError(f"{parameter}: unknown name {value!r}; {hint}choices: {listed}")


def require_known(parameter: str, names: Iterable[str], choices: Collection[str]) -> None:
    """Refuse names that are not among the choices."""
    for name in names:
        if name not in choices:
            raise unknown_name(parameter, name, choices)


def require(holds: bool, parameter: str, rule: str, value: object) -> None:
    """Refuse a value that breaks a rule."""
    if not holds:
        raise UserError(f"{parameter} must be {rule}, got {value!r}")


def first_line(error: Exception) -> str:
    """What an error says, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "")[:200] or type(error).__name__


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Inside, every failure becomes one sentence that begins with `what`: libraries raise whatever they trip over."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {first_line(error)}") from error


def optional(what: str, extra: str, *names: str) -> Any:
    """The last of the modules that a feature needs, once all are known to be there."""
    try:
        return [import_module(name) for name in names][-1]
    except ImportError as error:
        words = f"{what} needs {error.name}, which is not installed: pip install 'pmae[{extra}]'"
        raise UserError(words) from error


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: everything is saved; `code` is the exit code that the signal calls for."""

    def __init__(self, how_to_go_on: str, signal_number: int) -> None:
        super().__init__(f"stopped and saved; {how_to_go_on}")
        self.code = 128 + signal_number
