import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pmae.config import AugmentConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import DTYPES, ImageSet, Splits
from pmae.errors import UserError
from pmae.evaluate import features, progress, suite
from pmae.evaluate.baselines import RawPixels, fit_pca
from pmae.evaluate.metrics import SeedPredictions, score_of
from pmae.evaluate.protocols import FinetuneProtocol, KnnProtocol, ProbeProtocol, Protocols, only
from pmae.models.encoder import Encoder
from pmae.results import Evaluation, Score, read_evaluations

CPU = torch.device("cpu")
Pictures = Callable[..., ImageSet]

PROBE = ProbeProtocol(epochs=6, warmup_epochs=1, batch_size=32, base_lrs=(0.1, 0.5), augment=None, standardize=True)
SMALL = Protocols(
    "small", PROBE, KnnProtocol((1, 3, 5)), FinetuneProtocol(epochs=2, warmup_epochs=0, base_lr=0.01), resamples=50
)


def find(evaluation: Evaluation, protocol: str, pooling: str, split: str) -> Score:
    (one,) = [s for s in evaluation.scores if (s.protocol, s.pooling, s.split) == (protocol, pooling, split)]
    return one


def evaluate(*arguments: Any, **named: Any) -> Evaluation:
    """The suite on something made by PMAE, on a CPU."""
    return suite.evaluate(*arguments, method="pmae", epoch=3, **named)


def shuffled(part: ImageSet, seed: int) -> ImageSet:
    assert part.labels is not None
    return dataclasses.replace(part, labels=np.random.default_rng(seed).permutation(part.labels))


def test_long_work_says_how_far_it_is(
    encoder: Encoder, splits: Splits, standardize: Standardize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setitem(features.CHUNK, "cpu", 50)
    said: list[str] = []
    evaluate(encoder, splits, standardize, only(SMALL, ["knn", "finetune"]), seeds=(0, 1), say=said.append)
    total, sizes = sum(map(len, splits.parts.values())), [len(part) for part in splits.parts.values()]
    done = np.cumsum([min(50, size - start) for size in sizes for start in range(0, size, 50)])
    told = [re.fullmatch(r"pmae epoch 3: (\w+), (\d+) of (\d+) (\w+), about \d+:\d\d:\d\d left", line) for line in said]
    found = [(one[1], int(one[2]), int(one[3]), one[4]) for one in told if one]
    assert found == [
        *(("features", count, total, "images") for count in done[:-1]),
        *(("finetune", count, 4, "epochs") for count in (1, 2, 3)),
    ]


def test_everything_at_once_is_plain_json(
    encoder: Encoder, splits: Splits, standardize: Standardize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", float("inf"))  # a slow machine says how far it is
    said: list[str] = []
    found = evaluate(encoder, splits, standardize, SMALL, seeds=(0, 1), folder=tmp_path, say=said.append)
    written = json.loads(json.dumps(found.to_json(), allow_nan=False))
    (read,) = read_evaluations({"evaluations": [written]}, "results.json")
    assert dataclasses.replace(read, settings=found.settings) == found
    assert len(found.scores) == (4 + 2 + 1) * 2
    assert said == [f"pmae epoch 3: {stage}" for stage in ("features", "probes", "knn", "finetune")]
    linear = find(found, "linear", "mean", "test")
    assert (linear.label, linear.preset, linear.data) == ("pmae epoch 3", "small", splits.name)
    assert [one.seed for one in linear.by_seed] == [0, 1]
    assert linear.images == 60
    values = [one.metrics["accuracy"].value for one in linear.by_seed if one.metrics]
    assert linear.metrics["accuracy"].value == pytest.approx(np.mean(values))
    assert linear.metrics["accuracy"].std == pytest.approx(np.std(values, ddof=1))
    assert "split off the training part" in linear.chosen_on
    assert np.sum(linear.confusion) == 60
    assert [row.support for row in linear.per_class] == [20, 20, 20]
    neighbours = find(found, "knn", "cls", "val")
    assert [row.k for row in neighbours.by_k] == [1, 3, 5]
    assert all(neighbours.chosen_on.startswith(f"{row.images} images (") for row in neighbours.by_k)
    chosen = neighbours.by_seed[0].chosen["k"]
    assert max(row.validation for row in neighbours.by_k) == next(
        row.validation for row in neighbours.by_k if row.k == chosen
    )
    assert len(find(found, "finetune", "cls", "test").losses) == 2
    assert found.data.majority["test"] == pytest.approx(1 / 3)
    assert set(found.seconds) == {"features", "probes", "knn", "finetune"}
    assert 1 <= found.features["cls"].effective_rank <= 16
    assert len(list(tmp_path.glob("pmae-epoch-3-small-pictures-*/seed-1/finetune.safetensors"))) == 1


def test_the_same_seed_gives_the_same_results_and_the_test_part_no_influence(
    encoder: Encoder, splits: Splits, standardize: Standardize
) -> None:
    protocols = only(SMALL, ["linear", "knn"])
    first, again = (evaluate(encoder, splits, standardize, protocols).scores for _ in range(2))
    assert first == again
    assert splits.test is not None
    scrambled = shuffled(splits.test, 0)
    other = evaluate(encoder, dataclasses.replace(splits, test=scrambled), standardize, protocols).scores
    assert [e.by_seed[0].chosen for e in other] == [e.by_seed[0].chosen for e in first]
    assert [e for e in other if e.split == "val"] == [e for e in first if e.split == "val"]


def test_augmented_probes_run_the_encoder_anew_each_epoch(
    encoder: Encoder, splits: Splits, standardize: Standardize
) -> None:
    config = dataclasses.replace(PROBE, base_lrs=(0.1,), augment=AugmentConfig())
    protocols = Protocols("augmented", config, None, None, resamples=10)
    found = evaluate(encoder, splits, standardize, protocols)
    assert {(e.protocol, e.pooling) for e in found.scores} == {
        (kind, pooling) for kind in ("linear", "mlp") for pooling in ("cls", "mean")
    }
    assert found.scores[0].chosen_on == "fixed by the preset"
    plain = dataclasses.replace(protocols, probe=dataclasses.replace(config, augment=None))
    other = evaluate(encoder, splits, standardize, plain)
    assert [e.metrics for e in found.scores] != [e.metrics for e in other.scores]


def test_baselines_go_through_the_same_door(splits: Splits, standardize: Standardize) -> None:
    pixels = RawPixels(splits.train.shape, 16)
    pca = fit_pca(Batches(splits.train.images, CPU), standardize, splits.train.shape, 16)
    for represent, name in ((pixels, "pixels"), (pca, "pca")):
        found = evaluate(represent, splits, standardize, SMALL)
        assert {e.pooling for e in found.scores} == {name}
        assert any("nothing to train" in note for note in found.notes)
        assert find(found, "linear", name, "test").metrics["accuracy"].value > 0.9


def test_permuted_labels_score_at_chance(
    encoder: Encoder, splits: Splits, standardize: Standardize, pictures: Pictures
) -> None:
    permuted = Splits("permuted", shuffled(splits.train, 1), test=shuffled(pictures(300, 5), 2))
    for one in evaluate(encoder, permuted, standardize, SMALL).scores:
        accuracy = one.metrics["accuracy"]
        assert accuracy.low - 0.03 <= 1 / 3 <= accuracy.high + 0.03
        assert one.metrics["macro_auc"].value == pytest.approx(0.5, abs=0.1)


def test_images_that_are_harder_than_those_of_training_are_told(
    encoder: Encoder, splits: Splits, standardize: Standardize
) -> None:
    darker = dataclasses.replace(splits.test, images=255 - splits.test.images)
    other = dataclasses.replace(splits, test=darker)
    for data, harder in ((splits, []), (other, ["test"])):
        found = evaluate(encoder, data, standardize, only(SMALL, ["knn"]))
        said = r"k-NN on pmae epoch 3 is right for ([\d.]+)% of held-out training images and ([\d.]+)% of (\w+)"
        told = [re.match(said, note) for note in found.notes]
        assert [(one[2], one[3]) for one in told if one] == [
            (f"{find(found, 'knn', 'mean', split).accuracy.value:.1f}", split) for split in harder
        ]
    untrained = suite.evaluate(encoder, other, standardize, only(SMALL, ["knn"]), method="random weights")
    assert not any("by heart" in note for note in untrained.notes)


def test_a_set_without_test_split_and_with_duplicates_says_so(
    encoder: Encoder, standardize: Standardize, pictures: Pictures
) -> None:
    train = pictures(90, 0)
    images = train.images.copy()
    images[1::3] = images[1]
    found = evaluate(
        encoder,
        Splits("mine", dataclasses.replace(train, images=images)),
        standardize,
        only(SMALL, ["knn"]),
    )
    assert found.data.test == 18
    assert found.data.val is None
    assert "no test split" in found.data.notes[0]
    assert found.data.duplicates["test"].count == 6
    assert {e.split for e in found.scores} == {"test"}


def test_images_of_a_group_do_not_choose_as_if_each_were_another(
    encoder: Encoder, standardize: Standardize, pictures: Pictures
) -> None:
    """Five copies of every image: k is chosen on as much as their originals, or one less as Bessel has it."""
    train = pictures(60, 0)
    copied = train.take(np.repeat(np.arange(60), 5))
    of_groups = dataclasses.replace(copied, groups=np.repeat(np.arange(60), 5))
    wrong = np.random.default_rng(0).permutation(60)[np.repeat(np.arange(60), 5)] % 3  # right for a third, by chance
    for part, counted in (
        (copied, {30}),
        (of_groups, {5, 6}),
    ):
        data = Splits("copies", dataclasses.replace(part, labels=wrong), test=pictures(30, 1))
        scores = evaluate(encoder, data, standardize, only(SMALL, ["knn"])).scores
        assert {one.images for score in scores for one in score.by_k} <= counted


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_one_channel(dtype: str, pictures: Pictures) -> None:
    train, test = pictures(60, 0, (1, 8, 8)), pictures(30, 1, (1, 8, 8))
    cast = [dataclasses.replace(part, images=part.images.astype(dtype)) for part in (train, test)]
    standardize = Standardize(torch.tensor(100.0), torch.tensor(40.0))
    found = evaluate(RawPixels((1, 8, 8), 8), Splits("cast", cast[0], test=cast[1]), standardize, only(SMALL, ["knn"]))
    assert find(found, "knn", "pixels", "test").metrics["accuracy"].value > 0.9


def edge(pictures: Pictures, train: list[int], test: list[int], constant: bool = False) -> Evaluation:
    def part(labels: list[int], seed: int) -> ImageSet:
        made = pictures(len(labels), seed)
        images = np.full_like(made.images, 7) if constant else made.images
        return ImageSet(images, np.array(labels), ("a", "b", "c"))

    standardize = Standardize(torch.tensor(100.0), torch.tensor(40.0))
    splits = Splits("edge", part(train, 0), test=part(test, 1))
    return evaluate(RawPixels((2, 8, 12), 4), splits, standardize, SMALL)


def test_one_class_a_missing_class_and_constant_images_have_no_nan(pictures: Pictures) -> None:
    one = edge(pictures, [1] * 6, [1] * 4)
    assert "single class" in " ".join(one.notes)
    assert find(one, "linear", "pixels", "test").metrics["accuracy"].value == 1.0
    assert find(one, "linear", "pixels", "test").metrics["macro_auc"].value is None
    missing = edge(pictures, [0, 1] * 6, [0, 1, 2, 2])
    assert any("class 'c' is in test but not in train" in note for note in missing.notes)
    assert find(missing, "knn", "pixels", "test").per_class[2].recall == 0.0
    constant = edge(pictures, [0, 0, 0, 1, 1, 0] * 3, [0, 0, 1], constant=True)
    assert find(constant, "linear", "pixels", "test").metrics["macro_auc"].value == 0.5
    for found in (one, missing, constant):
        json.dumps(found.to_json(), allow_nan=False)


def test_two_images_and_missing_labels_are_clear_errors(pictures: Pictures) -> None:
    with pytest.raises(UserError, match="at least two images"):
        edge(pictures, [0, 1], [0])
    with pytest.raises(UserError, match="class numbers from 0"):
        edge(pictures, [0, -1, 0], [0])


def test_two_sets_of_one_name_are_told_apart(splits: Splits) -> None:
    protocols = Protocols("quick", None, KnnProtocol((1,)), None, resamples=10)
    assert splits.test is not None
    darker = dataclasses.replace(splits.test, images=np.asarray(splits.test.images) // 2)
    plain = Standardize(torch.zeros(1), torch.ones(1))
    moved, other = dataclasses.replace(splits, name="others"), dataclasses.replace(splits, test=darker)
    found = [evaluate(RawPixels((2, 8, 12), 8), each, plain, protocols) for each in (splits, moved, other)]
    first, again, elsewhere = (each.data.fingerprint for each in found)
    assert first == again != elsewhere


def test_seeds_must_differ(encoder: Encoder, splits: Splits, standardize: Standardize) -> None:
    with pytest.raises(UserError, match="no two alike"):
        evaluate(encoder, splits, standardize, SMALL, seeds=(1, 1))


def test_a_diverged_seed_is_named_and_has_no_metrics() -> None:
    good, bad = np.eye(2)[[0, 1, 1]], np.full((3, 2), np.nan)
    runs = [SeedPredictions(0, bad, {}), SeedPredictions(1, good, {})]
    named = {"protocol": "mlp", "pooling": "cls", "split": "test"}
    made = score_of(runs, np.array([0, 1, 0]), ("a", "b"), 20, **named)
    assert made.by_seed[0].metrics is None
    assert made.metrics["accuracy"].value == pytest.approx(2 / 3)
    assert "diverged for 1 of 2 seeds" in made.notes[0]
    lost = score_of(runs[:1], np.array([0, 1, 0]), ("a", "b"), 20, **named)
    assert lost.metrics["accuracy"].value is None
    assert lost.confusion is None


def test_a_head_that_died_to_a_constant_is_named() -> None:
    dead = SeedPredictions(0, np.tile([0.7, 0.3], (3, 1)), {})
    named = {"protocol": "mlp", "pooling": "cls", "split": "test"}
    made = score_of([dead], np.array([0, 1, 0]), ("a", "b"), 20, **named)
    assert "its training died" in made.notes[0]
    assert made.metrics["macro_auc"].value == 0.5


def test_features_that_are_not_finite_are_refused_before_any_head_is_trained() -> None:
    with pytest.raises(UserError, match=r"features must be finite for each of 4 training images, got .*for 1"):
        suite.shape_of(torch.tensor([[0.0, 1.0], [1.0, float("nan")], [2.0, 3.0], [1.0, 1.0]]))
