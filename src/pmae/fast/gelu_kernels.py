"""A layer and its GELU, forward and backward; importing this needs Triton.

The product is the library's and GELU a pass over memory, but for narrow layers on a GPU that copies tiles by itself:
their products are short and wait for memory anyway, so there both are one kernel, and what the product puts out crosses
memory once less. The gradient of the layer's bias leaves as partial sums over blocks of rows, to be added up later.
Shapes: R rows of K numbers, and of W after the layer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the functions under triton.jit are Triton's language, not Python's: their arguments have no Python types)

from functools import cache

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, import-untyped, unused-ignore]

NARROW = 256
"""The widest K of a product of our own. Microseconds on an H200, both ways, the library's product and a pass against
one kernel: 2,560 rows of 192: 19 and 14; 8,704: 45 and 35; 33,280: 131 and 122; 33,280 of 512: 398 and 424."""
ROWS, COLUMNS, DEPTH = 64, 128, 64
"""The tile that a program makes of it, and how much of the sum it adds at a time."""
PLAN = {"num_warps": 8, "num_stages": 3}
"""The fastest of 14 tiles and plans but for a few hundredths."""


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
    grad, x, out, partial, count, chunk, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
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


@triton.jit
def _product_gelu_kernel(
    x,
    weight,
    bias,
    hidden,
    out,
    inner,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Neighbouring programs read the same rows, and all weights fit into the cache.
    row, column = tl.program_id(0) // tl.cdiv(W, COLUMNS) * ROWS, tl.program_id(0) % tl.cdiv(W, COLUMNS) * COLUMNS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, inner, DEPTH):
        total = tl.dot(x.load([row, k]), weight.load([column, k]).T, total, input_precision="ieee")
    columns = column + tl.arange(0, COLUMNS)
    total += tl.load(bias + columns, mask=columns < W, other=0.0).to(tl.float32)[None, :]
    hidden.store([row, column], total.to(hidden.dtype))
    out.store([row, column], _gelu(total).to(out.dtype))


@triton.jit
def _product_gelu_backward_kernel(
    grad,
    weight,
    hidden,
    out,
    partial,
    inner,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row, column = tl.program_id(0) // tl.cdiv(W, COLUMNS) * ROWS, tl.program_id(0) % tl.cdiv(W, COLUMNS) * COLUMNS
    x = hidden.load([row, column])
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, inner, DEPTH):
        total = tl.dot(grad.load([row, k]), weight.load([k, column]), total, input_precision="ieee")
    total *= _slope(x.to(tl.float32))
    out.store([row, column], total.to(out.dtype))
    columns = column + tl.arange(0, COLUMNS)
    tl.store(partial + row // ROWS * W + columns, tl.sum(total, 0), mask=columns < W)


@cache
def _copies_tiles(device: torch.device) -> bool:
    # Triton's interpreter, with which the tests run on a CPU, can do all.
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _in_one(inner: int, weight: Tensor) -> bool:
    """Whether product and GELU are one kernel: narrow rows, all of whole 16 bytes, in which the device counts."""
    whole = all(size * weight.element_size() % 16 == 0 for size in weight.shape)
    return inner <= NARROW and whole and _copies_tiles(weight.device)


def partial_sums(rows: int, inner: int, weight: Tensor) -> int:
    """How many partial sums `linear_gelu_backward` leaves of so many rows."""
    if _in_one(inner, weight):
        return triton.cdiv(rows, ROWS)
    return min(64 if inner > 256 else 128, triton.cdiv(rows, 64))


def _tiles(rows: int, columns: int, *tensors: Tensor) -> list[TensorDescriptor]:
    return [TensorDescriptor.from_tensor(tensor, [rows, columns]) for tensor in tensors]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """The layer (R, K) to (R, W) with a weight (W, K); its exact GELU goes to `out`."""
    if not _in_one(x.shape[1], weight):
        hidden = torch.addmm(bias, x, weight.t())
        _gelu_kernel[(triton.cdiv(hidden.numel(), 2048),)](hidden, out, hidden.numel(), 2048, num_warps=4)
        return hidden
    hidden, (width, inner) = torch.empty_like(out), weight.shape
    read = *_tiles(ROWS, DEPTH, x), *_tiles(COLUMNS, DEPTH, weight), bias
    grid = (triton.cdiv(len(x), ROWS) * triton.cdiv(width, COLUMNS),)
    written = _tiles(ROWS, COLUMNS, hidden, out)
    _product_gelu_kernel[grid](*read, *written, inner, width, ROWS, COLUMNS, DEPTH, **PLAN)
    return hidden


def linear_gelu_backward(grad: Tensor, weight: Tensor, hidden: Tensor, partial: Tensor, out: Tensor) -> None:
    """From the gradient (R, K) after the next layer, of weight (K, W), that in GELU's input to `out`.

    Its sums over blocks of rows go to partial (`partial_sums`, W).
    """
    (count, inner), width, across = grad.shape, weight.shape[1], triton.cdiv(weight.shape[1], COLUMNS)
    if not _in_one(inner, weight):
        sizes = (count, triton.cdiv(count, len(partial)), width, 16, COLUMNS)
        _gelu_backward_kernel[(len(partial), across)](grad @ weight, hidden, out, partial, *sizes, num_warps=4)
        return
    read, tiles = (*_tiles(ROWS, DEPTH, grad), *_tiles(DEPTH, COLUMNS, weight)), _tiles(ROWS, COLUMNS, hidden, out)
    sizes = (inner, width, ROWS, COLUMNS, DEPTH)
    _product_gelu_backward_kernel[(len(partial) * across,)](*read, *tiles, partial, *sizes, **PLAN)
