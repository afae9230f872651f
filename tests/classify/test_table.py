"""Tables as they lie around: columns of other names, rows without labels, several images of one patient."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmae
from pmae.app.classifier import labelled_images
from pmae.classify.labels import LabelledData, as_splits, read_labelled, with_test, with_validation
from pmae.classify.model import load_classifier
from pmae.classify.table import Columns
from pmae.config import DataConfig
from pmae.data.augment import Standardize
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError
from pmae.evaluate.probes import online_probe
from pmae.evaluate.protocols import only, preset
from pmae.report.advice import advice
from pmae.report.contents import load
from pmae.runs import Run

from .conftest import write_table

Command = Callable[..., tuple[int, str]]
NAMES = {"file": "image_id", "label": "diagnosis", "group": "patient"}
WORDS = ["--columns", *(f"{what}={name}" for what, name in NAMES.items())]


def patients(folder: Path) -> list[dict[str, Any]]:
    """A row an image, four images a patient."""
    files = sorted(folder.rglob("*.png"))
    return [
        {"image_id": path.relative_to(folder).as_posix(), "diagnosis": path.parent.name, "patient": f"P{i // 4}"}
        for i, path in enumerate(files)
    ]


def of_patients(folder: Path, labelled: Path, rows: list[dict[str, Any]] | None = None) -> LabelledData:
    table = write_table(folder / "t.csv", patients(labelled) if rows is None else rows)
    return read_labelled(DataConfig(str(labelled)), table, Columns.named(NAMES))[1]


def scores(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())["scores"]


def test_other_names_and_rows_without_labels_are_as_if_they_were_renamed_and_removed(
    run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    rows = [{key: row[key] for key in ("image_id", "diagnosis")} for row in patients(labelled)]
    usual = write_table(tmp_path / "usual.csv", [{"file": r["image_id"], "label": r["diagnosis"]} for r in rows[::2]])
    for row in rows[1::2]:
        row["diagnosis"] = ""
    other = write_table(tmp_path / "other.csv", rows)
    start = ("finetune", run.path, "--data", labelled, "--method", "linear")
    code, said = command(*start, "--labels", other, *WORDS[:3], "--out", tmp_path / "a")
    assert code == 0, said
    assert "30 of the 60 rows of other.csv have no diagnosis and are left out" in said
    assert command(*start, "--labels", usual, "--out", tmp_path / "b")[0] == 0
    assert scores(tmp_path / "a") == scores(tmp_path / "b")


def test_a_class_may_be_called_as_python_calls_infinity(labelled: Path, tmp_path: Path) -> None:
    rows = patients(labelled)
    for row, name in zip(rows, ("inf", "nan", "sup") * 20, strict=True):
        row["diagnosis"] = name
    assert of_patients(tmp_path, labelled, rows).classes == ("inf", "nan", "sup")
    rows[0]["diagnosis"] = "1e3"
    with pytest.raises(UserError, match=r"diagnosis in row 2 .* must be a name or a whole number, got '1e3'"):
        of_patients(tmp_path, labelled, rows)


def test_no_patient_is_both_trained_on_and_held_out(labelled: Path, tmp_path: Path) -> None:
    data = with_validation(of_patients(tmp_path, labelled), 0.15, seed=0)
    assert data.val is not None
    train, val = data.train.images.groups, data.val.images.groups
    assert train is not None
    assert val is not None
    assert not set(train) & set(val)
    assert len(val) == 12
    assert set(data.val.targets) == set(data.train.targets) == {0, 1, 2}
    assert any("12 of 60 training images, all of 3 groups, are held out to stop" in note for note in data.notes)


@pytest.mark.parametrize("seed", range(4))
def test_a_patient_of_half_the_images_is_trained_on(seed: int, labelled: Path, tmp_path: Path) -> None:
    rows = patients(labelled)
    for row in rows[1::2]:
        row["patient"] = "seen for years"
    data = with_validation(of_patients(tmp_path, labelled, rows), 0.15, seed)
    assert data.val is not None
    assert 9 <= len(data.val.targets) <= 12


def test_patients_with_labels_that_nobody_else_has_together_are_held_out(
    run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    draw = np.random.default_rng(0).random((60, 8)) < 0.4
    rows = [
        {
            "file": row["image_id"],
            "patient": row["patient"],
            **{f"finding {i}": int(there) for i, there in enumerate(own)},
        }
        for row, own in zip(patients(labelled), draw, strict=True)
    ]
    table = write_table(tmp_path / "t.csv", rows)
    given = ("--data", labelled, "--labels", table, "--columns", WORDS[-1], "--method", "linear")
    code, said = command("finetune", run.path, *given, "--out", tmp_path / "clf")
    assert code == 0, said
    (held,) = re.findall(r"(\d+) of 60 training images, all of \d groups, are held out to stop", said)
    assert 8 <= int(held) <= 20


def test_a_test_part_is_asked_for_and_shares_no_patient(
    run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    data = with_validation(with_test(of_patients(tmp_path, labelled), 0.2, seed=0), 0.15, seed=0)
    assert data.test is not None
    assert data.val is not None
    parts = [part.images.groups for part in (data.train, data.val, data.test)]
    kinds = [set(groups) for groups in parts if groups is not None]
    assert sum(map(len, kinds)) == len(set.union(*kinds)) == 15
    how = ("--labels", tmp_path / "t.csv", *WORDS, "--method", "linear", "--test", "0.2")
    code, said = command("finetune", run.path, "--data", labelled, *how, "--out", tmp_path / "clf")
    assert code == 0, said
    assert "12 of 60 training images, all of 3 groups, are held out to score on" in said
    assert [(score["split"], score["images"]) for score in scores(tmp_path / "clf")] == [("val", 12), ("test", 12)]
    assert command("report", tmp_path / "clf", "-o", tmp_path / "clf.html")[0] == 0
    told = (tmp_path / "clf.html").read_text(encoding="utf-8")
    assert told.count("Intervals are over its 3 groups.") == 2
    again = labelled_images(str(tmp_path / "clf"), load_classifier(tmp_path / "clf"), None, pytest.fail)
    assert again is not None, "the explorer finds the images again by the same columns"
    assert len(again.targets) == 60


def test_an_evaluation_holds_patients_out_whole(run: Run, labelled: Path, tmp_path: Path, command: Command) -> None:
    table = write_table(tmp_path / "t.csv", patients(labelled))
    how = ("--protocols", "knn", "--no-baselines")
    code, said = command("evaluate", run.path, "--data", labelled, "--labels", table, *WORDS, *how)
    assert code == 0, said
    assert "12 images (20%, stratified, seed 0, whole groups) of its training split are held out as test" in said
    (score,) = (score for score in load(run.path).scores if score.pooling == "mean")
    assert np.bincount(score.groups).tolist().count(4) == 3
    knn = only(preset("strong"), ["knn"])
    pmae.evaluate(run, knn, baselines=False, device="cpu", data=labelled, labels=table, columns=NAMES, figures=False)
    typed, called = (found.scores for found in run.evaluations[-2:])
    assert typed == called, "in Python as from the command line"
    use = next(one.command for one in advice(load(run.path)) if one.title == "Use it")
    assert f" --data {labelled} --labels {table} {shlex.join(WORDS)} --out " in use, "as it can be copied"
    usual = [{**row, "patient": str(i)} for i, row in enumerate(patients(labelled))]
    assert (
        command("evaluate", run.path, "--data", labelled, "--labels", write_table(table, usual), *WORDS, *how)[0] == 0
    )
    (alone,) = (score for score in load(run.path).scores if score.pooling == "mean")
    assert np.bincount(alone.groups).max() == 1
    data = as_splits(of_patients(tmp_path, labelled))
    pmae.evaluate(run, knn, data, baselines=False, device="cpu", figures=False)
    assert load(run.path).labelled == {}, "the images scored last came from memory, and have no options"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "fil=image_id"], "--columns: unknown name 'fil'; did you mean 'file'?"),
        (["--columns", "file"], "--columns must be given as WHAT=NAME, such as label=diagnosis, got 'file'"),
        (
            [*WORDS[:3], "group=person"],
            "t.csv (image_id, diagnosis, patient, split), got 'person'",
        ),
        (
            [*WORDS[:3], "split=fold"],
            "t.csv (image_id, diagnosis, patient, split), got 'fold'",
        ),
        (WORDS, "group 'P0' must be of one split, as its images are alike (patient in"),
        ([], "got ['diagnosis', 'image_id', 'patient', 'split']; columns, as in label=NAME, say what"),
    ],
)
def test_what_is_wrong_with_columns_is_one_sentence(
    words: list[str], message: str, run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    rows = [{**row, "split": ["train", "test"][i % 2]} for i, row in enumerate(patients(labelled))]
    table = write_table(tmp_path / "t.csv", rows)
    start = ("finetune", run.path, "--data", labelled, "--labels", table, "--out", tmp_path / "clf")
    code, said = command(*start, *words)
    assert code == 2
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "clf").exists()


def test_pretraining_is_watched_by_a_table_of_other_names(labelled: Path, tmp_path: Path, command: Command) -> None:
    folder = shutil.copytree(labelled, tmp_path / "images")
    write_table(folder / "scans.csv", patients(folder))
    size = ("--encoder.width", "16", "--encoder.depth", "1", "--encoder.heads", "2", "--device", "cpu", "--epochs", "1")
    given = ("pretrain", "--data", labelled, *size, "--probe-data", folder / "scans.csv")
    code, said = command(*given, "--probe.columns", *WORDS[1:], "--out", tmp_path / "run")
    assert code == 0, said
    assert "quick k-NN, validation images" in said
    code, said = command(*given, "--out", tmp_path / "other")
    assert (code, "--probe-data: labels: " in said, len(said.splitlines())) == (2, True, 1), said


def test_no_patient_is_on_both_sides_of_what_watches_pretraining() -> None:
    groups = np.repeat(np.arange(12), 3)
    images = np.broadcast_to(groups[:, None, None, None], (36, 1, 4, 4)).astype(np.float32)
    train = ImageSet(images, groups % 2, ("a", "b"), groups=groups)
    standardize, seen = Standardize(torch.zeros(1, 1, 1), torch.ones(1, 1, 1)), list[set[float]]()

    class Pixels(nn.Module):
        def features(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append(set(x[:, 0, 0, 0].tolist()))
            return {"mean": x.flatten(1)}

    online_probe(Splits("scans", train))(Pixels(), standardize, torch.device("cpu"))  # type: ignore[arg-type]
    fitted, scored = seen
    assert scored
    assert not fitted & scored


@pytest.mark.parametrize("words", ["finetune {run} --labels {table}", "pretrain --data.labels folders --epochs 1"])
def test_a_split_of_which_nothing_can_be_read_is_one_sentence(
    words: str, run: Run, labelled: Path, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(labelled, folder / "train")
    (folder / "test" / "down").mkdir(parents=True)
    (folder / "test" / "down" / "x.png").write_text("no picture")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.png"))
    rows = [{"file": file.as_posix(), "label": file.parts[1], "split": file.parts[0]} for file in files]
    table = write_table(tmp_path / "t.csv", rows)
    given = words.format(run=run.path, table=table).split()
    code, said = command(*given, "--data", folder, "--out", tmp_path / "out")
    assert code == 2
    assert "--data must have a readable image in every split, got none in test: 'test/down/x.png'" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_columns_that_are_called_alike_are_refused(labelled: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("file,label,label\nacross/000.png,a,b\ndown/020.png,b,a\n")
    with pytest.raises(
        UserError, match=r"labels: .*t.csv must be a table whose columns have different names, got .*'label', 'label'"
    ):
        read_labelled(DataConfig(str(labelled)), table)


def test_a_patient_without_a_name_is_refused_by_the_row_of_the_file(labelled: Path, tmp_path: Path) -> None:
    rows = patients(labelled)
    rows[0]["diagnosis"] = rows[5]["patient"] = ""
    with pytest.raises(ValueError, match=r"^patient in row 7 of .*t.csv must be a name or a number, got 'nothing'"):
        of_patients(tmp_path, labelled, rows)


def test_groups_follow_their_images(labelled: Path, tmp_path: Path) -> None:
    whole = of_patients(tmp_path, labelled).train.images
    assert whole.groups is not None
    some = np.array([50, 3, 20])
    assert whole.take(some).groups is not None
    for part in (whole.take(some), whole.take(some).loaded()):
        assert part.groups is not None
        assert part.groups.tolist() == whole.groups[some].tolist()


def test_a_column_called_group_is_one_of_groups_only_where_it_is_named(labelled: Path, tmp_path: Path) -> None:
    """It may be those that were treated, or a class."""
    rows = [{"file": r["image_id"], "label": r["diagnosis"], "group": "treated"} for r in patients(labelled)]
    table = write_table(tmp_path / "t.csv", rows)
    assert read_labelled(DataConfig(str(labelled)), table)[1].train.images.groups is None
    classes = [{"file": r["image_id"], "group": i % 2, "other": i % 3 // 2} for i, r in enumerate(patients(labelled))]
    found = read_labelled(DataConfig(str(labelled)), write_table(tmp_path / "u.csv", classes))[1]
    assert found.classes == ("group", "other")


def test_columns_without_data_are_refused(run: Run) -> None:
    with pytest.raises(UserError, match="data must be given beside labels or columns, got None"):
        pmae.evaluate(run, columns=NAMES)
