"""Typed evaluations: what stands of several, which pooling counts, and what they look like on pages."""

import dataclasses
import json

import numpy as np
import pytest

from pmae.intervals import Interval
from pmae.results import (
    ClassScore,
    DuplicatePair,
    Duplicates,
    EvaluatedData,
    Evaluation,
    FeatureShape,
    KAccuracy,
    Score,
    SeedScore,
    read_evaluations,
)
from pmae.standing import pretrained, primary, primary_pooling, scores_of, standing


def evaluation(
    method: str, epoch: int = 0, accuracy: float = 0.5, *keys: str, data: str = "toy", images: str = ""
) -> Evaluation:
    """One score for each `protocol/pooling`."""
    metrics = {"accuracy": Interval(accuracy, accuracy - 0.02, accuracy + 0.02)}
    scores = [Score(*key.split("/"), "test", 100, metrics) for key in keys or ("linear/cls",)]
    described = EvaluatedData(data, ("a", "b"), 400, None, 100, majority={"test": 0.5}, fingerprint=images)
    return Evaluation(method, "strong", described, tuple(scores), epoch, settings={"epochs": epoch}, seeds=(0,))


def test_a_score_is_shown_in_percent_under_its_label() -> None:
    (score,) = evaluation("pmae", 5, 0.75).scores
    assert (score.label, score.representation, score.data) == ("pmae epoch 5", "pmae epoch 5 (CLS)", "toy")
    assert (score.accuracy.value, score.accuracy.low, score.accuracy.high) == pytest.approx((75.0, 73.0, 77.0))
    assert (score.chance, score.classes, score.is_baseline) == (50.0, ("a", "b"), False)
    assert score.percent("macro_auc") == Interval()
    (other,) = evaluation("raw pixels", 0, 0.5, "linear/pixels").scores
    assert (other.representation, other.is_baseline) == ("raw pixels", True)


def test_what_is_written_is_read_back_the_same() -> None:
    score = Score(
        "knn", "mean", "val", 60, {"accuracy": Interval(0.5, 0.4, 0.6, 0.01), "macro_auc": Interval()}, "fixed",
        (SeedScore(0, {"k": 3}, {"accuracy": Interval(0.5, 0.4, 0.6)}), SeedScore(1)),
        (ClassScore("a", 0.5, None, 30), ClassScore("b", None, 1.0, 30)), ((1, 2), (3, 4)), ("died",),
        (KAccuracy(3, 0.5, 0.6),), ((1.0, None), (0.5, 0.25)),
    )  # fmt: skip
    pairs = Duplicates(1, (DuplicatePair("x.png", "y.png"),))
    data = EvaluatedData("toy", ("a", "b"), 400, 60, None, ("a note",), {"val": pairs}, {"val": 0.5})
    whole = Evaluation(
        "pmae", "strong", data, (score,), 7, {"probe": {"epochs": 3}}, (0, 1), {"mean": FeatureShape(8, 2.5)},
        {"knn": 0.1}, ("left out",),
    )  # fmt: skip
    written = json.loads(json.dumps(whole.to_json(), allow_nan=False))
    assert "method" not in written["scores"][0]
    assert read_evaluations({"evaluations": [written]}, "results.json") == [whole]


def test_the_newest_score_of_the_same_thing_stands_and_older_ones_keep_what_they_say_of_themselves() -> None:
    first = evaluation("pmae", 3, 0.5, "linear/cls", "knn/cls")
    second = dataclasses.replace(evaluation("pmae", 3, 0.7, "linear/cls"), seeds=(1, 2), settings={"epochs": 9})
    elsewhere = evaluation("pmae", 3, 0.9, "linear/cls", data="others")
    kept = standing([first, second, elsewhere])
    assert [(one.seeds, [score.protocol for score in one.scores]) for one in kept] == [
        ((0,), ["knn"]),
        ((1, 2), ["linear"]),
        ((0,), ["linear"]),
    ]
    assert [score.accuracy.value for score in scores_of([first, second, elsewhere])] == pytest.approx([50, 70, 90])
    assert standing([first, first]) == [first]


def test_settings_have_the_names_of_this_version() -> None:
    whole = dataclasses.replace(evaluation("pmae", 3), settings={"finetune": {"randaugment": 0.5, "ema_decay": 0.9}})
    written = json.dumps(whole.to_json()).replace("randaugment", "distort").replace("ema_decay", "average")
    (found,) = read_evaluations({"evaluations": [json.loads(written)]}, "results.json")
    assert found.answers_to("pmae", 3, "toy", whole.settings, (0,))


def test_scores_of_other_images_of_the_same_name_stand_no_more() -> None:
    others = [evaluation("raw pixels", 0, 0.4, images="a"), evaluation("pmae", 3, 0.6, images="a")]
    old, elsewhere = evaluation("pca features"), evaluation("pmae", 3, 0.8, data="others", images="a")
    newest = evaluation("pmae", 4, 0.7, images="b")
    kept = standing([*others, old, elsewhere, newest])
    assert kept == [old, elsewhere, newest], "older versions noted no fingerprint, and are as before"


def test_the_latest_epoch_and_the_mean_of_the_patches_stand_for_an_encoder() -> None:
    keys = ("linear/cls", "linear/mean", "knn/cls")
    every = [evaluation(*what, 0.5, *keys) for what in (("random weights", 0), ("pmae", 10), ("pmae", 9))]
    scores = scores_of(every)
    assert scores[-1].label == "random weights"
    found = [(s.label, s.protocol, s.pooling) for s in primary(pretrained(scores))]
    assert found == [("pmae epoch 10", "linear", "mean"), ("pmae epoch 10", "knn", "cls")]
    assert [s.pooling for s in primary(pretrained(scores), "cls")] == ["cls", "cls"]


def test_on_a_few_images_chance_does_not_choose_the_pooling() -> None:
    """Coins decide which answers are right: [CLS] is chosen seldom where it is as good, often where it is better."""
    rng = np.random.default_rng(0)

    def knn(pooling: str, right: float, images: int) -> Score:
        return Score("knn", pooling, "test", 9, {}, by_k=(KAccuracy(5, 0.7, right, images),), method="pmae")

    def chosen(images: int, cls: float, mean: float = 0.7) -> float:
        """How often [CLS] is chosen, if so often each pooling is right."""
        count = 0
        for rights in rng.binomial(images, (cls, mean), (400, 2)) / images:
            pairs = zip(("cls", "mean"), rights, strict=True)
            count += primary_pooling([knn(pooling, right, images) for pooling, right in pairs]) == "cls"
        return count / 400

    assert chosen(50, 0.7) < 0.2
    assert chosen(50, 0.98, 0.98) < 0.2
    assert chosen(5000, 0.7) < 0.2
    assert chosen(50, 0.95) > 0.9
    assert chosen(5000, 0.74) > 0.9
    level = [knn("cls", 1.0, 50), knn("mean", 0.98, 50)]
    assert primary_pooling(level) == "mean", "one image of fifty is no evidence"


def test_the_pooling_that_is_best_on_validation_images_stands_for_a_run_everywhere() -> None:
    def knn(pooling: str, accuracy: float, validation: float) -> Score:
        by_k = (KAccuracy(5, accuracy, validation), KAccuracy(10, accuracy, validation - 0.1))
        return Score("knn", pooling, "test", 100, {"accuracy": Interval(accuracy)}, by_k=by_k, method="pmae", epoch=3)

    others = scores_of([evaluation("random weights", 0, 0.5, "linear/cls", "linear/mean")])
    scores = [knn("cls", 0.6, 0.9), knn("mean", 0.8, 0.7), *others]
    assert primary_pooling(scores) == "cls", "though the mean is better on test images"
    assert {score.pooling for score in primary(scores)} == {"cls"}
    assert primary_pooling([knn("cls", 0.6, 0.705), knn("mean", 0.5, 0.7)]) == "mean", "half a point is chance"
    assert primary_pooling(others) == "mean"
    assert primary_pooling([knn("cls", 0.6, 0.8)]) == "cls", "where it is all there is"
    # A baseline whose k-NN was measured too is chosen its own: the run's worse one would flatter the run.
    rivals = [
        dataclasses.replace(s, method="random weights", epoch=0) for s in (knn("cls", 0.4, 0.4), knn("mean", 0.5, 0.5))
    ]
    shown = {(s.method, s.pooling) for s in primary([*scores, *rivals]) if s.protocol == "knn"}
    assert shown == {("pmae", "cls"), ("random weights", "mean")}
    assert {s.pooling for s in primary([*scores, *rivals], "cls")} == {"cls"}
