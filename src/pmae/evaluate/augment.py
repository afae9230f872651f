"""A few random distortions of every image, in whole batches on their device: moves, shades and a blanked box.

None asks for a bit depth, a number of channels or a square: moves resample the images as they are, mirrored at their
edges; shades and blanks are of standardized images, whose unit is the data's own deviation. An amount of 0 leaves an
image as it is, so one pass serves a batch whose images draw different operations. All randomness arrives as arguments.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

CHOSEN = 2
"""How many of the operations an image draws."""
BLANKED = (0.02, 0.2)
"""Smallest and largest share of an image that is blanked."""
SLENDER = 3.0
"""How many times longer than wide a blanked box may be, in shares of the image's sides."""


class Amounts(NamedTuple):
    """How far each operation goes, one number an image (B,); 0 is not at all."""

    rotation: Tensor
    shear_x: Tensor
    shear_y: Tensor
    shift_x: Tensor
    shift_y: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    sharpness: Tensor


LARGEST = (math.pi / 6, 0.3, 0.3, 0.3, 0.3, 1.0, 0.9, 0.9, 0.9)
"""Each amount at full strength: radians, slopes, shares of the sides, deviations of the data, shares of contrast."""


def draw_distortions(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Noise (2, operations, count) for `amounts_of`."""
    return torch.rand(2, len(LARGEST), count, generator=generator, device=device)


def amounts_of(noise: Tensor, strength: float) -> Amounts:
    """For every image a few operations, and of each an amount that is uniform up to `strength` of the largest."""
    chosen = noise[0].argsort(0).argsort(0) < CHOSEN
    amounts = torch.where(chosen, 2 * noise[1] - 1, 0.0)
    return Amounts(*(strength * most * amount for most, amount in zip(LARGEST, amounts, strict=True)))


def move(images: Tensor, by: Amounts) -> Tensor:
    """Rotate images (B, C, H, W) of any dtype about their centre, shear and shift them by whole pixels: float32."""
    height, width = images.shape[-2:]
    cosine, sine = by.rotation.cos(), by.rotation.sin()
    # Where an output pixel comes from, first in pixels from the centre, then in halves of the sides.
    x_of_x, x_of_y = cosine - sine * by.shear_y, cosine * by.shear_x - sine
    y_of_x, y_of_y = sine + cosine * by.shear_y, sine * by.shear_x + cosine
    shift_x, shift_y = (by.shift_x * width).round(), (by.shift_y * height).round()
    x = torch.stack([x_of_x, x_of_y * (height / width), shift_x * (2 / width)], 1)
    y = torch.stack([y_of_x * (width / height), y_of_y, shift_y * (2 / height)], 1)
    grid = F.affine_grid(torch.stack([x, y], 1), list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)


def shade(x: Tensor, by: Amounts) -> Tensor:
    """Sharpness, saturation, contrast and brightness of standardized images (B, C, H, W), of any number of channels."""
    sharpness, saturation, contrast, brightness = (
        amount[:, None, None, None] for amount in (by.sharpness, by.saturation, by.contrast, by.brightness)
    )
    x = x + sharpness * (x - F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False))
    x = x + saturation * (x - x.mean(1, keepdim=True))
    x = x + contrast * (x - x.mean((1, 2, 3), keepdim=True))
    return x + brightness


def draw_blanks(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Noise (5, count) for `blank`."""
    return torch.rand(5, count, generator=generator, device=device)


def blank(x: Tensor, chance: float, noise: Tensor) -> Tensor:
    """Set one box of some standardized images (B, C, H, W) to the mean of the data; of a signal, one stretch."""
    height, width = x.shape[-2:]
    low, high = BLANKED
    area = (low + (high - low) * noise[0]) * (noise[1] < chance)
    slender = SLENDER ** (2 * noise[2] - 1) if height > 1 else 1 / area.clamp(min=low)
    inside_rows = _inside((area * slender).sqrt(), noise[3], height)
    inside_columns = _inside((area / slender).sqrt(), noise[4], width)
    return x.masked_fill((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0.0)


def _inside(length: Tensor, place: Tensor, size: int) -> Tensor:
    """(B, size): whether each pixel's centre lies in a stretch of this share of the side."""
    length = length.clamp(max=1)[:, None]
    start = place[:, None] * (1 - length)
    centre = (torch.arange(size, device=length.device) + 0.5) / size
    return (centre >= start) & (centre < start + length)


# Batches whose images are mixed in pairs, blended (mixup) or pasted (cutmix), and the loss on both of their labels.
#
# How is one map (H, W): the weight of an image's own value at every pixel, the rest being that of the image before it
# in the batch. The same everywhere, images are blended; 0 in a box and 1 around it, the box is pasted; 1, nothing
# happens.

BLENDED = 0.8
"""Both parameters of the Beta distribution of a blend's weight; pasted shares are uniform."""


def draw_mix(
    height: int, width: int, mixup: float, cutmix: float, draw: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Blend with probability `mixup`, paste with probability `cutmix`, else leave the batch as it is."""
    own, chance = np.ones((height, width), np.float32), draw.random()
    if chance < mixup:
        own[:] = draw.beta(BLENDED, BLENDED)
    elif chance < mixup + cutmix:
        top, bottom, left, right = _box(height, width, draw)
        own[top:bottom, left:right] = 0
    return own


def _box(height: int, width: int, draw: np.random.Generator) -> tuple[int, int, int, int]:
    """A box of uniform share and the image's aspect about a uniform centre, cut at the edges; of a signal a stretch."""
    share = draw.random()
    ranges: list[int] = []
    for size, length in ((height, height * share**0.5), (width, width * share ** (0.5 if height > 1 else 1.0))):
        centre, half = int(draw.integers(size)), int(length / 2)
        ranges += (0, 1) if size == 1 else (max(centre - half, 0), min(centre + half, size))
    top, bottom, left, right = ranges
    return top, bottom, left, right


def mix_images(x: Tensor, own: Tensor) -> Tensor:
    """The images (B, C, H, W) of a batch, mixed."""
    return torch.lerp(x.roll(1, 0), x, own)


def mixed_loss(logits: Tensor, labels: Tensor, own: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy against the labels mixed as the images were: it is linear in its targets."""
    first, second = (F.cross_entropy(logits, to, label_smoothing=smoothing) for to in (labels, labels.roll(1)))
    return torch.lerp(second, first, own.mean())
