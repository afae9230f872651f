"""Batches whose images are mixed in pairs, blended (mixup) or pasted (cutmix), and the loss on both of their labels."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

BLENDED = 0.8
"""Both parameters of the Beta distribution of a blend's weight; pasted shares are uniform."""


class Mix(NamedTuple):
    """How the images of one batch are mixed, each with the one before it."""

    kept: float
    """The weight of an image's own label."""
    box: tuple[int, int, int, int] | None
    """Top, bottom, left and right of what is pasted; without it, images are blended."""


def draw_mix(height: int, width: int, mixup: float, cutmix: float, draw: np.random.Generator) -> Mix | None:
    """Blend with probability `mixup`, paste with probability `cutmix`, else leave the batch as it is.

    Drawn on the host, where the numbers are used: nothing waits for the device.
    """
    chance = draw.random()
    if chance < mixup:
        return Mix(float(draw.beta(BLENDED, BLENDED)), None)
    if chance >= mixup + cutmix:
        return None
    top, bottom, left, right = box = _box(height, width, draw)
    return Mix(1 - (bottom - top) * (right - left) / (height * width), box)


def _box(height: int, width: int, draw: np.random.Generator) -> tuple[int, int, int, int]:
    """A box of uniform share and the image's aspect about a uniform centre, cut at the edges; of a signal a stretch."""
    share = draw.random()
    ranges: list[int] = []
    for size, length in ((height, height * share**0.5), (width, width * share ** (0.5 if height > 1 else 1.0))):
        centre, half = int(draw.integers(size)), int(length / 2)
        ranges += (0, 1) if size == 1 else (max(centre - half, 0), min(centre + half, size))
    top, bottom, left, right = ranges
    return top, bottom, left, right


def mix_images(x: Tensor, mix: Mix | None) -> Tensor:
    """The images (B, C, H, W) of a batch, mixed."""
    if mix is None:
        return x
    partner = x.roll(1, 0)
    if mix.box is None:
        return torch.lerp(partner, x, mix.kept)
    top, bottom, left, right = mix.box
    mixed = x.clone()
    mixed[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
    return mixed


def mixed_loss(logits: Tensor, labels: Tensor, mix: Mix | None, smoothing: float) -> Tensor:
    """Cross-entropy against the labels mixed as the images were: it is linear in its targets."""
    own = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    if mix is None:
        return own
    return mix.kept * own + (1 - mix.kept) * F.cross_entropy(logits, labels.roll(1), label_smoothing=smoothing)
