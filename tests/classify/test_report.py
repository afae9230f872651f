"""`pmae report clf`: the page says what the classifier does, and a damaged folder is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import calibration_curve

import pmae
from pmae.classify import FinetuneConfig
from pmae.classify.calibrate import BINS, calibration_error, reliability
from pmae.report.classifier import advice, share_of, verdict
from pmae.report.classifier_contents import load
from pmae.runs import Run

from .conftest import stripes, write_folder, write_table

Command = Callable[..., tuple[int, str]]


def test_the_reliability_diagram_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    claimed, targets = rng.dirichlet((1, 1, 1), 500), rng.integers(0, 3, 500)
    bins = reliability(claimed, targets)
    right, sure = calibration_curve(claimed.argmax(1) == targets, claimed.max(1), n_bins=BINS)
    np.testing.assert_allclose([(b.claimed, b.right) for b in bins], np.stack([sure, right], 1))
    assert sum(b.images for b in bins) == 500
    gaps = np.abs(sure - right) @ np.array([b.images for b in bins]) / 500
    assert calibration_error(bins) == pytest.approx(gaps)


def test_a_share_has_wilsons_interval() -> None:
    """By the formula: the centre and half-width of 8 of 10 at z = 1.96."""
    p, n, z = 0.8, 10, 1.959964
    centre, half = (p + z**2 / (2 * n)) / (1 + z**2 / n), z / (1 + z**2 / n) * np.sqrt(p * 0.2 / n + z**2 / (4 * n**2))
    found = share_of(8, 10)
    assert (found.value, found.low, found.high) == pytest.approx((80, 100 * (centre - half), 100 * (centre + half)))
    assert share_of(0, 0).value is None


@pytest.fixture(scope="module")
def tested(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of few and untinted images, which is often wrong, scored on a test part."""
    folder = tmp_path_factory.mktemp("tested")
    for seed, split in enumerate(("train", "val", "test")):
        write_folder(folder / "d" / split, 12, seed, tint=0)
    (folder / "d/test/across/000.png").rename(folder / "d/test/across/<b>.png")
    pmae.finetune(run, folder / "d", folder / "clf", FinetuneConfig(method="linear"), device="cpu")
    return folder / "clf"


def test_the_page_says_what_the_classifier_does(tested: Path, tmp_path: Path, command: Command) -> None:
    code, said = command("report", tested, "-o", tmp_path / "clf.html")
    assert (code, said) == (0, f"report: {tmp_path / 'clf.html'}\n")
    page, files = (tmp_path / "clf.html").read_text(), {path.name for path in (tmp_path / "clf_files").iterdir()}
    assert {"reliability.png", "confusion.svg", "coverage.csv", "classes.md", "mistakes.csv", "metrics.csv"} <= files
    labels = np.repeat(np.arange(3), 12)
    found = pmae.load_classifier(tested, "cpu").predict_proba(stripes(labels, seed=2, tint=0))
    right = found.argmax(1) == labels
    assert f"right for {right.mean():.1%} of 36 images" in page
    assert "Always answering the commonest class would be right for 33.3%." in page
    lines = (tmp_path / "clf_files/coverage.csv").read_text().splitlines()[1:]
    for line, least in zip(lines, (0.5, 0.8, 0.9, 0.95, 0.99), strict=True):
        sure = found.max(1) >= least
        count, share = line.split(",")[1:4:2]
        assert int(count) == sure.sum()
        assert not sure.any() or float(share) == pytest.approx(100 * right[sure].mean())
    named = [line.split(",") for line in (tmp_path / "clf_files/mistakes.csv").read_text().splitlines()[1:]]
    assert [float(line[3]) for line in named] == pytest.approx(100 * np.sort(found.max(1)[~right])[::-1][: len(named)])
    assert len(named) == min(12, (~right).sum())
    assert "<b>.png" not in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which nothing fetches


def test_the_verdict_follows_the_numbers(tested: Path, linear: Path, tmp_path: Path) -> None:
    told = json.loads((tested / "results.json").read_text())
    shutil.copytree(tested, tmp_path / "c")

    def with_test(**changes: Any) -> Any:
        changed = {**told, "scores": [told["scores"][0], {**told["scores"][1], **changes}]}
        (tmp_path / "c/results.json").write_text(json.dumps(changed))
        return load(tmp_path / "c", "c")

    sharp = {"accuracy": {"value": 0.95, "low": 0.93, "high": 0.97}}
    table = [[400, 0, 0], [10, 390, 0], [200, 0, 200]]
    good = with_test(metrics=sharp, confusion=table, images=1200)
    assert verdict(good).kind == "yes"
    (weak,) = (own.words for own in advice(good) if own.title == "Weakest class")
    assert all(part in weak for part in ("'slanted'", "'across'", "200 of 400"))
    assert verdict(with_test(metrics={"accuracy": {"value": 0.4, "low": 0.3, "high": 0.5}})).kind == "no"
    wide = with_test(metrics={"accuracy": {"value": 0.9, "low": 0.7, "high": 1.0}})
    assert verdict(wide).kind == "open"
    assert any("About 139 held-out" in own.words for own in advice(wide))  # 0.9 * 0.1 * (1.96 / 0.05)^2
    assert any("into test/" in own.words for own in advice(load(linear, "linear")))
    assert list(advice(load(linear, "linear")))[-1].command.startswith(f"pmae predict {linear} --data new/")


def test_several_labels_an_image_and_several_classifiers(
    run: Run, labelled: Path, linear: Path, tmp_path: Path, command: Command
) -> None:
    files = sorted(labelled.rglob("*.png"))
    rows = [
        {"file": str(path.relative_to(labelled)), "bars": i % 2, "dots": i % 3 // 2} for i, path in enumerate(files)
    ]
    table = write_table(tmp_path / "t.csv", rows)
    pmae.finetune(run, labelled, tmp_path / "c", FinetuneConfig(method="linear"), labels=table, device="cpu")
    assert command("report", linear, tmp_path / "c", "-o", tmp_path / "r.html")[0] == 0
    page = (tmp_path / "r.html").read_text()
    assert "All labels are right for" in page
    assert "average precision (%)" in page
    assert page.count("<figure>") == 3
    alone = load(tmp_path / "c", "c")
    assert not alone.main.coverage, "which probability an answer has is not asked of several"
    (rough,) = (own.words for own in advice(alone) if own.title == "Rough probabilities")
    assert "diagram of how often answers are right" in rough
    assert command("report", tmp_path / "c", "-o", tmp_path / "c.html")[0] == 0
    assert "With 95% intervals." in page
    assert "With 95% intervals." not in (tmp_path / "c.html").read_text()


def test_a_damaged_or_foreign_folder_is_one_sentence(tested: Path, run: Run, tmp_path: Path, command: Command) -> None:
    code, said = command("report", tested, run.path, "-o", tmp_path / "r.html")
    assert (code, "classifiers or runs, not both" in said) == (2, True)
    shutil.copytree(tested, tmp_path / "c")
    for text, message in (
        ("{}", "'scores'"),
        ('{"scores": [], "data": {}}', "got none"),
        ('{"scores": [{"metrics": {"accuracy": 7}}], "data": {}}', "must have 'calibration'"),
        ("no JSON", "results.json"),
    ):
        (tmp_path / "c/results.json").write_text(text)
        code, said = command("report", tmp_path / "c", "-o", tmp_path / "r.html")
        assert (code, len(said.splitlines())) == (2, 1), said
        assert message in said
    assert not (tmp_path / "r.html").exists()
