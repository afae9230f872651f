"""Tables of images, written by `datasets` itself: Arrow folders and parquet files, files and arrays, with classes."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from pmae.config import DataConfig
from pmae.data import tables
from pmae.data.batches import Batches
from pmae.data.images import ImageSet
from pmae.data.ondemand import OnDemand
from pmae.data.sets import load, read_chunks
from pmae.errors import UserError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (60, 8, 6, 3), dtype=np.uint8)
FIRST = PIXELS.transpose(0, 3, 1, 2)
FEATURES = datasets.Features({"label": datasets.ClassLabel(names=["cat", "dog"]), "image": datasets.Image()})


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


def pictures(numbers: range) -> datasets.Dataset:
    columns = {"label": [i % 2 for i in numbers], "image": [Image.fromarray(PIXELS[i]) for i in numbers]}
    return datasets.Dataset.from_dict(columns, features=FEATURES)


def source(path: Path | str, **settings: Any) -> ImageSet:
    return load(DataConfig(source=str(path), **settings)).train


def assert_same(found: ImageSet, pixels: np.ndarray) -> None:
    assert isinstance(found.images, OnDemand)
    np.testing.assert_array_equal(found.images[:], pixels)
    backwards = np.arange(len(pixels))[::-1].copy()
    np.testing.assert_array_equal(found.images[backwards], pixels[::-1])


def test_a_saved_data_set_and_its_splits(tmp_path: Path) -> None:
    whole = {"train": pictures(range(50)), "validation": pictures(range(50, 56)), "test": pictures(range(56, 60))}
    datasets.DatasetDict(whole).save_to_disk(tmp_path / "dict", num_shards={"train": 3, "validation": 1, "test": 1})
    splits = load(DataConfig(source=str(tmp_path / "dict")))
    assert splits.val is not None
    assert splits.test is not None
    for part, numbers in ((splits.train, range(50)), (splits.val, range(50, 56)), (splits.test, range(56, 60))):
        assert_same(part, FIRST[numbers])
        assert part.labels is not None
        assert (part.labels.tolist(), part.classes) == ([i % 2 for i in numbers], ("cat", "dog"))
    whole["train"].save_to_disk(tmp_path / "one")
    assert_same(source(tmp_path / "one"), FIRST[:50])
    chunks = [part for _, part in read_chunks(DataConfig(source=str(tmp_path / "one")), 20).chunks]
    assert ([len(part) for part in chunks], chunks[0].names[:2]) == ([20, 20, 10], ("row 0", "row 1"))


def test_labels_of_text_are_classes_over_all_splits(tmp_path: Path) -> None:
    for name, numbers, labels in (
        ("train", range(4), ["owl", "cat", "owl", "dog"]),
        ("test", range(4, 6), ["dog", "ä"]),
    ):
        table = pictures(numbers).remove_columns("label").add_column("label", labels)
        table.to_parquet(tmp_path / f"{name}.parquet")
    splits = load(DataConfig(source=str(tmp_path)))
    assert splits.test is not None
    for part, labels in ((splits.train, [2, 0, 2, 1]), (splits.test, [1, 3])):
        assert part.labels is not None
        assert (part.labels.tolist(), part.classes) == (labels, ("cat", "dog", "owl", "ä"))
    unknown = pictures(range(2)).remove_columns("label").add_column("label", ["cat", None])
    unknown.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match="must be whole numbers or text, one for each image, got 'object'"):
        source(tmp_path)


def test_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pictures(range(40)).to_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", batch_size=7)
    pictures(range(40, 50)).to_parquet(tmp_path / "data" / "train-00001-of-00002.parquet")
    pictures(range(50, 60)).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    splits = load(DataConfig(source=str(tmp_path)))
    assert splits.test is not None
    assert_same(splits.train, FIRST[:50])
    assert_same(splits.test, FIRST[50:])
    assert splits.train.classes == ("cat", "dog")
    assert_same(source(tmp_path / "data" / "train-*.parquet"), FIRST[:50])


def test_parquet_is_shuffled_in_windows_and_keeps_few_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(range(60)).to_parquet(tmp_path / "a.parquet", batch_size=6)
    size = max(
        pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(i).total_byte_size for i in range(10)
    )
    monkeypatch.setattr(tables, "KEPT_BYTES", 3 * size)
    found = source(tmp_path / "a.parquet", threads=1)
    batches = Batches(found.images, torch.device("cpu"))
    order = batches.order(torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(60))
    windows = [set((part // 6).tolist()) for part in order.split(18)]
    assert [len(window) for window in windows] == [3, 3, 3, 1]
    assert order[:18].tolist() != sorted(order[:18].tolist())
    assert torch.equal(order, batches.order(torch.Generator().manual_seed(0)))
    reads: list[int] = []
    original = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "read_row_group", lambda self, i, *a: reads.append(i) or original(self, i, *a)
    )
    assert torch.equal(torch.cat(list(batches.each(order.split(5)))), torch.from_numpy(FIRST.copy())[order])
    assert sorted(reads) == list(range(10))
    kept = found.take(np.arange(3, 60, 2))
    part = Batches(kept.images, torch.device("cpu")).order(torch.Generator().manual_seed(0))
    assert sorted(part.tolist()) == list(range(29))
    assert len(set((kept.images._positions[part[:9]] // 6).tolist())) <= 4  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int16"])
def test_arrays(tmp_path: Path, dtype: str) -> None:
    values = (100 * RNG.normal(size=(9, 6, 5, 2))).astype(dtype)
    table = datasets.Dataset.from_dict(
        {"x": list(values)}, features=datasets.Features({"x": datasets.Array3D((6, 5, 2), dtype)})
    )
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "a.parquet")
    for path in (tmp_path / "saved", tmp_path / "a.parquet"):
        assert_same(source(path), values.transpose(0, 3, 1, 2))
        assert source(path).images.dtype == dtype
    grey = datasets.Dataset.from_dict(
        {"x": list(values[..., 0])}, features=datasets.Features({"x": datasets.Array2D((6, 5), dtype)})
    )
    grey.save_to_disk(tmp_path / "grey")
    assert_same(source(tmp_path / "grey"), values[:, None, :, :, 0])


def test_paths_broken_rows_and_hidden_labels(tmp_path: Path) -> None:
    for i in range(4):
        Image.fromarray(PIXELS[i]).save(tmp_path / f"{i}.png")
    column = [{"bytes": (tmp_path / f"{i}.png").read_bytes(), "path": f"{i}.png"} for i in range(4)]
    # A row that only names a file, were it there or not.
    column[2] = {"bytes": None, "path": str(tmp_path / "2.png")}
    features = {"image": {"_type": "Image"}, "label": {"names": ["a"], "_type": "ClassLabel"}}
    table = pyarrow.table({"image": column, "label": [-1] * 4})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = source(tmp_path / "a.parquet")
    assert found.labels is None
    with pytest.warns(UserWarning, match="sample 2.*does not hold the bytes"):
        np.testing.assert_array_equal(found.images[:], FIRST[[0, 1, 3, 3]])
    assert (found.names[0], found.names[3]) == ("0.png", "3.png")


def test_plain_bytes_are_images_and_other_tables_are_refused(tmp_path: Path) -> None:
    files = [io.BytesIO() for _ in range(3)]
    for file, pixels in zip(files, PIXELS, strict=False):
        Image.fromarray(pixels).save(file, "PNG")
    plain = pyarrow.table({"id": [1, 2, 3], "picture": [file.getvalue() for file in files]})
    pyarrow.parquet.write_table(plain, tmp_path / "plain.parquet")
    assert_same(source(tmp_path / "plain.parquet"), FIRST[:3])
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0]}), tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"must have a column of images, got a"):
        source(tmp_path / "none.parquet")
    pyarrow.parquet.write_table(plain.slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match=r"empty\.parquet holds no rows"):
        source(tmp_path / "empty.parquet")
    for name in ("cut.parquet", "cut.arrow"):
        (tmp_path / name).write_bytes((tmp_path / "plain.parquet").read_bytes()[:-20])
        with pytest.raises(UserError, match=f"{name} cannot be read as a table"):
            source(tmp_path / name)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(range(2)).to_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'pmae\[stream\]'"):
        source(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_no_file_that_a_row_names_is_opened(tmp_path: Path, suffix: str) -> None:
    Image.fromarray(PIXELS[0]).save(tmp_path / "secret.png")
    os.mkfifo(tmp_path / "fifo.png")
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    paths = [str(tmp_path / "secret.png"), "secret.png", "../secret.png", "fifo.png", "/dev/zero", "in.png\0", "."]
    rows = [{"bytes": None, "path": path} for path in paths]
    rows.append({"bytes": (tmp_path / "secret.png").read_bytes(), "path": "../../up.png"})
    table, file = pyarrow.table({"image": pyarrow.array(rows, kind)}), tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.warns(UserWarning, match="does not hold the bytes") as told:
        images = source(file, max_unreadable=7).loaded()
    np.testing.assert_array_equal(images.images, FIRST[[0]])
    assert (len(told), images.names) == (7, ("../../up.png",))


def test_an_arrow_file_with_offsets_beyond_its_end_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [b"0123456789"] * 3})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    data = (tmp_path / "a.arrow").read_bytes()
    offsets = np.array([0, 10, 20, 30], "<i4").tobytes()
    assert data.count(offsets) == 1
    for wrong in ([0, 10, 2**31 - 8, 2**31 - 4], [0, -(2**30), 20, 30], [0, 20, 10, 30]):
        (tmp_path / "a.arrow").write_bytes(data.replace(offsets, np.array(wrong, "<i4").tobytes()))
        with pytest.raises(UserError, match=r"a\.arrow cannot be read as a table"):
            source(tmp_path / "a.arrow")


IMAGE: dict[str, Any] = {"_type": "Image"}
ARRAY: dict[str, Any] = {"_type": "Array2D", "shape": [2, 2], "dtype": "uint8"}


def noted_as(**features: Any) -> bytes:
    return json.dumps({"info": {"features": features}}).encode()


@pytest.mark.parametrize(
    "noted",
    [
        b"{",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"info": [1]}',
        b'{"info": {"features": [1]}}',
        b"\xff\xfe",
        noted_as(image={**ARRAY, "shape": None}),
        noted_as(image={"_type": "Array2D"}),
        noted_as(image={**ARRAY, "dtype": "object"}),
        noted_as(image={**ARRAY, "dtype": [7]}),
        noted_as(image=IMAGE, label={"_type": "ClassLabel", "names": 3}),
        noted_as(image=IMAGE, label={"_type": "ClassLabel", "names": [1]}),
    ],
)
def test_odd_metadata_is_one_sentence(tmp_path: Path, noted: bytes) -> None:
    table = pyarrow.table({"image": [b"x", b"y"], "label": [0, 1]}).replace_schema_metadata({"huggingface": noted})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"data\.source.*a\.parquet"):
        source(tmp_path / "a.parquet")


def test_odd_metadata_of_a_column_that_says_nothing_is_passed_over(tmp_path: Path) -> None:
    pictures(range(3)).to_parquet(tmp_path / "a.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    for noted in (b"{}", b'{"info": null}', b'{"info": {"features": {"image": 3, "label": null}}}'):
        pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": noted}), tmp_path / "a.parquet")
        assert_same(source(tmp_path / "a.parquet"), FIRST[:3])


def test_columns_of_one_name_and_files_that_differ_are_refused(tmp_path: Path) -> None:
    twice = pyarrow.table([pyarrow.array([b"x"]), pyarrow.array([b"y"])], names=["image", "image"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet must have columns of different names"):
        source(tmp_path / "twice.parquet")
    (tmp_path / "set").mkdir()
    pictures(range(3)).to_parquet(tmp_path / "set" / "0.parquet")
    others: list[dict[str, Any]] = [{"image": [b"x"]}, {"picture": [b"x"], "label": [1]}, {"a": [1.0]}]
    for other in others:
        pyarrow.parquet.write_table(pyarrow.table(other), tmp_path / "set" / "1.parquet")
        with pytest.raises(UserError, match=r"1\.parquet"):
            source(tmp_path / "set")
