"""Kernels of one pass over memory: layer norm, GELU, and gradients put in place; importing this needs Triton.

Residual sum and layer norm, GELU, and their backward, are what a transformer block does between its GEMMs. Sums over
rows (the gradients of norms and biases) leave a kernel as partial sums, one a program, and are added up later for all
layers at once. Shapes: R rows (images x tokens) of W numbers.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # rows that a norm's program holds at a time
COLUMNS = 128  # columns that a program of GELU's backward holds

Maybe = Tensor | None
Normed = tuple[Tensor, Tensor, Tensor]
"""What went into a layer norm (R, W), and each row's mean and 1 / standard deviation (R,)."""


@triton.jit
def _add_norm_kernel(
    x, branch, weight, bias, total, out, mean, rstd, factors, count, EPS: tl.constexpr, W: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (rows[:, None] < count) & (columns[None, :] < W)
    at = rows[:, None].to(tl.int64) * W + columns[None, :]
    v = tl.load(x + at, mask=real, other=0.0)
    if ADD:
        added = tl.load(branch + at, mask=real, other=0.0).to(tl.float32)
        if TOKENS:
            added *= tl.load(factors + rows // TOKENS, mask=rows < count, other=0.0)[:, None]
        v = (v.to(tl.float32) + added).to(total.dtype.element_ty)
        tl.store(total + at, v, mask=real)
    v = v.to(tl.float32)
    centre = tl.sum(v, 1) / W
    v = tl.where(real, v - centre[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(v * v, 1) / W + EPS)
    w = tl.load(weight + columns, mask=columns < W, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=columns < W, other=0.0).to(tl.float32)
    tl.store(out + at, (v * scale[:, None] * w[None, :] + b[None, :]).to(out.dtype.element_ty), mask=real)
    tl.store(mean + rows, centre, mask=rows < count)
    tl.store(rstd + rows, scale, mask=rows < count)


@triton.jit
def _norm_backward_kernel(
    grad, x, mean, rstd, weight, residual, out, to_branch, factors, partial, count, W: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, BRANCH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    w = tl.load(weight + columns, mask=columns < W, other=0.0).to(tl.float32)
    # Sums stay in two dimensions until the end: adding up rows inside the loop would make all warps wait every time.
    for_weight, for_bias = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for_branch = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        real = (rows[:, None] < count) & (columns[None, :] < W)
        at = rows[:, None].to(tl.int64) * W + columns[None, :]
        g = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        centre = tl.load(mean + rows, mask=rows < count, other=0.0)[:, None]
        scale = tl.load(rstd + rows, mask=rows < count, other=0.0)[:, None]
        v = tl.where(real, (tl.load(x + at, mask=real, other=0.0).to(tl.float32) - centre) * scale, 0.0)
        for_weight += g * v
        for_bias += g
        g = g * w[None, :]
        d = (g - (tl.sum(g, 1) / W)[:, None] - v * (tl.sum(g * v, 1) / W)[:, None]) * scale
        if ADD:
            d += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
        d = tl.where(real, d, 0.0)
        b = d
        if TOKENS:
            b = d * tl.load(factors + rows // TOKENS, mask=rows < count, other=0.0)[:, None]
        for_branch += b
        tl.store(out + at, d.to(out.dtype.element_ty), mask=real)
        if BRANCH:
            tl.store(to_branch + at, b.to(to_branch.dtype.element_ty), mask=real)
    partial += tl.program_id(0) * 3 * W + columns
    tl.store(partial, tl.sum(for_weight, 0), mask=columns < W)
    tl.store(partial + W, tl.sum(for_bias, 0), mask=columns < W)
    tl.store(partial + 2 * W, tl.sum(for_branch, 0), mask=columns < W)


@triton.jit
def _add_up_kernel(partial, out, count, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    partial += tl.program_id(1).to(tl.int64) * count * W
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        real = (rows < count)[:, None] & (columns < W)[None, :]
        total += tl.load(partial + rows[:, None] * W + columns[None, :], mask=real, other=0.0)
    tl.store(out + tl.program_id(1) * W + columns, tl.sum(total, 0), mask=columns < W)


@triton.jit
def _tail(x):
    """The standard normal's share beyond |x|, exact to 4e-7, and exp(-x^2 / 2), which a derivative needs too.

    Abramowitz and Stegun 7.1.26. The library's error function, and even an exact division, cost more than the memory
    traffic of the layer; an inverse root and its square do not.
    """
    s = x * 0.8493218002880191  # the root of log2(e) / 2
    bell = tl.exp2(-(s * s))
    root = tl.rsqrt(1.0 + 0.2316418882663604 * tl.abs(x))
    t = root * root
    series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    return t * series * bell, bell


@triton.jit
def _gelu(x):
    return tl.maximum(x, 0.0) - tl.abs(x) * _tail(x)[0]


@triton.jit
def _slope(x):
    tail, bell = _tail(x)
    return tl.where(x < 0, tail, 1.0 - tail) + x * bell * 0.3989422804014327


@triton.jit
def _gelu_kernel(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, _gelu(v).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _gelu_backward_kernel(
    grad, x, out, partial, count, chunk, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) * chunk
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, tl.minimum(first + chunk, count), ROWS):
        rows = start + tl.arange(0, ROWS)
        real = ((rows < count) & (rows < first + chunk))[:, None] & (columns[None, :] < W)
        at = rows[:, None].to(tl.int64) * W + columns[None, :]
        v = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=real, other=0.0).to(tl.float32) * _slope(v)
        tl.store(out + at, g.to(out.dtype.element_ty), mask=real)
        total += g
    tl.store(partial + tl.program_id(0) * W + columns, tl.sum(total, 0), mask=columns < W)


def programs(rows: int, width: int) -> int:
    """How many programs `norm_backward` has, each of which leaves a partial sum."""
    # The fastest on an H200 of five numbers with 2, 4 or 8 rows and 1 to 8 warps: four for each of its 132 processors,
    # eight for narrow rows; microseconds 44 for 33,280 rows of 512, 31 (40 with half as many) for as many of 192.
    return min(528 if width > 256 else 1056, triton.cdiv(rows, ROWS))


def _tokens(count: int, factors: Maybe) -> int:
    # A constant of the kernels, so that without factors they compile to what they would be if there were none.
    return 0 if factors is None else count // len(factors)


def add_norm(
    x: Tensor, branch: Maybe, weight: Tensor, bias: Tensor, eps: float, out: Tensor, factors: Maybe = None
) -> Normed:
    """x + branch in x's dtype, and each row's mean and 1 / standard deviation; the layer norm goes to `out`.

    With factors, one for each image in float32, the branch is multiplied by its image's.
    """
    count, width = x.shape
    total = x if branch is None else torch.empty_like(x)
    mean, rstd = x.new_empty(count, dtype=torch.float32), x.new_empty(count, dtype=torch.float32)
    tensors = (x, x if branch is None else branch, weight, bias, total, out, mean, rstd)
    tokens, scaled = _tokens(count, factors), mean if factors is None else factors
    sizes = (count, eps, width, triton.next_power_of_2(width), ROWS)
    _add_norm_kernel[(triton.cdiv(count, ROWS),)](*tensors, scaled, *sizes, branch is not None, tokens, num_warps=4)
    return total, mean, rstd


def norm_backward(
    grad: Tensor,
    normed: Normed,
    weight: Tensor,
    residual: Maybe,
    partial: Tensor,
    to_branch: Maybe = None,
    factors: Maybe = None,
) -> Tensor:
    """The gradient in a norm's input (plus the residual's), also in `to_branch`; partial (P, 3, W): of weight, bias and
    itself.

    `to_branch`, in bfloat16, and the last partial sum are the residual branch's: factors, one for each image, multiply
    them and not the result.
    """
    (x, mean, rstd), (count, width) = normed, normed[0].shape
    out = to_branch if to_branch is not None and to_branch.dtype == x.dtype and factors is None else torch.empty_like(x)
    apart = to_branch is not None and to_branch is not out
    tensors = (grad, x, mean, rstd, weight, grad if residual is None else residual, out, to_branch if apart else out)
    tokens, scaled = _tokens(count, factors), mean if factors is None else factors
    padded = triton.next_power_of_2(width)
    sizes, warps = (count, width, padded, ROWS), max(1, padded * ROWS // 1024)
    _norm_backward_kernel[(partial.shape[0],)](
        *tensors, scaled, partial, *sizes, residual is not None, apart, tokens, num_warps=warps
    )
    return out


def add_up(partial: Tensor) -> Tensor:
    """Partial sums (L, P, ...) of all layers added up: (L, ...)."""
    layers, count, *shape = partial.shape
    out = partial.new_empty(layers, *shape)
    width = out[0].numel()
    _add_up_kernel[(triton.cdiv(width, 32), layers)](partial, out, count, width, 64, 32, num_warps=4)
    return out


def gelu_programs(rows: int, inner: int) -> int:
    """How many partial sums `linear_gelu_backward` leaves of so many rows."""
    return min(64 if inner > 256 else 128, triton.cdiv(rows, 64))


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """The layer (R, K) to (R, W) with a weight (W, K); its exact GELU goes to `out`."""
    hidden = torch.addmm(bias, x, weight.t())
    _gelu_kernel[(triton.cdiv(hidden.numel(), 2048),)](hidden, out, hidden.numel(), 2048, num_warps=4)
    return hidden


def linear_gelu_backward(grad: Tensor, weight: Tensor, hidden: Tensor, partial: Tensor, out: Tensor) -> None:
    """From the gradient (R, K) after the next layer, of weight (K, W), that in GELU's input to `out`.

    Its sums over blocks of rows go to partial (`gelu_programs`, W).
    """
    count, width = hidden.shape
    sizes = (count, triton.cdiv(count, len(partial)), width, 16, COLUMNS)
    grid = (len(partial), triton.cdiv(width, COLUMNS))
    _gelu_backward_kernel[grid](grad @ weight, hidden, out, partial, *sizes, num_warps=4)


@triton.jit
def _place_kernel(
    grad, out, sums, N, skipped, image_stride, head_stride, token_stride,
    W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, total = columns < W, tl.zeros([COLUMNS], tl.float32)
    grad += image * image_stride + (columns // D) * head_stride + columns % D
    out += image * N * 3 * W + columns
    for start in range(0, N, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & real[None, :]
        there = inside & (rows >= skipped)[:, None]
        tile = tl.load(grad[None, :] + (rows - skipped)[:, None] * token_stride, mask=there, other=0.0)
        tl.store(out[None, :] + rows[:, None] * (3 * W), tile, mask=inside)
        total += tl.sum(tile.to(tl.float32), 0)
    tl.store(sums + image * 3 * W + columns, total, mask=real)


def place_gradients(out: Tensor, sums: Tensor, grads: Sequence[Tensor]) -> None:
    """Gradients of queries, keys and values (B, H, M, D) as that of qkv (B, N, 3 * H * D), in one pass with its sums
    over tokens; the first tokens of a part with fewer get 0."""
    count, tokens, width = len(out), out.shape[1], out.shape[2] // 3
    for part, grad in enumerate(grads):
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        to, total = out[:, :, part * width :], sums[:, part * width :]
        sizes = (tokens, tokens - grad.shape[2], *grad.stride()[:3], width, grad.shape[3])
        _place_kernel[(count, triton.cdiv(width, 128))](grad, to, total, *sizes, 32, 128, num_warps=4)
