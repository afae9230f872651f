"""Windows of images of many sizes in one piece, and the weights that resize them; importing this needs Triton.

By torch's operations every window is a launch of its own, and the weights are written and read again some twenty times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _windows_kernel(
    pixels, starts, strides, heights, widths, out, C: tl.constexpr, HIGH, WIDE, BLOCK: tl.constexpr
):  # fmt: skip
    image = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y, x = place // WIDE, place % WIDE
    inside = (y < tl.load(heights + image)) & (x < tl.load(widths + image))
    source = tl.load(starts + image) + y.to(tl.int64) * tl.load(strides + image) + x * C
    for c in range(C):
        value = tl.load(pixels + source + c, mask=inside, other=0)
        target = (image * C + c).to(tl.int64) * HIGH * WIDE + place
        tl.store(out + target, value.to(out.dtype.element_ty), mask=place < HIGH * WIDE)


@triton.jit
def _weights_kernel(
    lengths, flips, out, SIZE: tl.constexpr, PIXELS, WIDTH: tl.constexpr, CUBIC: tl.constexpr
):  # fmt: skip
    image, made = tl.program_id(0), tl.program_id(1)
    length, pixel = tl.load(lengths + image), tl.arange(0, WIDTH)
    step = length / SIZE
    distance = tl.abs(pixel + 0.5 - step * (made + 0.5)) / tl.maximum(step, 1.0)
    if CUBIC:
        # Keys' kernel with a = -1/2, as in `pmae.data.augment.resize_weights`.
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weight = tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))
    else:
        weight = tl.maximum(1 - distance, 0.0)
    weight = tl.where(pixel < length, weight, 0.0)
    row = tl.where(tl.load(flips + image) != 0, SIZE - 1 - made, made)
    target = (image * SIZE + row).to(tl.int64) * PIXELS + pixel
    tl.store(out + target, (weight / tl.sum(weight, 0)).to(out.dtype.element_ty), mask=pixel < PIXELS)


def windows(pixels: Tensor, corners: Tensor, sides: tuple[int, int], channels: int, dtype: torch.dtype) -> Tensor:
    """Windows (B, C, *sides) of images that lie one after the other, 0 beyond their own sides.

    `corners` (4, B): where in `pixels` each begins, how far its rows are apart, its height and its width.
    """
    count, (high, wide) = corners.shape[1], sides
    out = torch.empty(count, channels, high, wide, dtype=dtype, device=pixels.device)
    grid = (count, triton.cdiv(high * wide, BLOCK))
    _windows_kernel[grid](pixels, *corners, out, channels, high, wide, BLOCK)
    return out


def weights(lengths: Tensor, flips: Tensor, pixels: int, size: int, interpolation: str, dtype: torch.dtype) -> Tensor:
    """(B, size, pixels): what makes `size` pixels of the first `lengths` ones, backwards where `flips` says so."""
    out = torch.empty(len(lengths), size, pixels, dtype=dtype, device=lengths.device)
    width = triton.next_power_of_2(pixels)
    _weights_kernel[len(lengths), size](lengths, flips, out, size, pixels, width, interpolation == "bicubic")
    return out
