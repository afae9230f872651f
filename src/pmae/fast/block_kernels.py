"""What a transformer block does between its products, each in one pass over memory; importing this needs Triton.

Sums over rows (the gradients of norms and biases) leave a kernel as one partial sum a program and are added up later,
for all layers at once. Shapes: R rows (images x tokens) of W numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the functions under triton.jit are Triton's language, not Python's: their arguments have no Python types)

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

ROWS = 4
"""Rows that a norm's program holds at a time."""


@triton.jit
def _add_norm_kernel(
    x,
    branch,
    weight,
    bias,
    total,
    out,
    mean,
    rstd,
    factors,
    count,
    EPS: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
):
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
    grad,
    x,
    mean,
    rstd,
    weight,
    residual,
    out,
    half,
    factors,
    partial,
    count,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    HALVE: tl.constexpr,
    TOKENS: tl.constexpr,
):
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
        to_branch = d
        if TOKENS:
            to_branch = d * tl.load(factors + rows // TOKENS, mask=rows < count, other=0.0)[:, None]
        for_branch += to_branch
        tl.store(out + at, d.to(out.dtype.element_ty), mask=real)
        if HALVE:
            tl.store(half + at, to_branch.to(half.dtype.element_ty), mask=real)
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


def _power(width: int) -> int:
    return 1 << (width - 1).bit_length()


def programs(rows: int, width: int) -> int:
    """How many programs `norm_backward` has, each of which leaves a partial sum."""
    # The fastest on an H200 of five numbers with 2, 4 or 8 rows and 1 to 8 warps: four for each of its 132 processors,
    # eight for narrow rows; microseconds 44 for 33,280 rows of 512, 31 (40 with half as many) for as many of 192.
    return min(528 if width > 256 else 1056, triton.cdiv(rows, ROWS))


def _tokens(count: int, factors: Tensor | None) -> int:
    # A constant of the kernels, so that without factors they compile to what they would be if there were none.
    return 0 if factors is None else count // len(factors)


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch in x's dtype, and each row's mean and 1 / deviation; the layer norm goes to `out`.

    With factors, one for each image in float32, the branch is multiplied by its image's.
    """
    count, width = x.shape
    total = x if branch is None else torch.empty_like(x)
    mean, rstd = x.new_empty(count, dtype=torch.float32), x.new_empty(count, dtype=torch.float32)
    tensors = (x, x if branch is None else branch, weight, bias, total, out, mean, rstd)
    tokens, scaled = _tokens(count, factors), mean if factors is None else factors
    _add_norm_kernel[(triton.cdiv(count, ROWS),)](
        *tensors, scaled, count, eps, width, _power(width), ROWS, branch is not None, tokens, num_warps=4
    )
    return total, mean, rstd


def norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    partial: Tensor,
    half: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """The gradient in x (plus the residual's), also in `half`; partial (P, 3, W): of weight, bias and itself.

    `half` and the last partial sum are the branch's: factors, one for each image, multiply them and not the result.
    """
    count, width = x.shape
    out = half if half is not None and half.dtype == x.dtype and factors is None else torch.empty_like(x)
    halve = half is not None and half is not out
    tensors = (grad, x, mean, rstd, weight, grad if residual is None else residual, out, half if halve else out)
    tokens, scaled = _tokens(count, factors), mean if factors is None else factors
    sizes, warps = (count, width, _power(width), ROWS), max(1, _power(width) * ROWS // 1024)
    _norm_backward_kernel[(partial.shape[0],)](
        *tensors, scaled, partial, *sizes, residual is not None, halve, tokens, num_warps=warps
    )
    return out


def add_up(partial: Tensor) -> Tensor:
    """Partial sums (L, P, ...) of all layers added up: (L, ...)."""
    layers, count, *shape = partial.shape
    out = partial.new_empty(layers, *shape)
    width = out[0].numel()
    _add_up_kernel[(triton.cdiv(width, 32), layers)](partial, out, count, width, 64, 32, num_warps=4)
    return out
