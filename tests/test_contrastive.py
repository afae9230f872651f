"""The contrastive loss: two crops of an image, each with its own hidden part, find each other in a batch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pmae import contrastive
from pmae.config import Config, DecoderConfig, EncoderConfig, ObjectiveConfig, OptimConfig, TrainConfig, replace
from pmae.contrastive import ProjectionHead, nt_xent
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError
from pmae.files import read_tensors
from pmae.method import build_method
from pmae.runs import Run
from pmae.train.loop import Pretraining, pretrain
from pmae.train.trained import load_trained

SHAPE = (1, 8, 8)
FIXTURES = Path(__file__).parent / "fixtures"


def toy(space: str = "pca", weight: float = 1.0) -> tuple[Config, Splits]:
    config = Config(
        encoder=EncoderConfig(patch_size=4, width=16, depth=1, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        objective=ObjectiveConfig(contrastive_weight=weight),
        optim=OptimConfig(base_lr=8e-3),
        train=TrainConfig(epochs=8, batch_size=32, device="cpu", log_every=3, checkpoint_every=2, engine="plain"),
    )
    config = replace(config, space__name=space, objective__scale="mean" if space == "pixels" else "constant")
    images = np.random.default_rng(0).normal(size=(96, *SHAPE)).astype(np.float32).cumsum(3)
    splits = Splits("toy", ImageSet(images[:64]), None, ImageSet(images[64:]))
    return resolve(config, 64, SHAPE)[0], splits


def test_the_loss_is_the_cross_entropy_of_finding_the_partner() -> None:
    points = np.random.default_rng(1).normal(size=(10, 4))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    expected = 0.0
    for i in range(10):
        others = [j for j in range(10) if j != i]
        near = np.exp(points[others] @ points[i] / 0.3)
        partner = np.exp(points[(i + 5) % 10] @ points[i] / 0.3)
        expected -= np.log(partner / near.sum()) / 10
    assert nt_xent(torch.from_numpy(points), 0.3).item() == pytest.approx(expected, rel=1e-12)


def test_points_that_cannot_be_told_apart_score_at_chance() -> None:
    assert nt_xent(torch.ones(16, 4) / 2, 0.2).item() == pytest.approx(np.log(15), rel=1e-6)


def test_windows_lie_anywhere_inside_the_grid() -> None:
    torch.manual_seed(0)
    found = contrastive.draw_windows(400, (5, 8), torch.device("cpu")).unflatten(1, (2, 4))
    rows, columns = found // 8, found % 8
    assert bool((rows[:, 1] == rows[:, 0] + 1).all())
    assert bool((columns.diff(dim=2) == 1).all())
    assert {(int(r), int(c)) for r, c in zip(rows[:, 0, 0], columns[:, 0, 0], strict=True)} == {
        (row, column) for row in range(4) for column in range(5)
    }
    assert contrastive.draw_windows(3, (1, 1), torch.device("cpu")).tolist() == [[0]] * 3


def test_info_nce_is_the_cross_entropy_of_the_other_views_key() -> None:
    rng = np.random.default_rng(0)
    q, k = (points / np.linalg.norm(points, axis=1, keepdims=True) for points in rng.normal(size=(2, 10, 4)))
    expected = 0.0
    for i in range(10):
        others = range(5, 10) if i < 5 else range(5)
        near = np.exp([k[j] @ q[i] / 0.3 for j in others])
        expected -= np.log(np.exp(k[(i + 5) % 10] @ q[i] / 0.3) / near.sum()) / 10
    found = contrastive.info_nce(torch.from_numpy(q), torch.from_numpy(k), 0.3).item()
    assert found == pytest.approx(expected, rel=1e-12)


def test_windows_are_to_find_the_other_crop_of_their_image() -> None:
    torch.manual_seed(0)
    loss = contrastive.NTXent(12, 0.3)
    crops, windows = torch.randn(10, 12), [torch.randn(10, 12) for _ in range(2)]
    points, *local = (ProjectionHead.forward(loss, each).detach().double().numpy() for each in (crops, *windows))
    expected = [nt_xent(torch.from_numpy(points), 0.3).item()]
    for each in local:
        near = np.exp(each @ np.roll(points, 5, 0).T / 0.3)  # row i's partner is column i, of the other half
        chance = [near[i, i] / near[i, i // 5 * 5 : i // 5 * 5 + 5].sum() for i in range(10)]
        expected.append(-np.log(chance).mean())
    assert loss(crops, None, windows).item() == pytest.approx(np.mean(expected), rel=1e-5)


def test_local_views_are_windows_of_every_crop() -> None:
    """With one patch they are the whole crop, and with more the encoder sees a quarter of its patches."""
    config, _ = toy()
    config = replace(config, objective__local_views=3)
    torch.manual_seed(0)
    model, x = build_method(config, SHAPE), torch.randn(8, *SHAPE)
    assert model.contrastive is not None
    seen = model.contrastive.windows(x)
    assert [tuple(each.shape) for each in seen] == [(8, 16)] * 3
    alone = [model.encoder(x, torch.full((8, 1), place))[1].mean(1) for place in range(4)]
    for each in seen:
        near = [torch.isclose(each, one, atol=1e-6).all(1) for one in alone]
        assert bool(torch.stack(near).any(0).all())
    outcome = model.train()(x, model.draw(8, 0.2, torch.Generator().manual_seed(0)))
    outcome.loss.backward()
    assert torch.isfinite(outcome.loss)


@pytest.mark.parametrize(
    ("encoder", "name"),
    [(EncoderConfig(patch_size=4), "data2vec"), (EncoderConfig("resnet18", patch_size=4), "nt_xent")],
)
def test_local_views_that_cannot_be_had_are_refused(encoder: EncoderConfig, name: str) -> None:
    objective = ObjectiveConfig(contrastive_weight=1.0, contrastive=name, local_views=2)
    with pytest.raises(UserError, match=r"objective\.local_views must be 0 unless encoder\.name is a ViT .* got 2"):
        build_method(resolve(Config(encoder=encoder, objective=objective), 64, (3, 32, 32))[0], (3, 32, 32))


@pytest.mark.parametrize("space", ["pca", "pixels"])
def test_the_loss_is_added_while_training_alone(space: str) -> None:
    config, splits = toy(space)
    torch.manual_seed(0)
    model = build_method(config, SHAPE)
    if space == "pca":
        model.space.fit([torch.from_numpy(np.array(splits.train.images[:]))])
    x = torch.randn(8, *SHAPE)
    draw = model.draw(8, 0.75 if space == "pixels" else 0.2, torch.Generator().manual_seed(0))
    alone = model.eval()(x, draw).loss
    assert model.train()(x, draw).loss > alone
    model.contrastive = None
    torch.testing.assert_close(model(x, draw).loss, alone)


@pytest.mark.parametrize("space", ["pca", "pixels"])
def test_partners_are_found_after_training(space: str, tmp_path: Path) -> None:
    config, splits = toy(space)
    rarely = {"train__checkpoint_every": 20, "probe__every": 20, "optim__base_lr": 1.6e-2}
    run = pretrain(replace(config, train__epochs=20, **rarely), splits, tmp_path / "run", quiet=True)
    losses = [line["loss"] for line in run.metrics() if "loss" in line]
    # Chance is log 63 = 4.1 above what the masked autoencoder alone leaves.
    assert losses[-1] < losses[0] - 1.0


def test_two_different_crops_and_masks_are_drawn_for_every_image(tmp_path: Path) -> None:
    config, splits = toy()
    config = replace(config, train__epochs=1)
    run = pretrain(config, splits, tmp_path / "run", quiet=True)
    trainer = Pretraining(config, splits, run, torch.device("cpu"))
    drawn = trainer.inputs(0, 0, torch.zeros(32, *SHAPE))
    assert len(drawn.images) == 32
    for each in (drawn.crops[:, 0], drawn.draw.noise[:, 0]):
        first, second = each.chunk(2)
        assert (first != second).float().mean() > 0.5


@pytest.mark.parametrize(("loss", "drop", "local"), [("nt_xent", 0.0, 0), ("data2vec", 0.5, 0), ("nt_xent", 0.0, 2)])
def test_a_stopped_run_goes_on_bit_for_bit(
    loss: str, drop: float, local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, splits = toy()
    config = replace(config, objective__contrastive=loss, objective__local_views=local, train__epochs=4, probe__every=4)
    config = replace(config, encoder__depth=2, encoder__drop_path=drop)
    whole = pretrain(config, splits, tmp_path / "whole", quiet=True)
    save = Pretraining._save

    def stop_after(self: Pretraining) -> None:
        save(self)
        raise Interrupted("as before", 2)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "_save", stop_after)
        with pytest.raises(Interrupted):
            pretrain(config, splits, tmp_path / "stopped", quiet=True)
    again = pretrain(config, splits, tmp_path / "stopped", resume=True, quiet=True)
    for name in ("encoder.safetensors", "decoder.safetensors"):
        one, two = read_tensors(whole.checkpoint() / name), read_tensors(again.checkpoint() / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(key.startswith("projector.") for key in read_tensors(again.checkpoint() / "decoder.safetensors"))


def test_a_run_of_an_older_version_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by the version before with a head of 8 and 4 numbers, and stopped after the first of two epochs."""
    monkeypatch.setattr(contrastive, "HIDDEN", 8)
    monkeypatch.setattr(contrastive, "OUT", 4)
    shutil.copytree(FIXTURES / "contrastive_run", tmp_path / "run")
    run = Run(tmp_path / "run")
    model = load_trained(run).model
    assert model.contrastive is not None
    stored = read_tensors(run.checkpoint() / "decoder.safetensors")
    assert torch.equal(model.contrastive.module.first.weight, stored["projector.first.weight"])
    images = np.random.default_rng(0).normal(size=(48, 1, 4, 4)).astype(np.float32).cumsum(3)
    splits = Splits("toy", ImageSet(images[:32]), None, ImageSet(images[32:]))
    pretrain(run.config, splits, run.path, resume=True, quiet=True)
    for name in ("encoder", "decoder"):
        expected = read_tensors(FIXTURES / "contrastive_run_finished" / f"{name}.safetensors")
        found = read_tensors(run.checkpoint() / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), [("contrastive_weight", -1.0), ("temperature", 0.0)])
def test_senseless_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"objective.{name} must be .*{value:g}"):
        ObjectiveConfig(**{name: value})
