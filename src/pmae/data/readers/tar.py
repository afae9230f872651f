"""The members of a tar file and where they lie, without unpacking: ustar, GNU and pax headers.

The standard library reads them as well, three times slower and keeping them all: the index of a large set is felt.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pmae.errors import UserError

BLOCK = 512
REGULAR = (b"0", b"\0", b"7")
PAX, LONG_NAME = b"x", b"L"
# A name or a pax header of more than this is no name.
LONGEST = 2**20

Read = Callable[[int, int], bytes]
"""Offset and size to bytes, fewer at the end."""


class Member(NamedTuple):
    """One file in a tar file: where its headers begin, and where its content."""

    name: str
    start: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        """The end of its content."""
        return self.offset + self.size


def members(read: Read, what: str) -> Iterator[Member]:
    """The regular files in order; names are text alone, nothing is ever written under them."""
    start = at = 0
    name = size = None
    while (header := read(at, BLOCK)) != bytes(BLOCK):
        _require_header(header, at, what)
        kind, own, body = header[156:157], _number(header[124:136], what), at + BLOCK
        if kind in (PAX, LONG_NAME):
            fields = _extension(kind, read(body, min(own, LONGEST)), what)
            name, size = fields.get("path", name), fields.get("size", size)
        else:
            own = int(size) if size is not None else own
            if kind in REGULAR:
                yield Member(_text(header) if name is None else name, start, body, own)
            name = size = None
        at = body + -(-own // BLOCK) * BLOCK
        # A header before the header belongs to the member that follows.
        start = start if kind in (PAX, LONG_NAME) else at


def _require_header(header: bytes, at: int, what: str) -> None:
    if len(header) < BLOCK:
        raise UserError(f"data.source: {what} is cut short: it ends at byte {at + len(header):,} without an end mark")
    # The sum counts its own field as eight spaces.
    if sum(header) - sum(header[148:156]) + 256 != _number(header[148:156], what):
        raise UserError(f"data.source: {what} is not a plain tar file, or damaged: no header at byte {at:,}")


def _number(field: bytes, what: str) -> int:
    """Octal digits, or, with the first bit set, a binary number for sizes beyond 8 GiB."""
    try:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else int(field.strip(b" \0") or b"0", 8)
    except ValueError as error:
        raise UserError(f"data.source: {what} is not a plain tar file, or damaged: {field!r} is no number") from error


def _extension(kind: bytes, body: bytes, what: str) -> dict[str, str]:
    """The path and size that a header before the header gives: pax records `LENGTH KEY=VALUE`, or GNU's long name."""
    if kind == LONG_NAME:
        return {"path": _decoded(body)}
    fields, at = {}, 0
    while at < len(body):
        length = body[at : at + 20].partition(b" ")[0]
        if not length.isdigit() or not int(length):
            raise UserError(f"data.source: {what} is damaged: a pax header without a length")
        key, _, value = body[at : at + int(length) - 1].partition(b" ")[2].partition(b"=")
        fields[key.decode("latin1")], at = _decoded(value), at + int(length)
    if not fields.get("size", "0").isdigit():
        raise UserError(f"data.source: {what} is damaged: a member's size is {fields['size']!r}")
    return fields


def _text(header: bytes) -> str:
    name, prefix = _decoded(header[:100]), _decoded(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _decoded(name: bytes) -> str:
    return name.partition(b"\0")[0].decode("utf-8", "backslashreplace")
