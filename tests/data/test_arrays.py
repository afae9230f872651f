"""Arrays in memory, in .npy files and in .npz files; damaged and hostile ones are one sentence."""

import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pmae.config import DataConfig
from pmae.data import arrays, decode
from pmae.data.arrays import from_arrays, read_npz
from pmae.data.images import DTYPES
from pmae.data.sets import load, read_chunks
from pmae.errors import UserError

SIDES = st.integers(1, 7)
LABEL_KINDS = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64"]


def random_images(shape: tuple[int, ...], dtype: str = "uint8", seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random(shape) * 250).astype(dtype)


@given(st.integers(1, 4), SIDES, SIDES, SIDES, st.sampled_from(DTYPES), st.booleans())
def test_values_and_dtype_survive_every_layout(n: int, c: int, h: int, w: int, dtype: str, as_torch: bool) -> None:
    images = random_images((n, c, h, w), dtype)
    last = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    given_first = torch.from_numpy(images) if as_torch else images
    given_last = torch.from_numpy(last) if as_torch else last
    for result in (from_arrays(given_first, layout="NCHW"), from_arrays(given_last, layout="NHWC")):
        assert result.images.dtype == dtype
        assert result.shape == (c, h, w)
        np.testing.assert_array_equal(result.images, images)
    grey = from_arrays(images[:, 0], layout="NCHW")
    np.testing.assert_array_equal(grey.images, images[:, :1])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(5, 9), st.integers(5, 9), st.booleans())
def test_auto_takes_a_small_outer_axis_for_the_channels(n: int, few: int, h: int, w: int, last: bool) -> None:
    images = random_images((n, few, h, w))
    given = np.ascontiguousarray(images.transpose(0, 2, 3, 1)) if last else images
    np.testing.assert_array_equal(from_arrays(given).images, images)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((5, 28, 36), (1, 28, 36)),
        ((5, 3, 28, 28), (3, 28, 28)),
        ((5, 28, 28, 3), (3, 28, 28)),
        ((5, 1, 1, 30), (1, 1, 30)),
        ((5, 20, 32, 32), (20, 32, 32)),
        ((5, 32, 32, 20), (20, 32, 32)),
        ((5, 24, 48, 12), (12, 24, 48)),
        ((5, 8, 28, 28), (8, 28, 28)),
    ],
)
def test_auto_finds_the_channels_where_that_is_beyond_doubt(shape: tuple[int, ...], found: tuple[int, ...]) -> None:
    assert from_arrays(random_images(shape)).shape == found


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((480, 640, 3), r"of shape \(480, 640, 3\), which may be one image in color \(then give array\[None\]\)"),
        ((90, 120, 4), "one image in color"),
        ((5, 3, 128), r"signals \(data\.layout NCL\)"),
        ((5, 7, 4, 7), r"data\.layout must be NHWC or NCHW"),
        ((5, 32, 32, 100), r"axis 1 has 32 and the last axis 100, so either could be the channels"),
        ((5, 100, 32, 32), r"axis 1 has 100 and the last axis 32, so either could be the channels"),
        ((5, 100, 224, 103), r"data\.layout must be NHWC or NCHW"),
    ],
)
def test_an_array_that_can_be_read_in_two_ways_is_asked_about(
    tmp_path: Path, shape: tuple[int, ...], words: str
) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, np.uint8))
    readers: list[Callable[[DataConfig], object]] = [load, lambda config: list(read_chunks(config, 8).chunks)]
    for read in readers:
        with pytest.raises(UserError, match=words):
            read(DataConfig(str(tmp_path / "x.npy")))
    told = load(DataConfig(str(tmp_path / "x.npy"), layout="NCHW")).train
    assert told.shape == (shape[1:] if len(shape) == 4 else (1, *shape[1:]))


@given(st.sampled_from(LABEL_KINDS), st.lists(st.integers(0, 100), min_size=1, max_size=20), st.booleans())
def test_labels_of_any_integer_kind_are_numbered_from_zero(kind: str, values: list[int], column: bool) -> None:
    labels = np.array(values).astype(kind)
    result = from_arrays(random_images((len(values), 5, 6)), labels[:, None] if column else labels)
    assert result.labels is not None
    assert result.labels.dtype == np.int64
    np.testing.assert_array_equal(np.unique(result.labels), np.arange(len(np.unique(labels))))
    assert [result.classes[i] for i in result.labels] == [str(value) for value in labels.tolist()]


def test_another_byte_order_is_the_same_numbers() -> None:
    images = random_images((2, 1, 4, 5), "uint16")
    result = from_arrays(images.astype(">u2")).images
    assert result.dtype.isnative
    np.testing.assert_array_equal(result, images)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros(4), None, "shape"),
        (np.zeros((4, 5), np.uint8), None, r"data\.layout must be ND for uint8 vectors"),
        (np.zeros((0, 5, 5)), None, "empty"),
        (np.zeros((2, 5, 5), np.int64), None, "int64"),
        (np.zeros((2, 5, 5), bool), None, "bool"),
        (np.zeros((2, 5, 5), object), None, "dtype among"),
        (torch.zeros((2, 5, 5), dtype=torch.bfloat16), None, "bfloat16"),
        (np.zeros((2, 5, 5), np.uint8), np.zeros((2, 3), int), "one class per image"),
        (np.zeros((2, 5, 5), np.uint8), np.zeros(2), "whole numbers"),
        (np.zeros((2, 5, 5), np.uint8), np.zeros(3, int), "3 labels for 2 images"),
        (np.zeros((2, 5, 5), np.uint8), np.zeros((2, 1, 1), int), "labels"),
    ],
)
def test_what_cannot_be_images_or_labels_is_refused(images: Any, labels: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_arrays(images, labels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_is_memory_mapped_and_never_cast(tmp_path: Path, dtype: str) -> None:
    images = random_images((5, 6, 7, 2), dtype)
    np.save(tmp_path / "x.npy", images)
    splits = load(DataConfig(source=str(tmp_path / "x.npy")))
    assert isinstance(splits.train.images, np.memmap)
    assert splits.train.images.dtype == dtype
    np.testing.assert_array_equal(splits.train.images, images.transpose(0, 3, 1, 2))
    assert splits.name == "x"
    assert splits.test is None
    assert splits.train.labels is None


def test_npz_with_medmnist_keys(tmp_path: Path) -> None:
    counts = {"train": 6, "val": 3, "test": 4}
    labels = {"train": [5, 2, 2, 9, 5, 5], "val": [9, 9, 2], "test": [7, 5, 2, 9]}
    saved = {f"{s}_images": random_images((n, 8, 8, 3), seed=n) for s, n in counts.items()}
    saved |= {f"{s}_labels": np.array(v, np.uint8)[:, None] for s, v in labels.items()}
    np.savez_compressed(tmp_path / "x.npz", **saved)
    splits = load(DataConfig(source=str(tmp_path / "x.npz")))
    for split, values in labels.items():
        part = getattr(splits, split)
        np.testing.assert_array_equal(part.images, saved[f"{split}_images"].transpose(0, 3, 1, 2))
        # One numbering for all splits, also for class 7, which only the test split has.
        assert [part.classes[i] for i in part.labels] == [str(v) for v in values]


def test_npz_with_plain_keys(tmp_path: Path) -> None:
    images = random_images((6, 8, 9))
    np.savez(tmp_path / "a.npz", images=images)
    np.savez(tmp_path / "b.npz", images=images, labels=np.arange(6), test_images=images[:2], test_labels=[3, 4])
    bare, full = (load(DataConfig(source=str(tmp_path / name))) for name in ("a.npz", "b.npz"))
    assert bare.train.labels is None
    assert bare.train.classes == ()
    assert bare.test is None
    assert full.test is not None
    assert full.test.labels is not None
    assert full.test.labels.tolist() == [3, 4]
    np.testing.assert_array_equal(full.train.images[:, 0], images)


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_pickled_objects_are_refused_by_name(tmp_path: Path, name: str) -> None:
    objects = np.array([{"a": 1}, None], dtype=object)
    if name == "x.npy":
        np.save(tmp_path / name, objects, allow_pickle=True)
    else:
        np.savez(tmp_path / name, images=objects)
    with pytest.raises(UserError, match=rf"{name} .*pickled Python objects"):
        load(DataConfig(source=str(tmp_path / name)))


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    whole = tmp_path / f"whole-{name}"
    if name == "x.npy":
        np.save(whole, random_images((4, 5, 6)))
    else:
        np.savez(whole, images=random_images((4, 5, 6)))
    for content in (whole.read_bytes()[:-70], b"", b"not an array"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            load(DataConfig(source=str(tmp_path / name)))


def test_npz_without_images_or_with_unlike_splits(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", pixels=np.zeros(3), train_labels=np.zeros(3, int))
    with pytest.raises(UserError, match=r"'train_images' or 'images'.*train_labels"):
        load(DataConfig(source=str(tmp_path / "a.npz")))
    np.savez(tmp_path / "b.npz", images=random_images((3, 8, 8)), test_images=random_images((3, 8, 9)))
    with pytest.raises(UserError, match="alike"):
        load(DataConfig(source=str(tmp_path / "b.npz")))


def test_npz_larger_than_memory_is_refused_with_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "x.npz", images=np.zeros((100, 50, 50), np.uint8))
    monkeypatch.setattr(decode, "available_bytes", lambda: 100_000)
    with pytest.raises(UserError, match=r"250,\d{3} bytes.*100,000"):
        arrays.read_npz(tmp_path / "x.npz")


def test_available_memory_is_a_sane_number() -> None:
    assert 1 << 20 < decode.available_bytes() < 1 << 50


SAVERS = [np.savez, np.savez_compressed]


def values(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, shape).astype(dtype)


@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((11, 6, 4, 3), "uint8", "auto"),
        ((11, 5, 6, 9), "uint16", "NCHW"),
        ((11, 6, 5), ">i2", "auto"),
        ((11, 2, 30), "float32", "NCL"),
        ((11, 7), "float64", "auto"),
    ],
)
def test_chunks_are_what_the_whole_file_holds(
    tmp_path: Path, save: Callable[..., None], shape: tuple[int, ...], dtype: str, layout: Any
) -> None:
    images = values(*shape, dtype=dtype)
    save(tmp_path / "in.npz", train_images=images, test_images=images[:4], test_labels=np.array([[9], [5], [9], [5]]))
    whole = read_npz(tmp_path / "in.npz", layout)
    config = DataConfig(str(tmp_path / "in.npz"), layout=layout)
    source = read_chunks(config, size=3)
    parts = list(source.chunks)
    assert [(name, len(part)) for name, part in parts] == [("train", n) for n in (3, 3, 3, 2)] + [
        ("test", 3),
        ("test", 1),
    ]
    for split in ("train", "test"):
        mine, expected = [part for name, part in parts if name == split], getattr(whole, split)
        np.testing.assert_array_equal(np.concatenate([part.images for part in mine]), expected.images)
        assert all(part.vectors == expected.vectors for part in mine)
    assert np.concatenate([part.labels for _, part in parts]).tolist() == [-1] * 11 + [1, 0, 1, 0]
    second = [part.images for _, part in read_chunks(config, 3, "train", part=(1, 2)).chunks]
    np.testing.assert_array_equal(np.concatenate(second), whole.train.images[[3, 4, 5, 9, 10]])


def test_tiny_imagenet_streams_file_by_file(tmp_path: Path) -> None:
    tree = tmp_path / "tiny-imagenet-200"
    for folder in ("train/n01/images", "train/n02/images", "val/images"):
        (tree / folder).mkdir(parents=True)
    for number, image in enumerate(values(12, 8, 8)):
        place = "val/images" if number >= 8 else f"train/n0{number % 2 + 1}/images"
        Image.fromarray(image).save(tree / place / f"{number}.png")
    (tree / "val/val_annotations.txt").write_text("".join(f"{n}.png\tn0{n % 2 + 1}\t0\t0\n" for n in range(8, 12)))
    config = DataConfig("tinyimagenet", root=str(tmp_path))
    whole, source = load(config), read_chunks(config, 3)
    assert source.splits == ["train", "test"]
    parts = list(source.chunks)
    assert max(len(part) for _, part in parts) == 3
    for split in ("train", "test"):
        mine, expected = [part for name, part in parts if name == split], getattr(whole, split)
        np.testing.assert_array_equal(np.concatenate([part.images for part in mine]), expected.images)
        assert [name for part in mine for name in part.names] == list(expected.names)
        assert [label for part in mine for label in part.labels] == expected.labels.tolist()
    by_path = read_chunks(DataConfig(str(tree)), 100, "test", part=(0, 2))
    assert sum(len(part) for _, part in by_path.chunks) == 4


def test_medmnist_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    labels = np.arange(16)[:, None] % 8
    np.savez(tmp_path / "bloodmnist_64.npz", train_images=values(16, 8, 8, 3), train_labels=labels)
    _, part = next(read_chunks(DataConfig("bloodmnist", root=str(tmp_path)), 4).chunks)
    assert part.classes[0] == "basophil"
    assert part.images.shape == (4, 3, 8, 8)


def cut_short(path: Path) -> None:
    np.savez(path, images=values(50, 8, 8))
    data = path.read_bytes()
    at = data.index(b"(50, 8, 8)")
    # The header promises more images than there are.
    path.write_bytes(data[:at] + b"(90, 8, 8)" + data[at + 10 :])


def objects(path: Path) -> None:
    np.savez(path, images=np.array([object()] * 3, dtype=object))


def no_images(path: Path) -> None:
    np.savez(path, pictures=values(3, 8, 8))


def none_inside(path: Path) -> None:
    np.savez(path, images=values(0, 8, 8))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (cut_short, "cannot be read as arrays of numbers"),
        (objects, "pickled Python objects"),
        (no_images, "must hold the key 'train_images' or 'images'"),
        (none_inside, "with nothing empty"),
        (lambda path: path.write_bytes(b"no archive"), "cannot be read"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, write: Callable[[Path], object], message: str) -> None:
    write(tmp_path / "in.npz")
    with pytest.raises(UserError, match=message):
        list(read_chunks(DataConfig(str(tmp_path / "in.npz")), 8).chunks)


def test_an_array_in_fortrans_order_is_the_same(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", images=np.asfortranarray(values(9, 6, 4, 3)))
    parts = [part.images for _, part in read_chunks(DataConfig(str(tmp_path / "in.npz")), 4).chunks]
    np.testing.assert_array_equal(np.concatenate(parts), values(9, 6, 4, 3).transpose(0, 3, 1, 2))


def test_labels_that_unpack_to_more_than_the_images_are_refused_by_their_header(tmp_path: Path) -> None:
    """A small file whose labels would take a megabyte, as one of three megabytes takes three gigabytes."""
    np.savez_compressed(tmp_path / "in.npz", images=values(3, 8, 8), labels=np.zeros(10**6, np.int8))
    readers: list[Callable[[DataConfig], object]] = [load, lambda config: list(read_chunks(config, 8).chunks)]
    for read in readers:
        tracemalloc.start()
        with pytest.raises(UserError, match=r"labels must be one per image: labels has shape \(1000000,\)"):
            read(DataConfig(str(tmp_path / "in.npz")))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 900_000, f"{peak:,} bytes"


def test_more_labels_than_memory_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "in.npz", images=values(5000, 1, 1), labels=np.zeros(5000, np.int64))
    monkeypatch.setattr(decode, "available_bytes", lambda: 150_000)
    with pytest.raises(UserError, match="sorted to find the classes, would take 160,000 bytes"):
        load(DataConfig(str(tmp_path / "in.npz")))


def test_a_member_without_its_suffix_is_no_array(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
        archive.writestr("images", b"anything")
    with pytest.raises(UserError, match="must hold the key 'train_images' or 'images', got neither"):
        load(DataConfig(str(tmp_path / "in.npz")))
