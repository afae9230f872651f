"""Augmentation of fine-tuning, in whole batches on their device: RandAugment, random erasing, mixup and CutMix.

RandAugment (Cubuk et al. 2020), random erasing (Zhong et al. 2020), mixup (Zhang et al. 2018) and CutMix (Yun et al.
2019) for any bit depth, number of channels and shape: geometric operations resample the images as they are, mirrored at
their edges; the others are of standardized images. A magnitude of 0 leaves an image as it is, so one pass serves all.
All randomness arrives as arguments, so that a captured step can be replayed with new numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.data.augment import Standardize, boxes_of, crop, draw_crops
from pmae.evaluate.features import BOXES, ERASING, MAGNITUDES, MIXES, generator, mixed
from pmae.evaluate.protocols import FinetuneProtocol

CHOSEN = 2  # how many of the operations an image draws
ERASED = (0.02, 0.2)  # smallest and largest share of an image that is blanked
LONGEST_ASPECT = 3.0  # how many times longer than wide a blanked box may be, in shares of the image's sides
MIXUP_ALPHA = 0.8  # both parameters of the Beta distribution of a blend's weight; pasted shares are uniform
LARGEST = {
    "rotation": math.pi / 6,  # radians
    "shear_x": 0.3,  # slopes
    "shear_y": 0.3,
    "shift_x": 0.3,  # shares of the sides
    "shift_y": 0.3,
    "brightness": 1.0,  # standard deviations of the data
    "contrast": 0.9,  # shares of what is there
    "saturation": 0.9,
    "sharpness": 0.9,
}
"""The magnitude of each operation at full strength."""
Magnitudes = Mapping[str, Tensor]  # how far each operation goes, one number an image (B,); 0 is not at all


def magnitudes_of(noise: Tensor, strength: float) -> Magnitudes:
    """A few operations for every image, each uniform up to `strength` of the largest; noise (2, operations, B)."""
    chosen = noise[0].argsort(0).argsort(0) < CHOSEN
    amounts = torch.where(chosen, 2 * noise[1] - 1, 0.0)
    return {name: strength * LARGEST[name] * amount for name, amount in zip(LARGEST, amounts, strict=True)}


def geometric(images: Tensor, by: Magnitudes) -> Tensor:
    """Rotate images (B, C, H, W) of any dtype about their centre, shear and shift them by whole pixels: float32."""
    height, width = images.shape[-2:]
    cosine, sine, shear_x, shear_y = by["rotation"].cos(), by["rotation"].sin(), by["shear_x"], by["shear_y"]
    # Where an output pixel comes from, first in pixels from the centre, then in halves of the sides.
    x_of_x, x_of_y = cosine - sine * shear_y, cosine * shear_x - sine
    y_of_x, y_of_y = sine + cosine * shear_y, sine * shear_x + cosine
    shift_x, shift_y = (by["shift_x"] * width).round(), (by["shift_y"] * height).round()
    x = torch.stack([x_of_x, x_of_y * (height / width), shift_x * (2 / width)], 1)
    y = torch.stack([y_of_x * (width / height), y_of_y, shift_y * (2 / height)], 1)
    grid = F.affine_grid(torch.stack([x, y], 1), list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)


def photometric(x: Tensor, by: Magnitudes) -> Tensor:
    """Sharpness, saturation, contrast and brightness of standardized images (B, C, H, W), of any number of channels."""
    by = {name: amount[:, None, None, None] for name, amount in by.items()}
    x = x + by["sharpness"] * (x - F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False))
    x = x + by["saturation"] * (x - x.mean(1, keepdim=True))
    x = x + by["contrast"] * (x - x.mean((1, 2, 3), keepdim=True))
    return x + by["brightness"]


def random_erasing(x: Tensor, chance: float, noise: Tensor) -> Tensor:
    """Set a box of some standardized images (B, C, H, W) to their mean, of a signal a stretch; noise (5, B)."""
    height, width = x.shape[-2:]
    low, high = ERASED
    area = (low + (high - low) * noise[0]) * (noise[1] < chance)
    slender = LONGEST_ASPECT ** (2 * noise[2] - 1) if height > 1 else 1 / area.clamp(min=low)
    inside_rows = _inside((area * slender).sqrt(), noise[3], height)
    inside_columns = _inside((area / slender).sqrt(), noise[4], width)
    return x.masked_fill((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0.0)


def _inside(length: Tensor, place: Tensor, size: int) -> Tensor:
    """(B, size): whether each pixel's centre lies in a stretch of this share of the side."""
    length = length.clamp(max=1)[:, None]
    start = place[:, None] * (1 - length)
    centre = (torch.arange(size, device=length.device) + 0.5) / size
    return (centre >= start) & (centre < start + length)


def draw_mix(height: int, width: int, mixup: float, cutmix: float, draw: np.random.Generator) -> np.ndarray:
    """The weight (H, W) of an image's own value at every pixel; the rest is that of the image before it in the batch.

    With probability `mixup` the same everywhere, with probability `cutmix` 0 in a box and 1 around it, else 1. A box
    has a uniform share and the image's aspect about a uniform centre, cut at the edges; of a signal it is a stretch.
    """
    own, chance = np.ones((height, width), np.float32), draw.random()
    if chance < mixup:
        own[:] = draw.beta(MIXUP_ALPHA, MIXUP_ALPHA)
    elif chance < mixup + cutmix:
        share = draw.random()
        rows = _stretch(height, height * share**0.5, draw)
        columns = _stretch(width, width * share ** (0.5 if height > 1 else 1.0), draw)
        own[rows, columns] = 0
    return own


def _stretch(size: int, length: float, draw: np.random.Generator) -> slice:
    centre, half = int(draw.integers(size)), int(length / 2)
    return slice(0, 1) if size == 1 else slice(max(centre - half, 0), min(centre + half, size))


def mix_images(x: Tensor, own: Tensor) -> Tensor:
    return torch.lerp(x.roll(1, 0), x, own)


Loss = Callable[[Tensor, Tensor, float], Tensor]
"""The mean loss of logits (B, C) against labels, (B,) or (B, C), of which a share is smoothed away."""


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The loss where every image has one class, and all classes count alike."""
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def mixed_loss(logits: Tensor, labels: Tensor, own: Tensor, smoothing: float, loss: Loss = cross_entropy) -> Tensor:
    """A loss against the labels mixed as the images were: it is linear in its targets."""
    first, second = (loss(logits, to, smoothing) for to in (labels, labels.roll(1, 0)))
    return torch.lerp(second, first, own.mean())


class Noise(NamedTuple):
    """The randomness of one batch: crops, magnitudes of RandAugment, erased boxes and mix; None where there is none."""

    crops: Tensor | None
    magnitudes: Tensor | None
    erasing: Tensor | None
    mix: Tensor | None


def draw_noise(images: Tensor, config: FinetuneProtocol, key: tuple[int, int, int]) -> Noise:
    """All of it a function of the key (seed, epoch, step)."""
    (count, _, height, width), device = images.shape, images.device

    def uniform(purpose: int, *shape: int) -> Tensor:
        return torch.rand(*shape, count, generator=generator(device, *key, purpose), device=device)

    mix = None
    if config.mixup or config.cutmix:
        # Drawn on the host and small: the copy waits for nothing on the device.
        draw = np.random.default_rng(mixed(*key, MIXES))
        own = draw_mix(height, width, config.mixup, config.cutmix, draw)
        mix = torch.from_numpy(own).to(device, non_blocking=True)
    return Noise(
        draw_crops(count, generator(device, *key, BOXES), device) if config.augment else None,
        uniform(MAGNITUDES, 2, len(LARGEST)) if config.randaugment else None,
        uniform(ERASING, 5) if config.random_erasing else None,
        mix,
    )


def augmented(images: Tensor, noise: Noise, standardize: Standardize, config: FinetuneProtocol) -> Tensor:
    """Images as training sees them, standardized."""
    if config.augment is not None and noise.crops is not None:
        height, width = images.shape[-2:]
        boxes = boxes_of(noise.crops, height, width, config.augment)
        images = crop(images, boxes, config.augment.interpolation)
    if noise.magnitudes is not None:
        magnitudes = magnitudes_of(noise.magnitudes, config.randaugment)
        x = photometric(standardize(geometric(images, magnitudes)), magnitudes)
    else:
        x = standardize(images)
    x = x if noise.erasing is None else random_erasing(x, config.random_erasing, noise.erasing)
    return x if noise.mix is None else mix_images(x, noise.mix)
