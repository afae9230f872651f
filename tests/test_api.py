"""The front door in Python: arrays in, a run out, evidence merged into it."""

import dataclasses
import logging
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2 import Resize

import pmae
from pmae import api
from pmae.cli import main
from pmae.cli.encoder import score_table
from pmae.config import Config, replace
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError
from pmae.evaluate.probes import online_probe
from pmae.evaluate.protocols import KnnProtocol, only, preset
from pmae.report.page import write_report
from pmae.runs import Run
from pmae.standing import primary_pooling, scores_of
from pmae.train.checkpoint import load_encoder

pytestmark = pytest.mark.usefixtures("no_figures")


def test_a_run_of_arrays_is_resumed_with_them(tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, out = np.random.default_rng(0).integers(0, 255, (64, 16, 16), dtype=np.uint8), tmp_path / "run"
    config = replace(tiny, train__epochs=2)
    pmae.pretrain(config, images, out, quiet=True, until=1)
    assert main(["pretrain", "--out", str(out), "--resume"]) == 2
    assert "images must be given again to resume a run of images in memory ('array')" in capsys.readouterr().err
    with pytest.raises(UserError, match="images must be given again"):  # not that settings follow from others
        pmae.pretrain(config, None, out, quiet=True, resume=True)
    done = pmae.pretrain(config, images, out, quiet=True, resume=True)
    assert done.results["pretrain"]["epoch"] == 2


def test_arrays_in_features_out(tiny: Config, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (64, 16, 16), dtype=np.uint8)
    run = pmae.pretrain(replace(tiny, train__epochs=1), images, tmp_path / "run", quiet=True)
    _, encoder, standardize = pmae.load_encoder(run)
    x = torch.from_numpy(images[:4, None])
    first, again = (encoder.features(standardize(x))["mean"] for _ in range(2))
    assert first.shape == (4, 32)
    assert torch.equal(first, again)


def test_a_run_is_given_as_itself_or_as_its_path(tiny: Config, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (64, 16, 16), dtype=np.uint8)
    run = pmae.pretrain(replace(tiny, train__epochs=1), images, tmp_path / "run", quiet=True)
    np.save(tmp_path / "images.npy", images)
    for given in (run, run.path, str(run.path)):
        assert pmae.load_encoder(given)[1].width == 32
        assert api.embed(given, tmp_path / "images.npy", tmp_path / "features.npz", device="cpu") == 64
    with pytest.raises(UserError, match="run must be a folder that pretraining wrote"):
        pmae.load_encoder(tmp_path / "nothing")


def test_a_run_among_its_images_goes_on_wherever_they_lie_now(tiny: Config, tmp_path: Path) -> None:
    """Its own folder is then one of the runs that are passed over, which is told of the images and is none of them."""
    for number, image in enumerate(np.random.default_rng(0).integers(0, 255, (40, 16, 16, 3), dtype=np.uint8)):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / f"in/{number:02}.png")
    config = replace(tiny, data__source=str(tmp_path / "in"))
    whole = pmae.pretrain(config, out=tmp_path / "whole", quiet=True)
    pmae.pretrain(config, out=tmp_path / "in/runs/a", quiet=True, until=1)
    (tmp_path / "in").rename(tmp_path / "there")
    moved = replace(config, data__source=str(tmp_path / "there"))
    again = pmae.pretrain(moved, out=tmp_path / "there/runs/a", quiet=True, resume=True)
    weights = [(run.checkpoint() / "encoder.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]
    assert Run(again.path).config.data.source == str(tmp_path / "there")
    (tmp_path / "there/00.png").unlink()
    with pytest.raises(UserError, match="data must be what the run began with"):
        pmae.pretrain(moved, out=again.path, quiet=True, resume=True)


def test_nan_in_held_out_images_is_told_before_training(tiny: Config, tmp_path: Path) -> None:
    """It would be the R2 at the end."""
    images = np.random.default_rng(0).normal(size=(64, 1, 16, 16)).astype(np.float32)
    held_out = images[:8].copy()
    held_out[3, 0, 0, 0] = np.nan
    splits = Splits("toy", ImageSet(images), val=ImageSet(held_out))
    with pytest.raises(UserError, match="the val images must be finite numbers, got NaN or infinity in 1 of 8 images"):
        pmae.pretrain(tiny, splits, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_nan_in_labelled_images_is_told_before_they_are_scored(tiny: Config, tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).normal(size=(64, 1, 16, 16)).astype(np.float32), np.arange(64) % 2
    run = pmae.pretrain(replace(tiny, train__epochs=1), images, tmp_path / "run", quiet=True)
    broken = images.copy()
    broken[5:7] = np.inf
    parts = [ImageSet(each, labels, ("a", "b")) for each in (images, broken)]
    with pytest.raises(UserError, match="the test images must be finite numbers, got NaN or infinity in 2 of 64"):
        pmae.evaluate(run, splits=Splits("toy", parts[0], test=parts[1]))
    assert not run.evaluations


@pytest.mark.parametrize("loader", [False, True])
def test_a_torch_data_set_is_data(tiny: Config, tmp_path: Path, loader: bool) -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (64, 3, 16, 16), dtype=np.uint8))
    data = TensorDataset(images, torch.arange(64) % 2)
    run = pmae.pretrain(
        replace(tiny, train__epochs=1),
        DataLoader(data, batch_size=10) if loader else data,
        tmp_path / "run",
        quiet=True,
    )
    same = pmae.pretrain(replace(tiny, train__epochs=1), ImageSet(images.numpy()), tmp_path / "same", quiet=True)
    counts = run.environment["data"]
    assert (counts["shape"], counts["counts"]) == ([3, 16, 16], {"train": 58, "val": 6})
    assert len(counts["classes"]) == 2
    assert counts["shape"] == same.environment["data"]["shape"]
    sizes = [Resize((size, size))(images[0]) for size in (8, 16)]
    with pytest.raises(UserError, match="images must be of one shape"):
        pmae.pretrain(tiny, ListOf(sizes), tmp_path / "other")


class ListOf(torch.utils.data.Dataset[torch.Tensor]):
    """A data set of given images."""

    def __init__(self, images: list[torch.Tensor]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index]


def test_what_is_said_goes_to_the_logger_where_it_has_a_handler(
    tiny: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 255, (64, 16, 16), dtype=np.uint8)
    with caplog.at_level(logging.INFO, logger="pmae"):
        pmae.pretrain(replace(tiny, train__epochs=1), images, tmp_path / "run")
    assert any("train.epochs" in record.message for record in caplog.records if record.name == "pmae")
    assert capsys.readouterr().out == ""


def test_completion_shows_the_public_names_alone() -> None:
    assert dir(pmae) == sorted([*pmae.__all__, "__version__"])
    assert all(getattr(pmae, name) is not None for name in dir(pmae))
    assert pmae.__version__ == version("pmae")
    with pytest.raises(AttributeError, match="has no attribute 'pretrian'"):
        pmae.pretrian  # noqa: B018


def test_images_that_are_held_out_are_never_trained_or_fitted_on(tiny: Config, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 16, 16), dtype=np.uint8)
    config = replace(tiny, train__epochs=2, train__batch_size=16)
    run = pmae.pretrain(config, images, tmp_path / "a", quiet=True)
    held = [int(name.removeprefix("#")) for name in run.results["held_out"]]
    assert len(held) == 4
    assert run.environment["data"]["counts"] == {"train": 36, "val": 4}
    changed = images.copy()
    changed[held] = 0
    other = pmae.pretrain(config, changed, tmp_path / "b", quiet=True)
    for name in ("fitted.safetensors", "checkpoints/epoch_0002/encoder.safetensors"):
        assert (run.path / name).read_bytes() == (other.path / name).read_bytes()
    assert run.results["pretrain"]["held_out_r2"] != other.results["pretrain"]["held_out_r2"]
    # Too few to spare any: the number says what it is.
    few = pmae.pretrain(config, images[:19], tmp_path / "c", quiet=True).results["pretrain"]
    assert "train_r2" in few
    assert "held_out_r2" not in few


def test_evaluations_of_different_protocols_add_up(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=2), toy, tmp_path / "run", quiet=True)
    strong = preset("strong")
    assert strong.probe
    short = dataclasses.replace(strong, probe=dataclasses.replace(strong.probe, epochs=2, warmup_epochs=0))
    for kinds in (["linear"], ["knn"]):
        api.evaluate(run.path, only(short, kinds), toy, epochs=(1, None), device="cpu")
    scores = scores_of(run.evaluations)
    labels = ("pmae epoch 1", "pmae epoch 2", "random weights", "raw pixels", "pca features")
    assert {(s.label, s.protocol) for s in scores} == {(label, kind) for label in labels for kind in ("linear", "knn")}
    assert {s.preset for s in scores} == {"strong"}
    # Each says of itself how it was made, whatever came after it.
    asked = [[name for name in ("probe", "knn") if e.settings[name]] for e in run.evaluations]
    assert asked == [["probe"]] * 5 + [["knn"]] * 5
    assert "pmae epoch 2" in score_table(scores)
    assert (run.path / "features.safetensors").exists()


def test_a_run_of_images_in_memory_is_not_scored_on_the_embedded_photographs(tiny: Config, tmp_path: Path) -> None:
    """Both are 32x32 in colour, so nothing else would tell."""
    images = np.random.default_rng(0).integers(0, 255, (40, 3, 32, 32), np.uint8)
    run = api.pretrain(replace(tiny, train__epochs=1), images, tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"^data must be given for a run of images in memory \('array'\)"):
        api.evaluate(run.path, device="cpu")
    assert "evaluations" not in run.results


def test_heads_can_read_the_last_blocks_side_by_side(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True)
    nearest = dataclasses.replace(only(preset("strong"), ["knn"]), knn=KnnProtocol((1,)))
    api.evaluate(run.path, nearest, toy, device="cpu", figures=False)
    usual = primary_pooling(scores_of(run.evaluations))
    api.evaluate(run.path, dataclasses.replace(nearest, layers=2), toy, device="cpu")
    found = {s.label: s for s in scores_of(run.evaluations[4:])}
    assert {label: s.pooling for label, s in found.items()} == {
        **dict.fromkeys(("pmae epoch 1", "random weights"), "last_2"), "raw pixels": "pixels", "pca features": "pca"
    }  # fmt: skip
    assert run.evaluations[4].features["last_2"].width == 2 * 32
    write_report([run.path], tmp_path / "report.html")
    assert "last 2 blocks" in (tmp_path / "report.html").read_text()
    assert primary_pooling(scores_of(run.evaluations)) == usual  # it stands for nothing but itself

    _, encoder, standardize = load_encoder(run)
    assert toy.test
    vectors = []
    for part in (toy.train, toy.test):
        x = standardize(torch.from_numpy(part.images).float())
        with torch.no_grad():
            vectors.append(torch.cat([each.mean(1) for each in encoder.net.get_intermediate_layers(x, 2)], 1).numpy())
    judge = KNeighborsClassifier(1, metric="cosine").fit(vectors[0], toy.train.labels)
    accuracy = found["pmae epoch 1"].metrics["accuracy"].value
    assert accuracy == pytest.approx(judge.score(vectors[1], toy.test.labels), abs=1.5 / len(toy.test))


def test_layers_that_there_are_not_are_refused(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"layers must be at most the blocks of the encoder \(2\), got 3"):
        api.evaluate(run.path, dataclasses.replace(only(preset("strong"), ["knn"]), layers=3), toy, device="cpu")
    with pytest.raises(UserError, match="layers must be 1 beside finetune"):
        dataclasses.replace(preset("strong"), layers=2)
    assert not run.evaluations


def test_fine_tuning_under_two_presets_and_on_two_sets(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True)
    few = toy.train.take(np.arange(32))
    for name, splits in (("paper", toy), ("strong", toy), ("paper", Splits("a few/of them", few, test=toy.test))):
        protocols = only(preset(name), ["finetune"])
        assert protocols.finetune
        short = dataclasses.replace(protocols.finetune, epochs=1, warmup_epochs=0)
        api.evaluate(
            run.path,
            dataclasses.replace(protocols, finetune=short),
            splits,
            device="cpu",
            baselines=False,
            figures=False,
        )
    found = {(score.label, score.preset, score.data) for score in scores_of(run.evaluations)}
    expected = {("paper", "toy"), ("strong", "toy"), ("paper", "a few/of them")}
    assert found == {("pmae epoch 1", *rest) for rest in expected}
    assert len(list((run.path / "finetune").iterdir())) == 3


def test_fine_tuning_on_another_set_of_the_same_name_begins_anew(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True, figures=False)
    protocols = only(preset("paper"), ["finetune"])
    assert protocols.finetune
    short = dataclasses.replace(protocols.finetune, epochs=4, warmup_epochs=1, batch_size=16, augment=None)

    def scored(path: Path, splits: Splits) -> Any:
        shorter = dataclasses.replace(protocols, finetune=short)
        done = api.evaluate(path, shorter, splits, device="cpu", baselines=False, figures=False)
        return done.evaluations[-1].scores[0].metrics

    inverse = {n: dataclasses.replace(part, images=255 - part.images) for n, part in toy.parts.items()}  # type: ignore[operator]
    other, alone = Splits("toy", **inverse), tmp_path / "alone"
    shutil.copytree(run.path, alone)
    before = scored(run.path, toy)
    assert scored(run.path, other) == scored(alone, other) != before


@pytest.mark.parametrize(
    "changes",
    [{"space__name": "kernel_pca", "space__components": 1}, {"space__name": "pixels", "encoder__patch_size": 8}],
)
def test_a_mask_has_something_to_hide_and_to_leave(
    tiny: Config, toy: Splits, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"the groups that a mask hides some of must be two or more .*, got 1"):
        api.pretrain(replace(tiny, **changes), toy, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("until", [0, -1])
def test_a_run_stops_after_an_epoch_that_there_is(tiny: Config, toy: Splits, tmp_path: Path, until: int) -> None:
    with pytest.raises(UserError, match=f"until must be an epoch, from 1 on, got {until}"):
        api.pretrain(tiny, toy, tmp_path / "run", quiet=True, until=until)


def test_the_twin_differs_in_what_is_hidden_alone(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True)
    twin = api.pretrain_twin(run.path, toy)
    assert twin.path == tmp_path / "run-mae"
    assert twin.config.space.name == "pixels"
    same = ("data", "augment", "encoder", "decoder", "optim", "train")
    assert all(getattr(twin.config, part) == getattr(run.config, part) for part in same)
    # Asked for again, the finished twin is found, not trained anew.
    before = (twin.path / "metrics.jsonl").read_bytes()
    assert (api.pretrain_twin(run.path, toy).path / "metrics.jsonl").read_bytes() == before


def test_other_shapes_are_refused(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True)
    grey = Splits("grey", ImageSet(toy.train.images[:, :1], toy.train.labels))
    with pytest.raises(UserError, match=r"data must have images of the shape .* 3 channels of 8x8, got 1 channel of"):
        api.evaluate(run.path, None, grey, device="cpu")


def test_watching_never_looks_at_the_test_split(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = api.pretrain(replace(tiny, train__epochs=1), toy, tmp_path / "run", quiet=True)
    _, encoder, standardize = load_encoder(run)
    assert toy.test is not None
    nonsense = Splits("toy", toy.train, None, ImageSet(toy.test.images[::-1], toy.test.labels))
    device = torch.device("cpu")
    scores = [online_probe(splits)(encoder, standardize, device) for splits in (toy, nonsense)]
    assert scores[0] == scores[1]
    assert {"knn", "linear", "effective_rank"} == scores[0].keys()
    unlabelled = Splits("toy", ImageSet(toy.train.images))
    assert online_probe(unlabelled)(encoder, standardize, device).keys() == {"effective_rank"}


def test_a_labelled_set_can_watch_over_an_unlabelled_one(tiny: Config, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "probe.npz", images=rng.integers(0, 255, (40, 16, 16, 3), np.uint8), labels=np.arange(40) % 2)
    images = rng.integers(0, 255, (64, 16, 16, 3), dtype=np.uint8)
    config = replace(tiny, train__epochs=2, probe__data=str(tmp_path / "probe.npz"), probe__every=1)
    run = api.pretrain(config, images, tmp_path / "run", quiet=True)
    watched = [line for line in run.metrics() if "knn" in line]
    assert [line["epoch"] for line in watched] == [1.0, 2.0]
    assert {"held_out_r2", "effective_rank", "linear", "r2_band_0_50"} <= watched[0].keys()


def test_public_names_are_there_and_documented() -> None:
    assert all(callable(getattr(pmae, name)) for name in pmae.__all__)
    page = (Path(__file__).parents[1] / "docs/api.md").read_text()
    documented = set(re.findall(r"auto(?:function|class):: pmae\.([\w.]+)", page)) | {"Config"}  # with its module
    others = {"spaces.build_space", "spaces.Space", "train.callbacks.Training"}
    assert documented == {*pmae.__all__, *others}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pmae.nothing
