"""Encoders and decoder: timm's own forward and state dict, any shape, clear refusals."""

from typing import Literal

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from pmae.config import DecoderConfig, EncoderConfig
from pmae.errors import UserError
from pmae.models import Decoder, Encoder, build_encoder
from pmae.models.encoder import sine_cosine


def vit(shape: tuple[int, int, int] = (3, 32, 32), patch: int = 8, **settings: int) -> Encoder:
    return build_encoder(EncoderConfig(patch_size=patch, **settings), shape).eval()


def test_the_default_is_the_papers_vit_tiny() -> None:
    encoder = vit()
    assert encoder.width == 192
    assert len(encoder.net.blocks) == 12
    assert encoder.net.blocks[0].attn.num_heads == 12
    assert encoder.net.blocks[0].mlp.fc1.out_features == 768
    count = sum(p.numel() for p in encoder.parameters())
    assert 5.3e6 < count < 5.5e6


@torch.no_grad()
def test_features_equal_timm_with_the_same_weights() -> None:
    encoder, x = vit((4, 24, 16), width=48, depth=2, heads=4), torch.randn(3, 4, 24, 16)
    reference = VisionTransformer(
        img_size=(24, 16), patch_size=8, in_chans=4, num_classes=0, embed_dim=48, depth=2, num_heads=4
    ).eval()
    reference.load_state_dict(encoder.net.state_dict())
    tokens = reference.forward_features(x)
    torch.testing.assert_close(encoder.features(x)["cls"], tokens[:, 0])
    torch.testing.assert_close(encoder.features(x)["mean"], tokens[:, 1:].mean(1))
    torch.testing.assert_close(encoder.features(x)["cls"], reference(x))


@torch.no_grad()
def test_keeping_every_patch_in_any_order_changes_nothing() -> None:
    encoder, x = vit(width=48, depth=2, heads=4), torch.randn(3, 3, 32, 32)
    order = torch.rand(3, 16).argsort(1)
    prefix, patches = encoder(x, order)
    whole = encoder(x)
    torch.testing.assert_close(prefix, whole[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(patches, whole[1].gather(1, order[..., None].expand(-1, -1, 48)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(3, 33, 96), (3, 66, 160), (3, 64, 32)])
def test_tokens_of_a_network_that_rounds_its_grid_up_stay_in_their_rows(shape: tuple[int, int, int]) -> None:
    encoder = build_encoder(EncoderConfig("resnet10t"), shape)
    rows, columns = encoder.net.forward_features(torch.zeros(1, *shape)).shape[2:]
    tokens = torch.arange(rows).repeat_interleave(columns).float().reshape(1, -1, 1)
    spread = Decoder(DecoderConfig("small", 8, 1, 2), encoder, 2)._onto_grid(tokens)
    wide = spread.unflatten(1, (shape[1] // 2, -1))
    torch.testing.assert_close(wide, wide[:, :, :1].expand_as(wide))  # a row of tokens has one number


@torch.no_grad()
def test_timm_names_keep_timms_architecture() -> None:
    encoder = build_encoder(EncoderConfig("resnet10t"), (1, 40, 24)).eval()
    x = torch.randn(2, 1, 40, 24)
    torch.testing.assert_close(encoder.features(x)["mean"], encoder.net(x), atol=1e-5, rtol=1e-4)
    assert (
        encoder.net.state_dict().keys() == timm.create_model("resnet10t", in_chans=1, num_classes=0).state_dict().keys()
    )


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (
            EncoderConfig(patch_size=7),
            (3, 32, 32),
            r"patch_size must be a divisor of the image's sides \(32x32\), got 7",
        ),
        (EncoderConfig(patch_size=64), (3, 32, 32), r"patch_size must be at most the image's sides \(32x32\), got 64"),
        (EncoderConfig("resnet81"), (3, 32, 32), r"encoder\.name: unknown name 'resnet81'; did you mean '.*resnet"),
        (EncoderConfig(patch_size=8, width=100, heads=12), (3, 32, 32), r"width must be a multiple of encoder\.heads"),
        (EncoderConfig(patch_size=8, width=30, heads=3), (3, 32, 32), "a multiple of 4 for sine-cosine"),
        (EncoderConfig("convnext_atto"), (3, 16, 16), r"'convnext_atto' cannot take images of shape \(3, 16, 16\)"),
    ],
)
def test_refusals(config: EncoderConfig, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_encoder(config, shape)


@pytest.mark.parametrize(("name", "width", "depth", "count"), [("released", 512, 8, 25.4e6), ("text", 192, 12, 5.4e6)])
def test_named_decoders_have_their_sizes(name: str, width: int, depth: int, count: float) -> None:
    decoder = Decoder(DecoderConfig(name), vit(), 8)  # type: ignore[arg-type]
    assert decoder.embed.out_features == width
    assert len(decoder.blocks) == depth
    assert sum(p.numel() for p in decoder.parameters()) == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("init", ["xavier", "normal"])
def test_initial_matrices_have_the_standard_deviation_that_is_asked_for(init: Literal["xavier", "normal"]) -> None:
    encoder = build_encoder(EncoderConfig(patch_size=8, init=init), (3, 32, 32))
    decoder = Decoder(DecoderConfig("text", init=init), encoder, 8)
    layers = [m for m in (*encoder.modules(), *decoder.modules()) if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len(layers) == 1 + 24 * 4 + 2
    for layer in layers:
        inputs, outputs = layer.weight[0].numel(), len(layer.weight)
        expected = 0.02 if init == "normal" else (2 / (inputs + outputs)) ** 0.5
        assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.03)
        assert layer.bias is not None
        assert not bool(layer.bias.any())


def test_a_timm_name_keeps_timms_initial_weights() -> None:
    with pytest.raises(UserError, match=r"encoder\.init must be left unset unless encoder\.name is vit_tiny"):
        EncoderConfig("resnet18", init="normal")


def test_positions_tell_rows_and_columns_apart() -> None:
    table = sine_cosine(32, 5, 7, prefix=2)[0]
    assert bool((table[:2] == 0).all())
    grid = table[2:]
    assert len(torch.unique(grid, dim=0)) == 35
    # Sines and cosines of the same angles: every position has the same norm.
    torch.testing.assert_close(grid.square().sum(1), torch.full((35,), 16.0))
    # A step to the right changes one half, a step down the other.
    assert bool((grid[0] != grid[1]).nonzero().max() < 16)
    assert bool((grid[0] != grid[7]).nonzero().min() >= 16)
