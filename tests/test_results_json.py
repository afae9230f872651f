"""Reading results.json: of this version and the one before, edited, damaged or hostile, through one door."""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmae import api
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError
from pmae.evaluate.protocols import KnnProtocol, Protocols
from pmae.report.contents import load
from pmae.results import Evaluation, read_evaluations
from pmae.runs import Run
from pmae.standing import scores_of

ROOT = Path(__file__).parent.parent
OLD = Path(__file__).parent / "fixtures" / "evaluated_run"
"""A tiny run that the version before pretrained and scored: probes, k-NN, fine-tuning and baselines, two seeds."""
PUBLISHED = [
    path for path in sorted((ROOT / "results").glob("*/*/results.json")) if '"evaluation":' in path.read_text()
]
"""Runs that it published."""


@pytest.fixture
def old(tmp_path: Path) -> Run:
    return Run(shutil.copytree(OLD, tmp_path / "run"))


def flat(results: dict[str, Any]) -> dict[tuple[object, ...], tuple[object, ...]]:
    """What the old format says, read in the plainest way: the accuracy of each (label, preset, protocol, ...)."""
    found = {}
    for key, suite in results.get("evaluation", {}).items():
        label, preset = key.removesuffix("]").split(" [")
        for entry in suite["results"]:
            metric = entry["metrics"]["accuracy"]
            place = (label, preset, suite["data"]["name"], entry["protocol"], entry["pooling"], entry["split"])
            seeds = [one["seed"] for one in entry["runs"]]
            found[place] = (*(metric.get(name) for name in ("value", "low", "high", "std")), entry["images"], seeds)
    return found


@pytest.mark.parametrize("path", [OLD / "results.json", *PUBLISHED], ids=lambda path: path.parent.name)
def test_what_the_version_before_wrote_is_read_to_the_digit(path: Path) -> None:
    results = json.loads(path.read_text())
    read = {}
    for s in scores_of(read_evaluations(results, path)):
        metric = s.metrics["accuracy"]
        values = (metric.value, metric.low, metric.high, metric.std, s.images, [one.seed for one in s.by_seed])
        read[s.label, s.preset, s.data, s.protocol, s.pooling, s.split] = values
    assert read == flat(results)


def test_a_run_of_the_version_before_is_evaluated_further_and_nothing_of_it_is_lost(old: Run) -> None:
    before, rng = old.results["evaluation"], np.random.default_rng(0)
    images = rng.integers(0, 255, (2, 24, 1, 8, 8), dtype=np.uint8)
    train, test = (ImageSet(part, np.arange(24) % 2, ("dark", "light")) for part in images)
    protocols = Protocols("quick", None, KnnProtocol((1,)), None, resamples=5)
    api.evaluate(old.path, protocols, Splits("stripes", train, test=test), baselines=False, device="cpu", figures=False)
    assert old.results["evaluation"] == before
    assert [(e.method, e.epoch) for e in old.evaluations[len(before) :]] == [("pmae", 1)]
    labels = {score.label for score in scores_of(old.evaluations)}
    assert labels == {"pmae epoch 1", "pmae epoch 2", "random weights", "raw pixels", "pca features"}
    assert load(old.path).problems == ["there are no sample pictures (training writes them when it ends): no "
                                       "reconstructions, masks or spectrum"]  # fmt: skip


@pytest.fixture(scope="module")
def newest() -> dict[str, Any]:
    """The same evaluations in today's format."""
    found = read_evaluations(json.loads((OLD / "results.json").read_text()), "old")
    return {"evaluations": [json.loads(json.dumps(one.to_json())) for one in found]}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("evaluations",), {}, r"evaluations must be a list, got \{\}"),
        (("evaluations", 0), 3, r"evaluations\[0\] must be an object, got 3"),
        (("evaluations", 0, "method"), None, r"evaluations\[0\]\.method must be text, got None"),
        (("evaluations", 0, "epoch"), "2", r"\.epoch must be a whole number, got '2'"),
        (("evaluations", 0, "epoch"), 10**30, r"\.epoch must be below 2"),
        (("evaluations", 0, "epoch"), True, r"\.epoch must be a whole number"),
        (("evaluations", 0, "data", "name"), "\ud800", r"data\.name must be text, got '\\ud800'"),
        (("evaluations", 0, "scores", 0, "images"), 1.5, r"scores\[0\]\.images must be a whole number"),
        (
            ("evaluations", 0, "scores", 0, "metrics", "accuracy", "value"),
            7.0,
            r"accuracy\.value must be a share",
        ),
        (("evaluations", 0, "scores", 0, "confusion"), [[1, 2]], r"confusion must be a row and a column for each"),
        (("evaluations", 0, "seconds", "knn"), float("inf"), r"seconds\.knn must be a number"),
    ],
)
def test_the_file_and_the_key_are_named(newest: dict[str, Any], path: tuple[Any, ...], value: Any, said: str) -> None:
    damaged = copy.deepcopy(newest)
    place: Any = damaged
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UserError, match=rf"^results\.json: .*{said}"):
        read_evaluations(damaged, "results.json")


def test_what_is_missing_is_named_and_what_is_undefined_is_none(newest: dict[str, Any]) -> None:
    damaged = copy.deepcopy(newest)
    damaged["evaluations"][0]["scores"][0]["metrics"]["accuracy"]["value"] = float("nan")
    damaged["evaluations"][0]["of a later version"] = 1
    assert read_evaluations(damaged, "results.json")[0].scores[0].accuracy.value is None
    del damaged["evaluations"][0]["preset"]
    with pytest.raises(UserError, match=r"evaluations\[0\] must have 'preset'"):
        read_evaluations(damaged, "results.json")


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 10**400, 1.5, float("nan"), float("-inf"), "", "x" * 300, "\udfff", [], [[]], {}, {"\ud800": 1},
)  # fmt: skip


def damage(value: Any, rng: random.Random) -> Any:
    """The value with something in it, at any depth, put in another's place, taken out or doubled."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        action = rng.random()
        if action < 0.15:
            value.pop(key)
        elif action < 0.25 and isinstance(value, dict):
            value[rng.choice(["", "\ud800", "evaluation", key + "x"])] = value.pop(key)
        else:
            value[key] = damage(value[key], rng)
        return value
    return copy.deepcopy(rng.choice(VALUES))


@pytest.mark.parametrize("format", ["before", "now"])
def test_no_damage_raises_anything_but_a_sentence(newest: dict[str, Any], format: str) -> None:
    whole = newest if format == "now" else json.loads((OLD / "results.json").read_text())
    text, refused = json.dumps(whole), 0
    for seed in range(300):
        rng = random.Random(seed)
        damaged = json.loads(text)
        for _ in range(rng.randint(1, 4)):
            damaged = damage(damaged, rng)
        try:
            found = read_evaluations(damaged if isinstance(damaged, dict) else {}, "results.json")
            "".join(map(show, found)).encode()
        except UserError as error:
            refused += 1
            str(error).encode()
    assert 50 < refused < 300


def show(evaluation: Evaluation) -> str:
    """Everything a page would show."""
    shown = [f"{s.representation} {s.accuracy.value} {s.images:,} {s.chance} {s.classes}" for s in evaluation.scores]
    return json.dumps(evaluation.to_json(), allow_nan=True) + "".join(shown)
