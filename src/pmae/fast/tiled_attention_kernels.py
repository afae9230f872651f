"""Attention over 33 to 128 tokens: a program takes one head, keeps all its keys and walks over its queries.

The keys lie in two tiles, the largest power of two below their number and what is left of it, because matrix units
want powers of two: 65 tokens are 64 and 16, not 128. Backward, where it pays, so do the queries. Importing this needs
Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the functions under triton.jit are Triton's language, not Python's: their arguments have no Python types)

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _at(rows, ROW: tl.constexpr, WIDTH: tl.constexpr):
    """Where a tile's elements lie in rows of `ROW` elements."""
    return rows[:, None] * ROW + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(base, rows, ROW: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    real = (rows[:, None] < N) & (tl.arange(0, WIDTH)[None, :] < D)
    return tl.load(base + _at(rows, ROW, WIDTH), mask=real, other=0.0)


@triton.jit
def _store(base, rows, tile, ROW: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    real = (rows[:, None] < N) & (tl.arange(0, WIDTH)[None, :] < D)
    tl.store(base + _at(rows, ROW, WIDTH), tile.to(base.dtype.element_ty), mask=real)


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _probabilities(q, k1, k2, second, SCALE: tl.constexpr, N: tl.constexpr):
    """Softmax over both tiles of keys together, in float32; only the second tile has padding."""
    s1 = _dot(q, tl.trans(k1)) * (SCALE * LOG2_E)
    s2 = tl.where(second[None, :] < N, _dot(q, tl.trans(k2)) * (SCALE * LOG2_E), float("-inf"))
    top = tl.maximum(tl.max(s1, 1), tl.max(s2, 1))[:, None]
    w1, w2 = tl.exp2(s1 - top), tl.exp2(s2 - top)
    inverse = 1.0 / (tl.sum(w1, 1) + tl.sum(w2, 1))[:, None]
    return w1 * inverse, w2 * inverse


@triton.jit
def forward_kernel(
    qkv,
    out,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    QUERIES: tl.constexpr,
):
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
        p1, p2 = _probabilities(_load(qkv, rows, 3 * H * D, N, D, WIDTH), k1, k2, second, SCALE, N)
        _store(out, rows, _dot(p1.to(v1.dtype), v1) + _dot(p2.to(v2.dtype), v2), H * D, N, D, WIDTH)


@triton.jit
def _backward_tile(
    qkv,
    grad_out,
    grad_qkv,
    rows,
    second,
    k1,
    k2,
    v1,
    v2,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gradients of one tile's queries, stored, and their sum; what they add to those of both tiles' keys and values."""
    q = _load(qkv, rows, 3 * H * D, N, D, WIDTH)
    g = _load(grad_out, rows, H * D, N, D, WIDTH)
    p1, p2 = _probabilities(q, k1, k2, second, SCALE, N)
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
def backward_kernel(
    qkv,
    grad_out,
    grad_qkv,
    sums,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SUM: tl.constexpr,
):
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
