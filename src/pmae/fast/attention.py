"""Attention layers for short sequences: timm's own, but on a GPU one kernel instead of a dozen.

On a CPU in bfloat16 they are plain products.
"""

from typing import Any

import torch
from timm.models.vision_transformer import Attention  # type: ignore[attr-defined]  # where every timm has it
from torch import Tensor, nn

try:
    from pmae.fast.attention_kernels import short_attention
except ImportError:  # no Triton: a machine without a GPU, or not Linux
    short_attention = None

LIMIT = 128
"""The most tokens the kernel takes: a head's whole score matrix stays in the registers of one warp.

Microseconds on an H200, forward and backward of a batch of 512 in bfloat16, by the first kernel (a warp for one or two
heads), torch's fused attention and the plain products: 27, 258, 140 for 5 tokens and 12 heads of 16; 84, 272, 170 for
17 tokens; 120, 398, 243 for 17 tokens and 16 heads of 32. At 65 tokens fused attention won: 416 against 3881, and 623
against 1415 with the wider heads.
"""

WIDEST = 64
"""The widest head it takes, for the same reason."""


def available(device: torch.device, tokens: int, head_dim: int) -> bool:
    """Whether the kernel runs on this device for sequences and heads of this size."""
    return short_attention is not None and 1 <= tokens <= LIMIT and head_dim <= WIDEST and on_recent_gpu(device)


def on_recent_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU whose matrix units know bfloat16."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(device).major >= 8


class ShortAttention(Attention):
    """timm's attention with the kernel where it applies, and timm's own forward everywhere else."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Tokens (B, N, width) to the same; a mask, or whatever else is asked of timm's forward, goes there."""
        asked = [value for value in (*args, *options.values()) if value is not None and value is not False]
        if asked or self._altered():
            return super().forward(x, *args, **options)
        if available(x.device, x.shape[1], self.head_dim):
            return self.proj_drop(self.proj(short_attention(self.qkv(x), self.num_heads, self.scale)))
        # torch's fused attention has no fast bfloat16 on a CPU: it takes two to three times as long as its products.
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            return self.proj_drop(self.proj(self._products(self.qkv(x))))
        return super().forward(x, *args, **options)

    def _products(self, qkv: Tensor) -> Tensor:
        """Attention as two plain products with a softmax between them."""
        q, k, v = qkv.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(-1).to(v.dtype)
        return (weights @ v).transpose(1, 2).flatten(2)

    def _altered(self) -> bool:
        """Whether this layer does more than plain attention: normalized or gated, or dropping some of the weights."""
        extras = (getattr(self, name, None) for name in ("q_norm", "k_norm", "norm", "gate"))
        plain = all(extra is None or isinstance(extra, nn.Identity) for extra in extras)
        return not plain or (self.training and self.attn_drop.p > 0)


def install(module: nn.Module) -> int:
    """Let every timm attention layer inside a module use the kernel where it applies; how many layers now may.

    A layer changes its class and nothing else: parameters, state dict, hooks and flags stay, copies and pickles find
    the class by name, and the compiler sees an ordinary module. Each call decides by its own input, because a masked
    autoencoder's encoder sees fewer tokens than its decoder. Layers of any other class may compute something else and
    are left alone.
    """
    layers = [layer for layer in module.modules() if type(layer) is Attention]
    for layer in layers:
        layer.__class__ = ShortAttention
    return len(layers)
