"""The way back through attention over a power of two of tokens and one, as a ViT's patches and [CLS] are: 17, 33, 65.

Matrix units want powers of two, so the first P tokens are exact tiles and the last stands apart: it adds a column, a
row and their corner to the score matrix, and to every product a term of rank one. A program takes one head. Forward
that gains nothing. Importing this needs Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the functions under triton.jit are Triton's language, not Python's: their arguments have no Python types)

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

LOG2_E = tl.constexpr(1.4426950408889634)

# A tile is (tokens, columns). Names in `_l` are the lone token's row. A matrix of pairs is four parts: the tile; its
# column on the right, the lone key's; the row below, the lone query's, held as a column too; the corner.


def fits(tokens: int, head_dim: int) -> bool:
    """Whether these are a power of two of tokens, 16 at least, and one more, and a head's tiles fit into registers."""
    return tokens > 16 and (tokens - 1) & (tokens - 2) == 0 and head_dim <= 32


def warps(tokens: int) -> int:
    """How many warps a program gets."""
    # The fastest of 1, 2, 4 and 8 on an H200 with a batch of 512; before and now, in microseconds, 17 tokens: 15.4 and
    # 12.5 (12 heads of 16), 35.7 and 35.0 (16 of 32); 33: 22.2 and 11.8 (6 of 16); 65: 108 and 84, 213 and 158.
    return 1 if tokens < 65 else 2


@triton.jit
def _places(head, ROW: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr):
    """Where a head's tile and its lone token lie in rows of `ROW` elements."""
    columns = head * D + tl.arange(0, WIDTH)[None, :]
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
    if a.shape[0] < 64:
        return _dot(a, tl.trans(b_l))
    # The tile's own product has another layout than one with a single column, and bringing them together would move
    # the whole tile through shared memory; eight equal columns are the fewest that have the same.
    copies, _ = tl.broadcast(b_l, tl.zeros((8, 1), b_l.dtype))
    return tl.max(_dot(a, tl.trans(copies)), 1, keep_dims=True)


@triton.jit
def _pairs(a, a_l, b, b_l):
    """Products of all rows of a with all rows of b."""
    corner = tl.sum(a_l.to(tl.float32) * b_l.to(tl.float32), 1, keep_dims=True)
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
    tile, right = _softmax(tile, right, SCALE, 1)
    below, corner = _softmax(below, corner, SCALE, 0)
    return tile, right, below, corner


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
    SUM: tl.constexpr,
):
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H  # a large batch passes 2^31 elements
    qkv += image * (N * 3 * H * D)
    grad_qkv += image * (N * 3 * H * D)
    grad_out += image * (N * H * D)
    real = tl.arange(0, WIDTH)[None, :] < D
    at, at_l = _places(head, H * D, D, N - 1, WIDTH)
    g, g_l = _load(grad_out, at, at_l, real)
    at, at_l = _places(head, 3 * H * D, D, N - 1, WIDTH)
    q, q_l = _load(qkv, at, at_l, real)
    k, k_l = _load(qkv + H * D, at, at_l, real)
    v, v_l = _load(qkv + 2 * H * D, at, at_l, real)
    p, p_right, p_below, p_corner = _probabilities(q, q_l, k, k_l, SCALE)
    s, s_right, s_below, s_corner = _pairs(g, g_l, v, v_l)  # gradients, in probabilities first and then in scores
    s, s_right = _softmax_gradient(p, p_right, s, s_right, SCALE, 1)
    s_below, s_corner = _softmax_gradient(p_below, p_corner, s_below, s_corner, SCALE, 0)
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
        tl.store(sums, tl.sum(grad_q, 0, keep_dims=True) + grad_q_l, mask=real)
        # What all keys share moves a query's scores alike, which its softmax does not see: the sum is nothing. And a
        # query's weights add up to one, so that the values' sum is that of the gradient that came in.
        tl.store(sums + H * D, tl.zeros_like(grad_k_l), mask=real)
        ones = tl.full(tl.trans(p_right).shape, 1.0, g.dtype)
        tl.store(sums + 2 * H * D, _dot(ones, g) + g_l.to(tl.float32), mask=real)
