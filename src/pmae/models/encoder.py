"""Encoders: the paper's ViT-T or any timm image model, built for the data's size and channels.

`Encoder.net` is the timm model itself, with timm's own state dict, so exporting an encoder is copying it.
"""

from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmae.config import EncoderConfig
from pmae.errors import UserError, require, unknown_name
from pmae.models.positions import sine_cosine
from pmae.models.short_attention import install

VIT_TINY = {"width": 192, "depth": 12, "heads": 12}
VIT_MODULES = ("timm.models.vision_transformer", "timm.models.deit")


class Encoder(nn.Module):
    """A timm model seen as a map from images to prefix tokens (such as [CLS]) and patch tokens."""

    def __init__(self, net: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.net = net
        self.shape = shape
        self.width: int = net.num_features  # type: ignore[assignment]
        self.is_vit = isinstance(net, VisionTransformer)
        install(net)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Prefix tokens (B, P, width) and patch tokens (B, N, width); `keep` (B, V) drops all other patches (MAE)."""
        if keep is not None or self.is_vit:
            return self._forward_vit(x, keep)
        tokens: Any = self.net.forward_features(x)  # type: ignore[operator]
        if tokens.ndim == 4:
            channels_last = getattr(self.net, "output_fmt", "NCHW") == "NHWC"
            tokens = tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
            return tokens[:, :0], tokens
        prefix = int(getattr(self.net, "num_prefix_tokens", 0))
        return tokens[:, :prefix], tokens[:, prefix:]

    def _forward_vit(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        net: Any = self.net
        if not self.is_vit:
            raise UserError(f"masking patches (MAE) must have a ViT encoder from timm, got {type(net).__name__}")
        prefix = net.num_prefix_tokens
        tokens = net._pos_embed(net.patch_embed(x))
        if keep is not None:
            patches = tokens[:, prefix:].gather(1, keep[..., None].expand(-1, -1, tokens.shape[2]))
            tokens = torch.cat([tokens[:, :prefix], patches], dim=1)
        tokens = net.norm(net.blocks(net.norm_pre(tokens)))
        return tokens[:, :prefix], tokens[:, prefix:]

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """The representations of unmasked images: "mean" of the patch tokens, and "cls" where there is such a token."""
        prefix, patches = self(x)
        pooled = {"mean": patches.mean(1)}
        return {"cls": prefix[:, 0], **pooled} if prefix.shape[1] else pooled


def build_encoder(config: EncoderConfig, shape: tuple[int, int, int]) -> Encoder:
    """An untrained encoder for images (C, H, W); `config.patch_size` must be resolved for a ViT."""
    if config.name == "vit_tiny":
        return Encoder(_vit_tiny(config, shape), shape)
    if not timm.is_model(config.name):
        raise unknown_name("encoder.name", config.name, ["vit_tiny", *timm.list_models()])
    encoder = Encoder(_from_timm(config, shape), shape)
    _try_once(encoder, config.name)
    return encoder


def _try_once(encoder: Encoder, name: str) -> None:
    """Some networks shrink small images to nothing, and only running them tells."""
    try:
        with torch.no_grad():
            encoder.eval()(torch.zeros(1, *encoder.shape))
    except RuntimeError as error:
        raise UserError(f"encoder.name {name!r} cannot take images of shape {encoder.shape}: {error}") from error
    encoder.train()


def is_vit_name(name: str) -> bool:
    """Whether this name builds a plain ViT, the only kind of encoder that can drop tokens."""
    return name == "vit_tiny" or (timm.is_model(name) and timm.model_entrypoint(name).__module__ in VIT_MODULES)


def _vit_tiny(config: EncoderConfig, shape: tuple[int, int, int]) -> VisionTransformer:
    channels, height, width = shape
    dim, depth, heads = (getattr(config, key) or default for key, default in VIT_TINY.items())
    require(dim % heads == 0, "encoder.width", f"a multiple of encoder.heads ({heads})", dim)
    patch = _patch(config, shape)
    net = VisionTransformer(
        img_size=(height, width),
        patch_size=patch,
        in_chans=channels,
        num_classes=0,
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
    )
    net.apply(xavier)
    net.pos_embed = nn.Parameter(sine_cosine(dim, height // patch, width // patch), requires_grad=False)
    return net


def _from_timm(config: EncoderConfig, shape: tuple[int, int, int]) -> nn.Module:
    channels, height, width = shape
    options: dict[str, Any] = {"in_chans": channels, "num_classes": 0, "pretrained": False}
    if is_vit_name(config.name):
        options |= {"img_size": (height, width), "patch_size": _patch(config, shape)}
    elif getattr(timm.get_pretrained_cfg(config.name), "fixed_input_size", False):
        options["img_size"] = (height, width)
    try:
        return timm.create_model(config.name, **options)
    except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"encoder.name {config.name!r} cannot be built for images of shape {shape}: {error}") from error


def _patch(config: EncoderConfig, shape: tuple[int, int, int]) -> int:
    """The patch side, checked against the image."""
    _, height, width = shape
    patch = config.patch_size
    if patch is None:
        raise UserError("encoder.patch_size must be set or derived from the data before the encoder is built")
    require(patch <= min(height, width), "encoder.patch_size", f"at most the image's side ({height}x{width})", patch)
    divides = height % patch == 0 and width % patch == 0
    require(divides, "encoder.patch_size", f"a divisor of the image's sides ({height}x{width})", patch)
    return patch


def xavier(module: nn.Module) -> None:
    """Xavier-uniform matrices and zero biases, as MAE starts; a patch embedding counts as a matrix."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
