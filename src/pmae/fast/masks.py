"""Which components to hide, without sorting them; importing this needs Triton.

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

WIDEST = 32768
"""The most components whose row fits the registers of one program."""


@triton.jit
def _hide_kernel(noise, share, ratio, hidden, K: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64) * K
    # Uniform float32 noise is a multiple of 2^-24, so as an integer it loses nothing; padding is above every threshold.
    key = (tl.load(noise + row + columns, mask=columns < K, other=2.0) * 16777216.0).to(tl.int32)
    part = tl.load(share + columns, mask=columns < K, other=0.0)
    target = tl.load(ratio)
    low, high = 0, 16777216
    for _ in range(24):
        middle = (low + high) // 2
        below = tl.sum(tl.where(key < middle, part, 0.0), 0) <= target
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    # The component at `low` crosses the ratio: with or without it, whichever is closer, but never none and never all.
    without, count = tl.sum(tl.where(key < low, part, 0.0), 0), tl.sum((key < low).to(tl.int32), 0)
    together, all_of_them = tl.sum(tl.where(key < high, part, 0.0), 0), tl.sum((key < high).to(tl.int32), 0)
    closer = tl.abs(together - target) < tl.abs(without - target)
    threshold = tl.where((count == 0) | (closer & (all_of_them < K)), high, low)
    tl.store(hidden + row + columns, key < threshold, mask=columns < K)


def hide_components(
    noise_BK: Tensor, share_K: Tensor, ratio: Tensor | float, prefix: Literal["closest", "shorter"] = "closest"
) -> Tensor:
    """(B, K) booleans, as `masking.hide_components`, which takes over where the kernel does not apply."""
    fits = noise_BK.is_cuda and noise_BK.dtype == torch.float32 and noise_BK.shape[1] <= WIDEST
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
    width = 1 << (int(components) - 1).bit_length()
    warps = min(16, max(1, width // 1024))
    wrap_triton(_hide_kernel)[(rows,)](noise_BK, share_K, ratio, hidden, int(components), width, num_warps=warps)
    return hidden
