"""Sources in chunks: the same images, labels and names as when they are read whole."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pmae.config import DataConfig
from pmae.data.chunks import NO_LABEL, stream
from pmae.data.readers.folder import walk_images
from pmae.data.sets import load
from pmae.errors import UserError


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
    whole, source = load(config), stream(config, 4)
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
    source = stream(DataConfig(source=str(tmp_path), max_unreadable=0), 8, "test")
    assert [part.names for _, part in source.chunks] == [("test/2.png", "test/3.png")]


def test_arrays_are_cut_in_slices_and_missing_labels_are_marked(tmp_path: Path) -> None:
    images = np.arange(5 * 2 * 3, dtype=np.uint16).reshape(5, 2, 3)
    np.save(tmp_path / "a.npy", images)
    source = stream(DataConfig(source=str(tmp_path / "a.npy")), 2)
    chunks = [part for _, part in source.chunks]
    assert [len(part) for part in chunks] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([part.images for part in chunks])[:, 0], images)
    assert all(part.labels is None for part in chunks)
    np.savez(tmp_path / "b.npz", images=images, test_images=images[:2], test_labels=[3, 3])
    labels = [(split, part.labels.tolist()) for split, part in stream(DataConfig(source=str(tmp_path / "b.npz")), 9)[1]]
    assert labels == [("train", [NO_LABEL] * 5), ("test", [0, 0])]
