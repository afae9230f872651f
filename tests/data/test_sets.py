"""Named sets, files and folders: what loads, whole or in chunks, and what is said when it does not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from pmae.config import DataConfig
from pmae.data import fetch as archives
from pmae.data.download import checksum
from pmae.data.fetch import BUILT_IN, FETCHABLE
from pmae.data.files import walk_images
from pmae.data.sets import NAMED, NO_LABEL, load, read_chunks
from pmae.errors import UserError

DOWNLOADED = sorted(set(NAMED) - {"digits", "photos"})


def write_medmnist(path: Path, side: int, classes: int) -> None:
    rng = np.random.default_rng(side)
    saved: dict[str, Any] = {}
    for split, n in (("train", 20), ("val", 10), ("test", 12)):
        saved[f"{split}_images"] = rng.integers(0, 256, (n, side, side, 3), dtype=np.uint8)
        saved[f"{split}_labels"] = (np.arange(n) % classes).astype(np.uint8)[:, None]
    np.savez(path, **saved)


def test_a_misspelt_name_gets_the_nearest_ones() -> None:
    with pytest.raises(UserError, match=r"unknown name 'cifra10'; did you mean 'cifar10'\?.*; nor is there a file"):
        load(DataConfig(source="cifra10"))


@pytest.mark.parametrize("source", ["./nowhere", "some/folder", "images.npz", "~/surely/not/there", "x" * 5000 + "/y"])
def test_a_missing_path_is_named(source: str) -> None:
    with pytest.raises(UserError, match=r"data.source: there is no file or folder"):
        load(DataConfig(source=source))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for name, rule in (("a.txt", r"a \.npy, \.npz, \.tar.* file"), ("a.csv", "the folder of those that a table names")):
        (tmp_path / name).write_text("1,2")
        with pytest.raises(UserError, match=rf"{rule}, got .*{name}"):
            load(DataConfig(source=str(tmp_path / name)))


@pytest.mark.parametrize("name", DOWNLOADED)
def test_a_missing_named_set_says_what_where_and_how(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        load(DataConfig(source=name, root=str(tmp_path)))
    message = str(caught.value)
    assert f"pmae data {name} --root {tmp_path}" in message
    assert repr(str(tmp_path)) in message
    assert any(file in message for file in ("_64.npz", "cifar-10-batches-py/", "tiny-imagenet-200/"))


def test_every_named_set_is_fetchable_or_built_in() -> None:
    assert set(NAMED) == {*FETCHABLE, *BUILT_IN}


@pytest.mark.parametrize("setting", [{"resize": 8}, {"channels": 1}, {"labels": "folders"}])
@pytest.mark.parametrize("source", ["digits", "photos", "file"])
def test_settings_for_folders_are_not_silently_dropped(tmp_path: Path, setting: dict[str, Any], source: str) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 4), np.uint8))
    with pytest.raises(UserError, match=f"data.{next(iter(setting))} is for folders"):
        load(DataConfig(source=str(tmp_path / "x.npy") if source == "file" else source, **setting))


def test_digits_are_all_there_split_by_class_and_always_alike() -> None:
    one, two = load(DataConfig(source="digits")), load(DataConfig(source="digits"))
    assert one.test is not None
    assert one.test.labels is not None
    assert one.train.labels is not None
    assert two.test is not None
    np.testing.assert_array_equal(one.test.images, two.test.images)
    pixels, labels = load_digits(return_X_y=True)
    ours = np.concatenate([one.train.images, one.test.images]).reshape(-1, 64)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, pixels.astype(np.uint8)))
    shares = np.bincount(one.test.labels) / np.bincount(labels)
    assert np.abs(shares - 0.25).max() < 0.01


@pytest.mark.parametrize("name", sorted(archives.MEDMNIST_64))
def test_medmnist_prefers_64_and_says_what_it_read(tmp_path: Path, name: str) -> None:
    classes = archives.MEDMNIST_CLASSES[name]
    write_medmnist(tmp_path / f"{name}.npz", 28, len(classes))
    small = load(DataConfig(source=name, root=str(tmp_path)))
    assert small.train.shape == (3, 28, 28)
    assert any(f"{name}_64.npz is not there" in note for note in small.notes)
    write_medmnist(tmp_path / f"{name}_64.npz", 64, len(classes))
    large = load(DataConfig(source=name, root=str(tmp_path)))
    assert large.name == name
    assert large.train.shape == (3, 64, 64)
    assert large.train.classes == classes
    assert large.val is not None
    assert len(large.val) == 10
    assert large.test is not None
    assert len(large.test) == 12
    assert large.test.labels is not None
    assert large.test.labels.tolist() == [i % len(classes) for i in range(12)]
    assert any("report results on it as rebuilt" in note for note in large.notes)


def test_a_published_medmnist_file_carries_no_rebuilt_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bloodmnist_64.npz"
    write_medmnist(path, 64, 8)
    true_copy = archives.MEDMNIST_64["bloodmnist"]._replace(digest=checksum(path, "MD5"))
    monkeypatch.setitem(archives.MEDMNIST_64, "bloodmnist", true_copy)
    notes = load(DataConfig(source="bloodmnist", root=str(tmp_path))).notes
    assert notes == ("read from bloodmnist_64.npz",)


def write_images(folder: Path, names: list[str]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (len(names), 6, 6, 3), dtype=np.uint8)
    for name, image in zip(names, images, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)


def test_files_are_walked_in_the_order_of_sorted_paths(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "a/b.png", "a/c/d.png", "a-b/1.png", "b/10.png", "b/9.png", "B/1.png"])
    (tmp_path / "a" / "notes.txt").write_text("no image")
    write_images(tmp_path, [".hidden/1.png", "b/.2.png"])
    shown = [path for path in tmp_path.rglob("*.png") if not any(p.startswith(".") for p in path.parts)]
    assert list(walk_images(tmp_path)) == sorted(shown)
    with pytest.raises(UserError, match="cannot be listed: No such file or directory"):
        list(walk_images(tmp_path / "gone"))


def test_chunks_are_what_load_gives(tmp_path: Path) -> None:
    names = [f"{split}/{i % 3}/{i}.png" for split in ("train", "val", "test") for i in range(7)]
    write_images(tmp_path, names)
    config = DataConfig(source=str(tmp_path), labels="folders")
    whole, source = load(config), read_chunks(config, 4)
    assert source.splits == ["train", "val", "test"]
    chunks = list(source.chunks)
    assert [(split, len(part)) for split, part in chunks] == [(s, n) for s in source.splits for n in (4, 3)]
    for split in source.splits:
        expected, parts = getattr(whole, split), [part for name, part in chunks if name == split]
        np.testing.assert_array_equal(np.concatenate([part.images for part in parts]), expected.images)
        np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), expected.labels)
        assert sum((part.names for part in parts), ()) == expected.names
        assert {part.classes for part in parts} == {expected.classes}


def test_a_split_can_be_read_alone_and_the_others_are_not_opened(tmp_path: Path) -> None:
    write_images(tmp_path, ["train/1.png", "test/2.png", "test/3.png"])
    (tmp_path / "train" / "broken.png").write_bytes(b"")
    source = read_chunks(DataConfig(source=str(tmp_path), max_unreadable=0), 8, "test")
    assert [part.names for _, part in source.chunks] == [("test/2.png", "test/3.png")]


def test_arrays_are_cut_in_slices_and_missing_labels_are_marked(tmp_path: Path) -> None:
    images = np.arange(5 * 6 * 7, dtype=np.uint16).reshape(5, 6, 7)
    np.save(tmp_path / "a.npy", images)
    source = read_chunks(DataConfig(source=str(tmp_path / "a.npy")), 2)
    chunks = [part for _, part in source.chunks]
    assert [len(part) for part in chunks] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([part.images for part in chunks])[:, 0], images)
    assert all(part.labels is None for part in chunks)
    np.savez(tmp_path / "b.npz", images=images, test_images=images[:2], test_labels=[3, 3])
    both = read_chunks(DataConfig(source=str(tmp_path / "b.npz")), 9)
    labels = [(split, part.labels.tolist()) for split, part in both.chunks]
    assert labels == [("train", [NO_LABEL] * 5), ("test", [0, 0])]
