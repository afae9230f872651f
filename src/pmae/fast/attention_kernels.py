"""Attention over at most 128 tokens as one Triton kernel forward and one backward; importing this needs Triton.

Both read queries, keys and values where the qkv layer left them and write where the next layer wants them, and they
save nothing but qkv: for so few keys the probabilities are cheaper to compute again than to fetch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the functions under triton.jit are Triton's language, not Python's: their arguments have no Python types)

from math import gcd
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from torch.library import triton_op, wrap_triton

from pmae.fast import lone_attention_kernels as lone
from pmae.fast import tiled_attention_kernels as tiled

SHORT = 32
"""The most tokens whose whole score matrix stays in the registers of one warp; beyond, it lies in tiles."""
Launch = tuple[Any, tuple[int, ...], int, int]
"""A kernel, its sizes beyond those of the tensors, how many programs an image takes and how many warps a program."""
LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware's exponential is a power of two


@triton.jit
def _offsets(first, ROW: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Where a group's tile (heads, tokens, columns) lies in rows of `ROW` elements."""
    heads, rows = (first + tl.arange(0, GROUP))[:, None, None], tl.arange(0, KEYS)[None, :, None]
    return heads * D + rows * ROW + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _real(N: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a tile are no padding."""
    return (tl.arange(0, KEYS)[None, :, None] < N) & (tl.arange(0, WIDTH)[None, None, :] < D)


@triton.jit
def _probabilities(q, k, SCALE: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr):
    """Softmax over the real keys, in float32; a padded query is all zeros and gets a harmless uniform row."""
    scores = tl.dot(q, tl.trans(k, 0, 2, 1), input_precision="ieee") * (SCALE * LOG2_E)
    scores = tl.where(tl.arange(0, KEYS)[None, None, :] < N, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 2, keep_dims=True))
    return weights * (1.0 / tl.sum(weights, 2, keep_dims=True))


@triton.jit
def _forward_kernel(
    qkv,
    out,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    image = (tl.program_id(0) // (H // GROUP)).to(tl.int64)  # a large batch passes 2^31 elements
    first = tl.program_id(0) % (H // GROUP) * GROUP
    qkv += image * (N * 3 * H * D)
    out += image * (N * H * D)
    real = _real(N, D, KEYS, WIDTH)
    at = _offsets(first, 3 * H * D, D, KEYS, WIDTH, GROUP)
    q = tl.load(qkv + at, mask=real, other=0.0)
    k = tl.load(qkv + H * D + at, mask=real, other=0.0)
    v = tl.load(qkv + 2 * H * D + at, mask=real, other=0.0)
    p = _probabilities(q, k, SCALE, N, KEYS)
    o = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    at_out = _offsets(first, H * D, D, KEYS, WIDTH, GROUP)
    tl.store(out + at_out, o.to(v.dtype), mask=real)


@triton.jit
def _backward_kernel(
    qkv,
    grad_out,
    grad_qkv,
    sums,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SUM: tl.constexpr,
):
    image = (tl.program_id(0) // (H // GROUP)).to(tl.int64)
    first = tl.program_id(0) % (H // GROUP) * GROUP
    qkv += image * (N * 3 * H * D)
    grad_qkv += image * (N * 3 * H * D)
    grad_out += image * (N * H * D)
    real = _real(N, D, KEYS, WIDTH)
    at = _offsets(first, 3 * H * D, D, KEYS, WIDTH, GROUP)
    at_out = _offsets(first, H * D, D, KEYS, WIDTH, GROUP)
    q = tl.load(qkv + at, mask=real, other=0.0)
    k = tl.load(qkv + H * D + at, mask=real, other=0.0)
    v = tl.load(qkv + 2 * H * D + at, mask=real, other=0.0)
    g = tl.load(grad_out + at_out, mask=real, other=0.0)
    p = _probabilities(q, k, SCALE, N, KEYS)
    grad_p = tl.dot(g, tl.trans(v, 0, 2, 1), input_precision="ieee")
    # The row sum is the softmax's own correction; computed here, it spares keeping the forward's output.
    grad_s = (p * (grad_p - tl.sum(p * grad_p, 2, keep_dims=True)) * SCALE).to(q.dtype)
    grad_k = tl.dot(tl.trans(grad_s, 0, 2, 1), q, input_precision="ieee")
    grad_v = tl.dot(tl.trans(p.to(g.dtype), 0, 2, 1), g, input_precision="ieee")
    grad_q = tl.dot(grad_s, k, input_precision="ieee")
    tl.store(grad_qkv + at, grad_q.to(q.dtype), mask=real)
    tl.store(grad_qkv + H * D + at, grad_k.to(k.dtype), mask=real)
    tl.store(grad_qkv + 2 * H * D + at, grad_v.to(v.dtype), mask=real)
    if SUM:  # over the tokens: padded queries and keys have no gradient
        heads, columns = (first + tl.arange(0, GROUP))[:, None], tl.arange(0, WIDTH)[None, :]
        sums += image * (3 * H * D) + heads * D + columns
        tl.store(sums, tl.sum(grad_q, 1), mask=(heads < H) & (columns < D))
        tl.store(sums + H * D, tl.sum(grad_k, 1), mask=(heads < H) & (columns < D))
        tl.store(sums + 2 * H * D, tl.sum(grad_v, 1), mask=(heads < H) & (columns < D))


def plan(heads: int, head_dim: int) -> int:
    """How many neighbouring heads a program works on, a warp each: a power of two that divides all the heads."""
    # As many as fill 128 bytes of a row in bfloat16: one whole cache line instead of a quarter.
    return gcd(heads, 64 // _padded(head_dim))


def tile(head_dim: int) -> tuple[int, int]:
    """Beyond `SHORT` tokens: how many queries a program takes at a time forward, and its warps there."""
    # The fastest of 12 on an H200 at 65 tokens and a batch of 512: 31 us for 12 heads of 16, 64 us for 16 of 32.
    return (32, 2) if head_dim <= 16 else (64, 4)


BACKWARD_WARPS = 2
"""The warps of a program backward: 109 and 214 us (217 with four, 260 with queries in equal tiles)."""


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())  # matrix units take 16 at least, Triton powers of two only


def _whole(tokens: int, heads: int, head_dim: int, backward: bool) -> Launch:
    """Few tokens: a group of heads a program, a warp each."""
    kernel, group = (_backward_kernel if backward else _forward_kernel), plan(heads, head_dim)
    return kernel, (_padded(tokens), _padded(head_dim), group), heads // group, group


def _tiled(tokens: int, heads: int, head_dim: int, backward: bool) -> Launch:
    """More tokens: a head a program."""
    first = 1 << (tokens - 1).bit_length() - 1
    sizes = (_padded(head_dim), first, _padded(tokens - first))
    if backward:
        return tiled.backward_kernel, sizes, heads, BACKWARD_WARPS
    queries, crew = tile(head_dim)
    return tiled.forward_kernel, (*sizes, queries), heads, crew


def _choose(tokens: int, heads: int, head_dim: int, backward: bool) -> Launch:
    if backward and lone.fits(tokens, head_dim):
        return lone.backward_kernel, (_padded(head_dim),), heads, lone.warps(tokens)
    return (_whole if tokens <= SHORT else _tiled)(tokens, heads, head_dim, backward)


def _launch(tensors: list[Tensor], heads: int, scale: float, *flags: bool) -> None:
    """Run the kernel for this many tokens over every image and head; two tensors go forward, four backward."""
    batch, tokens, width = tensors[0].shape  # the batch may be the compiler's symbol: no int()
    tokens, head_dim = int(tokens), int(width) // (3 * heads)
    kernel, sizes, programs, crew = _choose(tokens, heads, head_dim, bool(flags))
    # The scale is a constant of the kernel: as an argument the compiler makes it a float64, and that halves the speed.
    constants = (scale, tokens, heads, head_dim, *sizes, *flags)
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, whatever the tensors' own
        wrap_triton(kernel)[(batch * programs,)](*tensors, *constants, num_warps=crew, num_stages=1)


@triton_op("pmae::short_attention", mutates_args=())
def short_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention (B, N, H * D) of every token to every token, from qkv (B, N, 3 * H * D) ordered 3, H, D."""
    qkv = qkv.contiguous()
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3)
    _launch([qkv, out], heads, scale)
    return out


@triton_op("pmae::short_attention_backward", mutates_args=())
def short_attention_backward(qkv: Tensor, grad_out: Tensor, heads: int, scale: float) -> Tensor:
    """The gradient of `short_attention` in qkv: every element written once by one program, so it is deterministic."""
    qkv, grad_out = qkv.contiguous(), grad_out.contiguous()
    grad_qkv = torch.empty_like(qkv)
    _launch([qkv, grad_out, grad_qkv, grad_qkv], heads, scale, False)
    return grad_qkv


def forward_into(out: Tensor, qkv: Tensor, heads: int, scale: float) -> None:
    """`short_attention` of contiguous tensors, into memory of the caller's; autograd does not see it."""
    _launch([qkv, out], heads, scale)


def backward_into(out: Tensor, sums: Tensor, qkv: Tensor, grad_out: Tensor, heads: int, scale: float) -> None:
    """Its gradient in qkv, and the sums of that over each image's tokens (B, 3 * H * D), which its bias wants."""
    _launch([qkv, grad_out, out, sums], heads, scale, True)


def _keep(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    qkv, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
    (qkv,) = ctx.saved_tensors
    return short_attention_backward(qkv, grad_out.to(qkv.dtype), ctx.heads, ctx.scale), None, None


short_attention.register_autograd(_differentiate, setup_context=_keep)
