"""Attention over a few hundred tokens, block by block (FlashAttention, Dao et al. 2022); importing this needs Triton.

A program takes one head of one image. Forward keeps the logarithm of each query's softmax denominator, so that backward
computes any block of probabilities again by itself: first the queries' gradients, then those of keys and values. Seven
matrix products instead of five, but each from registers, with nothing turned round in between and nothing added up in
memory: on an H200 faster than torch's kernels up to some three hundred tokens, and deterministic. Where a kernel reads
what the qkv layer left and writes what the next layer wants, there is nothing to copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmae.fast.attention_kernels import LOG2_E, _dot, _load, _padded, _store

BLOCK = 64  # queries and keys of a tile: four warps, a row of the matrix units each


@triton.jit
def _attend(
    q, keys, total, top, sum, qkv, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Take in one block of keys: weighted values so far, the highest score and the sum of weights, both of base 2."""
    k = _load(qkv + H * D, keys, 3 * H * D, N, D, WIDTH)
    v = _load(qkv + 2 * H * D, keys, 3 * H * D, N, D, WIDTH)
    s = _dot(q, tl.trans(k))
    if PADDED:
        s = tl.where(keys[None, :] < N, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * (SCALE * LOG2_E))
    p = tl.exp2(s * (SCALE * LOG2_E) - higher[:, None])
    shrink = tl.exp2(top - higher)
    return total * shrink[:, None] + _dot(p.to(v.dtype), v), higher, sum * shrink + tl.sum(p, 1)


@triton.jit
def _forward_kernel(
    qkv, out, log_sum, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * (N * 3 * H * D) + head * D
    out += image * (N * H * D) + head * D
    log_sum += tl.program_id(0).to(tl.int64) * N
    WHOLE: tl.constexpr = N // BLOCK * BLOCK
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = _load(qkv, rows, 3 * H * D, N, D, WIDTH)
        total, sum = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK], tl.float32)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, WHOLE, BLOCK):
            keys = first + tl.arange(0, BLOCK)
            total, top, sum = _attend(q, keys, total, top, sum, qkv, SCALE, N, H, D, WIDTH, False)
        if LAST:
            keys = WHOLE + tl.arange(0, LAST)
            total, top, sum = _attend(q, keys, total, top, sum, qkv, SCALE, N, H, D, WIDTH, True)
        _store(out, rows, total / sum[:, None], H * D, N, D, WIDTH)
        tl.store(log_sum + rows, top + tl.log2(sum), mask=rows < N)


@triton.jit
def _to_queries(
    q, g, log, correction, keys, grad_q, qkv, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """What a block of keys adds to the gradient of a block of queries; a padded key is 0 and adds nothing."""
    k = _load(qkv + H * D, keys, 3 * H * D, N, D, WIDTH)
    v = _load(qkv + 2 * H * D, keys, 3 * H * D, N, D, WIDTH)
    p = tl.exp2(_dot(q, tl.trans(k)) * (SCALE * LOG2_E) - log[:, None])
    return grad_q + _dot((p * (_dot(g, tl.trans(v)) - correction[:, None])).to(k.dtype), k)


@triton.jit
def _to_keys(
    k, v, queries, grad_k, grad_v, qkv, grad_out, log_sum, corrections, SCALE: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a block of queries adds to the gradients of a block of keys and values; a padded query adds nothing."""
    q = _load(qkv, queries, 3 * H * D, N, D, WIDTH)
    g = _load(grad_out, queries, H * D, N, D, WIDTH)
    log = tl.load(log_sum + queries, mask=queries < N, other=0.0)
    correction = tl.load(corrections + queries, mask=queries < N, other=0.0)
    p = tl.exp2(_dot(k, tl.trans(q)) * (SCALE * LOG2_E) - log[None, :])
    grad_s = (p * (_dot(v, tl.trans(g)) - correction[None, :])).to(q.dtype)
    return grad_k + _dot(grad_s, q), grad_v + _dot(p.to(g.dtype), g)


@triton.jit
def _backward_kernel(
    qkv, out, log_sum, grad_out, corrections, grad_qkv, sums, SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * (N * 3 * H * D) + head * D
    grad_qkv += image * (N * 3 * H * D) + head * D
    out += image * (N * H * D) + head * D
    grad_out += image * (N * H * D) + head * D
    log_sum += tl.program_id(0).to(tl.int64) * N
    corrections += tl.program_id(0).to(tl.int64) * N
    sums += image * (3 * H * D) + head * D + tl.arange(0, WIDTH)
    real = tl.arange(0, WIDTH) < D
    WHOLE: tl.constexpr = N // BLOCK * BLOCK
    sum_q = tl.zeros([WIDTH], tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = _load(qkv, rows, 3 * H * D, N, D, WIDTH)
        g = _load(grad_out, rows, H * D, N, D, WIDTH)
        o = _load(out, rows, H * D, N, D, WIDTH)
        log = tl.load(log_sum + rows, mask=rows < N, other=0.0)
        correction = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)  # the softmax's own
        tl.store(corrections + rows, correction, mask=rows < N)
        grad_q = tl.zeros([BLOCK, WIDTH], tl.float32)
        for first in range(0, WHOLE, BLOCK):
            keys = first + tl.arange(0, BLOCK)
            grad_q = _to_queries(q, g, log, correction, keys, grad_q, qkv, SCALE, N, H, D, WIDTH)
        if LAST:
            keys = WHOLE + tl.arange(0, LAST)
            grad_q = _to_queries(q, g, log, correction, keys, grad_q, qkv, SCALE, N, H, D, WIDTH)
        grad_q *= SCALE
        _store(grad_qkv, rows, grad_q, 3 * H * D, N, D, WIDTH)
        sum_q += tl.sum(grad_q, 0)
    tl.store(sums, sum_q, mask=real)
    tl.debug_barrier()  # all warps read the corrections that any of them wrote
    sum_k, sum_v = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        k = _load(qkv + H * D, rows, 3 * H * D, N, D, WIDTH)
        v = _load(qkv + 2 * H * D, rows, 3 * H * D, N, D, WIDTH)
        grad_k, grad_v = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
        for first in range(0, WHOLE, BLOCK):
            queries = first + tl.arange(0, BLOCK)
            grad_k, grad_v = _to_keys(
                k, v, queries, grad_k, grad_v, qkv, grad_out, log_sum, corrections, SCALE, N, H, D, WIDTH
            )
        if LAST:
            queries = WHOLE + tl.arange(0, LAST)
            grad_k, grad_v = _to_keys(
                k, v, queries, grad_k, grad_v, qkv, grad_out, log_sum, corrections, SCALE, N, H, D, WIDTH
            )
        there = (rows < N)[:, None]  # a padded key has gradients that nobody wants
        grad_k, grad_v = tl.where(there, grad_k * SCALE, 0.0), tl.where(there, grad_v, 0.0)
        _store(grad_qkv + H * D, rows, grad_k, 3 * H * D, N, D, WIDTH)
        _store(grad_qkv + 2 * H * D, rows, grad_v, 3 * H * D, N, D, WIDTH)
        sum_k += tl.sum(grad_k, 0)
        sum_v += tl.sum(grad_v, 0)
    tl.store(sums + H * D, sum_k, mask=real)
    tl.store(sums + 2 * H * D, sum_v, mask=real)


def _sizes(tokens: int, heads: int, head_dim: int, scale: float) -> tuple[float | int, ...]:
    left = tokens % BLOCK
    return scale, tokens, heads, head_dim, _padded(head_dim), BLOCK, _padded(left) if left else 0


def forward_into(out: Tensor, qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention of every token to every token to `out` (B, N, H * D), from qkv (B, N, 3 * H * D) ordered 3, H, D.

    Back comes the logarithm (base 2) of each query's softmax denominator (B, H, N), which backward wants.
    """
    batch, tokens, width = qkv.shape
    log_sum = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    sizes = _sizes(tokens, heads, width // (3 * heads), scale)
    _forward_kernel[(batch * heads,)](qkv, out, log_sum, *sizes, num_warps=4, num_stages=3)
    return log_sum


def backward_into(
    to: Tensor, sums: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor, grad_out: Tensor, scale: float
) -> None:
    """The gradient in qkv, and its sums over each image's tokens (B, 3 * H * D), which its bias wants."""
    batch, heads, tokens = log_sum.shape
    head_dim = qkv.shape[2] // (3 * heads)
    tensors = (qkv, out, log_sum, grad_out, torch.empty_like(log_sum), to, sums)
    # As many as let three or four programs share a processor; the compiler would take more. Microseconds on an H200, a
    # batch of 256: 276 instead of 301 for 197 tokens and 12 heads of 16, 313 instead of 326 for 6 of 64.
    registers = 128 if head_dim <= 16 else 168
    sizes = _sizes(tokens, heads, head_dim, scale)
    _backward_kernel[(batch * heads,)](*tensors, *sizes, num_warps=4, num_stages=1, maxnreg=registers)
