"""The plain words at the top, in every case that decides them differently."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pmae.config import replace
from pmae.report.charts import learning_curves
from pmae.report.contents import load
from pmae.report.samples import reconstructions
from pmae.report.summary import between, verdict
from pmae.runs import Run

Suite = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Run]
KEYS = {"random weights": "linear/cls/test", "raw pixels": "linear/pixels/test", "pca features": "linear/pca/test"}
OURS = "linear/cls/test"


@pytest.mark.parametrize(
    ("rivals", "kind", "headline"),
    [
        ((0.5, 0.5, 0.5), "yes", "Yes: pretraining helped"),
        (
            (0.5, 0.67, 0.5),
            "open",
            "Probably: ahead of random weights, raw pixels and PCA features, but within the error",
        ),
        ((0.68, 0.67, 0.69), "open", "Unclear: ahead of random weights, raw pixels and PCA features"),
        ((0.5, 0.8, 0.5), "no", "Not convincingly: ahead of random weights and PCA features, but not of raw pixels"),
        ((0.8, 0.7, 0.9), "no", "No: pretraining did not beat random weights, raw pixels or PCA features"),
        ((0.5, None, None), "open", "So far yes: clearly better than random weights; raw pixels and pca features not"),
        ((None, None, None), "open", "No evidence yet: nothing to compare with"),
    ],
)
def test_the_verdict_follows_the_intervals(
    make_run: MakeRun, suite: Suite, rivals: tuple[float | None, ...], kind: str, headline: str
) -> None:
    found = {name: suite({KEYS[name]: value}) for name, value in zip(KEYS, rivals, strict=True) if value is not None}
    run = load(make_run(evaluation={"pmae epoch 3": suite({OURS: 0.7}), **found}).path)
    said = verdict(run)
    assert said.kind == kind
    assert said.headline.startswith(headline)
    assert len(said.comparisons) == len(found)


def test_the_mean_of_the_patches_decides_and_not_the_class_token(make_run: MakeRun, suite: Suite) -> None:
    ours = suite({"linear/cls/test": 0.739, "linear/mean/test": 0.79})
    random = suite({"linear/cls/test": 0.696, "linear/mean/test": 0.689})
    rivals = {name: suite({KEYS[name]: 0.5}) for name in ("raw pixels", "pca features")}
    said = verdict(load(make_run(evaluation={"pmae epoch 3": ours, "random weights": random, **rivals}).path))
    assert said.headline == "Yes: pretraining helped"
    assert "a linear probe on pmae epoch 3 (patch mean) gets 79.0% right" in said.sentences[0]
    assert said.comparisons[0].startswith("10.1 points more than the same encoder with random weights (68.9%)")


def test_points_and_overlap_are_said(make_run: MakeRun, suite: Suite) -> None:
    rivals = {
        "random weights": suite({KEYS["random weights"]: 0.623}),
        "raw pixels": suite({KEYS["raw pixels"]: 0.712}),
    }
    said = verdict(load(make_run(evaluation={"pmae epoch 3": suite({OURS: 0.7}), **rivals}).path))
    assert "70.0% right (95% interval 68.0 to 72.0)" in said.sentences[0]
    random, pixels = said.comparisons
    assert random.startswith("7.7 points more than the same encoder with random weights (62.3%): the intervals do not")
    assert pixels.startswith("1.2 points less than raw pixels (71.2%): the intervals overlap")
    assert any("Not compared" in words and "pca features" in words for words in said.more)


def test_without_labels_the_page_does_not_pretend(make_run: MakeRun) -> None:
    said = verdict(load(make_run().path))
    assert (said.kind, said.headline) == ("open", "No evidence yet")
    assert "It predicts 20.0% of the hidden variance of held-out images (R²)." in said.more


def test_r2_of_training_images_is_not_called_held_out(make_run: MakeRun) -> None:
    path = make_run().path
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("held_out_r2", "train_r2"))
    run = load(path)
    assert "It predicts 20.0% of the hidden variance of training images (R²)." in verdict(run).more
    titles = [axes.get_title(loc="left") for axes in learning_curves([run]).figure.axes]
    assert "R² on training images (%; faint: in training)" in titles
    assert "Train r2" not in titles
    assert "on training images" in reconstructions(run).caption


def test_a_model_that_learned_nothing_is_named(make_run: MakeRun) -> None:
    assert "has not learned" in verdict(load(make_run(epochs=1).path)).more[-1]


def test_only_like_is_compared_with_like(make_run: MakeRun, suite: Suite) -> None:
    other = suite({KEYS["random weights"]: 0.5}, preset="strong")
    said = verdict(load(make_run(evaluation={"pmae epoch 3": suite({OURS: 0.7}), "random weights": other}).path))
    assert said.comparisons == []
    assert said.kind == "open"


def test_fine_tuning_is_compared_with_training_from_scratch(make_run: MakeRun, suite: Suite) -> None:
    tuned, scratch = suite({"finetune/cls/test": 0.9}), suite({"finetune/cls/test": 0.8})
    said = verdict(load(make_run(evaluation={"pmae epoch 3": tuned, "from scratch": scratch}).path))
    assert any("10.0 points more than training from scratch (80.0%)" in words for words in said.more)


def test_a_score_at_chance_is_called_that(make_run: MakeRun, suite: Suite) -> None:
    said = verdict(load(make_run(evaluation={"pmae epoch 3": suite({OURS: 0.51})}).path))
    assert any("commonest class gets 50.0%" in words for words in said.more)


def test_the_mae_twin_and_other_runs_are_compared(make_run: MakeRun, suite: Suite) -> None:
    both = {"mae epoch 3": suite({OURS: 0.6}), "pmae epoch 3": suite({OURS: 0.7})}
    first = load(make_run("first", evaluation=both).path)
    second = load(make_run("second", space="pixels", evaluation={"mae epoch 3": suite({OURS: 0.65})}).path)
    assert verdict(first).comparisons == ["10.0 points more than mae epoch 3 (60.0%): the intervals do not overlap."]
    assert between([first, second]) == [
        "first (pmae epoch 3) gets 5.0 points more than second (mae epoch 3) (65.0%): the intervals do not overlap."
    ]


def test_baselines_evaluated_with_another_run_of_the_same_encoder_serve_both(make_run: MakeRun, suite: Suite) -> None:
    rivals = {name: suite({KEYS[name]: 0.5}) for name in KEYS}
    first = load(make_run("first", evaluation={"pmae epoch 3": suite({OURS: 0.7}), **rivals}).path)
    second = load(make_run("second", space="pixels", evaluation={"mae epoch 3": suite({OURS: 0.65})}).path)
    said = verdict(second, [first, second])
    assert said.headline == "Yes: pretraining helped"
    assert "Baselines are those evaluated with first." in said.more
    assert not any("Baselines are" in words for words in verdict(first, [first, second]).more)
    larger = dataclasses.replace(second, config=replace(second.config, encoder__width=36))
    assert verdict(larger, [first, larger]).headline.startswith("No evidence yet")
