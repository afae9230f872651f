"""Reading evaluations, the published numbers, and which scores stand side by side."""

from collections.abc import Callable
from typing import Any

import pytest

from pmae.config import Config, replace
from pmae.report.contents import distinct_names, file_name, load
from pmae.report.lineup import epochs_of, lineup
from pmae.report.published import for_score
from pmae.report.scores import Interval, pretrained, primary, scores_of
from pmae.runs import Run

Suite = Callable[..., dict[str, Any]]
LINEAR = "linear/cls/test"


def test_shares_become_percentages_and_missing_metrics_stay_missing(suite: Suite) -> None:
    (score,) = scores_of({"pmae epoch 5": suite({LINEAR: 0.75})})
    assert score.accuracy.value == pytest.approx(75.0)
    assert (score.accuracy.low, score.accuracy.high) == pytest.approx((73.0, 77.0))
    assert score.metrics["macro_auc"] == Interval(None, None, None)
    assert (score.epoch, score.chance, score.images) == (5, 50.0, 100)


def test_the_latest_epoch_and_the_mean_of_the_patches_stand_for_an_encoder(suite: Suite) -> None:
    both = {"linear/mean/test": 0.9, LINEAR: 0.7}
    scores = scores_of({"random weights": suite(both), "pmae epoch 10": suite(both), "pmae epoch 9": suite(both)})
    assert [s.label for s in scores][-1] == "random weights"
    found = primary(pretrained(scores))
    assert [(s.label, s.pooling) for s in found] == [("pmae epoch 10", "mean")]


@pytest.mark.parametrize(
    ("data", "label", "key", "settings", "value"),
    [
        ("cifar10", "pmae epoch 800", LINEAR, {}, 59.0),
        ("CIFAR-10", "pmae epoch 800", "knn/cls/test", {"masking__ratio_schedule": "uniform"}, 41.8),
        ("bloodmnist_64", "pmae epoch 1", "mlp/cls/test", {"objective__target": "pixels"}, 91.0),
        ("dermamnist", "mae epoch 1", "finetune/cls/test", {"space__name": "pixels"}, 80.4),
        ("dermamnist", "mae epoch 1", LINEAR, {"space__name": "pixels", "masking__masked_patches": 0.5}, 73.7),
        ("cifar10", "pmae epoch 800", LINEAR, {"space__name": "kernel_pca"}, 64.1),
        ("cifar10", "pmae epoch 800", LINEAR, {"space__name": "wavelet"}, None),
        ("cifar100", "pmae epoch 800", LINEAR, {}, None),
        ("photos", "pmae epoch 800", LINEAR, {}, None),
        ("cifar10", "raw pixels", "linear/pixels/test", {}, None),
        ("cifar10", "pmae epoch 800", "linear/mean/test", {}, None),
        ("cifar10", "pmae epoch 800", "finetune/cls/test", {"objective__target": "pixels"}, None),
    ],
)
def test_published_numbers_of_the_paper(
    suite: Suite, data: str, label: str, key: str, settings: dict[str, object], value: float | None
) -> None:
    (score,) = scores_of({label: suite({key: 0.5}, data=data)})
    found = for_score(score, replace(Config(), **settings))
    assert (found[0] if found else None) == value


def test_intervals_overlap_when_they_touch_or_are_unknown() -> None:
    assert Interval(5, 4, 6).overlaps(Interval(7, 6, 8))
    assert not Interval(5, 4, 6).overlaps(Interval(8, 6.1, 9))
    assert Interval(5).overlaps(Interval(50, 49, 51))


def test_a_baseline_that_two_runs_share_is_listed_once(make_run: Callable[..., Run], suite: Suite) -> None:
    rivals = {"random weights": suite({LINEAR: 0.5}), "raw pixels": suite({"linear/pixels/test": 0.6})}
    a = make_run("a", evaluation={"pmae epoch 1": suite({LINEAR: 0.6}), "pmae epoch 3": suite({LINEAR: 0.7}), **rivals})
    other = {**rivals, "raw pixels": suite({"linear/pixels/test": 0.61})}
    b = make_run("b", evaluation={"pmae epoch 3": suite({LINEAR: 0.7}), **other})
    found = [entrant.name for entrant in lineup([load(a.path), load(b.path)], "test")]
    ours = ["a: pmae epoch 3 (CLS)", "b: pmae epoch 3 (CLS)"]
    assert found == [*ours, "random weights (CLS)", "a: raw pixels", "b: raw pixels"]
    curves = epochs_of(load(a.path), "linear", "test")
    assert [(name, [s.epoch for s in scores]) for name, scores in curves.items()] == [("pmae (CLS)", [1, 3])]


def test_two_presets_of_one_encoder_stand_side_by_side(make_run: Callable[..., Run], suite: Suite) -> None:
    strong, paper = suite({LINEAR: 0.7}), {**suite({LINEAR: 0.6}), "preset": "paper"}
    evaluation = {"pmae epoch 3 [strong]": {**strong, "preset": "strong"}, "pmae epoch 3 [paper]": paper}
    run = load(make_run("a", evaluation=evaluation).path)
    found = {entrant.name: entrant.score.accuracy.value for entrant in lineup([run], "test")}
    assert found == {"pmae epoch 3 (CLS), strong": 70.0, "pmae epoch 3 (CLS), paper": 60.0}
    assert set(epochs_of(run, "linear", "test")) == {"pmae (CLS), strong", "pmae (CLS), paper"}


def test_names_that_differ_and_names_for_files() -> None:
    assert distinct_names(["x/a", "y/a"]) == ["x/a", "y/a"]
    assert distinct_names(["x/a", "x/b"]) == ["a", "b"]
    assert distinct_names(["x/a", "x/a"]) == ["a (1)", "a (2)"]
    assert file_name("<script>/ö A") == "script-a"
