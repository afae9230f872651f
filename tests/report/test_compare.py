"""Scores side by side, the paper's number beside them, and the plain words at the top of a report."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pmae.config import Config, replace
from pmae.report.charts import learning_curves
from pmae.report.compare import between, epochs_of, lineup, verdict
from pmae.report.contents import load
from pmae.report.published import published_for
from pmae.report.samples import reconstructions
from pmae.results import Score
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
            (0.5, 0.68, 0.5),
            "open",
            "Partly: clearly ahead of random weights and PCA features, but the lead over raw pixels may be chance",
        ),
        (
            (0.68, 0.68, 0.69),
            "open",
            "Unclear: the leads over random weights, raw pixels and PCA features may be chance",
        ),
        (
            (0.5, 0.8, 0.69),
            "no",
            "Not convincingly: clearly ahead of random weights; the lead over PCA features may be chance; not",
        ),
        (
            (0.8, 0.69, 0.69),
            "no",
            "Not convincingly: the leads over raw pixels and PCA features may be chance; not ahead of random weights",
        ),
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
    # Whatever its comparisons call chance, the headline calls no lead.
    chance = [words for words in said.comparisons if " more than" in words and words.endswith("may be chance.")]
    assert bool(chance) == ("may be chance" in said.headline)


def test_the_mean_of_the_patches_decides_and_not_the_class_token(make_run: MakeRun, suite: Suite) -> None:
    ours = suite({"linear/cls/test": 0.739, "linear/mean/test": 0.79})
    random = suite({"linear/cls/test": 0.696, "linear/mean/test": 0.689})
    rivals = {name: suite({KEYS[name]: 0.5}) for name in ("raw pixels", "pca features")}
    said = verdict(load(make_run(evaluation={"pmae epoch 3": ours, "random weights": random, **rivals}).path))
    assert said.headline == "Yes: pretraining helped"
    assert "a linear probe on pmae epoch 3 (patch mean) gets 79.0% right" in said.sentences[0]
    assert said.comparisons[0].startswith("10.1 points more than the same encoder with random weights (68.9%)")


def test_points_and_the_interval_of_the_difference_are_said(make_run: MakeRun, suite: Suite) -> None:
    rivals = {
        "random weights": suite({KEYS["random weights"]: 0.623}),
        "raw pixels": suite({KEYS["raw pixels"]: 0.712}),
    }
    said = verdict(load(make_run(evaluation={"pmae epoch 3": suite({OURS: 0.7}), **rivals}).path))
    assert "70.0% right (95% interval 68.0 to 72.0)" in said.sentences[0]
    random, pixels = said.comparisons
    assert random.startswith("7.7 points more than the same encoder with random weights (62.3%); 95% interval")
    assert random.endswith("+4.9 to +10.5 from the two intervals, for the answers were not kept: clear.")
    assert pixels.startswith("1.2 points less than raw pixels (71.2%); 95% interval of the difference −4.0 to +1.6")
    assert pixels.endswith("may be chance.")
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
    assert "R² on training images (%; thin: in training)" in titles
    assert "Train r2" not in titles
    assert "on training images" in reconstructions(run).caption


def test_a_model_that_learned_nothing_is_named(make_run: MakeRun) -> None:
    assert "has not learned" in verdict(load(make_run(epochs=1).path)).more[-1]


def test_only_like_is_compared_with_like(make_run: MakeRun, suite: Suite) -> None:
    other = suite({KEYS["random weights"]: 0.5}, preset="strong")
    said = verdict(load(make_run(evaluation={"pmae epoch 3": suite({OURS: 0.7}), "random weights": other}).path))
    assert said.comparisons == []
    assert said.kind == "open"


def test_the_last_blocks_together_are_compared_with_the_same_alone(make_run: MakeRun, suite: Suite) -> None:
    plain, deep = suite({"linear/mean/test": 0.7}), suite({"linear/last_4/test": 0.6})
    rivals = {name: suite({KEYS[name]: 0.5}) for name in ("raw pixels", "pca features")}
    found = {"pmae epoch 3": plain, "random weights": deep, **rivals}
    said = verdict(load(make_run("a", evaluation=found).path))
    assert said.headline == "So far yes: clearly better than raw pixels and PCA features; random weights not evaluated"
    first, second = (
        load(make_run(name, evaluation={"pmae epoch 3": one}).path) for name, one in (("b", plain), ("c", deep))
    )
    assert between([first, second]) == []
    both = suite({"linear/mean/test": 0.7, "linear/last_4/test": 0.75})
    ours = verdict(load(make_run("d", evaluation={"pmae epoch 3": both, "random weights": plain}).path))
    assert "(patch mean) gets 70.0% right" in ours.sentences[0]
    random, blocks = ours.comparisons
    assert random.startswith("as much as the same encoder with random weights (70.0%)")
    assert blocks.startswith("5.0 points less than the same encoder by its last 4 blocks side by side (75.0%)")


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
    (twin,), (other,) = verdict(first).comparisons, between([first, second])
    assert twin.startswith("10.0 points more than mae epoch 3 (60.0%)")
    assert other.startswith("first (pmae epoch 3) gets 5.0 points more than second (mae epoch 3) (65.0%)")
    assert twin.endswith("clear.")


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


def test_baselines_on_other_images_of_the_same_name_serve_no_other_run(make_run: MakeRun, suite: Suite) -> None:
    ours, random = suite({OURS: 0.7}), suite({KEYS["random weights"]: 0.5})
    ours["data"]["fingerprint"], random["data"]["fingerprint"] = "a", "b"
    runs = make_run("a", evaluation={"pmae epoch 3": ours}), make_run("b", evaluation={"random weights": random})
    run, other = (load(each.path) for each in runs)
    assert verdict(run, [other]).comparisons == []


def test_a_baseline_that_two_runs_share_is_listed_once(make_run: MakeRun, suite: Suite) -> None:
    rivals = {"random weights": suite({OURS: 0.5}), "raw pixels": suite({"linear/pixels/test": 0.6})}
    a = make_run("a", evaluation={"pmae epoch 1": suite({OURS: 0.6}), "pmae epoch 3": suite({OURS: 0.7}), **rivals})
    other = {**rivals, "raw pixels": suite({"linear/pixels/test": 0.61})}
    b = make_run("b", evaluation={"pmae epoch 3": suite({OURS: 0.7}), **other})
    found = [entrant.name for entrant in lineup([load(a.path), load(b.path)], "test")]
    ours = ["a: pmae epoch 3 (CLS)", "b: pmae epoch 3 (CLS)"]
    assert found == [*ours, "random weights (CLS)", "a: raw pixels", "b: raw pixels"]
    curves = epochs_of(load(a.path), "linear", "test")
    assert [(name, [s.epoch for s in scores]) for name, scores in curves.items()] == [("pmae (CLS)", [1, 3])]


def test_two_presets_of_one_encoder_stand_side_by_side(make_run: MakeRun, suite: Suite) -> None:
    strong, paper = suite({OURS: 0.7}), {**suite({OURS: 0.6}), "preset": "paper"}
    evaluation = {"pmae epoch 3 [strong]": {**strong, "preset": "strong"}, "pmae epoch 3 [paper]": paper}
    run = load(make_run("a", evaluation=evaluation).path)
    found = {entrant.name: entrant.score.accuracy.value for entrant in lineup([run], "test")}
    assert found == {"pmae epoch 3 (CLS), strong": 70.0, "pmae epoch 3 (CLS), paper": 60.0}
    assert set(epochs_of(run, "linear", "test")) == {"pmae (CLS), strong", "pmae (CLS), paper"}


def test_two_data_sets_of_one_encoder_are_told_apart(make_run: MakeRun, suite: Suite) -> None:
    evaluation = {"pmae epoch 3 [paper]": suite({OURS: 0.7}), "pmae epoch 3": suite({OURS: 0.6}, data="others")}
    found = {e.name: e.score.accuracy.value for e in lineup([load(make_run("a", evaluation=evaluation).path)], "test")}
    assert found == {"pmae epoch 3 (CLS), bloodmnist": 70.0, "pmae epoch 3 (CLS), others": 60.0}


@pytest.mark.parametrize(
    ("data", "label", "key", "settings", "value"),
    [
        ("cifar10", "pmae epoch 800", OURS, {}, 59.0),
        ("CIFAR-10", "pmae epoch 800", "knn/cls/test", {"masking__ratio_schedule": "uniform"}, 41.8),
        ("bloodmnist_64", "pmae epoch 1", "mlp/cls/test", {"objective__target": "pixels"}, 91.0),
        ("dermamnist", "mae epoch 1", "finetune/cls/test", {"space__name": "pixels"}, 80.4),
        ("dermamnist", "mae epoch 1", OURS, {"space__name": "pixels", "masking__masked_patches": 0.5}, 73.7),
        ("cifar10", "pmae epoch 800", OURS, {"space__name": "kernel_pca"}, 64.1),
        ("cifar10", "pmae epoch 800", OURS, {"space__name": "wavelet"}, None),
        ("cifar100", "pmae epoch 800", OURS, {}, None),
        ("photos", "pmae epoch 800", OURS, {}, None),
        ("cifar10", "raw pixels", "linear/pixels/test", {}, None),
        ("cifar10", "pmae epoch 800", "linear/mean/test", {}, None),
        ("cifar10", "pmae epoch 800", "finetune/cls/test", {"objective__target": "pixels"}, None),
    ],
)
def test_published_numbers_of_the_paper(
    data: str, label: str, key: str, settings: dict[str, object], value: float | None
) -> None:
    protocol, pooling, split = key.split("/")
    method, _, epoch = label.partition(" epoch ")
    score = Score(protocol, pooling, split, 100, {}, method=method, epoch=int(epoch or 0), data=data)
    found = published_for(score, replace(Config(), **settings))
    assert (found[0] if found else None) == value
