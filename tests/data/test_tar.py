"""Members of tar files: what the standard library finds in all formats, and nothing of a damaged file."""

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmae.data.readers.webdataset import Member, members
from pmae.errors import UserError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def found(archive: bytes) -> list[Member]:
    return list(members(lambda at, size: archive[at : at + size], "a.tar"))


def packed(files: dict[str, bytes], kind: int, **fields: float) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in fields.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=20, deadline=None)
@given(files=st.dictionaries(st.from_regex(r"[a-z0-9]{1,20}(/[a-z0-9]{1,30}){0,4}\.jpg", fullmatch=True), st.binary()))
def test_members_are_those_of_the_standard_library(kind: str, files: dict[str, bytes]) -> None:
    archive = packed(files, FORMATS[kind], mtime=1.5)
    with tarfile.open(fileobj=io.BytesIO(archive)) as reference:
        expected = [Member(info.name, info.offset, info.offset_data, info.size) for info in reference]
    assert found(archive) == expected
    assert [archive[member.offset : member.stop] for member in expected] == list(files.values())


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_long_and_foreign_names(kind: str) -> None:
    names = ["x" * 300 + ".png", "mäander/ü.png", "/etc/passwd.png", "../../up.png"]
    archive = packed(dict.fromkeys(names, b"1"), FORMATS[kind])
    assert [member.name for member in found(archive)] == names


def test_links_and_folders_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    os.symlink("/etc/passwd", tmp_path / "folder" / "link.png")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "folder", "folder")
    assert [member.name for member in found((tmp_path / "a.tar").read_bytes())] == ["folder/a.txt"]


def test_a_size_beyond_octal_is_read() -> None:
    info = tarfile.TarInfo("a.npy")
    info.size = 9 * 2**30
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        header = info.tobuf(kind)
        member = next(members(lambda at, size, header=header: header[at : at + size], "a.tar"))
        assert (member.size, member.offset) == (info.size, len(header))


@pytest.mark.parametrize("cut", [0, 100, 512, 1100, 1536])
def test_a_file_without_its_end_is_refused(cut: int) -> None:
    archive = packed({"a.jpg": b"1" * 600}, tarfile.USTAR_FORMAT)[:cut]
    with pytest.raises(UserError, match="cut short"):
        found(archive)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_anything_else_is_refused_in_words(junk: bytes) -> None:
    with pytest.raises(UserError, match=r"a\.tar is"):
        found(b"x" + junk)


def test_a_damaged_header_is_refused() -> None:
    archive = bytearray(packed({"a.jpg": b"1", "b.jpg": b"2"}, tarfile.GNU_FORMAT))
    archive[1024 + 3] ^= 1
    with pytest.raises(UserError, match="no header at byte 1,024"):
        found(bytes(archive))
