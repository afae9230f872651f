"""The embedded photographs: where they come from, disjoint splits, a task neither trivial nor void."""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier

from pmae.data import named
from pmae.errors import UserError


def test_counts_shapes_and_speed() -> None:
    start = time.perf_counter()
    splits = named.load_photos()
    assert time.perf_counter() - start < 5
    assert splits.test is not None
    assert splits.train.labels is not None
    assert splits.test.labels is not None
    assert splits.train.shape == splits.test.shape == (3, 32, 32)
    assert splits.train.images.dtype == np.uint8
    assert 4000 <= len(splits.train) <= 6000
    assert 1000 <= len(splits.test) <= 1700
    assert len(splits.train.classes) == 17 == len(set(splits.train.classes))
    assert len(set(np.bincount(splits.train.labels))) == len(set(np.bincount(splits.test.labels))) == 1
    np.testing.assert_array_equal(splits.train.images, named.load_photos().train.images)


def test_splits_share_no_pixel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A picture whose every pixel has its own colour shows where each crop was cut."""
    rows, columns = np.indices((160, 240), dtype=np.uint8)
    Image.fromarray(np.stack([rows, columns, columns], 2)).save(tmp_path / "columns.png")
    monkeypatch.setattr(named, "photo_paths", lambda: [tmp_path / "columns.png"])
    splits = named.load_photos()
    seen = []
    for part in (splits.train, splits.val, splits.test):
        assert part is not None
        seen.append(set(map(tuple, part.images[:, :2].transpose(0, 2, 3, 1).reshape(-1, 2).tolist())))
    assert sum(map(len, seen)) == 160 * 240, "no pixel is in two of them"
    assert set.union(*seen) == {(row, column) for row in range(160) for column in range(240)}


def test_no_test_crop_is_a_training_crop() -> None:
    splits = named.load_photos()
    assert splits.test is not None
    train = {crop.tobytes() for crop in splits.train.images if crop.std() > 0}
    assert not any(crop.tobytes() in train for crop in splits.test.images)
    assert len(train) > 0.98 * len(splits.train)


def test_the_task_is_neither_trivial_nor_void() -> None:
    splits = named.load_photos()
    assert splits.test is not None
    train, test = (part.images.reshape(len(part), -1) / 255 for part in (splits.train, splits.test))
    pca = PCA(32, random_state=0).fit(train)
    accuracy = (
        KNeighborsClassifier(10)
        .fit(pca.transform(train), splits.train.labels)
        .score(pca.transform(test), splits.test.labels)
    )
    assert 4 / 17 < accuracy < 0.8


def test_a_package_without_the_picture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "PHOTOS", {"skimage/data": ("nothing_here.png",)})
    with pytest.raises(UserError, match=r"nothing_here.png"):
        named.load_photos()
    monkeypatch.setattr(named, "PHOTOS", {"no_such_package/data": ("a.png",)})
    with pytest.raises(UserError, match="no_such_package"):
        named.load_photos()
