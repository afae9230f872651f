"""WebDataset shards, written and read by `webdataset` itself for comparison; broken ones are told in words."""

import io
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pmae.config import DataConfig
from pmae.data.batches import Batches, fit_standardize
from pmae.data.images import ImageSet
from pmae.data.ondemand import OnDemand
from pmae.data.sets import converts, load, load_settled, read_chunks
from pmae.data.shards import braces, shard_files
from pmae.data.webdataset import Member, members
from pmae.errors import UserError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 12, 10, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write(path: Path, numbers: range, **more: Any) -> Path:
    """Samples NUMBER.png and NUMBER.cls, and whatever else is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for i in numbers:
            writer.write({"__key__": f"{i:04d}", "png": png(PIXELS[i]), "cls": i % 3, **more})
    return path


def pack(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four shards of ten samples."""
    for i in range(4):
        write(tmp_path / f"set/train-{i:03d}.tar", range(10 * i, 10 * i + 10))
    return tmp_path / "set"


def source(path: Path | str, **settings: Any) -> ImageSet:
    return load(DataConfig(source=str(path), **settings)).train


def test_the_samples_are_those_that_webdataset_reads(shards: Path) -> None:
    reader = webdataset.WebDataset(str(shards / "train-{000..003}.tar"), shardshuffle=False).decode("rgb8")
    expected = list(reader.to_tuple("png", "cls", "__key__"))
    for name in ("", "train-{000..003}.tar", "*.tar"):
        found = source(os.path.join(shards, name))
        assert isinstance(found.images, OnDemand)
        np.testing.assert_array_equal(found.images[:], np.stack([one[0] for one in expected]).transpose(0, 3, 1, 2))
        assert found.labels is not None
        assert found.labels.tolist() == [one[1] for one in expected]
        assert list(found.names) == [f"{one[2]}.png" for one in expected]
        assert found.shape == (3, 12, 10)


def test_it_reads_like_an_array(shards: Path) -> None:
    found, array = source(shards), PIXELS.transpose(0, 3, 1, 2)
    images = found.images
    assert (images.shape, images.dtype, images.nbytes, images.ndim) == (array.shape, array.dtype, array.nbytes, 4)
    np.testing.assert_array_equal(images[-1], array[-1])
    np.testing.assert_array_equal(images[3:20:4], array[3:20:4])
    np.testing.assert_array_equal(images[np.array([7, 7, 0])], array[[7, 7, 0]])
    np.testing.assert_array_equal(np.asarray(images), array)
    with pytest.raises(IndexError):
        images[40]
    part = found.take(np.array([5, 30, 31])).take(np.array([2, 0]))
    assert isinstance(part.images, OnDemand)
    assert (list(part.names), part.names[-1:]) == (["0031.png", "0005.png"], ("0005.png",))
    np.testing.assert_array_equal(part.loaded().images, array[[31, 5]])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_batches_do_not_depend_on_the_number_of_threads_and_come_in_order(shards: Path, threads: int) -> None:
    batches = Batches(source(shards, threads=threads).images, torch.device("cpu"))
    whole = Batches(PIXELS.transpose(0, 3, 1, 2), torch.device("cpu"))
    orders = [one.order(torch.Generator().manual_seed(3)) for one in (batches, whole)]
    assert torch.equal(*orders)
    for ours, theirs in zip(batches.each(orders[0].split(7)), whole.each(orders[0].split(7)), strict=True):
        assert torch.equal(ours, theirs)
    kept = Batches(source(shards, threads=threads).images, torch.device("cpu"), "device")
    assert kept.resident
    assert torch.equal(kept.take(orders[0]), whole.take(orders[0]))
    assert torch.equal(fit_standardize(batches, "pixel").std, fit_standardize(whole, "pixel").std)


def test_reading_ahead_is_bounded_and_stops_with_its_reader(shards: Path) -> None:
    images = source(shards).images
    asked: list[int] = []
    batches = Batches(images, torch.device("cpu"))
    coming = batches.each(torch.tensor([asked.append(i) or i]) for i in range(40))  # type: ignore[func-returns-value]
    next(coming)
    assert len(asked) <= 3
    threads = threading.active_count()
    coming.close()  # type: ignore[attr-defined]
    assert threading.active_count() < threads


def test_a_process_reads_only_its_rows(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = source(shards).images
    read: list[int] = []
    original = type(images._samples).read  # type: ignore[union-attr]
    monkeypatch.setattr(
        type(images._samples),  # type: ignore[union-attr]
        "read",
        lambda self, position: read.append(position) or original(self, position),
    )
    batches = Batches(images, torch.device("cpu"))
    order = batches.order(torch.Generator().manual_seed(0)).view(5, 8)
    halves = [list(batches.each(order[:, rows])) for rows in (slice(0, 4), slice(4, 8))]
    assert sorted(read) == list(range(40))
    joined = torch.stack([torch.cat(pair) for pair in zip(*halves, strict=True)])
    assert torch.equal(joined.flatten(0, 1), batches.take(order.flatten()))


def test_splits_by_name(tmp_path: Path) -> None:
    for name, numbers in {"train-0": range(6), "val-0": range(6, 9), "test-0": range(9, 11)}.items():
        write(tmp_path / f"flat/{name}.tar", numbers)
        write(tmp_path / f"deep/{name.removesuffix('-0').replace('val', 'validation')}/0.tar", numbers)
    for folder in ("flat", "deep"):
        splits = load(DataConfig(source=str(tmp_path / folder)))
        assert [len(part) for part in (splits.train, splits.val, splits.test) if part] == [6, 3, 2]
    assert len(source(tmp_path / "flat" / "val-*.tar")) == 3
    assert [len(part) for _, part in read_chunks(DataConfig(source=str(tmp_path / "flat")), 4, "test").chunks] == [2]
    with pytest.raises(UserError, match="must have shards for training"):
        source(tmp_path / "flat" / "{val,test}-0.tar")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("a", ["a"]), ("{08..11}", ["08", "09", "10", "11"]), ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"])],
)
def test_braces_are_expanded_as_in_a_shell(pattern: str, expected: list[str]) -> None:
    assert list(braces(pattern)) == expected


def test_other_members_arrays_and_json(tmp_path: Path) -> None:
    arrays = RNG.normal(size=(5, 2, 6, 7)).astype(np.float32)
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for i, array in enumerate(arrays):
            writer.write({"__key__": f"dir.v1/{i}", "npy": array, "json": {"label": 7 - i}, "txt": "words"})
    found = source(tmp_path / "a.tar", layout="NCHW")
    np.testing.assert_array_equal(found.images[:], arrays)
    assert found.labels is not None
    assert (found.labels.tolist(), found.classes) == ([4, 3, 2, 1, 0], ("3", "4", "5", "6", "7"))
    write(tmp_path / "b.tar", range(3), **{"seg.png": png(PIXELS[9])})
    np.testing.assert_array_equal(source(tmp_path / "b.tar").images[:], PIXELS[:3].transpose(0, 3, 1, 2))
    pack(tmp_path / "c.tar", {f"{i}.JPG": png(PIXELS[i]) for i in range(3)})
    assert source(tmp_path / "c.tar").labels is None
    vectors = {f"{i}.npy": npy(np.arange(4.0) + i) for i in range(3)}
    assert source(pack(tmp_path / "d.tar", vectors)).vectors


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_sizes_and_channels_are_made_alike_on_request(tmp_path: Path) -> None:
    files = {"a.png": png(PIXELS[0]), "b.png": png(PIXELS[1][:8, :8]), "c.png": png(PIXELS[2][:, :, 0])}
    path = pack(tmp_path / "a.tar", files)
    assert (load_settled(DataConfig(str(path)))[0].resize, load_settled(DataConfig(str(path)))[0].channels) == (8, 3)
    assert source(path, resize=6).images[:].shape == (3, 3, 6, 6)
    assert source(path, resize=6, channels=1).images[:].shape == (3, 1, 6, 6)
    assert converts(DataConfig(source=str(path)))


def test_broken_samples_are_counted_and_replaced_by_the_next_of_their_class(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for i in range(9):
        files[f"{i}.png"] = b"broken" if i == 4 else png(PIXELS[i])[:-40] if i == 8 else png(PIXELS[i])
        files[f"{i}.cls"] = str(i % 3).encode()
    path = pack(tmp_path / "a.tar", files)
    found = source(path)
    with pytest.warns(UserWarning, match=r"'4\.png'|'8\.png'"):
        images = found.images[:]
    expected = PIXELS[[0, 1, 2, 3, 7, 5, 6, 7, 2]].transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(images, expected)
    read = read_chunks(DataConfig(source=str(path)), 9)
    ((_, chunk),) = read.chunks
    assert read.unreadable is not None
    assert [words.partition(" ")[0] for words in read.unreadable.found] == ["'4.png'", "'8.png'"]
    assert (len(chunk), chunk.names[4]) == (7, "5.png")
    assert chunk.labels is not None
    assert chunk.labels.tolist() == [0, 1, 2, 0, 2, 0, 1]
    with pytest.raises(UserError, match=r"data\.max_unreadable is 1"), pytest.warns(UserWarning, match="unreadable"):
        source(path, max_unreadable=1, threads=1).images[:]
    pack(tmp_path / "b.tar", dict.fromkeys(("a.png", "b.png"), b"broken"))
    with pytest.raises(UserError, match="at least one readable image"), pytest.warns(UserWarning, match="unreadable"):
        source(tmp_path / "b.tar")


def test_samples_without_an_image_are_left_out_and_told(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar", {"0.png": png(PIXELS[0]), "1.txt": b"words", "2.png": png(PIXELS[2])})
    splits = load(DataConfig(source=str(path)))
    assert list(splits.train.names) == ["0.png", "2.png"]
    assert any("'1' of a.tar (no image among .txt)" in note for note in splits.notes)
    with pytest.raises(UserError, match=r"data\.max_unreadable is 0.*'1' of a\.tar"):
        source(path, max_unreadable=0)


def test_names_with_several_dots_are_said_to_be_those_of_one_sample(tmp_path: Path) -> None:
    named = (f"scan.2020.{number}.png" for number in range(9))
    pack(tmp_path / "a.tar", {name: png(pixels) for name, pixels in zip(named, PIXELS, strict=False)})
    told = r"one training image, got none: 'scan' of a\.tar \(no image among .*, \.\.\.; a name ends at its first dot\)"
    with pytest.raises(UserError, match=told):
        load(DataConfig(source=str(tmp_path / "a.tar")))


def test_shards_are_read_on_systems_without_pread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.pread")
    path = pack(tmp_path / "a.tar", {"0.png": png(PIXELS[0]), "0.cls": b"3", "1.png": png(PIXELS[1]), "1.cls": b"4"})
    assert source(path).classes == ("3", "4")
    np.testing.assert_array_equal(source(path).images[1], PIXELS[1].transpose(2, 0, 1))


def test_names_that_point_elsewhere_write_nothing(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    pack(inside / "a.tar", {"../outside.png": png(PIXELS[0]), "/abs/olute.png": png(PIXELS[1])})
    found = source(inside / "a.tar")
    assert list(found.names) == ["../outside.png", "/abs/olute.png"]
    np.testing.assert_array_equal(found.images[:], PIXELS[:2].transpose(0, 3, 1, 2))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "inside"]


def test_what_is_no_shard_is_refused_by_name(tmp_path: Path, shards: Path) -> None:
    with pytest.raises(UserError, match=r"empty\.tar is cut short"):
        source(touched(tmp_path / "empty.tar", b""))
    with pytest.raises(UserError, match=r"bare\.tar holds no samples"):
        source(pack(tmp_path / "bare.tar", {}))
    whole = (shards / "train-000.tar").read_bytes()
    with pytest.raises(UserError, match=r"cut\.tar is cut short"):
        source(touched(tmp_path / "cut.tar", whole[: len(whole) // 2 + 300]))
    with pytest.raises(UserError, match=r"zip\.tar is not a plain tar file"):
        source(touched(tmp_path / "zip.tar", b"\x1f\x8b" + whole))
    with pytest.raises(UserError, match=r"there is no file .*train-004\.tar"):
        source(shards / "train-{000..004}.tar")
    with pytest.raises(UserError, match=r"the \.cls of '0' of .* must be a whole number, got b'cat'"):
        source(pack(tmp_path / "words.tar", {"0.png": png(PIXELS[0]), "0.cls": b"cat"}))
    with pytest.raises(UserError, match=r"all samples must have a class or none, and 1 of .*half\.tar lack one"):
        source(pack(tmp_path / "half.tar", {"0.png": png(PIXELS[0]), "0.cls": b"1", "1.png": png(PIXELS[1])}))
    with pytest.raises(UserError, match=r"data\.labels is for folders"):
        source(shards, labels="folders")


def touched(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_folder_of_pictures_with_an_archive_in_it_stays_one(tmp_path: Path) -> None:
    write(tmp_path / "backup.tar", range(3))
    Image.fromarray(PIXELS[0]).save(tmp_path / "picture.png")
    assert shard_files(str(tmp_path)) is None
    assert source(tmp_path).names == ("picture.png",)


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


def sized(size: bytes) -> bytes:
    """A tar file of one member whose header gives this as its size."""
    header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


@pytest.mark.parametrize("size", [b"-0000001000\0", b"+0000001000\0", b"0o000001000\0", b"0_000001000\0", b"\xff" * 12])
def test_a_size_that_is_no_plain_number_is_refused_at_once(size: bytes) -> None:
    with pytest.raises(UserError, match="is no number"):
        found(sized(size))


@pytest.mark.parametrize("size", ["\u00b2", "-512", "1" * 5000, "1e3", " 7"])
def test_a_pax_size_that_is_no_plain_number_is_refused(size: str) -> None:
    info = tarfile.TarInfo("a.png")
    info.pax_headers = {"size": size}
    with pytest.raises(UserError, match="a member's size is"):
        found(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


def test_an_array_whose_header_claims_a_terabyte_is_counted_as_unreadable(tmp_path: Path) -> None:
    small = npy(np.zeros((2, 8, 8), np.uint8))
    huge = small.replace(b"(2, 8, 8), }            ", b"(20000000000, 8, 8), }  ")
    assert len(huge) == len(small)
    assert huge != small
    pack(tmp_path / "a.tar", {"0.npy": small, "1.npy": huge})
    with pytest.warns(UserWarning, match=r"'1\.npy' \(ValueError: its header claims 1,280,000,000,000 bytes"):
        assert source(tmp_path / "a.tar", layout="NCHW").images[:].shape == (2, 2, 8, 8)


@pytest.mark.parametrize(
    "pattern", ["{0..999999999}.tar", "{a,b}{0..99999999999999999}.tar", "{0.." + "9" * 5000 + "}"]
)
def test_a_pattern_of_too_many_files_is_refused_at_once(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UserError, match="there is no file"):
        source(f"{tmp_path}/{pattern}")


def test_a_pattern_that_names_one_file_too_often_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmae.data.shards.MOST_SHARDS", 1000)
    write(tmp_path / "a.tar", range(2))
    with pytest.raises(UserError, match="at most 1,000 shards"):
        source(f"{tmp_path}/a{'{,}' * 40}.tar")


def test_a_shard_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(UserError, match=r"the shard .*a\.tar must be a regular file"):
        source(tmp_path)


def test_a_class_of_many_bytes_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a whole number, got b'a long text'"):
        source(pack(tmp_path / "a.tar", {"0.png": png(PIXELS[0]), "0.cls": b"1" * 10**6}))
