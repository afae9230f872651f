"""Distillation: targets against timm's own features, and a teacher that neither learns nor is saved."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from pmae import api
from pmae.cli import main
from pmae.config import Config, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.runs import Run
from pmae.teacher import Distill
from pmae.train.checkpoint import load_encoder
from pmae.train.loop import Pretraining, alone, pretrain

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
Distilling = Callable[..., Config]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolutional network as timm writes it, with pixel statistics of its own."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("timm")
    net = timm.create_model("test_resnet", num_classes=0)
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, folder / "model.safetensors")
    pixels = {"input_size": [3, 8, 8], "mean": MEAN, "std": STD}
    told = {"architecture": "test_resnet", "num_classes": 0, "pretrained_cfg": pixels}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture
def distilling(tiny: Config, toy: Splits) -> Distilling:
    """Settings that learn from a teacher."""

    def settle(teacher: Path, **changes: object) -> Config:
        named = {"objective__contrastive": f"distill(teacher={str(teacher)!r})", **changes}
        config = replace(tiny, objective__contrastive_weight=1.0, **named)
        return resolve(config, len(toy.train), toy.train.shape)[0]

    return settle


def distill_of(training: Pretraining) -> Distill:
    assert training.model.contrastive is not None
    assert isinstance(training.model.contrastive.module, Distill)
    return training.model.contrastive.module


def test_targets_are_the_features_that_timm_computes(
    distilling: Distilling, toy: Splits, weights: Path, tmp_path: Path
) -> None:
    """Whatever statistics the student's images have, and averaged or repeated to the student's grid of 2x2."""
    net = timm.create_model("test_resnet", num_classes=0)
    net.load_state_dict(load_file(weights / "model.safetensors"))
    images = torch.from_numpy(np.asarray(toy.train.images[:6]))
    seen = (images / 255 - torch.tensor(MEAN).reshape(-1, 1, 1)) / torch.tensor(STD).reshape(-1, 1, 1)
    with torch.no_grad():
        expected = functional.adaptive_avg_pool2d(net.eval().forward_features(seen), 2).flatten(2).mT
    for name in ("channel", "pixel"):
        config = distilling(weights, data__standardize=name)
        with alone(config, toy, tmp_path / name, quiet=True) as training:
            found = distill_of(training).targets(training.standardize(images), (2, 2))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_images_that_the_teachers_patches_do_not_divide_are_resized_for_it(
    distilling: Distilling, toy: Splits, tmp_path: Path
) -> None:
    """For patches of 3, images of 8x8 to 9x9."""
    net = timm.create_model("vit_tiny_patch16_224", num_classes=0, patch_size=3, img_size=9, depth=1)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    model, pixels = {"patch_size": 3, "img_size": 9, "depth": 1}, {"input_size": [3, 9, 9], "mean": MEAN, "std": STD}
    told = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "model_args": model, "pretrained_cfg": pixels}
    (tmp_path / "config.json").write_text(json.dumps(told))
    images = torch.from_numpy(np.asarray(toy.train.images[:6]))
    seen = (images / 255 - torch.tensor(MEAN).reshape(-1, 1, 1)) / torch.tensor(STD).reshape(-1, 1, 1)
    with torch.no_grad():
        larger = functional.interpolate(seen, (9, 9), mode="bicubic", antialias=True)
        maps = net.eval().forward_features(larger)[:, 1:].mT.unflatten(2, (3, 3))
    with alone(distilling(tmp_path), toy, tmp_path / "run", quiet=True) as training:
        found = distill_of(training).targets(training.standardize(images), (2, 2))
    expected = functional.adaptive_avg_pool2d(maps, 2).flatten(2).mT
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_run_as_teacher_sees_its_own_pixels(
    distilling: Distilling, tiny: Config, toy: Splits, tmp_path: Path
) -> None:
    darker = Splits("darker", ImageSet(np.asarray(toy.train.images) // 2))
    run = api.pretrain(replace(tiny, train__epochs=1), darker, out=tmp_path / "teacher", quiet=True)
    _, encoder, standardize = load_encoder(run)
    images = torch.from_numpy(np.asarray(toy.train.images[:6]))
    with torch.no_grad():
        expected = encoder.eval()(standardize(images))[1]
    with alone(distilling(run.path), toy, tmp_path / "student", quiet=True) as training:
        found = distill_of(training).targets(training.standardize(images), (2, 2))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_loss_is_of_masked_tokens_and_the_teachers_normalized_ones(
    distilling: Distilling, toy: Splits, weights: Path, tmp_path: Path
) -> None:
    with alone(distilling(weights), toy, tmp_path / "run", quiet=True) as training:
        model, module = training.model.train(), distill_of(training)
        x = training.standardize(torch.from_numpy(np.asarray(toy.train.images[:8])))
        draw = model.draw(len(x), 0.2, torch.Generator().manual_seed(1))
        found = model(x, draw).loss
        tokens, target = model.encoder(model.hide(x, draw)[2])[1], module.targets(x, (2, 2))  # type: ignore[attr-defined]
        centred = target - target.mean(2, keepdim=True)
        normalized = centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt()
        expected = functional.smooth_l1_loss(module.token_predictor(tokens), normalized)
        model.contrastive = None
        torch.testing.assert_close(found - model(x, draw).loss, expected)


def test_the_teacher_stays_as_it_is_and_is_not_saved(
    distilling: Distilling, toy: Splits, weights: Path, tmp_path: Path
) -> None:
    """And a run that was stopped ends as one that was not."""
    config = distilling(weights)
    with alone(config, toy, tmp_path / "alone", quiet=True) as training:
        teacher = distill_of(training).teacher
        before = {name: tensor.clone() for name, tensor in teacher.net.state_dict().items()}
        training.rehearse()
        assert all(torch.equal(before[name], tensor) for name, tensor in teacher.net.state_dict().items())
        assert not any(p.requires_grad for p in teacher.parameters())
    pretrain(config, toy, tmp_path / "whole", quiet=True)
    pretrain(config, toy, tmp_path / "cut", quiet=True, until=1)
    pretrain(config, toy, tmp_path / "cut", resume=True, quiet=True)
    for part in ("encoder", "decoder"):
        whole, cut = (load_file(Run(tmp_path / one).checkpoint() / f"{part}.safetensors") for one in ("whole", "cut"))
        assert whole.keys() == cut.keys()
        assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())
    assert [name for name in whole if "projector" in name] == [
        f"projector.token_predictor.{name}" for name in ("0.bias", "0.weight", "2.bias", "2.weight")
    ]


def test_a_small_network_learns_what_the_teacher_knows(
    distilling: Distilling, toy: Splits, weights: Path, tmp_path: Path
) -> None:
    """With nothing hidden and nothing to reconstruct it is plain distillation; a convolutional student will do."""
    plain = {"masking__enabled": False, "objective__reconstruction_weight": 0, "encoder__name": "test_resnet"}
    plain |= {"encoder__width": None, "encoder__depth": None, "encoder__heads": None, "train__epochs": 12}
    pretrain(distilling(weights, encoder__patch_size=None, **plain), toy, tmp_path / "run", quiet=True)
    losses = [line["loss"] for line in Run(tmp_path / "run").metrics() if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ("distill", r"objective.contrastive must be distill\(teacher=\.\.\.\), as that has no default, got 'distill'"),
        ("distill(teacher=3)", "distill.teacher must be text, got 3"),
        ("distill(teacher='gone')", "objective.contrastive distill: teacher must be a run folder, .*, got 'gone'"),
        ("distill(teacher='.')", "objective.contrastive distill: teacher must be a run folder, .* with 0 of them"),
    ],
)
def test_a_teacher_that_is_none_is_one_sentence(
    teacher: str, said: str, tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        api.pretrain(replace(tiny, objective__contrastive=teacher), toy, out="run", quiet=True)
    assert not Path("run").exists()


def test_the_command_takes_a_teacher(
    weights: Path, toy: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "images.npy", toy.train.images)
    small = ["--epochs=1", "--device=cpu", "--encoder.width=16", "--encoder.depth=1", "--encoder.heads=2"]
    command = ["pretrain", "--data", str(tmp_path / "images.npy"), "--out", str(tmp_path / "run"), *small]
    assert main([*command, "--teacher", str(weights), "--objective.contrastive", "data2vec"]) == 2
    assert "--teacher must be left out where --objective.contrastive is given" in capsys.readouterr().err
    assert main([*command, "--teacher", str(weights)]) == 0
    objective = Run(tmp_path / "run").config.objective
    assert objective.contrastive == f"distill(teacher={str(weights)!r})"
    assert objective.contrastive_weight == 1.0
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), "--format", "timm", "-o", str(exported)]) == 0
    card = (exported / "README.md").read_text()
    assert str(weights) not in card
    assert "learned the tokens of another encoder, whose licence may bind it too" in card
