"""`pmae report clf`: the page says what the classifier does, and a damaged folder is named."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve

import pmae
from pmae.classify import FinetuneConfig
from pmae.classify.calibrate import BINS, calibration_error, reliability
from pmae.evaluate.metrics import evaluate_scores, share_of
from pmae.intervals import wilson
from pmae.report.classifier import advice, verdict
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


@pytest.mark.parametrize(("right", "count"), [(8, 10), (0, 7), (7, 7), (3, 500)])
def test_a_share_has_wilsons_interval(right: int, count: int) -> None:
    found, judge = wilson(right, count), binomtest(right, count).proportion_ci(method="wilson")
    assert (found.value, found.low, found.high) == pytest.approx((right / count, judge.low, judge.high), abs=1e-6)
    assert wilson(0, 0).value is None


def test_where_images_are_of_groups_an_interval_is_over_these() -> None:
    """As wide as that of resampled groups; and copies of an image tell no more than the image."""
    rng = np.random.default_rng(0)
    right = np.arange(400) % 400 < 260
    for groups in (np.arange(400) // 4, rng.integers(60, size=400)):
        scores, labels = np.stack([~right, right], 1).astype(float), np.ones(400, int)
        judge, found = evaluate_scores(scores, labels, 4000, groups=groups)["accuracy"], share_of(right, groups)
        assert (found.value, found.low, found.high) == pytest.approx((judge.value, judge.low, judge.high), abs=0.015)
    copied, groups = np.repeat(right[::40], 40), np.repeat(np.arange(10), 40)
    assert share_of(copied, groups).high - share_of(copied, groups).low > 0.5
    assert share_of(np.ones(40), groups[:40] + np.arange(40) % 4) == wilson(4, 4)
    assert share_of(right) == wilson(260, 400)
    assert share_of(right[:0], groups[:0]).value is None


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
    assert any("with --test 0.2" in own.words for own in advice(load(linear, "linear")))
    assert list(advice(load(linear, "linear")))[-1].command.startswith(f"pmae predict {linear} --data new/")


@pytest.mark.parametrize(
    ("images", "sharpened", "said"),
    [
        (100, 1.0, "On so few images exact"),
        (100, 3.0, "as an order"),
        (5000, 1.0, "at their word"),
        (5000, 1.5, "as an order"),
    ],
)
def test_probabilities_are_blamed_for_no_more_than_they_are_off(
    tested: Path, tmp_path: Path, images: int, sharpened: float, said: str
) -> None:
    """Labels that are drawn by probabilities, which are then told as they are, or too sure of themselves."""
    rng = np.random.default_rng(1)
    exact = rng.dirichlet((1, 1, 1), images)
    targets = (rng.random((images, 1)) > exact.cumsum(1)).sum(1)
    claimed = exact**sharpened / (exact**sharpened).sum(1, keepdims=True)
    bins = reliability(claimed, targets)
    told = json.loads((tested / "results.json").read_text())
    found = {"reliability": [one._asdict() for one in bins], "calibration_error": calibration_error(bins)}
    told["scores"][1]["calibration"] |= found
    shutil.copytree(tested, tmp_path / "c")
    (tmp_path / "c/results.json").write_text(json.dumps(told))
    one = load(tmp_path / "c", "c")
    assert any(said in words for words in verdict(one).sentences)
    assert (said == "as an order") == any(own.title == "Rough probabilities" for own in advice(one))


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
    calibration = dataclasses.replace(alone.main.calibration, calibration_error=0.9)
    parts = (dataclasses.replace(alone.main, calibration=calibration),)
    (rough,) = (w.words for w in advice(dataclasses.replace(alone, parts=parts)) if w.title == "Rough probabilities")
    assert "diagram of how often answers are right" in rough
    assert command("report", tmp_path / "c", "-o", tmp_path / "c.html")[0] == 0
    exact, images = alone.accuracy, alone.main.images
    judge = binomtest(round((exact.value or 0) * images / 100), images).proportion_ci(method="wilson")
    assert (exact.low, exact.high) == pytest.approx((100 * judge.low, 100 * judge.high), abs=1e-4)
    assert f"(95% interval {exact.low:.0f} to {exact.high:.0f}%)" in (tmp_path / "c.html").read_text()


def test_a_damaged_or_foreign_folder_is_one_sentence(tested: Path, run: Run, tmp_path: Path, command: Command) -> None:
    code, said = command("report", tested, run.path, "-o", tmp_path / "r.html")
    assert (code, "classifiers or runs, not both" in said) == (2, True)
    code, said = command("report", tested, tmp_path / "nowhere", "-o", tmp_path / "r.html")
    assert (code, f"runs must be folders that exist, got '{tmp_path / 'nowhere'}'" in said) == (2, True)
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


def test_a_page_never_takes_the_place_of_a_folder(tested: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(tested, tmp_path / "clf")
    code, said = command("report", tmp_path / "clf", "-o", tmp_path / "clf")
    assert (code, "-o must be a file such as report.html, not a folder" in said) == (2, True)
    assert (tmp_path / "clf/classifier.safetensors").is_file()


def test_images_to_label_are_counted_in_groups_where_intervals_are_over_these(tested: Path, tmp_path: Path) -> None:
    shutil.copytree(tested, tmp_path / "clf")
    results = json.loads((tmp_path / "clf/results.json").read_text())
    for score in results["scores"]:
        score |= {"groups": 6, "over_groups": True}
        score["metrics"]["accuracy"] = {"value": 0.6, "low": 0.4, "high": 0.8}
    (tmp_path / "clf/results.json").write_text(json.dumps(results))
    (few,) = (one for one in advice(load(tmp_path / "clf", "clf")) if one.title == "Too few held-out images")
    # Half as wide an interval takes four times as many of what it is over: from 40 points to 10, 16 times 6 groups.
    assert "About 96 groups" in few.words
