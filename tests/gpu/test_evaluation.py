"""Evaluation and fine-tuning on the card: compiled and captured against eager, and on where the compiler gives up."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tests.evaluate.test_finetune_step import CONFIGS, trained
from tests.gpu.conftest import Within
from tests.gpu.test_training import images_for
from torch import nn

from pmae.config import EncoderConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import ImageSet
from pmae.embed import Embedder
from pmae.evaluate import finetune_step
from pmae.evaluate.features import Extractor
from pmae.evaluate.finetune import Finetuned, finetune
from pmae.evaluate.finetune_step import CapturedFinetuneStep, FinetuneStep
from pmae.evaluate.probes import ProbeTask, train_probes
from pmae.evaluate.protocols import FinetuneProtocol, ProbeProtocol
from pmae.fast import accelerate
from pmae.models.encoder import build_encoder

CUDA = torch.device("cuda")


def encoder(name: str = "vit_tiny") -> Any:
    torch.manual_seed(0)
    sizes = {"patch_size": 8, "width": 96, "depth": 4, "heads": 6} if name == "vit_tiny" else {"name": name}
    return build_encoder(EncoderConfig(**sizes), (3, 32, 32)).to(CUDA)  # type: ignore[arg-type]


def labelled(count: int = 640) -> tuple[Batches, torch.Tensor, Standardize]:
    """Images whose class is how bright they are."""
    images = images_for(32, count)
    level = images.mean((1, 2, 3))
    labels = np.digitize(level, np.quantile(level, [0.25, 0.5, 0.75]))
    standardize = Standardize(torch.tensor(float(images.mean())), torch.tensor(float(images.std()))).to(CUDA)
    return Batches(images, CUDA), torch.from_numpy(labels).to(CUDA), standardize


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_fine_tuning_has_the_losses_of_the_eager_step(name: str, assert_within: Within) -> None:
    config = dataclasses.replace(CONFIGS[name], base_lr=0.01)
    (_, plain), (_, captured) = (trained(kind, config, CUDA) for kind in (FinetuneStep, CapturedFinetuneStep))
    apart = max(abs(a / b - 1) for a, b in zip(captured, plain, strict=True))
    assert_within(f"fine-tuning captured against eager, {name}", apart, 0.02)


def test_branches_are_dropped_anew_at_every_replay() -> None:
    config = dataclasses.replace(FinetuneProtocol(augment=None), base_lr=1e-12)
    _, losses = trained(CapturedFinetuneStep, config, CUDA, depth=0.5)
    assert len({round(loss, 6) for loss in losses[4:]}) > 1


def test_captured_probes_are_the_eager_ones(assert_within: Within) -> None:
    torch.manual_seed(0)
    features = torch.randn(2, 1024, 96, device=CUDA)
    labels = (features[0, :, :4].argmax(1)).long()
    task = ProbeTask(labels, 4, ("cls", "mean"), hidden=32, seeds=(0, 1))
    config = ProbeProtocol(epochs=8, batch_size=128, base_lrs=(0.1, 0.5), weight_decays=(0.0, 1e-3), warmup_epochs=2)
    found, plain = (
        train_probes(lambda epoch: features, task, config, task.grid(config), plain=plain).scores(features)
        for plain in (False, True)
    )
    assert found.keys() == plain.keys()
    assert len(found) == 8
    assert_within("probes' probabilities captured against eager",
         max(float((found[head] - plain[head]).abs().max()) for head in found), 1e-3)  # fmt: skip


@pytest.mark.parametrize("name", ["vit_tiny", "resnet18"])
def test_features_are_those_of_float64(name: str, assert_within: Within) -> None:
    net, (batches, _, standardize) = encoder(name).to(CUDA).eval(), labelled(300)
    found = Extractor(net, standardize, CUDA)(batches)
    x = standardize(batches.take(torch.arange(300, device=CUDA)))
    accelerate(net, "none")
    with torch.no_grad():
        with torch.autocast("cuda", torch.bfloat16):
            rounded = net.features(x)
        exact = net.double().features(x.double())
    for pooling, expected in exact.items():
        errors = [float((each[pooling].double() - expected).norm() / expected.norm()) for each in (found, rounded)]
        assert_within(f"features of {name}, against float64", errors[0], 2 * errors[1] + 2**-8)


def test_features_that_are_streamed_are_those_in_memory() -> None:
    images = images_for(32, 300)
    embedder = Embedder(encoder(), labelled()[2], device=CUDA, batch_size=64)
    chunks = [("train", ImageSet(images[start : start + 64])) for start in range(0, 300, 64)]
    streamed = [features for _, features in embedder.ahead(chunks)]
    np.testing.assert_array_equal(np.concatenate(streamed), embedder(images))


def tuned(net: Any, **options: Any) -> Finetuned:
    batches, labels, standardize = labelled()
    config = FinetuneProtocol(epochs=4, batch_size=64, warmup_epochs=1, base_lr=2e-3, augment=None)
    return finetune(net, batches, labels, 4, standardize, config, **options)


@pytest.mark.parametrize("from_pixels", [0, 1e12])
@pytest.mark.parametrize("name", ["vit_tiny", "resnet18"])
def test_fine_tuning_learns_as_the_plain_one_does(
    name: str, from_pixels: float, assert_within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_step, "COMPILE_FROM", from_pixels)
    fast, plain = (tuned(encoder(name), plain=plain).losses for plain in (False, True))
    assert fast[-1] < 0.95 * fast[0]
    how = f"fine-tuning {name}{'' if from_pixels else ', compiled'}"
    assert_within(f"{how}, first epoch's loss against plain", abs(fast[0] / plain[0] - 1), 0.05)


class Refused(nn.Module):
    """What the compiler made, if it had made anything."""

    def forward(self, *arguments: object, **options: object) -> None:
        raise RuntimeError("the compiler gave up\nwith many lines")


@pytest.mark.parametrize("name", ["vit_tiny", "resnet18"])
def test_where_the_compiler_gives_up_fine_tuning_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: Refused())
    monkeypatch.setattr(finetune_step, "COMPILE_FROM", 0)
    with pytest.warns(UserWarning, match="the compiler gave up"):
        assert len(tuned(encoder(name)).losses) == 4
