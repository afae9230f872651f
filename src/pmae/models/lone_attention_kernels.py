"""Attention over a power of two of tokens and one more, as a ViT's patches and [CLS] are: 17, 33 or 65.

Matrix units want powers of two, so the first P tokens are exact tiles and the last stands apart: it adds a column, a
row and their corner to the score matrix, and to every product a term of rank one. Importing this needs Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the functions under triton.jit are Triton's language, not Python's: their arguments have no Python types)

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

LOG2_E = tl.constexpr(1.4426950408889634)

# A tile is (tokens, columns), or (heads, tokens, columns) for a group of heads. Axes count from the end and sums keep
# theirs, so that the same lines serve both. Names in `_l` are the lone token's row. A matrix of pairs is four parts:
# the tile; its column on the right, the lone key's; the row below, the lone query's, held as a column too; the corner.


def fits(tokens: int) -> bool:
    """Whether these are a power of two of tokens, 16 at least, and one more."""
    return tokens > 16 and (tokens - 1) & (tokens - 2) == 0


def warps(tokens: int, group: int) -> int:
    """How many warps a program gets: one a head, until four can share the widest product a matrix unit takes."""
    return group if tokens < 65 else 4


@triton.jit
def _places(first, ROW: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Where the tile and the lone token lie in rows of `ROW` elements."""
    columns = first * D + tl.arange(0, WIDTH)[None, :]
    if GROUP > 1:
        columns = tl.arange(0, GROUP)[:, None, None] * D + columns
    return tl.arange(0, P)[:, None] * ROW + columns, P * ROW + columns


@triton.jit
def _load(base, at, at_l, real):
    return tl.load(base + at, mask=real, other=0.0), tl.load(base + at_l, mask=real, other=0.0)


@triton.jit
def _store(base, at, at_l, tile, lone, real):
    tl.store(base + at, tile.to(base.dtype.element_ty), mask=real)
    tl.store(base + at_l, lone.to(base.dtype.element_ty), mask=real)


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _column(a, b_l):
    """Products of a tile's rows with one row."""
    if a.shape[-2] < 64:
        return _dot(a, tl.trans(b_l))
    # The tile's own product has another layout than one with a single column, and bringing them together would move
    # the whole tile through shared memory; eight equal columns are the fewest that have the same.
    copies, _ = tl.broadcast(b_l, tl.zeros((8, 1), b_l.dtype))
    return tl.max(_dot(a, tl.trans(copies)), -1, keep_dims=True)


@triton.jit
def _pairs(a, a_l, b, b_l):
    """Products of all rows of a with all rows of b."""
    corner = tl.sum(a_l.to(tl.float32) * b_l.to(tl.float32), -1, keep_dims=True)
    return _dot(a, tl.trans(b)), _column(a, b_l), _column(b, a_l), corner


@triton.jit
def _mix(tile, right, below, corner, x, x_l):
    """The rows of x added up by the weights in every row of a matrix."""
    mixed = _dot(tile, x) + right * x_l.to(tl.float32)
    return mixed, _dot(tl.trans(below.to(x.dtype)), x) + corner * x_l.to(tl.float32)


@triton.jit
def _softmax(scores, last, SCALE: tl.constexpr, AXIS: tl.constexpr):
    """Softmax over an axis and one score more, in float32; the scale is positive, so it leaves the largest largest."""
    top = tl.maximum(tl.max(scores, AXIS, keep_dims=True), last) * (SCALE * LOG2_E)
    weights, weight = tl.exp2(scores * (SCALE * LOG2_E) - top), tl.exp2(last * (SCALE * LOG2_E) - top)
    inverse = 1.0 / (tl.sum(weights, AXIS, keep_dims=True) + weight)
    return weights * inverse, weight * inverse


@triton.jit
def _softmax_gradient(p, last, grad_p, grad_last, SCALE: tl.constexpr, AXIS: tl.constexpr):
    """The gradient in unscaled scores from that in probabilities; the sum is the softmax's own correction."""
    correction = (tl.sum(p * grad_p, AXIS, keep_dims=True) + last * grad_last) * SCALE
    return p * (grad_p * SCALE - correction), last * (grad_last * SCALE - correction)


@triton.jit
def _probabilities(q, q_l, k, k_l, SCALE: tl.constexpr):
    tile, right, below, corner = _pairs(q, q_l, k, k_l)
    tile, right = _softmax(tile, right, SCALE, -1)
    below, corner = _softmax(below, corner, SCALE, -2)
    return tile, right, below, corner


@triton.jit
def forward_kernel(
    qkv,
    out,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    image = (tl.program_id(0) // (H // GROUP)).to(tl.int64)  # a large batch passes 2^31 elements
    first = tl.program_id(0) % (H // GROUP) * GROUP
    qkv += image * (N * 3 * H * D)
    out += image * (N * H * D)
    real = tl.arange(0, WIDTH)[None, :] < D
    at, at_l = _places(first, 3 * H * D, D, N - 1, WIDTH, GROUP)
    q, q_l = _load(qkv, at, at_l, real)
    k, k_l = _load(qkv + H * D, at, at_l, real)
    v, v_l = _load(qkv + 2 * H * D, at, at_l, real)
    p, p_right, p_below, p_corner = _probabilities(q, q_l, k, k_l, SCALE)
    o, o_l = _mix(p.to(v.dtype), p_right, p_below, p_corner, v, v_l)
    at, at_l = _places(first, H * D, D, N - 1, WIDTH, GROUP)
    _store(out, at, at_l, o, o_l, real)


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
    GROUP: tl.constexpr,
    SUM: tl.constexpr,
):
    image = (tl.program_id(0) // (H // GROUP)).to(tl.int64)
    first = tl.program_id(0) % (H // GROUP) * GROUP
    qkv += image * (N * 3 * H * D)
    grad_qkv += image * (N * 3 * H * D)
    grad_out += image * (N * H * D)
    real = tl.arange(0, WIDTH)[None, :] < D
    at, at_l = _places(first, H * D, D, N - 1, WIDTH, GROUP)
    g, g_l = _load(grad_out, at, at_l, real)
    at, at_l = _places(first, 3 * H * D, D, N - 1, WIDTH, GROUP)
    q, q_l = _load(qkv, at, at_l, real)
    k, k_l = _load(qkv + H * D, at, at_l, real)
    v, v_l = _load(qkv + 2 * H * D, at, at_l, real)
    p, p_right, p_below, p_corner = _probabilities(q, q_l, k, k_l, SCALE)
    s, s_right, s_below, s_corner = _pairs(g, g_l, v, v_l)  # gradients, in probabilities first and then in scores
    s, s_right = _softmax_gradient(p, p_right, s, s_right, SCALE, -1)
    s_below, s_corner = _softmax_gradient(p_below, p_corner, s_below, s_corner, SCALE, -2)
    p, s = p.to(g.dtype), s.to(q.dtype)
    # A query adds up its keys; a key and a value their queries, so there row and column change places.
    grad_q, grad_q_l = _mix(s, s_right, s_below, s_corner, k, k_l)
    grad_k, grad_k_l = _mix(tl.trans(s), s_below, s_right, s_corner, q, q_l)
    grad_v, grad_v_l = _mix(tl.trans(p), p_below, p_right, p_corner, g, g_l)
    _store(grad_qkv, at, at_l, grad_q, grad_q_l, real)
    _store(grad_qkv + H * D, at, at_l, grad_k, grad_k_l, real)
    _store(grad_qkv + 2 * H * D, at, at_l, grad_v, grad_v_l, real)
    if SUM:  # over the tokens
        sums += image * (3 * H * D) + at_l - (N - 1) * (3 * H * D)
        tl.store(sums, tl.sum(grad_q, -2, keep_dims=True) + grad_q_l, mask=real)
        # What all keys share moves a query's scores alike, which its softmax does not see: the sum is nothing. And a
        # query's weights add up to one, so that the values' sum is that of the gradient that came in.
        tl.store(sums + H * D, tl.zeros_like(grad_k_l), mask=real)
        ones = tl.full(tl.trans(p_right).shape, 1.0, g.dtype)
        tl.store(sums + 2 * H * D, _dot(ones, g) + g_l.to(tl.float32), mask=real)
