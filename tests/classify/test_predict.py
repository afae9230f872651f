"""`pmae predict` and exports: what a classifier says is the same by every door, and what it cannot read is named."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow.parquet
import pytest
import timm
import torch
from PIL import Image
from scipy.special import softmax

import pmae
from pmae.classify import FinetuneConfig
from pmae.classify.finetune import finetune
from pmae.errors import UserError
from pmae.runs import Run

from .conftest import CLASSES, SIDE, make_run, stripes, write_folder

Command = Callable[..., tuple[int, str]]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Seven images of each class, one of noise, one that cannot be read."""
    folder = write_folder(tmp_path / "new", 7, seed=9)
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def test_the_table_says_what_the_classifier_says(linear: Path, new: Path, tmp_path: Path, command: Command) -> None:
    code, said = command("predict", linear, "--data", new, "--top-k", 2, "--probabilities", "-o", tmp_path / "p.csv")
    assert code == 0
    assert "unreadable: 'broken.png'" in said
    rows, kept = rows_of(tmp_path / "p.csv"), pmae.load_classifier(linear, "cpu")
    every = [f"p_{name}" for name in kept.classes]
    likeliest = ["label", "probability", "label_2", "probability_2"]
    assert list(rows[0]) == ["file", *likeliest, *every, "distance", "drifted"]
    readable = [str(path.relative_to(new)) for path in sorted(new.rglob("*.png")) if path.name != "broken.png"]
    assert sorted(row["file"] for row in rows) == sorted(readable)
    images = np.stack([np.asarray(Image.open(new / row["file"])) for row in rows])
    found = kept.predict_proba(images)
    assert [row["label"] for row in rows] == kept.predict(images)
    np.testing.assert_allclose([float(row["probability"]) for row in rows], found.max(1), atol=1e-6)
    np.testing.assert_allclose([float(row["probability_2"]) for row in rows], np.sort(found, 1)[:, -2], atol=1e-6)
    np.testing.assert_allclose([[float(row[name]) for name in every] for row in rows], found, atol=1e-6)
    assert [row["drifted"] for row in rows if row["file"] == "noise.png"] == ["1"]
    assert sum(row["drifted"] == "1" for row in rows) < 8


def test_one_image_is_a_folder_of_one(linear: Path, new: Path, tmp_path: Path, command: Command) -> None:
    assert command("predict", linear, "--data", new, "-o", tmp_path / "all.csv")[0] == 0
    expected = next(row for row in rows_of(tmp_path / "all.csv") if row["file"] == "noise.png")
    code, said = command("predict", linear, "--data", new / "noise.png", "-o", tmp_path / "one.csv")
    assert (code, "one.csv: 1 image, 1 unlike" in said) == (0, True), said
    assert rows_of(tmp_path / "one.csv") == [expected]
    code, said = command("predict", linear, "--data", new / "broken.png", "-o", tmp_path / "none.csv")
    assert (code, "--data must have at least one readable image, got none: 'broken.png'" in said) == (2, True), said
    assert not (tmp_path / "none.csv").exists()


def test_grey_files_of_another_size_are_read_for_the_encoder(run: Run, tmp_path: Path, command: Command) -> None:
    """By fine-tuning and by prediction, though the settings of the run name neither a size nor channels."""
    folder = write_folder(tmp_path / "some", 4)
    for path in folder.rglob("*3.png"):
        Image.open(path).convert("L").resize((20, 12)).save(path)
    assert command("finetune", run.path, "--data", folder, "--method", "linear", "--out", tmp_path / "clf")[0] == 0
    assert command("predict", tmp_path / "clf", "--data", folder, "-o", tmp_path / "p.csv")[0] == 0
    rows = rows_of(tmp_path / "p.csv")
    files = [Image.open(folder / row["file"]).convert("RGB") for row in rows]
    assert {file.size for file in files} == {(8, 8), (20, 12)}
    square = [((f.width - f.height) / 2, 0, (f.width + f.height) / 2, f.height) for f in files]
    made = [f.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box) for f, box in zip(files, square, strict=True)]
    found = pmae.load_classifier(tmp_path / "clf", "cpu").predict_proba(np.stack([np.asarray(image) for image in made]))
    np.testing.assert_allclose([float(row["probability"]) for row in rows], found.max(1), atol=0.01)


def test_parquet_arrays_and_small_batches_say_the_same(linear: Path, tmp_path: Path, command: Command) -> None:
    labels = np.arange(40) % 3
    np.save(tmp_path / "new.npy", stripes(labels, seed=4))
    for size, name in ((256, "a.parquet"), (7, "b.csv")):
        more = ("--batch-size", size, "-o", tmp_path / name)
        assert command("predict", linear, "--data", tmp_path / "new.npy", *more)[0] == 0
    table, rows = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist(), rows_of(tmp_path / "b.csv")
    assert [row["label"] for row in table] == [row["label"] for row in rows]
    ours, theirs = ([float(row["probability"]) for row in each] for each in (table, rows))
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert (np.array([row["label"] for row in table]) == np.array(CLASSES)[labels]).mean() > 0.8


def test_arrays_of_several_splits_are_told_apart(linear: Path, tmp_path: Path, command: Command) -> None:
    """Rows of an array have no file name, so that without their split nobody could say whose they are."""
    kinds = {"train": np.arange(9) % 3, "test": np.arange(5) % 3}
    arrays = {f"{name}_images": stripes(labels, seed=6) for name, labels in kinds.items()}
    np.savez(tmp_path / "new.npz", **arrays, **{f"{name}_labels": labels for name, labels in kinds.items()})
    assert command("predict", linear, "--data", tmp_path / "new.npz", "-o", tmp_path / "p.csv")[0] == 0
    rows = rows_of(tmp_path / "p.csv")
    assert [row["split"] for row in rows] == ["train"] * 9 + ["test"] * 5
    assert (
        command("predict", linear, "--data", tmp_path / "new.npz", "--split", "test", "-o", tmp_path / "t.csv")[0] == 0
    )
    expected = [{key: value for key, value in row.items() if key != "split"} for row in rows[9:]]
    assert rows_of(tmp_path / "t.csv") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "p.txt"], "-o must end in .csv or .parquet, got 'p.txt'"),
        (["-o", "p.csv", "--top-k", "4"], "--top-k must be from 1 to the number of classes (3), got 4"),
        (["-o", "p.csv", "--resize", "9"], "data must have images of the shape"),
        (["-o", "p.csv", "--max-unreadable", "0"], "--max-unreadable"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    words: list[str], message: str, linear: Path, new: Path, tmp_path: Path, monkeypatch: Any, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = command("predict", linear, "--data", new, *words)
    assert (code, message in said) == (2, True), said
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


@pytest.mark.filterwarnings("ignore:the images are float32")
def test_no_number_gets_no_answer(linear: Path, tmp_path: Path, command: Command) -> None:
    images = stripes(np.arange(3)).astype(np.float32)
    images[1, 2, 2, 0] = np.nan
    np.save(tmp_path / "new.npy", images)
    code, said = command("predict", linear, "--data", tmp_path / "new.npy", "-o", tmp_path / "p.csv")
    assert (code, "--data must be finite numbers, got NaN or infinity in 1 of 3 images" in said) == (2, True), said
    assert not (tmp_path / "p.csv").exists()
    with pytest.raises(UserError, match="NaN or infinity in 1 of 3 images"):
        pmae.load_classifier(linear, "cpu").predict(images)
    with pytest.raises(UserError, match="with nothing empty"):
        pmae.load_classifier(linear, "cpu").predict(images[:0].transpose(0, 3, 1, 2))


@pytest.fixture(scope="module")
def by_token(run: Run, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier on [CLS], as transformers' own ViT has it."""
    out = tmp_path_factory.mktemp("classifiers") / "cls"
    finetune(run, labelled, out, FinetuneConfig(method="linear", pooling="cls"), device="cpu")
    return out


def test_timm_gives_the_same_probabilities(linear: Path, tmp_path: Path, command: Command) -> None:
    assert command("export", linear, "--format", "timm", "-o", tmp_path / "x")[0] == 0
    net = timm.create_model(f"local-dir:{tmp_path / 'x'}", pretrained=True).eval()
    assert list(net.pretrained_cfg["label_names"]) == list(CLASSES)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net))
    images = stripes(np.arange(6) % 3, seed=2)
    with torch.no_grad():
        logits = net(torch.stack([transform(Image.fromarray(image)) for image in images])).numpy()
    np.testing.assert_allclose(softmax(logits, 1), pmae.load_classifier(linear, "cpu").predict_proba(images), atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_transformers_gives_the_same_probabilities(
    pooling: str, linear: Path, by_token: Path, tmp_path: Path, command: Command
) -> None:
    transformers = pytest.importorskip("transformers")
    path = linear if pooling == "mean" else by_token
    assert command("export", path, "--format", "huggingface", "-o", tmp_path / "x")[0] == 0
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "x").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "x")
    assert [model.config.id2label[number] for number in range(3)] == list(CLASSES)
    assert isinstance(model, transformers.ViTForImageClassification) == (pooling == "cls")
    images = stripes(np.arange(6) % 3, seed=2)
    with torch.no_grad():
        logits = model(**processor([Image.fromarray(image) for image in images], return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(softmax(logits, 1), pmae.load_classifier(path, "cpu").predict_proba(images), atol=1e-4)


def test_onnxruntime_gives_the_same_probabilities(linear: Path, tmp_path: Path, command: Command) -> None:
    assert command("export", linear, "--format", "onnx", "-o", tmp_path / "x")[0] == 0
    session = onnxruntime.InferenceSession(tmp_path / "x/classifier.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)
    images = stripes(np.arange(6) % 3, seed=2)
    raw = images.transpose(0, 3, 1, 2).astype(np.float32)
    (found,) = session.run(["probabilities"], {"images": raw})
    np.testing.assert_allclose(found, pmae.load_classifier(linear, "cpu").predict_proba(images), atol=1e-4)
    assert "image-classification" in (tmp_path / "x/README.md").read_text()


def test_a_resnet_is_exported_too(labelled: Path, tmp_path: Path, command: Command) -> None:
    resnet = make_run(tmp_path / "run", "resnet10t")
    finetune(resnet, labelled, tmp_path / "clf", FinetuneConfig(method="linear"), device="cpu")
    assert command("export", tmp_path / "clf", "--format", "timm", "-o", tmp_path / "timm")[0] == 0
