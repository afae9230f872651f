import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmae.config import AugmentConfig, EncoderConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.errors import UserError
from pmae.evaluate.baselines import random_weights
from pmae.evaluate.finetune import Classifier, Finetuned, _optimizer, finetune, layer_depths
from pmae.evaluate.protocols import FinetuneConfig
from pmae.models.encoder import Encoder, build_encoder

CPU = torch.device("cpu")

SHAPE: dict[str, Any] = {
    "img_size": (8, 12),
    "patch_size": 4,
    "in_chans": 2,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}
FAST = FinetuneConfig(epochs=3, warmup_epochs=1, batch_size=32, base_lr=0.02, weight_decay=0.05)


def run(
    encoder: nn.Module, splits: Splits, standardize: Standardize, config: FinetuneConfig = FAST, **more: Any
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


@pytest.mark.parametrize("augment", [AugmentConfig(), None])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    augment: AugmentConfig | None, splits: Splits, standardize: Standardize, tmp_path: Path
) -> None:
    net = VisionTransformer(num_classes=0, drop_path_rate=0.3, **SHAPE)
    encoder, config = Encoder(net, (2, 8, 12)), dataclasses.replace(FAST, layer_decay=0.7, augment=augment)
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["finetune-00003.safetensors", "finetune.json"]


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
    (tmp_path / "finetune-00003.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="readable"):
        run(encoder, splits, standardize, folder=tmp_path)


def test_depth_and_rates_of_a_vit(encoder: Encoder) -> None:
    classifier = Classifier(encoder, "cls", 3)
    depths = layer_depths([name for name, _ in classifier.named_parameters()])
    assert depths["encoder.net.patch_embed.proj.weight"] == depths["encoder.net.cls_token"] == 0
    assert depths["encoder.net.blocks.0.attn.qkv.weight"] == 1
    assert depths["encoder.net.blocks.1.mlp.fc1.bias"] == 2
    assert depths["encoder.net.norm.weight"] == depths["head.weight"] == 3
    groups = _optimizer(
        classifier, FinetuneConfig(base_lr=0.1, layer_decay=0.5, weight_decay=0.3), 256, CPU
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
