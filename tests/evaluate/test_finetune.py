import copy
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from pmae.config import AugmentConfig, EncoderConfig
from pmae.data.augment import Standardize, crop, draw_boxes
from pmae.data.batches import Batches, fit_standardize
from pmae.data.images import ImageSet, Splits
from pmae.errors import UserError
from pmae.evaluate.baselines import random_weights
from pmae.evaluate.features import BOXES, generator, order
from pmae.evaluate.finetune import Classifier, Finetuned, finetune
from pmae.evaluate.finetune_step import build_optimizer
from pmae.evaluate.protocols import FinetuneProtocol, preset, without_augmentation
from pmae.models.encoder import Encoder, build_encoder, layer_depths

CPU = torch.device("cpu")

SHAPE: dict[str, Any] = {
    "img_size": (8, 12),
    "patch_size": 4,
    "in_chans": 2,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}
FAST = FinetuneProtocol(epochs=3, warmup_epochs=1, batch_size=32, base_lr=0.02, weight_decay=0.05)


EVERYTHING: dict[str, Any] = {
    "randaugment": 0.5,
    "random_erasing": 0.25,
    "mixup": 0.4,
    "cutmix": 0.4,
    "label_smoothing": 0.1,
    "drop_path": 0.3,
    "ema_decay": 0.9,
    "clip_norm": 1.0,
}


def run(
    encoder: nn.Module, splits: Splits, standardize: Standardize, config: FinetuneProtocol = FAST, **more: Any
) -> Finetuned:
    labels = torch.from_numpy(splits.train.labels)
    return finetune(encoder, Batches(splits.train.images, CPU), labels, 3, standardize, config, **more)


def test_forward_equals_timm_with_the_same_weights() -> None:
    torch.manual_seed(0)
    whole = VisionTransformer(num_classes=5, **SHAPE)
    encoder = build_encoder(EncoderConfig(patch_size=4, width=16, depth=2, heads=2), (2, 8, 12))
    weights = {name: value for name, value in whole.state_dict().items() if not name.startswith("head.")}
    encoder.net.load_state_dict(weights)
    classifier = Classifier(encoder, "cls", 5)
    classifier.head.load_state_dict(whole.head.state_dict())
    x = torch.randn(6, 2, 8, 12)
    assert torch.allclose(classifier(x), whole(x), atol=1e-6)
    loss, expected = classifier(x).square().sum(), whole(x).square().sum()
    loss.backward()
    expected.backward()
    ours, theirs = (dict(net.named_parameters())["blocks.0.attn.qkv.weight"].grad for net in (encoder.net, whole))
    assert ours is not None
    assert theirs is not None
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_it_learns_and_leaves_the_given_encoder_alone(
    encoder: Encoder, splits: Splits, standardize: Standardize
) -> None:
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    heard: list[int] = []
    made = run(
        encoder,
        splits,
        standardize,
        dataclasses.replace(FAST, epochs=8, augment=None),
        on_epoch=lambda e, _: heard.append(e),
    )
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert heard == list(range(8))
    assert made.losses[-1] < 0.7 * made.losses[0]
    assert splits.test is not None
    assert splits.test.labels is not None
    scores = made.scores(Batches(splits.test.images, CPU), standardize)
    assert float((scores.argmax(1) == torch.from_numpy(splits.test.labels)).float().mean()) > 0.7


class Interrupted(Exception):
    """Stands for a machine that goes away."""


@pytest.mark.parametrize("changes", [{}, {"augment": None}, EVERYTHING])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    changes: dict[str, Any], splits: Splits, standardize: Standardize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["pmae.evaluate.finetune"], "PAUSE", 0.0)
    net = VisionTransformer(num_classes=0, drop_path_rate=0.3, **SHAPE)
    encoder, config = Encoder(net, (2, 8, 12)), dataclasses.replace(FAST, layer_decay=0.7, **changes)
    whole = run(encoder, splits, standardize, config, seed=4)

    def stop(epoch: int, loss: float) -> None:
        if epoch == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(encoder, splits, standardize, config, seed=4, folder=tmp_path, on_epoch=stop)
    torch.manual_seed(123)  # what the global stream does in between must not matter
    resumed = run(encoder, splits, standardize, config, seed=4, folder=tmp_path)
    assert resumed.losses == whole.losses
    for (name, a), b in zip(
        whole.classifier.state_dict().items(), resumed.classifier.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["finetune.safetensors"]


def test_a_finished_folder_is_read_and_a_strange_one_refused(
    encoder: Encoder, splits: Splits, standardize: Standardize, tmp_path: Path
) -> None:
    first = run(encoder, splits, standardize, folder=tmp_path)
    again = run(encoder, splits, standardize, folder=tmp_path)
    assert again.losses == first.losses
    assert torch.equal(again.classifier.head.weight, first.classifier.head.weight)
    with pytest.raises(UserError, match="same settings"):
        run(encoder, splits, standardize, dataclasses.replace(FAST, epochs=5), folder=tmp_path)
    other = random_weights(lambda: build_encoder(EncoderConfig(patch_size=4, width=16, depth=2, heads=2), (2, 8, 12)))
    with pytest.raises(UserError, match="same settings"):
        run(other, splits, standardize, folder=tmp_path)
    train = dataclasses.replace(splits.train, images=255 - splits.train.images)  # type: ignore[operator]
    with pytest.raises(UserError, match="same settings"):
        run(encoder, dataclasses.replace(splits, train=train), standardize, folder=tmp_path)
    (tmp_path / "finetune.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="readable"):
        run(encoder, splits, standardize, folder=tmp_path)


def test_with_all_settings_off_it_is_the_plain_loop(encoder: Encoder, splits: Splits, standardize: Standardize) -> None:
    made = run(encoder, splits, standardize, seed=2)
    images, labels = torch.from_numpy(splits.train.images), torch.from_numpy(splits.train.labels)  # type: ignore[arg-type]
    model = Classifier(copy.deepcopy(encoder), "cls", 3, seed=2).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = [p for name, p in model.named_parameters() if p.ndim < 2 or name.endswith("token")]
    matrices = [p for p in trained if not any(p is q for q in plain)]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    losses = []
    for epoch in range(3):
        total = torch.zeros(())
        for step, index in enumerate(order(160, 16, 2, epoch, CPU)):
            done = epoch + step / 10
            fraction = done if done < 1 else 0.5 * (1 + math.cos(math.pi * (done - 1) / 2))
            boxes = draw_boxes(16, 8, 12, AugmentConfig(), generator(CPU, 2, epoch, step, BOXES), CPU)
            loss = F.cross_entropy(model(standardize(crop(images[index], boxes))), labels[index])
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * 16 / 256 * fraction
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(float(total / 10))
    assert made.losses == tuple(losses)
    for (name, a), b in zip(made.classifier.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_every_setting_changes_the_outcome_and_is_reproducible(
    name: str, encoder: Encoder, splits: Splits, standardize: Standardize
) -> None:
    config = dataclasses.replace(FAST, epochs=2, **{name: EVERYTHING[name] if name != "clip_norm" else 0.1})
    plain = run(encoder, splits, standardize, dataclasses.replace(FAST, epochs=2)).classifier.head.weight
    first, again = (run(encoder, splits, standardize, config).classifier.head.weight for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)


def test_the_average_is_scored_and_training_does_not_depend_on_it(
    encoder: Encoder, splits: Splits, standardize: Standardize
) -> None:
    config = dataclasses.replace(FAST, epochs=2)
    last = run(encoder, splits, standardize, config)
    mean = run(encoder, splits, standardize, dataclasses.replace(config, ema_decay=0.5))
    assert mean.losses == last.losses
    rate_of_ten = run(encoder, splits, standardize, dataclasses.replace(config, ema_decay=1e-9))
    torch.testing.assert_close(rate_of_ten.classifier.head.weight, last.classifier.head.weight)
    assert not torch.equal(mean.classifier.head.weight, last.classifier.head.weight)


@pytest.mark.parametrize("shape", [(1, 8, 8), (7, 8, 12), (3, 64, 64), (2, 1, 16)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_strong_settings_take_any_channels_shape_and_dtype(shape: tuple[int, int, int], dtype: str) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 200, (24, *shape)).astype(dtype), np.arange(24) % 3
    if shape[1] > 1:
        images[labels == 1, :, ::2] //= 2
    part = ImageSet(images, labels, ("a", "b", "c"))
    patch = {1: 4, 64: 32}.get(shape[1], 4)
    encoder = build_encoder(EncoderConfig(patch_size=patch, width=16, depth=2, heads=2), shape)
    strong = preset("strong").finetune
    assert strong
    config = dataclasses.replace(strong, epochs=2, warmup_epochs=1)
    made = run(encoder, Splits("any", part), fit_standardize(Batches(part.images, CPU), "channel"), config)
    assert made.classifier.pooling == "mean"
    assert all(math.isfinite(loss) and loss > 0 for loss in made.losses)


def test_strong_settings_learn(encoder: Encoder, splits: Splits, standardize: Standardize) -> None:
    strong = preset("strong").finetune
    assert strong
    # The class is a place here, which strong crops would move.
    gentle: dict[str, Any] = {"augment": AugmentConfig(crop=False), "randaugment": 0.2}
    config = dataclasses.replace(strong, epochs=25, warmup_epochs=2, base_lr=0.1, **gentle)
    made = run(encoder, splits, standardize, config)
    assert splits.test is not None
    assert splits.test.labels is not None
    scores = made.scores(Batches(splits.test.images, CPU), standardize)
    assert float((scores.argmax(1) == torch.from_numpy(splits.test.labels)).float().mean()) > 0.7


def test_the_other_presets_have_none_of_it_and_vectors_only_what_needs_no_place() -> None:
    off = {name: getattr(FinetuneProtocol(), name) for name in EVERYTHING}
    assert set(off.values()) == {0.0, None}
    for name in ("paper", "released", "plain"):
        config = preset(name).finetune
        assert {key: getattr(config, key) for key in off} == off
    vectors = without_augmentation(preset("strong")).finetune
    assert vectors
    assert (vectors.augment, vectors.randaugment, vectors.random_erasing, vectors.cutmix) == (None, 0.0, 0.0, 0.0)
    assert vectors.mixup > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("randaugment", 1.1),
        ("random_erasing", -0.1),
        ("mixup", 2.0),
        ("drop_path", 1.0),
        ("ema_decay", 1.0),
        ("clip_norm", 0.0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"finetune\.{name} must be .*{value}"):
        FinetuneProtocol(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"finetune\.cutmix must be at most what mixup \(0.6\) leaves of 1, got 0.5"):
        FinetuneProtocol(mixup=0.6, cutmix=0.5)


def test_depth_and_rates_of_a_vit(encoder: Encoder) -> None:
    classifier = Classifier(encoder, "cls", 3)
    depths = layer_depths([name for name, _ in classifier.named_parameters()])
    assert depths["encoder.net.patch_embed.proj.weight"] == depths["encoder.net.cls_token"] == 0
    assert depths["encoder.net.blocks.0.attn.qkv.weight"] == 1
    assert depths["encoder.net.blocks.1.mlp.fc1.bias"] == 2
    assert depths["encoder.net.norm.weight"] == depths["head.weight"] == 3
    groups = build_optimizer(
        classifier, FinetuneProtocol(base_lr=0.1, layer_decay=0.5, weight_decay=0.3), 256, CPU
    ).param_groups
    peak = {id(p): group for group in groups for p in group["params"]}
    found = {name: peak[id(p)] for name, p in classifier.named_parameters() if p.requires_grad}
    assert found["head.weight"]["peak"] == pytest.approx(0.1)
    assert found["encoder.net.blocks.0.attn.qkv.weight"]["peak"] == pytest.approx(0.1 * 0.5**2)
    assert found["encoder.net.patch_embed.proj.weight"]["peak"] == pytest.approx(0.1 * 0.5**3)
    assert found["encoder.net.blocks.0.attn.qkv.weight"]["weight_decay"] == 0.3
    assert found["encoder.net.cls_token"]["weight_decay"] == found["head.bias"]["weight_decay"] == 0.0


class Convolutional(nn.Module):
    """An encoder without [CLS], and with batch statistics."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU())

    def features(self, x: Tensor) -> dict[str, Tensor]:
        return {"mean": self.net(x).mean((2, 3))}


def test_a_convolutional_net_uses_its_mean_and_one_rate(splits: Splits, standardize: Standardize) -> None:
    made = run(Convolutional(), splits, standardize, dataclasses.replace(FAST, layer_decay=0.5))
    assert made.classifier.pooling == "mean"
    assert len(made.losses) == 3
    assert set(layer_depths([name for name, _ in made.classifier.named_parameters()]).values()) == {0}
    with pytest.raises(UserError, match=r"finetune\.pooling"):
        run(Convolutional(), splits, standardize, dataclasses.replace(FAST, pooling="max"))


def test_batch_norms_keep_the_statistics_that_a_given_head_was_fitted_with(
    splits: Splits, standardize: Standardize
) -> None:
    encoder = build_encoder(EncoderConfig("test_resnet"), (2, 8, 12))  # timm's smallest with batch norms
    given = {name: value.clone() for name, value in encoder.state_dict().items()}
    head, short = (torch.zeros(3, encoder.width), torch.zeros(3)), dataclasses.replace(FAST, epochs=1, warmup_epochs=0)
    for start, kept in ((head, True), (None, False)):
        found = run(encoder, splits, standardize, short, head=start).classifier.encoder.state_dict()
        assert torch.equal(found["net.bn1.running_mean"], given["net.bn1.running_mean"]) == kept
        assert not torch.equal(found["net.bn1.weight"], given["net.bn1.weight"])
