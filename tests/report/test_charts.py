"""Curves, bars and maps: the values they are drawn at, and the words over them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pmae.data.images import ImageSet, Splits
from pmae.data.sets import with_held_out
from pmae.report import charts
from pmae.report.contents import load
from pmae.report.feature_map import feature_map
from pmae.runs import Run
from pmae.train.environment import describe_environment

Suite = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Run]


def test_bars_stand_at_the_accuracies(make_run: MakeRun, suite: Suite) -> None:
    evaluation = {"pmae epoch 3": suite({"linear/cls/test": 0.7}), "raw pixels": suite({"linear/pixels/test": 0.4})}
    (axes,) = charts.accuracy_bars([load(make_run(evaluation=evaluation).path)], "test").figure.axes
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [70.0, 40.0]
    assert {text.get_text() for text in axes.texts} == {"pmae epoch 3 (CLS)", "raw pixels", "70.0", "40.0"}


@pytest.mark.parametrize(("count", "width"), [(2, 5), (10, 5), (40, 1), (40, 5)])
def test_feature_maps_of_few_flat_or_unlabelled_features(make_run: MakeRun, count: int, width: int) -> None:
    run = make_run()
    values = np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)
    values[:, 0] = 1.0
    save_file({"features": values}, run.path / "features.safetensors")
    drawing = feature_map(load(run.path))
    assert np.isfinite(drawing.figure.axes[0].collections[0].get_offsets()).all()


def test_probes_name_their_images_while_the_run_still_trains(make_run: MakeRun) -> None:
    images, labels = np.zeros((64, 1, 8, 8), np.uint8), np.arange(64) % 2
    splits = with_held_out(Splits("toy", ImageSet(images, labels, ("a", "b"))))
    run = make_run(data=describe_environment(splits, torch.device("cpu"))["data"])
    assert not run.results  # which are written at the end
    assert charts.probed_on(load(run.path)) == "validation part of the training images"


@pytest.mark.parametrize(
    ("counts", "settings", "held_out", "images"),
    [
        ({"train": 400, "test": 100}, {}, [], "validation part of the training images"),
        ({"train": 400, "val": 50}, {}, [], "validation images"),
        ({"train": 400, "val": 40}, {}, ["#3"], "validation part of the training images"),
        ({"train": 400}, {"probe__data": "labelled"}, [], "validation images of labelled"),
    ],
)
def test_probes_name_their_images_and_are_in_percent(
    make_run: MakeRun, counts: dict[str, int], settings: dict[str, str], held_out: list[str], images: str
) -> None:
    made = make_run(data={"counts": counts}, **settings)
    made.add_results(**{"held_out": held_out} if held_out else {})
    run = load(made.path)
    panels = {axes.get_title(loc="left"): axes for axes in charts.learning_curves([run]).figure.axes}
    panels = {" ".join(title.split()): axes for title, axes in panels.items()}
    assert set(panels[f"Linear probe on {images} (%)"].lines[0].get_ydata()) == {60.0}
    assert set(panels[f"k-NN on {images} (%)"].lines[0].get_ydata()) == {50.0}
    assert set(panels["Effective rank"].lines[0].get_ydata()) == {8.0}
    np.testing.assert_allclose(panels["R² on held-out images (%; thin: in training)"].lines[1].get_ydata(), [0, 10, 20])
