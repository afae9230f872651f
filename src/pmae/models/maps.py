"""Patch tokens as maps of the image: features for dense tasks, components as colours, and the attention of [CLS]."""

from typing import Any

import torch
from torch import Tensor

from pmae.errors import UserError
from pmae.models.encoder import Encoder, split_tokens

SPREAD = (0.01, 0.99)
"""Quantiles of a component that become black and full colour."""


def token_maps(encoder: Encoder, x: Tensor) -> Tensor:
    """Patch features (B, width, rows, columns) of standardized images (B, C, H, W)."""
    net: Any = encoder.net
    if encoder.is_vit:
        return encoder(x)[1].transpose(1, 2).unflatten(2, tuple(net.patch_embed.grid_size))
    found: Tensor = net.forward_features(x)
    if found.ndim == 4:
        return found.permute(0, 3, 1, 2) if getattr(net, "output_fmt", "NCHW") == "NHWC" else found
    return to_maps(split_tokens(net, found)[1], x)


def to_maps(tokens: Tensor, x: Tensor) -> Tensor:
    """Patch tokens (B, N, width) of images (B, C, H, W) as (B, width, rows, columns)."""
    rows = max(1, round((tokens.shape[1] * x.shape[2] / x.shape[3]) ** 0.5))
    if tokens.shape[1] % rows:
        raise UserError(f"encoder must have a grid of tokens to be seen as a map, got {tokens.shape[1]} tokens")
    return tokens.transpose(1, 2).unflatten(2, (rows, -1))


def attention_maps(encoder: Encoder, x: Tensor) -> Tensor | None:
    """How much [CLS] attends to each patch in the last block (B, heads, rows, columns); None without a ViT's [CLS]."""
    net: Any = encoder.net
    if not encoder.is_vit or net.cls_token is None:
        return None
    attn, seen = net.blocks[-1].attn, list[Tensor]()
    # Only the unfused path makes the matrix; what it drops out of is the softmax itself.
    fused, attn.fused_attn = attn.fused_attn, False
    hook = attn.attn_drop.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        net.forward_features(x)
    finally:
        hook.remove()
        attn.fused_attn = fused
    return seen[0][:, :, 0, net.num_prefix_tokens :].unflatten(2, tuple(net.patch_embed.grid_size))


def colours(maps: Tensor) -> Tensor:
    """Maps (B, width, rows, columns) as pictures (B, rows, columns, 3) from 0 to 1.

    Red, green and blue are the three leading principal components of all tokens together: like colours are like tokens.
    """
    tokens = maps.movedim(1, -1).flatten(0, -2).double().cpu()
    centred = tokens - tokens.mean(0)
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -3:].flip(1)
    # The sign of a component is arbitrary: its largest weight is made positive, so that two calls agree.
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    found = centred @ (axes * largest.sign())
    low, high = torch.quantile(found[:: max(1, len(found) // 100_000)], torch.tensor(SPREAD).double(), dim=0)
    scaled = ((found - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    scaled = torch.nn.functional.pad(scaled, (0, 3 - scaled.shape[1]))
    return scaled.unflatten(0, (len(maps), *maps.shape[2:])).float()
