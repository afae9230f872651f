"""Attention over at most 128 tokens as one Triton kernel forward and one backward; importing this needs Triton.

Both read queries, keys and values where the qkv layer left them, write where the next layer wants them, and save but
qkv: for so few keys the probabilities are cheaper to compute again than to fetch. Up to 32 tokens a head's whole score
matrix stays in the registers of one warp, and a program takes a group of heads. Beyond, a program takes one head, whose
keys lie in two tiles, the largest power of two below their number and what is left of it, because matrix units want
powers of two: 65 tokens are 64 and 16, not 128. Backward, where it pays, so do the queries. Longer sequences are for
`flash_kernels`.
"""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

SHORT = 32  # the most tokens for which a warp holds a head; beyond, the score matrix lies in tiles
LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware's exponential is a power of two
Launch = tuple[Any, tuple[int, ...], int, int]
"""A kernel, its sizes beyond those of the tensors, how many programs an image takes and how many warps a program."""


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _offsets(first, ROW: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Where a group's tile (heads, tokens, columns) lies in rows of `ROW` elements."""
    heads, rows = (first + tl.arange(0, GROUP))[:, None, None], tl.arange(0, KEYS)[None, :, None]
    return heads * D + rows * ROW + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _real(N: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    return (tl.arange(0, KEYS)[None, :, None] < N) & (tl.arange(0, WIDTH)[None, None, :] < D)


@triton.jit
def _short_softmax(q, k, SCALE: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr):
    """Softmax over the real keys, in float32; a padded query is all zeros and gets a harmless uniform row."""
    scores = _dot(q, tl.trans(k, 0, 2, 1)) * (SCALE * LOG2_E)
    scores = tl.where(tl.arange(0, KEYS)[None, None, :] < N, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 2, keep_dims=True))
    return weights * (1.0 / tl.sum(weights, 2, keep_dims=True))


@triton.jit
def _short_forward_kernel(
    qkv, out, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    image = (tl.program_id(0) // (H // GROUP)).to(tl.int64)  # a large batch passes 2^31 elements
    first = tl.program_id(0) % (H // GROUP) * GROUP
    qkv += image * (N * 3 * H * D)
    out += image * (N * H * D)
    real = _real(N, D, KEYS, WIDTH)
    at = _offsets(first, 3 * H * D, D, KEYS, WIDTH, GROUP)
    q = tl.load(qkv + at, mask=real, other=0.0)
    k = tl.load(qkv + H * D + at, mask=real, other=0.0)
    v = tl.load(qkv + 2 * H * D + at, mask=real, other=0.0)
    o = _dot(_short_softmax(q, k, SCALE, N, KEYS).to(v.dtype), v)
    at_out = _offsets(first, H * D, D, KEYS, WIDTH, GROUP)
    tl.store(out + at_out, o.to(v.dtype), mask=real)


@triton.jit
def _short_backward_kernel(
    qkv, grad_out, grad_qkv, sums, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
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
    p = _short_softmax(q, k, SCALE, N, KEYS)
    grad_p = _dot(g, tl.trans(v, 0, 2, 1))
    # The row sum is the softmax's own correction; computed here, it spares keeping the forward's output.
    grad_s = (p * (grad_p - tl.sum(p * grad_p, 2, keep_dims=True)) * SCALE).to(q.dtype)
    grad_k = _dot(tl.trans(grad_s, 0, 2, 1), q)
    grad_v = _dot(tl.trans(p.to(g.dtype), 0, 2, 1), g)
    grad_q = _dot(grad_s, k)
    tl.store(grad_qkv + at, grad_q.to(q.dtype), mask=real)
    tl.store(grad_qkv + H * D + at, grad_k.to(k.dtype), mask=real)
    tl.store(grad_qkv + 2 * H * D + at, grad_v.to(v.dtype), mask=real)
    if SUM:  # over the tokens: padded queries and keys have no gradient
        heads, columns = (first + tl.arange(0, GROUP))[:, None], tl.arange(0, WIDTH)[None, :]
        sums += image * (3 * H * D) + heads * D + columns
        tl.store(sums, tl.sum(grad_q, 1), mask=(heads < H) & (columns < D))
        tl.store(sums + H * D, tl.sum(grad_k, 1), mask=(heads < H) & (columns < D))
        tl.store(sums + 2 * H * D, tl.sum(grad_v, 1), mask=(heads < H) & (columns < D))


@triton.jit
def _load(base, rows, ROW: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)[None, :]
    return tl.load(base + rows[:, None] * ROW + columns, mask=(rows[:, None] < N) & (columns < D), other=0.0)


@triton.jit
def _store(base, rows, tile, ROW: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    columns, real = tl.arange(0, WIDTH)[None, :], (rows[:, None] < N) & (tl.arange(0, WIDTH)[None, :] < D)
    tl.store(base + rows[:, None] * ROW + columns, tile.to(base.dtype.element_ty), mask=real)


@triton.jit
def _tiled_softmax(q, k1, k2, second, SCALE: tl.constexpr, N: tl.constexpr):
    """Softmax over both tiles of keys together, in float32; only the second tile has padding."""
    s1 = _dot(q, tl.trans(k1)) * (SCALE * LOG2_E)
    s2 = tl.where(second[None, :] < N, _dot(q, tl.trans(k2)) * (SCALE * LOG2_E), float("-inf"))
    top = tl.maximum(tl.max(s1, 1), tl.max(s2, 1))[:, None]
    w1, w2 = tl.exp2(s1 - top), tl.exp2(s2 - top)
    inverse = 1.0 / (tl.sum(w1, 1) + tl.sum(w2, 1))[:, None]
    return w1 * inverse, w2 * inverse


@triton.jit
def _tiled_forward_kernel(
    qkv, out, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * (N * 3 * H * D) + head * D
    out += image * (N * H * D) + head * D
    first, second = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
    k1 = _load(qkv + H * D, first, 3 * H * D, N, D, WIDTH)
    k2 = _load(qkv + H * D, second, 3 * H * D, N, D, WIDTH)
    v1 = _load(qkv + 2 * H * D, first, 3 * H * D, N, D, WIDTH)
    v2 = _load(qkv + 2 * H * D, second, 3 * H * D, N, D, WIDTH)
    for start in range(0, N, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        p1, p2 = _tiled_softmax(_load(qkv, rows, 3 * H * D, N, D, WIDTH), k1, k2, second, SCALE, N)
        _store(out, rows, _dot(p1.to(v1.dtype), v1) + _dot(p2.to(v2.dtype), v2), H * D, N, D, WIDTH)


@triton.jit
def _backward_tile(
    qkv, grad_out, grad_qkv, rows, second, k1, k2, v1, v2,
    SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile's queries, stored, and their sum; what they add to those of both tiles' keys and values."""
    q = _load(qkv, rows, 3 * H * D, N, D, WIDTH)
    g = _load(grad_out, rows, H * D, N, D, WIDTH)
    p1, p2 = _tiled_softmax(q, k1, k2, second, SCALE, N)
    grad_p1, grad_p2 = _dot(g, tl.trans(v1)), _dot(g, tl.trans(v2))
    # The row sum is the softmax's own correction; a padded query has no gradient and adds nothing below.
    correction = (tl.sum(p1 * grad_p1, 1) + tl.sum(p2 * grad_p2, 1))[:, None]
    grad_s1 = (p1 * (grad_p1 - correction) * SCALE).to(q.dtype)
    grad_s2 = (p2 * (grad_p2 - correction) * SCALE).to(q.dtype)
    grad_q = _dot(grad_s1, k1) + _dot(grad_s2, k2)
    _store(grad_qkv, rows, grad_q, 3 * H * D, N, D, WIDTH)
    grad_k1, grad_k2 = _dot(tl.trans(grad_s1), q), _dot(tl.trans(grad_s2), q)
    grad_v1, grad_v2 = _dot(tl.trans(p1.to(g.dtype)), g), _dot(tl.trans(p2.to(g.dtype)), g)
    return tl.sum(grad_q, 0), grad_k1, grad_k2, grad_v1, grad_v2


@triton.jit
def _tiled_backward_kernel(
    qkv, grad_out, grad_qkv, sums, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * (N * 3 * H * D) + head * D
    grad_qkv += image * (N * 3 * H * D) + head * D
    grad_out += image * (N * H * D) + head * D
    first, second = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
    k1 = _load(qkv + H * D, first, 3 * H * D, N, D, WIDTH)
    k2 = _load(qkv + H * D, second, 3 * H * D, N, D, WIDTH)
    v1 = _load(qkv + 2 * H * D, first, 3 * H * D, N, D, WIDTH)
    v2 = _load(qkv + 2 * H * D, second, 3 * H * D, N, D, WIDTH)
    sum_q, grad_k1, grad_k2, grad_v1, grad_v2 = _backward_tile(
        qkv, grad_out, grad_qkv, first, second, k1, k2, v1, v2, SCALE, N, H, D, WIDTH
    )
    more_q, more_k1, more_k2, more_v1, more_v2 = _backward_tile(
        qkv, grad_out, grad_qkv, second, second, k1, k2, v1, v2, SCALE, N, H, D, WIDTH
    )
    grad_k1, grad_k2, grad_v1, grad_v2 = grad_k1 + more_k1, grad_k2 + more_k2, grad_v1 + more_v1, grad_v2 + more_v2
    _store(grad_qkv + H * D, first, grad_k1, 3 * H * D, N, D, WIDTH)
    _store(grad_qkv + H * D, second, grad_k2, 3 * H * D, N, D, WIDTH)
    _store(grad_qkv + 2 * H * D, first, grad_v1, 3 * H * D, N, D, WIDTH)
    _store(grad_qkv + 2 * H * D, second, grad_v2, 3 * H * D, N, D, WIDTH)
    if SUM:
        columns = tl.arange(0, WIDTH)
        sums += image * (3 * H * D) + head * D + columns
        tl.store(sums, sum_q + more_q, mask=columns < D)
        tl.store(sums + H * D, tl.sum(grad_k1, 0) + tl.sum(grad_k2, 0), mask=columns < D)
        tl.store(sums + 2 * H * D, tl.sum(grad_v1, 0) + tl.sum(grad_v2, 0), mask=columns < D)


def plan(heads: int, head_dim: int) -> int:
    """How many neighbouring heads a short program works on, a warp each: a power of two that divides all the heads."""
    # As many as fill 128 bytes of a row in bfloat16: one whole cache line instead of a quarter.
    return gcd(heads, 64 // _padded(head_dim))


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())  # matrix units take 16 at least, Triton powers of two only


def _choose(tokens: int, heads: int, head_dim: int, backward: bool) -> Launch:
    if tokens <= SHORT:
        kernel, group = (_short_backward_kernel if backward else _short_forward_kernel), plan(heads, head_dim)
        return kernel, (_padded(tokens), _padded(head_dim), group), heads // group, group
    first = 1 << (tokens - 1).bit_length() - 1
    sizes = (_padded(head_dim), first, _padded(tokens - first))
    # The fastest on an H200 at 65 tokens and a batch of 512: for 12 heads of 16 and 16 of 32, 31 and 64 us forward, 109
    # and 214 us backward (217 with four warps, 260 with queries in equal tiles).
    if backward:
        return _tiled_backward_kernel, sizes, heads, 2
    queries, warps = (32, 2) if head_dim <= 16 else (64, 4)
    return _tiled_forward_kernel, (*sizes, queries), heads, warps


def _launch(tensors: list[Tensor], heads: int, scale: float, *flags: bool) -> None:
    """Run the kernel for this many tokens over every image and head; two tensors go forward, four backward."""
    batch, tokens, width = tensors[0].shape  # the batch may be the compiler's symbol: no int()
    tokens, head_dim = int(tokens), int(width) // (3 * heads)
    kernel, sizes, programs, warps = _choose(tokens, heads, head_dim, bool(flags))
    # The scale is a constant of the kernel: as an argument the compiler makes it a float64, and that halves the speed.
    constants = (scale, tokens, heads, head_dim, *sizes, *flags)
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, whatever the tensors' own
        wrap_triton(kernel)[(batch * programs,)](*tensors, *constants, num_warps=warps, num_stages=1)


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
