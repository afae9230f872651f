"""Reads the pickles of CIFAR-10's Python version as data, without running them.

A pickle is a program for a small stack machine, and it is dangerous because that machine can import any function
and call it. The machine below has the same stack but can do neither: where a program says "import", the name is
pushed as text, and where it says "call", name and arguments are pushed as an inert record. No operation could run code,
so there is nothing to forbid; records that are not the one kind of array we know are refused afterwards.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pmae.errors import UserError

# The opcode's own argument is the value: Python 2's strings arrive decoded as Latin-1, one character a byte.
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_FRESH: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

T = TypeVar("T")


@dataclass
class Record:
    """A call that was asked for and never made."""

    function: object
    arguments: object
    state: object = None


class _Machine:
    """The stack, its marks and its memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.operations: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "STOP": lambda _: None,
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "BINGET": lambda key: self.stack.append(self.memo[key]),
            "LONG_BINGET": lambda key: self.stack.append(self.memo[key]),
            "TUPLE": lambda _: self.stack.append(tuple(self._since_mark())),
            "APPEND": lambda _: self._extend(self._take(1)),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "SETITEM": lambda _: self._update(self._take(2)),
            "SETITEMS": lambda _: self._update(self._since_mark()),
            "GLOBAL": self.stack.append,
            "STACK_GLOBAL": lambda _: self.stack.append(" ".join(self._take(2))),
            "REDUCE": lambda _: self.stack.append(Record(*self._take(2))),
            "BUILD": self._build,
        }

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._take(_TUPLES[name])))
        elif name in self.operations:
            self.operations[name](argument)
        else:
            raise ValueError(f"operation {name} is not part of plain data")

    def _remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def _take(self, count: int) -> list[Any]:
        return self._cut(len(self.stack) - count)

    def _since_mark(self) -> list[Any]:
        return self._cut(self.marks.pop())

    def _cut(self, start: int) -> list[Any]:
        if start < 0:
            raise ValueError("the stack is empty")
        items, self.stack[start:] = self.stack[start:], []
        return items

    def _extend(self, items: list[Any]) -> None:
        _only(list, self.stack[-1]).extend(items)

    def _update(self, items: list[Any]) -> None:
        target = _only(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_only(str, key)] = value

    def _build(self, _: Any) -> None:
        state = self._take(1)[0]
        _only(Record, self.stack[-1]).state = state


def _only(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} was due, not a {type(value).__name__}")
    return value


def read_plain_pickle(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle; arrays in it stay records until `bytes_array` is asked for them."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        return _only(dict, machine.stack[-1])
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{where} is not a pickle of plain data, and no other is read: {error}") from error


def bytes_array(value: object, where: str) -> np.ndarray:
    """The uint8 array that a record of NumPy's array rebuilding describes; every other record is refused by name."""
    try:
        record = _only(Record, value)
        # A name and nothing else: the text of a structure that holds itself many times over has no end.
        function = _only(str, record.function)
        if not function.endswith("multiarray _reconstruct"):
            raise ValueError(f"it asks for a call of {function!r}")
        _, shape, dtype, fortran, raw = _only(tuple, record.state)
        if _only(Record, dtype).function != "numpy dtype" or _only(tuple, _only(Record, dtype).arguments)[0] != "u1":
            raise ValueError("its elements are not bytes")
        pixels = np.frombuffer(_raw_bytes(raw), np.uint8)
        return pixels.reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise UserError(f"{where} does not hold an array of bytes: {error}") from error


def _raw_bytes(raw: object) -> bytes:
    """Bytes as Python 3 pickles them, as Python 2 did, or as Python 3 does for Python 2: encode(text, 'latin1')."""
    if isinstance(raw, Record) and raw.function == "_codecs encode":
        raw = _only(tuple, raw.arguments)[0]
    return raw if isinstance(raw, bytes) else _only(str, raw).encode("latin-1")
