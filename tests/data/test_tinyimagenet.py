"""The tiny-imagenet-200 tree, written here in small."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pmae.config import DataConfig
from pmae.data.sets import load
from pmae.errors import UserError


def save(path: Path, *shape: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)).save(path)


def write_tinyimagenet(root: Path) -> Path:
    tree = root / "tiny-imagenet-200"
    for wnid in ("n02", "n01"):
        for j in range(2):
            save(tree / "train" / wnid / "images" / f"{wnid}_{j}.JPEG", 64, 64, 3)
        (tree / "train" / wnid / f"{wnid}_boxes.txt").write_text("0\t0\t1\t1\n")
    save(tree / "val" / "images" / "val_0.JPEG", 64, 64)
    save(tree / "val" / "images" / "val_1.JPEG", 64, 64, 3)
    (tree / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    save(tree / "test" / "images" / "test_0.JPEG", 64, 64, 3)
    (tree / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\ttench\nn03\tshark\n")
    return tree


@pytest.mark.parametrize("by_name", [True, False])
def test_tiny_imagenet_tree(tmp_path: Path, by_name: bool) -> None:
    tree = write_tinyimagenet(tmp_path)
    splits = load(DataConfig("tinyimagenet", root=str(tmp_path)) if by_name else DataConfig(str(tree)))
    assert splits.train.classes == ("goldfish", "tench")
    assert splits.train.shape == (3, 64, 64)
    assert splits.train.labels is not None
    assert splits.train.labels.tolist() == [0, 0, 1, 1]
    assert splits.val is None
    assert splits.test is not None
    assert splits.test.labels is not None
    assert splits.test.labels.tolist() == [1, 0]
    assert splits.test.names == ("val/images/val_0.JPEG", "val/images/val_1.JPEG")
    assert any("no labels" in note for note in splits.notes)


def test_tiny_imagenet_with_an_unknown_class_is_refused(tmp_path: Path) -> None:
    tree = write_tinyimagenet(tmp_path)
    (tree / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t9\t9\n")
    with pytest.raises(UserError, match="n99"):
        load(DataConfig(str(tree)))
