"""`pmae finetune`: each method, each form of labels, resuming, calibration; and mistakes, told in one sentence."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from scipy.special import softmax
from sklearn.calibration import CalibratedClassifierCV
from sklearn.covariance import LedoitWolf
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix

import pmae
from pmae.classify import FinetuneConfig, fit
from pmae.classify.calibrate import calibration_error, fit_reference, fit_temperature, nll, reliability
from pmae.classify.finetune import finetune
from pmae.classify.fit import loss_for, regression
from pmae.cli import main
from pmae.evaluate import finetune as loop
from pmae.evaluate import progress
from pmae.evaluate.probes import logistic_regression
from pmae.runs import Run
from pmae.train import journal

from .conftest import CLASSES, make_run, stripes, write_folder, write_table

Command = Callable[..., tuple[int, str]]
QUICK = ("--epochs", "4", "--device", "cpu")


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_lowers_the_validation_loss_and_is_kept(
    method: str, run: Run, tmp_path: Path, command: Command
) -> None:
    out, labelled = tmp_path / "clf", write_folder(tmp_path / "labelled", 20, tint=0)  # hard for a linear head
    more = ("--method", method, "--augment", "none", "--epochs", 15, "--patience", 15, "--lr", 3e-3, "--device", "cpu")
    code, said = command("finetune", run.path, "--data", labelled, "--out", out, *more)
    assert code == 0, said
    told = results(out)["training"]
    assert told["losses"][0] < 2 * np.log(3), "an epoch begins where a guess would be, not far above it"
    assert f"kept: the weights of epoch {told['best_epoch']}" in said
    assert "at most 15 epochs; it stops after 15 without a lower validation loss" in said
    value, low, high = (results(out)["scores"][0]["metrics"]["accuracy"][name] for name in ("value", "low", "high"))
    assert f"accuracy {value:.3f} (95% interval {low:.3f} to {high:.3f})" in said
    assert "val was used to choose" in said
    assert min(told["validation_losses"]) < 0.9 * told["validation_losses"][0]
    assert told["best_epoch"] == np.argmin(told["validation_losses"]) > 0
    assert sorted(path.name for path in out.iterdir()) == ["classifier.json", "classifier.safetensors", "results.json"]
    kept = pmae.load_classifier(out, "cpu")
    start = load_file(run.checkpoint() / "encoder.safetensors")
    assert kept.encoder.net.state_dict().keys() == start.keys()
    changed = [name for name, value in kept.encoder.net.state_dict().items() if not torch.equal(value, start[name])]
    adapted = {"blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight"}
    assert adapted <= set(changed)
    assert method == "full" or all(name.endswith("weight") and "blocks" in name for name in changed)


def test_how_long_it_takes_is_told_before_it_begins(
    run: Run, labelled: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(fit, "LONG", 0.0)
    code, said = command("finetune", run.path, "--data", labelled, "--out", tmp_path / "clf", *QUICK)
    assert code == 0, said
    assert re.search(r"features, \d+ of \d+ images, about 0:00:0\d left", said)
    assert re.search(
        r"at most 4 epochs, about 0:0\d:\d\d on this CPU \(a linear head alone took 0:00:0\d: --method linear\)", said
    )


def test_a_linear_head_is_that_of_scikit_learn(linear: Path, labelled: Path) -> None:
    kept = pmae.load_classifier(linear, "cpu")
    told = results(linear)["training"]
    assert told["penalty"] == float(min(told["validation_losses"], key=told["validation_losses"].get))
    assert results(linear)["scores"][0]["metrics"]["accuracy"]["value"] > 0.8
    labels = np.repeat(np.arange(3), 30)
    assert (np.array(kept.predict(stripes(labels, seed=5))) == np.array(CLASSES)[labels]).mean() > 0.8


def test_regression_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    targets = rng.choice(3, 200, p=[0.7, 0.2, 0.1])
    x = rng.normal(size=(200, 4)) + targets[:, None] * 0.5
    weight, bias = regression(x, targets, 1.0, balanced=False)
    theirs = logistic_regression(torch.from_numpy(x), torch.from_numpy(targets), 3, 1.0).numpy()
    np.testing.assert_allclose(softmax(x @ weight.T + bias, 1), softmax(x @ theirs[:-1] + theirs[-1], 1), atol=5e-3)


@pytest.mark.parametrize("shape", [(90,), (90, 2)])
def test_balanced_weights_leave_no_class_likelier(shape: tuple[int, ...]) -> None:
    """Where images tell nothing, the answer is even odds, however rare a class is."""
    targets = (np.arange(90) % 9 == 0).astype(np.int64)
    targets = targets if len(shape) == 1 else np.stack([targets, 1 - targets], 1).astype(np.float32)
    _, plain = regression(np.zeros((90, 3)), targets, 1.0, balanced=False)
    _, even = regression(np.zeros((90, 3)), targets, 1.0, balanced=True)
    np.testing.assert_allclose(even, 0, atol=1e-3)
    odds = np.log(1 / 8) * (np.array([-0.5, 0.5]) if len(shape) == 1 else np.array([1, -1]))
    np.testing.assert_allclose(plain, odds, atol=1e-2)
    loss = loss_for(torch.from_numpy(targets), 2, "balanced")
    logits = torch.zeros(90, 2, requires_grad=True)
    loss(logits, torch.from_numpy(targets), 0.0).backward()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.sum(0).numpy(), 0, atol=1e-6)


def test_temperature_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4000, 3)), rng.integers(0, 3, 4000)
    x[np.arange(4000), y] += 1.0
    over = LogisticRegression(C=1e6).fit(x, y)
    over.coef_, over.intercept_ = 4 * over.coef_, 4 * over.intercept_  # four times too sure
    theirs = CalibratedClassifierCV(FrozenEstimator(over), method="temperature").fit(x, y)
    found = fit_temperature(over.decision_function(x), y)
    assert found == pytest.approx(4.0, rel=0.05)
    ours = softmax(over.decision_function(x) / found, 1)
    np.testing.assert_allclose(ours, theirs.predict_proba(x), atol=5e-3)
    before = softmax(over.decision_function(x), 1)
    assert calibration_error(reliability(ours, y)) < 0.03 < calibration_error(reliability(before, y))


def test_a_few_images_all_answered_right_make_nothing_certain() -> None:
    logits, targets = 10 * np.eye(3)[np.arange(6) % 3], np.arange(6) % 3
    sure = softmax(logits / fit_temperature(logits, targets), 1).max()
    assert 0.85 < sure < 0.95


def test_distances_are_those_of_scikit_learn() -> None:
    features = np.random.default_rng(0).normal(size=(60, 8)) @ np.random.default_rng(1).normal(size=(8, 8))
    found = fit_reference(features[:40], features[40:])
    theirs = np.sqrt(LedoitWolf().fit(features[:40]).mahalanobis(features[40:]))
    np.testing.assert_allclose(found.distances(features[40:]), theirs, rtol=1e-6)
    assert found.threshold == pytest.approx(np.quantile(theirs, 0.99))


def table_of(folder: Path, label: Callable[[Path], Any] = lambda path: path.parent.name) -> list[dict[str, Any]]:
    files = sorted(folder.rglob("*.png"))
    return [{"file": path.relative_to(folder).as_posix(), "label": label(path)} for path in files]


def in_folders(folder: Path, labelled: Path) -> list[object]:
    return ["--data", labelled, "--labels", "folders"]


def in_csv(folder: Path, labelled: Path) -> list[object]:
    return ["--data", labelled, "--labels", write_table(folder / "t.csv", table_of(labelled))]


def in_semicolons(folder: Path, labelled: Path) -> list[object]:
    table = write_table(folder / "t.csv", table_of(labelled))
    table.write_text(table.read_text().replace(",", ";"))
    return ["--data", labelled, "--labels", table]


def in_parquet(folder: Path, labelled: Path) -> list[object]:
    rows = [{**row, "file": str(labelled / row["file"])} for row in table_of(labelled)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "t.parquet")
    return ["--data", folder / "t.parquet"]


def in_npz(folder: Path, labelled: Path) -> list[object]:
    labels = np.repeat(np.arange(3), 20)
    np.savez(folder / "t.npz", images=stripes(labels), labels=labels)
    return ["--data", folder / "t.npz"]


@pytest.mark.parametrize("form", [in_folders, in_csv, in_semicolons, in_parquet, in_npz])
def test_labels_come_in_every_form(
    form: Any, run: Run, labelled: Path, linear: Path, tmp_path: Path, command: Command
) -> None:
    code, said = command("finetune", run.path, *form(tmp_path, labelled), "--method", "linear", "--out", tmp_path / "c")
    assert code == 0, said
    ours, theirs = load_file(tmp_path / "c/classifier.safetensors"), load_file(linear / "classifier.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    classes = json.loads((tmp_path / "c/classifier.json").read_text())["classes"]
    assert classes == (["0", "1", "2"] if form is in_npz else list(CLASSES))


@pytest.mark.filterwarnings("error")
def test_many_classes_of_two_images_are_no_cause_for_warnings(run: Run, tmp_path: Path) -> None:
    images = stripes(np.arange(60) % 3)
    np.savez(tmp_path / "t.npz", images=images, labels=np.arange(60) // 2)
    kept = finetune(run, tmp_path / "t.npz", tmp_path / "c", FinetuneConfig(method="linear"), device="cpu")
    assert len(kept.classes) == 30


@pytest.mark.parametrize("names", [("-1", "7", "007"), ("²", "--3", "1.b"), ("日本", "été à Paris", "1_2")])
def test_labels_may_be_any_names(
    names: tuple[str, ...], run: Run, labelled: Path, linear: Path, tmp_path: Path, command: Command
) -> None:
    called = dict(zip(CLASSES, names, strict=True))
    table = write_table(tmp_path / "t.csv", table_of(labelled, lambda path: called[path.parent.name]))
    given = ("--data", labelled, "--labels", table, "--method", "linear", "--out", tmp_path / "c")
    code, said = command("finetune", run.path, *given)
    assert code == 0, said
    kept = pmae.load_classifier(tmp_path / "c", "cpu")
    assert set(kept.classes) == set(names)
    images = stripes(np.repeat(np.arange(3), 9), seed=3)
    own = pmae.load_classifier(linear, "cpu").predict(images)
    assert kept.predict(images) == [called[name] for name in own]


def test_a_table_may_have_spaces_and_other_names_of_splits(
    run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    splits = ("Training", "valid", "test", "train")
    lines = [f"{row['file']}, {row['label']}, {splits[i % 4]}" for i, row in enumerate(table_of(labelled))]
    (tmp_path / "t.csv").write_text("\n".join(["file, label, split", *lines]))
    given = ("--data", labelled, "--labels", tmp_path / "t.csv", "--method", "linear", "--out", tmp_path / "c")
    code, said = command("finetune", run.path, *given)
    assert code == 0, said
    assert "30 train, 15 val, 15 test images, 3 classes" in said


@pytest.mark.usefixtures("no_figures")
def test_tables_are_evaluated_on_as_folders_are(labelled: Path, tmp_path: Path, command: Command) -> None:
    run = make_run(tmp_path / "run")
    for given in (["--data", labelled], in_csv(tmp_path, labelled), in_parquet(tmp_path, labelled)):
        code, said = command("evaluate", run.path, *given, "--protocols", "knn", "--no-baselines", "--device", "cpu")
        assert code == 0, said
    folder, *tables = (evaluation.scores for evaluation in run.evaluations)
    assert [[score.accuracy for score in scores] for scores in tables] == [[score.accuracy for score in folder]] * 2
    several = write_table(tmp_path / "several.csv", table_of(labelled, lambda path: f"{path.parent.name};new"))
    code, said = command("evaluate", run.path, "--data", labelled, "--labels", several)
    assert (code, "labels must be of one class an image to be evaluated, got " in said) == (2, True)


@pytest.mark.parametrize("method", ["linear", "full"])
@pytest.mark.parametrize("columns", [True, False])
def test_images_may_have_several_labels_or_none(
    method: str, columns: bool, run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    several = {"across": "bars", "down": "bars;upright", "slanted": ""}
    rows = table_of(labelled, lambda path: several[path.parent.name])
    if columns:
        names = ("bars", "upright")
        rows = [{"file": row["file"], **{name: int(name in row["label"]) for name in names}} for row in rows]
    table = write_table(tmp_path / "t.csv", rows)
    more = ("--method", method, "--class-weights", "balanced", *(QUICK if method == "full" else QUICK[2:]))
    code, said = command("finetune", run.path, "--data", labelled, "--labels", table, *more, "--out", tmp_path / "c")
    assert code == 0, said
    kept = pmae.load_classifier(tmp_path / "c", "cpu")
    assert kept.classes == ("bars", "upright")
    (score,) = results(tmp_path / "c")["scores"]
    if method == "linear":
        assert score["metrics"]["mean_average_precision"] > 0.8
        assert set(kept.predict(stripes(np.repeat(np.arange(3), 9), seed=3))) <= {"", "bars", "upright", "bars;upright"}
    assert [row["name"] for row in score["per_class"]] == ["bars", "upright"]
    asked = ("--data", labelled, "--top-k", "2", "-o", tmp_path / "p.csv")
    code, said = command("predict", tmp_path / "c", *asked)
    rule = "--top-k must be 1 where images may have several labels, each of which has its probability, got 2"
    assert (code, rule in said) == (2, True), said
    assert not (tmp_path / "p.csv").exists()


def test_results_say_confusion_and_calibration_on_a_test_part(run: Run, tmp_path: Path, command: Command) -> None:
    for seed, split in enumerate(("train", "val", "test")):
        write_folder(tmp_path / "d" / split, 12, seed)
    code, said = command("finetune", run.path, "--data", tmp_path / "d", "--method", "linear", "--out", tmp_path / "c")
    assert code == 0, said
    val, test = results(tmp_path / "c")["scores"]
    assert (val["split"], test["split"], test["images"]) == ("val", "test", 36)
    kept, labels = pmae.load_classifier(tmp_path / "c", "cpu"), np.repeat(np.arange(3), 12)
    found = kept.predict_proba(stripes(labels, seed=2))
    assert test["confusion"] == confusion_matrix(labels, found.argmax(1)).tolist()
    assert test["calibration"]["nll"] == pytest.approx(nll(np.log(found), labels), abs=1e-6)
    assert "calibration_error" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method linear --epochs 5", "--epochs must be left out for a linear head, whose fit has no epochs, got 5"),
        ("--method linear --lr 0.1", "--lr must be left out for a linear head, whose fit has no epochs, got 0.1"),
        ("--method linear --patience 3", "--patience must be left out for a linear head"),
        ("--rank 4", "--rank must be left out but for method lora, got 4"),
    ],
)
def test_a_setting_that_a_method_does_not_have_is_refused(
    words: str, message: str, run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    code, said = command("finetune", run.path, "--data", labelled, *words.split(), "--out", tmp_path / "c")
    assert (code, message in said) == (2, True), said
    assert not (tmp_path / "c").exists()


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_killed_training_is_resumed_to_the_same_weights(
    method: str, run: Run, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PAUSE", 0.0)
    monkeypatch.setattr(journal, "PLAIN_SECONDS", 0.0)
    config = FinetuneConfig(method=method, epochs=4, patience=2)  # type: ignore[arg-type]
    finetune(run, labelled, tmp_path / "whole", config, device="cpu")

    def kill(message: str) -> None:
        if message.startswith("epoch 2/"):
            raise Killed

    with pytest.raises(Killed):
        finetune(run, labelled, tmp_path / "parts", config, device="cpu", say=kill)
    with pytest.raises(pmae.errors.UserError, match=r"finetune\.patience must be 2 to be resumed, got 3"):
        finetune(run, labelled, tmp_path / "parts", replace(config, patience=3), device="cpu", resume=True)
    finetune(run, labelled, tmp_path / "parts", config, device="cpu", resume=True)
    assert (tmp_path / "parts/results.json").read_text() == (tmp_path / "whole/results.json").read_text()
    parts, whole = (load_file(tmp_path / name / "classifier.safetensors") for name in ("parts", "whole"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_training_stops_when_the_validation_loss_falls_no_more(run: Run, labelled: Path, tmp_path: Path) -> None:
    config = FinetuneConfig(epochs=30, patience=2, lr=0.3, augment="none")
    finetune(run, labelled, tmp_path / "c", config, device="cpu")
    told = results(tmp_path / "c")["training"]
    start, *losses = told["validation_losses"]
    assert told["epochs"] < 30
    assert 1 + int(np.argmin(losses)) == told["epochs"] - 2
    assert told["best_epoch"] == int(np.argmin([start, *losses]))


def test_weights_of_timm_and_of_hugging_face_are_a_start(labelled: Path, tmp_path: Path, command: Command) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=16, patch_size=4, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "hf")
    transformers.ViTImageProcessor(image_mean=[0.4] * 3, image_std=[0.2] * 3).save_pretrained(tmp_path / "hf")
    net = timm.create_model("resnet10t", num_classes=5)
    save_file(net.state_dict(), tmp_path / "resnet.safetensors")
    cases = {"hf": [tmp_path / "hf"], "timm": [tmp_path / "resnet.safetensors", "--encoder", "resnet10t"]}
    for name, words in cases.items():
        out = tmp_path / f"clf-{name}"
        code, said = command("finetune", *words, "--data", labelled, "--resize", 8, "--method", "linear", "--out", out)
        assert code == 0, said
        assert len(pmae.load_classifier(out, "cpu").predict(stripes(np.arange(3)))) == 3
    code, said = command("finetune", tmp_path / "hf", "--data", labelled, "--resize", 9, "--out", tmp_path / "odd")
    assert (code, "the patches of the weights, of 4 pixels, divide (for files resize=8), got 9x9" in said) == (
        2,
        True,
    )
    mean = load_file(tmp_path / "clf-hf/classifier.safetensors")["standardize.mean"]
    np.testing.assert_allclose(mean.flatten(), 0.4 * 255, rtol=1e-5)


# Mistakes: one sentence, exit code 2, nothing written.


def one_image(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 3)
    for path in sorted((folder / "down").iterdir())[1:]:
        path.unlink()
    return ["--data", folder]


def other_classes(tmp: Path) -> list[object]:
    for split in ("train", "test"):
        write_folder(tmp / "d" / split, 3)
    (tmp / "d/test/down").rename(tmp / "d/test/up")
    return ["--data", tmp / "d"]


def missing_file(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    return ["--data", write_table(folder / "t.csv", [*table_of(folder), {"file": "gone.png", "label": "down"}])]


def elsewhere(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    rows = [{**row, "file": f"d/{row['file']}"} for row in table_of(folder)]
    return ["--data", folder, "--labels", write_table(tmp / "t.csv", rows)]


def no_suffix(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    rows = [{**row, "file": row["file"].removesuffix(".png")} for row in table_of(folder)]
    return ["--data", write_table(folder / "t.csv", rows)]


def other_columns(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    rows = [{"file": row["file"], "treatment": row["label"]} for row in table_of(folder)]
    return ["--data", write_table(folder / "t.csv", rows)]


def no_file_column(tmp: Path) -> list[object]:
    return ["--data", write_table(tmp / "t.csv", [{"image_id": "a", "label": "b"}])]


def twice(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    rows = [{**row, "split": "train"} for row in table_of(folder)]
    return ["--data", write_table(folder / "t.csv", [*rows, {**rows[0], "split": "test"}])]


def floats(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    return ["--data", write_table(folder / "t.csv", table_of(folder, lambda path: 0.5))]


def other_split(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    return ["--data", write_table(folder / "t.csv", [{**row, "split": "holdout"} for row in table_of(folder)])]


def no_label(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    rows = table_of(folder)
    for row in rows:
        row["label"] = ""
    return ["--data", write_table(folder / "t.csv", rows)]


def same_images(tmp: Path) -> list[object]:
    for split in ("train", "test"):
        write_folder(tmp / "d" / split, 3)
    return ["--data", tmp / "d"]


def long_row(tmp: Path) -> list[object]:
    folder = write_folder(tmp / "d", 2)
    lines = [f"{row['file']},{row['label']},more" for row in table_of(folder)]
    (folder / "t.csv").write_text("\n".join(["file,label", *lines]))
    return ["--data", folder / "t.csv"]


def no_parquet(tmp: Path) -> list[object]:
    (tmp / "t.parquet").write_bytes(b"no table")
    return ["--data", tmp / "t.parquet"]


def other_shape(tmp: Path) -> list[object]:
    np.savez(tmp / "t.npz", images=np.zeros((6, 9, 9, 3), np.uint8), labels=np.arange(6) % 2)
    return ["--data", tmp / "t.npz"]


def alike(tmp: Path) -> list[object]:
    rows = [{"image": path.read_bytes(), "label": 0} for path in sorted(write_folder(tmp / "d", 2).rglob("*.png"))]
    noted = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["crane", "crane"]}}}}
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(noted)})
    pyarrow.parquet.write_table(table, tmp / "t.parquet")
    return ["--data", tmp / "t.parquet"]


def no_number(tmp: Path) -> list[object]:
    images = stripes(np.arange(6) % 3).astype(np.float32)
    images[5, 0, 0, 0] = np.nan
    np.savez(tmp / "t.npz", images=images, labels=np.arange(6) % 3)
    return ["--data", tmp / "t.npz"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (no_number, "the train images must be finite numbers, got NaN or infinity in 1 of 6 images"),
        (alike, "classes must be names of which no two are alike, got ('crane', 'crane')"),
        (one_image, "class 'down' must be of at least 2 training images, got 1"),
        (other_classes, "labels of test must be classes of train (across, down, slanted), got 'up'"),
        (
            same_images,
            "test must be of images that are not trained on, got 9 of 9 that are, such as 'test/across/000.png'",
        ),
        (long_row, "t.csv must be of 2 cells, as its header"),
        (no_parquet, "t.parquet cannot be read as a table"),
        (missing_file, "got 1 that are not: gone.png"),
        (elsewhere, "they lie below the folder of the table, which can be given as data, alone"),
        (
            no_suffix,
            "got 6 that are not: across/000, across/001, down/002, down/003, slanted/004, ...; file names have",
        ),
        (other_columns, "is a class where none is called 'label' (columns label=NAME), got 'across'"),
        (no_file_column, "must be a table with a column 'file', and 'label' or one for each class, got ['image_id',"),
        (twice, "must name every file once, got 'across/000.png' in row 2 (train) and row 8 (test)"),
        (floats, "must be a name or a whole number, got '0.5'"),
        (lambda tmp: ["--data", tmp, "--labels", "nowhere.csv"], "labels: there is no file 'nowhere.csv'"),
        (no_label, "must be a class in some of the rows, got 'nothing in all of them'"),
        (other_split, "t.csv must be one of train, val, test, got 'holdout'"),
        (other_shape, "that the run was trained on, 3 channels of 8x8, got 3 channels of 9x9; give arrays of"),
        (lambda tmp: ["--data", "digits", "--epochs", "0"], ": --epochs must be at least 1, got 0"),
        (lambda tmp: ["--data", tmp / "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    wrong: Any, message: str, run: Run, tmp_path: Path, command: Command
) -> None:
    code, said = command("finetune", run.path, *wrong(tmp_path), "--out", tmp_path / "clf")
    assert code == 2
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "clf").exists()


def test_what_takes_no_table_asks_for_its_folder(run: Run, labelled: Path, tmp_path: Path, command: Command) -> None:
    table = write_table(tmp_path / "t.csv", table_of(labelled))
    for words in (("pretrain", "--out"), ("embed", run.path, "-o")):
        code, said = command(*words, tmp_path / "new.csv", "--data", table)
        assert code == 2
        assert said.endswith(f"must be images, here the folder of those that a table names, got {table}\n")


def test_an_unreadable_file_is_told_once_and_the_time_left_at_the_end(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_folder(tmp_path / "d", 6), tmp_path / "clf"
    (folder / "down" / "broken.png").write_bytes(b"no image")
    assert main(["finetune", str(run.path), "--data", str(folder), "--out", str(out), "--epochs", "2"]) == 0
    said = capsys.readouterr()
    assert (said.err.count("broken.png"), said.out.count("broken.png")) == (1, 0)
    assert any("broken.png" in note for note in results(out)["data"]["notes"])
    assert re.search(r"^epoch 2/2  loss \d.*  validation loss \d.*  0:00:00 left at most$", said.out, re.MULTILINE)


def test_a_finished_or_foreign_folder_is_left_alone(
    run: Run, linear: Path, labelled: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for out, message in ((linear, "which has one; name another"), (tmp_path, "must be a new or an empty folder")):
        code, said = command("finetune", run.path, "--data", labelled, "--out", out)
        assert (code, message in said) == (2, True)


def test_a_start_that_is_none_is_one_sentence(
    run: Run, linear: Path, labelled: Path, tmp_path: Path, command: Command
) -> None:
    resnet = make_run(tmp_path / "resnet", "resnet10t")
    for start, more, message in (
        (
            tmp_path / "nowhere",
            (),
            "run must be a folder that pretraining wrote, or weights that timm or Hugging Face did",
        ),
        (linear, (), "not a classifier, got"),
        (resnet.path, ("--pooling", "cls"), "pooling must be mean or patches for an encoder without a [CLS] token"),
    ):
        code, said = command("finetune", start, "--data", labelled, *more, "--out", tmp_path / "clf")
        assert (code, len(said.splitlines()), message in said) == (2, 1, True), said
        assert not (tmp_path / "clf").exists()


def test_without_peft_the_extra_is_named(
    run: Run, labelled: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    code, said = command("finetune", run.path, "--data", labelled, "--method", "lora", "--out", tmp_path / "clf")
    assert (code, "pip install 'pmae[lora]'" in said) == (2, True)
    assert not (tmp_path / "clf").exists()


def test_a_damaged_classifier_is_refused_by_name(linear: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(linear, tmp_path / "c")
    card = json.loads((tmp_path / "c/classifier.json").read_text())
    (tmp_path / "c/classifier.json").write_text(json.dumps({**card, "classes": ["a"]}))
    code, said = command("predict", tmp_path / "c", "--data", "digits", "-o", tmp_path / "p.csv")
    assert code == 2
    assert "head.weight in" in said
    code, said = command("predict", tmp_path, "--data", "digits", "-o", tmp_path / "p.csv")
    assert (code, "folder that `pmae finetune` wrote" in said) == (2, True)
