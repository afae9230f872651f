"""The kernel that masks components; importing this needs Triton.

Hiding the shortest prefix in the noise's order whose share is closest to the ratio means hiding all noise below a
threshold. A row's threshold is found by bisection with the whole row in registers: 24 sums instead of a sort.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from pmae import masking

WIDEST, TILE = 32768, 8192
"""The most components whose row fits the registers of one program, and how many of more it holds at a time."""


@triton.jit
def _hide_kernel(noise, share, ratio, hidden, K: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64) * K
    # Uniform float32 noise is a multiple of 2^-24, so as an integer it loses nothing; padding is above every threshold.
    key = _keys(noise + row, columns, K)
    part = tl.load(share + columns, mask=columns < K, other=0.0)
    target = tl.load(ratio)
    low, high = 0, 16777216
    for _ in range(24):
        middle = (low + high) // 2
        below = tl.sum(tl.where(key < middle, part, 0.0), 0) <= target
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    without, count = tl.sum(tl.where(key < low, part, 0.0), 0), tl.sum((key < low).to(tl.int32), 0)
    together, all_of_them = tl.sum(tl.where(key < high, part, 0.0), 0), tl.sum((key < high).to(tl.int32), 0)
    chosen = _threshold(low, high, without, together, count, all_of_them, target, K)
    tl.store(hidden + row + columns, key < chosen, mask=columns < K)


@triton.jit
def _threshold(low, high, without, together, count, all_of_them, target, K: tl.constexpr):
    """The component at `low` crosses the ratio: with or without it, whichever is closer, but never none or all."""
    closer = tl.abs(together - target) < tl.abs(without - target)
    return tl.where((count == 0) | (closer & (all_of_them < K)), high, low)


@triton.jit
def _keys(noise, columns, K: tl.constexpr):
    return (tl.load(noise + columns, mask=columns < K, other=2.0) * 16777216.0).to(tl.int32)


@triton.jit
def _shares_below(noise, share, first, second, third, K: tl.constexpr, TILE: tl.constexpr):
    """The shares of the components below each of three thresholds."""
    a, b, c = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, K, TILE):
        columns = start + tl.arange(0, TILE)
        key, part = _keys(noise, columns, K), tl.load(share + columns, mask=columns < K, other=0.0)
        a += tl.where(key < first, part, 0.0)
        b += tl.where(key < second, part, 0.0)
        c += tl.where(key < third, part, 0.0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _count_below(noise, first, second, K: tl.constexpr, TILE: tl.constexpr):
    a, b = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, K, TILE):
        key = _keys(noise, start + tl.arange(0, TILE), K)
        a += (key < first).to(tl.int32)
        b += (key < second).to(tl.int32)
    return tl.sum(a, 0), tl.sum(b, 0)


@triton.jit
def _hide_many_kernel(noise, share, ratio, hidden, K: tl.constexpr, TILE: tl.constexpr):
    """The same for rows that no program holds: they are read again, from the cache, for every two bits."""
    row = tl.program_id(0).to(tl.int64) * K
    noise, hidden, target = noise + row, hidden + row, tl.load(ratio)
    low, step = 0, 16777216
    for _ in range(12):
        step = step // 4
        a, b, c = _shares_below(noise, share, low + step, low + 2 * step, low + 3 * step, K, TILE)
        low += step * ((a <= target).to(tl.int32) + (b <= target).to(tl.int32) + (c <= target).to(tl.int32))
    high = low + 1
    without, together, _ = _shares_below(noise, share, low, high, high, K, TILE)
    count, all_of_them = _count_below(noise, low, high, K, TILE)
    chosen = _threshold(low, high, without, together, count, all_of_them, target, K)
    for start in range(0, K, TILE):
        columns = start + tl.arange(0, TILE)
        tl.store(hidden + columns, _keys(noise, columns, K) < chosen, mask=columns < K)


def hide_components(
    noise_BK: Tensor, share_K: Tensor, ratio: Tensor | float, prefix: Literal["closest", "shorter"] = "closest"
) -> Tensor:
    """(B, K) booleans, as `masking.hide_components`, which takes over where the kernel does not apply."""
    fits = noise_BK.is_cuda and noise_BK.dtype == torch.float32
    if fits and isinstance(ratio, Tensor) and ratio.ndim == 0 and prefix == "closest":
        return hide_closest(noise_BK, share_K.detach(), ratio)
    return _by_sorting(noise_BK, share_K, ratio, prefix)


# The compiler has no scan over a hundred thousand components, as patch_pca has of 224x224 pixels.
_by_sorting = torch.compiler.disable(masking.hide_components)


@triton_op("pmae::hide_components", mutates_args=())
def hide_closest(noise_BK: Tensor, share_K: Tensor, ratio: Tensor) -> Tensor:
    """The kernel for the prefix whose share is closest to the ratio, a tensor of no dimensions."""
    noise_BK, hidden = noise_BK.contiguous(), torch.empty_like(noise_BK, dtype=torch.bool)
    rows, components = noise_BK.shape
    many = int(components) > WIDEST
    kernel, width = (_hide_many_kernel, TILE) if many else (_hide_kernel, 1 << (int(components) - 1).bit_length())
    warps = min(16, max(1, width // 1024))
    wrap_triton(kernel)[(rows,)](noise_BK, share_K, ratio, hidden, int(components), width, num_warps=warps)
    return hidden
