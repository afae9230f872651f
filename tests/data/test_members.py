"""Images inside .npz files, on demand: the same as read whole, in memory that the file's size does not touch."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pmae.config import DataConfig
from pmae.data.chunks import stream
from pmae.data.readers.arrays import MemberImages, open_npz, read_npz
from pmae.data.sets import load
from pmae.errors import UserError

SAVERS = [np.savez, np.savez_compressed]


def values(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, shape).astype(dtype)


@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((11, 6, 4, 3), "uint8", "auto"),
        ((11, 5, 6, 9), "uint16", "NCHW"),
        ((11, 6, 4), ">i2", "auto"),
        ((11, 2, 30), "float32", "NCL"),
        ((11, 7), "float64", "auto"),
    ],
)
def test_chunks_are_what_the_whole_file_holds(
    tmp_path: Path, save: Callable[..., None], shape: tuple[int, ...], dtype: str, layout: Any
) -> None:
    images = values(*shape, dtype=dtype)
    save(tmp_path / "in.npz", train_images=images, test_images=images[:4], test_labels=np.array([[9], [5], [9], [5]]))
    whole, opened = read_npz(tmp_path / "in.npz", layout), open_npz(tmp_path / "in.npz", layout)
    assert isinstance(opened.train.images, MemberImages)
    assert (opened.train.shape, opened.train.images.dtype) == (whole.train.shape, whole.train.images.dtype)
    config = DataConfig(str(tmp_path / "in.npz"), layout=layout)
    source = stream(config, size=3)
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
    second = [part.images for _, part in stream(config, 3, "train", share=(1, 2)).chunks]
    np.testing.assert_array_equal(np.concatenate(second), whole.train.images[6:])


def test_any_order_of_rows(tmp_path: Path) -> None:
    images = values(20, 4, 5, 3)
    np.savez_compressed(tmp_path / "in.npz", images=images)
    opened, first = open_npz(tmp_path / "in.npz").train, images.transpose(0, 3, 1, 2)
    for index in (np.array([15, 2, 2, 19]), np.arange(3), np.array([4])):
        np.testing.assert_array_equal(opened.take(index).loaded().images, first[index])
    np.testing.assert_array_equal(opened.images[7], first[7])
    np.testing.assert_array_equal(np.asarray(opened.images), first)


@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
def test_memory_is_bounded_by_the_chunk(tmp_path: Path, save: Callable[..., None]) -> None:
    """3,000 images of 12 kB are 37 MB; a chunk of 32 is 0.4 MB: its bytes, both axis orders, the chunk before it, and
    zlib's buffers are less than 3 MB."""
    count, row = 3_000, 64 * 64 * 3
    save(tmp_path / "in.npz", images=np.tile(values(10, 64, 64, 3), (count // 10, 1, 1, 1)))
    tracemalloc.start()
    seen = sum(len(part) for _, part in stream(DataConfig(str(tmp_path / "in.npz")), 32).chunks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == count
    assert peak < 5 * 32 * row + 2**20 < count * row / 10, f"{peak:,} bytes"


def test_tiny_imagenet_streams_file_by_file(tmp_path: Path) -> None:
    tree = tmp_path / "tiny-imagenet-200"
    for folder in ("train/n01/images", "train/n02/images", "val/images"):
        (tree / folder).mkdir(parents=True)
    for number, image in enumerate(values(12, 8, 8)):
        place = "val/images" if number >= 8 else f"train/n0{number % 2 + 1}/images"
        Image.fromarray(image).save(tree / place / f"{number}.png")
    (tree / "val/val_annotations.txt").write_text("".join(f"{n}.png\tn0{n % 2 + 1}\t0\t0\n" for n in range(8, 12)))
    config = DataConfig("tinyimagenet", root=str(tmp_path))
    whole, source = load(config), stream(config, 3)
    assert source.splits == ["train", "test"]
    parts = list(source.chunks)
    assert max(len(part) for _, part in parts) == 3
    for split in ("train", "test"):
        mine, expected = [part for name, part in parts if name == split], getattr(whole, split)
        np.testing.assert_array_equal(np.concatenate([part.images for part in mine]), expected.images)
        assert [name for part in mine for name in part.names] == list(expected.names)
        assert [label for part in mine for label in part.labels] == expected.labels.tolist()
    by_path = stream(DataConfig(str(tree)), 100, "test", share=(0, 2))
    assert sum(len(part) for _, part in by_path.chunks) == 4


def test_medmnist_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    labels = np.arange(16)[:, None] % 8
    np.savez(tmp_path / "bloodmnist_64.npz", train_images=values(16, 8, 8, 3), train_labels=labels)
    _, part = next(stream(DataConfig("bloodmnist", root=str(tmp_path)), 4).chunks)
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
        list(stream(DataConfig(str(tmp_path / "in.npz")), 8).chunks)


def test_an_array_in_fortrans_order_is_read_whole(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", images=np.asfortranarray(values(9, 6, 4, 3)))
    assert isinstance(open_npz(tmp_path / "in.npz").train.images, np.ndarray)
    parts = [part.images for _, part in stream(DataConfig(str(tmp_path / "in.npz")), 4).chunks]
    np.testing.assert_array_equal(np.concatenate(parts), values(9, 6, 4, 3).transpose(0, 3, 1, 2))
