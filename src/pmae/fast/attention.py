"""Attention in timm's blocks: kernels of ours on a GPU, torch's own or matrix multiplications on a CPU.

Importing this needs no Triton.
"""

from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import Attention, Block  # type: ignore[attr-defined]  # where every timm has them
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from pmae.fast.attention_kernels import short_attention
    from pmae.fast.kernels import place_gradients
except ImportError:  # no Triton: a machine without a GPU, or not Linux
    short_attention = None

LIMIT = 128
"""The most tokens the kernels for short sequences take. Microseconds on an H200 for both directions of a batch of 512
in bfloat16, ours and torch's: 113 and 418 for 65 tokens and 12 heads of 16."""
FLASH_LIMIT = 320
"""The most tokens those for longer ones take; beyond, torch's are as fast. The same of a batch of 256, torch's copies
included: 660 and 1,049 for 197 tokens and 16 heads of 32, 407 and 510 for 6 heads of 64, 552 and 1,203 for 257 tokens
and 12 heads of 16; but 1,330 and 1,036 for 577 tokens and 6 heads of 64 (a batch of 128)."""
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's own kernels, the fastest first; it skips those that cannot, or not deterministically where that is asked."""
WIDEST = 64  # the widest head that either takes: a program holds a head in its registers


def available(device: torch.device, tokens: int, head_dim: int) -> bool:
    """Whether those for short sequences run on this device for sequences and heads of this size."""
    return short_attention is not None and 1 <= tokens <= LIMIT and head_dim <= WIDEST and on_recent_gpu(device)


def takes_flash(tokens: int, head_dim: int) -> bool:
    """Whether a stack of blocks leaves attention over so many tokens to the kernels for longer sequences."""
    return LIMIT < tokens <= FLASH_LIMIT and head_dim <= WIDEST


class Attended(NamedTuple):
    """Attention over more tokens than the kernels take, by torch's own, as `Stack` needs it: with its backward."""

    parts: tuple[Tensor, Tensor, Tensor]
    """Queries (B, H, M, D) of each sequence's last M tokens, keys and values (B, H, N, D)."""
    found: Tensor

    @classmethod
    def into(cls, out: Tensor, qkv: Tensor, heads: int, scale: float) -> "Attended":
        """From qkv (B, N, 3 * H * D) to rows `out` (B * M, H * D)."""
        q, k, v = qkv.detach().unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        rows = out.unflatten(0, (len(qkv), -1))
        q, k, v = q[:, :, -rows.shape[1] :].requires_grad_(), k.requires_grad_(), v.requires_grad_()
        with torch.enable_grad(), sdpa_kernel(FASTEST, set_priority=True):
            found = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        rows.copy_(found.detach().transpose(1, 2).flatten(2))
        return cls((q, k, v), found)

    def backward_into(self, out: Tensor, sums: Tensor, grad_rows: Tensor) -> None:
        """The gradient in qkv, and its sums over each image's tokens (B, 3 * H * D), which its bias wants."""
        grad = grad_rows.unflatten(0, (len(out), -1)).unflatten(2, (self.found.shape[1], -1)).transpose(1, 2)
        place_gradients(out, sums, torch.autograd.grad(self.found, self.parts, grad))


def on_recent_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU whose matrix units know bfloat16."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(device).major >= 8


def run_blocks(blocks: nn.Sequential, norm: nn.Module, x: Tensor, last: int | None = None) -> Tensor:
    """Tokens (B, N, width) through timm's blocks and the last norm; out come all, or each sequence's `last`.

    In the last block, tokens that nobody reads end with its attention, which needs their keys and values.
    """
    for index, block in enumerate(blocks):
        x = _run_block(block, x, last if index == len(blocks) - 1 else None)
    return norm(x)


def _run_block(block: Any, x: Tensor, last: int | None) -> Tensor:
    # A class of another name may do something else, or something more: torch's sharding makes one of its own.
    if type(block) is not Block or (last is None and _faster(block.attn, x) is None):
        x = block(x)
        return x if last is None else x[:, -last:]
    first = 0 if last is None else x.shape[1] - last
    x = x[:, first:] + block.drop_path1(block.ls1(attend(block.attn, block.norm1(x))[:, first:]))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def attend(attn: Any, x: Tensor) -> Tensor:
    """Tokens (B, N, width) through an attention layer of timm's: by what is faster here, or by timm itself."""
    attention = _faster(attn, x)
    if attention is None:
        return attn(x)
    return attn.proj_drop(attn.proj(attention(attn.qkv(x), attn.num_heads, attn.scale)))


def _faster(attn: Any, x: Tensor) -> Any:
    """A function from qkv (B, N, 3 * H * D), H and the scale to attention, where one is faster than timm's forward."""
    if not is_plain(attn):
        return None
    rounds = x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type)
    # In float32 the compiler takes over a minute for heads that are wider.
    if available(x.device, x.shape[1], attn.head_dim) and (rounds or attn.head_dim <= 32):
        return short_attention
    if x.device.type != "cpu":
        return None
    # torch's fused attention has no fast bfloat16 on a CPU: it takes 2.4 times as long as its GEMMs.
    return _by_gemms if torch.is_autocast_enabled("cpu") else _fused


def is_plain(attn: Any) -> bool:
    """Whether a layer is timm's attention and no more: not normalized, gated or dropping some of the weights."""
    extras = (getattr(attn, name, None) for name in ("q_norm", "k_norm", "norm", "gate"))
    plain = all(extra is None or isinstance(extra, nn.Identity) for extra in extras)
    return type(attn) is Attention and plain and not (attn.training and attn.attn_drop.p > 0)


def _fused(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """torch's fused attention (B, N, H * D), whose gradient comes back in the order of qkv.

    timm turns qkv round before it takes it apart, and its gradient once more: a fifth of the time of 65 tokens.
    """
    q, k, v = (part.transpose(1, 2) for part in qkv.unflatten(2, (3, heads, -1)).unbind(2))
    return functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def _by_gemms(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention (B, N, H * D) as two matrix multiplications with a softmax between them."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (q * scale @ k.transpose(-2, -1)).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2).flatten(2)
