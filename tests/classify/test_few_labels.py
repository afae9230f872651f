"""`pmae evaluate --shots --label-fraction`: scikit-learn's regression on the same draws, for every representation."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pmae.data.images import ImageSet, Splits
from pmae.evaluate.features import budgets, short_budgets
from pmae.evaluate.protocols import FewLabelsProtocol, Protocols
from pmae.evaluate.suite import evaluate
from pmae.runs import Run
from pmae.train.start import load_start

from .conftest import make_run, stripes

LABELS = np.arange(60) % 3
CONFIG = FewLabelsProtocol((1, 5), (0.1,), draws=2)


def test_draws_are_of_every_class_and_differ() -> None:
    found = dict(budgets(LABELS, CONFIG, seed=0))
    assert list(found) == ["1-shot", "5-shot", "10% labels"]
    for name, each in (("1-shot", 1), ("5-shot", 5), ("10% labels", 2)):
        first, second = found[name]
        assert np.bincount(LABELS[first]).tolist() == [each] * 3
        assert first.tolist() != second.tolist()
    rare = np.array([0, *[1] * 40, *[2] * 3])  # one image, and of three a large share
    for draw in dict(budgets(rare, FewLabelsProtocol((), (0.1, 0.9)), seed=0))["90% labels"]:
        assert np.bincount(rare[draw]).tolist() == [1, 36, 3]
    whole = dict(budgets(LABELS, FewLabelsProtocol((99,)), seed=0))["99-shot"]
    assert all(len(places) == 60 for places in whole)


def test_scores_are_those_of_scikit_learn(run: Run) -> None:
    train, test = (ImageSet(stripes(LABELS, seed).transpose(0, 3, 1, 2), LABELS, ("a", "b", "c")) for seed in (0, 1))
    start = load_start(run, train)
    protocols = Protocols("few", None, None, None, CONFIG, resamples=20)
    found = evaluate(start.encoder, Splits("toy", train, test=test), start.standardize, protocols, "pmae")
    with torch.no_grad():
        pixels = [start.standardize(torch.from_numpy(part.images.copy())) for part in (train, test)]
        x, held = (start.encoder.features(each)["mean"] for each in pixels)
    mean, std = x.mean(0), x.std(0, correction=0)
    x, held = (((part - mean) / std).numpy() for part in (x, held))
    (score,) = [s for s in found.scores if (s.protocol, s.pooling) == ("5-shot", "mean")]
    draws = dict(budgets(LABELS, CONFIG, seed=0))["5-shot"]
    heads = [LogisticRegression(tol=1e-6, max_iter=1000).fit(x[places], LABELS[places]) for places in draws]
    right = [head.score(held, LABELS) for head in heads]
    assert [one.metrics["accuracy"].value for one in score.by_seed if one.metrics] == pytest.approx(right, abs=0.02)
    assert score.metrics["accuracy"].value == pytest.approx(np.mean(right), abs=0.02)
    assert score.metrics["accuracy"].std == pytest.approx(np.std(right, ddof=1), abs=0.03)


@pytest.mark.usefixtures("no_figures")
def test_every_representation_is_scored_by_the_command(
    labelled: Path, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    run = make_run(tmp_path / "run")
    more = ("--labels", "folders", "--protocols", "knn", "--shots", 1, 5, "--label-fraction", 0.1, "--draws", 2)
    code, said = command("evaluate", run.path, "--data", labelled, *more, "--device", "cpu")
    assert code == 0, said
    for name in ("pmae epoch 1", "random weights", "raw pixels", "pca features"):
        lines = [line for line in said.splitlines() if line.strip().startswith(name)]
        assert {budget for budget in ("1-shot", "5-shot", "10% labels") if any(budget in line for line in lines)} == {
            "1-shot", "5-shot", "10% labels",
        }  # fmt: skip
    assert "accuracy %" in said
    assert "logistic regression on frozen features, the mean of 2 draws of the labelled images" in said
    code, said = command("evaluate", run.path, "--data", labelled, "--labels", "folders", "--shots", 0)
    assert (code, "--shots must be numbers of at least 1" in said) == (2, True)
    code, said = command("evaluate", run.path, "--data", labelled, "--shots", 5, 5)
    assert (code, "--shots must be numbers of which no two are alike, got (5, 5)" in said) == (2, True)
    code, said = command("evaluate", run.path, "--protocols")
    assert (code, "--protocols must be one or more of linear, mlp, knn and finetune, got ()" in said) == (2, True)
    code, said = command("evaluate", run.path, "--data", labelled, "--shots", 5, 500)
    assert code == 2
    assert re.search(r"--shots must be at most \d+, the training images of the largest class, got 500", said)


def test_what_a_budget_cannot_be_is_said() -> None:
    labels = np.repeat([0, 1], [3, 40])
    found = list(short_budgets(labels, ("rare", "common"), FewLabelsProtocol((2, 10), (0.05, 0.5))))
    assert found == [
        "10-shot: all images of the classes that have fewer, 'rare' (3)",
        "5% labels: one image of every class at least, in all 3 of 43",
    ]
