"""Differences between methods: intervals against SciPy's bootstrap, McNemar's test and closed forms."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, bootstrap

from pmae.cli import main
from pmae.files import read_tensors, write_tensors
from pmae.intervals import NORMAL
from pmae.paper.tables import ITEMS, Row, RunChoices, spec_of
from pmae.runs import Run

Store = Callable[..., Run]
IMAGES = 1000
ROWS = {"mae": Row("mae", 0.75), "pmae": Row("pmae", "oracle")}
FOUND = ["--datasets", "bloodmnist", "--epochs", "9", "--ratios", "0.2", "--protocols", "linear", "--only-found"]


def answered(store: Store, folder: Path, method: str, seed: int, right: np.ndarray, keep: bool = True) -> None:
    """A stored run whose linear probe was right on these images, with what it answered to each if that is kept."""
    ratio = {"mae": 0.75, "pmae": 0.2}[method]
    spec = spec_of(ITEMS["main"], ROWS[method], "bloodmnist", ratio, seed, RunChoices(epochs=9))
    run = store(folder, spec, {9: right.mean()}, 0.6)
    results = run.path / "results.json"
    results.write_text(results.read_text().replace('"images": 100', f'"images": {IMAGES}'))
    (score,) = run.evaluations[0].scores
    answers = torch.from_numpy(np.stack([np.zeros(IMAGES), 1 - right]).astype(np.int16))
    if keep:
        write_tensors(run.path / "answers.safetensors", {score.key: answers})


def table(folder: Path, *seeds: int) -> dict[str, str]:
    given = [*FOUND, "--seeds", *map(str, seeds), "--runs", str(folder), "--out", str(folder.parent / "out")]
    assert main(["paper", "main", *given]) == 0
    with (folder.parent / "out" / "main-differences.csv").open() as file:
        (row,) = [r for r in csv.DictReader(file) if r["against"] == "MAE, 75% of patches"]
    assert row["method"] == "PMAE, oracle ratio"
    return row


def draws(seed: int, lead: float) -> tuple[np.ndarray, np.ndarray]:
    """What two methods are right on: mostly the same images, the first more often."""
    rng = np.random.default_rng(seed)
    hard = rng.random(IMAGES)
    return (hard + 0.1 * rng.normal(size=IMAGES) < 0.6 + lead), (hard + 0.1 * rng.normal(size=IMAGES) < 0.6)


@pytest.mark.parametrize("lead", [0.0, 0.01, 0.05])
def test_a_difference_on_the_same_images_is_scipys_and_mcnemar_agrees(
    store: Store, tmp_path: Path, lead: float, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = draws(3, lead)
    for method, right in (("pmae", mine), ("mae", theirs)):
        answered(store, tmp_path / "kept", method, 0, right)
    row = table(tmp_path / "kept", 0)
    assert row["how"] == "paired"
    assert float(row["difference"]) == pytest.approx(100 * (mine.mean() - theirs.mean()))
    wanted = bootstrap((100.0 * mine - 100 * theirs,), np.mean, method="percentile", n_resamples=9999, random_state=0)
    ends = wanted.confidence_interval
    assert (float(row["low"]), float(row["high"])) == pytest.approx((ends.low, ends.high), abs=0.15)
    lost, won = int((theirs & ~mine).sum()), int((mine & ~theirs).sum())
    clear = binomtest(won, won + lost).pvalue < 0.05
    assert row["said"] == ("clearly above" if clear else "may be chance")
    assert clear == (lead == 0.05)
    said = f"PMAE, oracle ratio against MAE, 75% of patches, clearly above in {int(clear)}, clearly below in 0, "
    assert said in capsys.readouterr().out


def test_several_runs_are_one_difference_over_all_their_answers(store: Store, tmp_path: Path) -> None:
    given = [draws(seed, 0.03) for seed in (0, 1)]
    for seed, (mine, theirs) in enumerate(given):
        answered(store, tmp_path / "kept", "pmae", seed, mine)
        answered(store, tmp_path / "kept", "mae", seed, theirs)
    row = table(tmp_path / "kept", 0, 1)
    each = 100 * np.mean([mine.astype(float) - theirs for mine, theirs in given], 0)
    assert float(row["difference"]) == pytest.approx(each.mean())
    half = 1.96 * each.std() / IMAGES**0.5
    assert (float(row["low"]), float(row["high"])) == pytest.approx((each.mean() - half, each.mean() + half), abs=0.2)
    assert (row["how"], row["runs"]) == ("paired", "2 and 2")


@pytest.mark.parametrize("bounds", [True, False], ids=["stored intervals", "no intervals"])
def test_without_answers_it_is_that_of_two_proportions(store: Store, tmp_path: Path, bounds: bool) -> None:
    mine, theirs = draws(0, 0.05)
    for method, right in (("pmae", mine), ("mae", theirs)):
        answered(store, tmp_path / "kept", method, 0, right, keep=False)
    if not bounds:
        for run in (tmp_path / "kept").iterdir():
            results = (run / "results.json").read_text()
            (run / "results.json").write_text(results.replace('"low"', '"not"').replace('"high"', '"known"'))
    row = table(tmp_path / "kept", 0)
    assert row["how"] == "from two intervals"
    shares = np.array([mine.mean(), theirs.mean()])
    # Stored intervals are of one point each way; else a binomial one follows from the accuracies.
    half = 2**0.5 if bounds else 100 * NORMAL * (shares * (1 - shares) / IMAGES).sum() ** 0.5
    assert float(row["high"]) - float(row["difference"]) == pytest.approx(half, abs=1e-5)
    assert float(row["difference"]) - float(row["low"]) == pytest.approx(half, abs=1e-5)


def test_other_test_images_are_not_paired(store: Store, tmp_path: Path) -> None:
    mine, theirs = draws(0, 0.05)
    answered(store, tmp_path / "kept", "pmae", 0, mine)
    answered(store, tmp_path / "kept", "mae", 0, theirs)
    (file,) = (tmp_path / "kept").glob("*mae-0.75*/answers.safetensors")
    ((key, answers),) = read_tensors(file).items()
    for other in (answers[:, 1:], answers + 1):  # fewer, and as many of another class
        write_tensors(file, {key: other.contiguous()})
        assert table(tmp_path / "kept", 0)["how"] == "from two intervals"
