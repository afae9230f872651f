"""Which scores of which runs stand side by side, and under which names."""

from collections.abc import Callable
from typing import Any

from pmae.report.contents import load
from pmae.report.lineup import epochs_of, lineup
from pmae.runs import Run

Suite = Callable[..., dict[str, Any]]
LINEAR = "linear/cls/test"


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


def test_two_data_sets_of_one_encoder_are_told_apart(make_run: Callable[..., Run], suite: Suite) -> None:
    evaluation = {"pmae epoch 3 [paper]": suite({LINEAR: 0.7}), "pmae epoch 3": suite({LINEAR: 0.6}, data="others")}
    found = {e.name: e.score.accuracy.value for e in lineup([load(make_run("a", evaluation=evaluation).path)], "test")}
    assert found == {"pmae epoch 3 (CLS), bloodmnist": 70.0, "pmae epoch 3 (CLS), others": 60.0}
