"""Crops of images of many sizes, cut and resized with antialiasing; on a GPU by matrix multiplications."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pmae.data.augment import Boxes, resize_weights
from pmae.data.ragged import Ragged

TOGETHER = 64  # crops that one matrix multiplication resizes: 130 MB of windows at 224 pixels


def crop_ragged(
    images: Ragged,
    places: np.ndarray | Sequence[int],
    boxes: Boxes,
    size: tuple[int, int],
    interpolation: str,
    threads: int = 1,
    plain: bool = False,
) -> Tensor:
    """Crops (B, C, *size) of the images at these places: uint8 of uint8, else float32; plain ones without kernels."""
    if images.pixels.is_cuda:
        cut = [slice(start, start + TOGETHER) for start in range(0, len(places), TOGETHER)]
        parts = [(np.asarray(places[c]), Boxes(*(each[c] for each in boxes))) for c in cut]
        return torch.cat([by_gemm(images, *part, size, interpolation, plain) for part in parts])
    windows = [tuple(map(int, box)) for box in zip(places, *(each.tolist() for each in boxes[:4]), strict=True)]

    def resized(window: tuple[int, ...], flip: bool) -> Tensor:
        pixels = images.window(*window)[None]
        pixels = pixels if pixels.dtype == torch.uint8 else pixels.float()
        made = functional.interpolate(pixels, size, mode=interpolation, antialias=True)
        return made.flip(3) if flip else made

    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(resized, windows, boxes.flip.tolist()))).contiguous()


def by_gemm(
    images: Ragged, places: np.ndarray, boxes: Boxes, size: tuple[int, int], interpolation: str, plain: bool = False
) -> Tensor:
    """Windows resized as `rows @ (window @ columns^T)`; beyond the end of a window the weights are 0."""
    # Half precision keeps 11 bits, 0.06 of a grey level, of numbers up to 255.
    whole = images.pixels.dtype == torch.uint8
    dtype = torch.float16 if whole else torch.float32
    make = _by_torch if plain else _maker(images.pixels.device)
    padded, rows, columns = make(images, places, boxes, size, interpolation, dtype)
    if not whole:
        return rows[:, None] @ (padded @ columns.transpose(1, 2)[:, None])
    # The cubic kernel overshoots; 8-bit resizing clips what it makes of rows before it goes on to columns.
    narrow = (padded @ columns.transpose(1, 2)[:, None]).clamp_(0, 255)
    return (rows[:, None] @ narrow).round_().clamp_(0, 255).to(torch.uint8)


Factors = tuple[Tensor, Tensor, Tensor]
"""Windows (B, C, high, wide) and the weights of rows (B, size, high) and columns (B, size, wide)."""


@cache
def _maker(device: torch.device) -> Callable[..., Factors]:
    """What cuts windows and weighs their pixels: kernels where they run, else torch's operations."""
    from pmae import fast

    if fast.level() != "all":
        return _by_torch
    one, first = torch.ones(1, dtype=torch.int64), np.zeros(1, int)
    images = Ragged(torch.zeros(3, dtype=torch.uint8, device=device), first, np.ones((1, 2), int), 3)
    box = Boxes(one - 1, one - 1, one, one, one > 1)
    try:
        _by_kernels(images, first, box, (1, 1), "bicubic", torch.float16)
    except Exception as error:  # no Triton, no compiler, a GPU it does not know: whatever it is, crops can be cut
        warnings.warn(f"crops are cut without kernels, which takes longer: {error}", stacklevel=2)
        return _by_torch
    return _by_kernels


def _by_kernels(
    images: Ragged, places: np.ndarray, boxes: Boxes, size: tuple[int, int], interpolation: str, dtype: torch.dtype
) -> Factors:
    from pmae.fast import crop_kernels

    device, (tops, lefts, heights, widths) = images.pixels.device, (each.long() for each in boxes[:4])
    corners = torch.from_numpy(images.corners(places, tops.numpy(), lefts.numpy()))
    given = torch.stack([*corners, heights, widths, boxes.flip.long()]).to(device, non_blocking=True)
    sides = int(heights.max()), int(widths.max())
    padded = crop_kernels.windows(images.pixels, given[:4], sides, images.channels, dtype)
    rows = crop_kernels.weights(given[2], torch.zeros_like(given[4]), sides[0], size[0], interpolation, dtype)
    return padded, rows, crop_kernels.weights(given[3], given[4], sides[1], size[1], interpolation, dtype)


def _by_torch(
    images: Ragged, places: np.ndarray, boxes: Boxes, size: tuple[int, int], interpolation: str, dtype: torch.dtype
) -> Factors:
    device, (tops, lefts, heights, widths) = images.pixels.device, (each.int().tolist() for each in boxes[:4])
    high, wide = max(heights), max(widths)
    padded = torch.zeros(len(places), images.channels, high, wide, dtype=dtype, device=device)
    windows = zip(places.tolist(), tops, lefts, heights, widths, strict=True)
    for window, room in zip(windows, padded.unbind(), strict=True):
        room[:, : window[3], : window[4]].copy_(images.window(*window))
    start, flip = torch.zeros(len(places), device=device), boxes.flip.to(device)
    rows = resize_weights(start, boxes.height.to(device), high, size[0], interpolation).to(dtype)
    columns = resize_weights(start, boxes.width.to(device), wide, size[1], interpolation).to(dtype)
    return padded, rows, torch.where(flip[:, None, None], columns.flip(1), columns)
