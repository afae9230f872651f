"""Batches whose images are mixed in pairs, blended (mixup) or pasted (cutmix), and the loss on both of their labels.

How is one map (H, W): the weight of an image's own value at every pixel, the rest being that of the image before it in
the batch. The same everywhere, images are blended; 0 in a box and 1 around it, the box is pasted; 1, nothing happens.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

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
