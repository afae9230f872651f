"""Color jitter, grayscale, blur and solarization of whole batches, each image with its own chance and strengths.

All are torchvision's. The order of jitter's adjustments, which torchvision draws, is one: brightness, contrast,
saturation, hue. Whether colors are worth distorting is told by how much images differ in hue.
"""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pmae.data.images import ImageSet
from pmae.data.ondemand import OnDemand
from pmae.plugins import register
from pmae.validation import NonNegative, Rule, UpToOne

LUMA = (0.2989, 0.587, 0.114)
"""What red, green and blue add to grey."""
LOOKED_AT, TOGETHER = 256, 16  # images whose hues are compared, and how many are read at once
Sigmas = Annotated[tuple[float, float], Rule("two increasing numbers above 0", lambda s: 0 < s[0] <= s[1])]
OddCount = Annotated[int, Rule("an odd number", lambda n: n > 0 and n % 2 == 1)]
Hue = Annotated[float, Rule("in [0, 0.5]", lambda x: 0 <= x <= 0.5)]


def hue_concentration(colors: np.ndarray) -> float:
    """Mean resultant length of the hues of colors (N, 3): 1 if all are alike."""
    red, green, blue = colors.T
    hue = np.arctan2(np.sqrt(3) * (green - blue), 2 * red - green - blue)
    return float(np.hypot(np.cos(hue).mean(), np.sin(hue).mean()))


def hues_of(train: ImageSet) -> float | None:
    """The concentration of hues of the mean colors of some images of a set; None where they are not in color."""
    if train.vectors or train.shape[0] != 3 or train.images.dtype.name not in ("uint8", "uint16"):
        return None
    # Of shards the first ones, for the disk gives them only in groups.
    spread = not isinstance(train.images, OnDemand) or train.images.blocks() is None
    count = min(LOOKED_AT, len(train))
    places = np.linspace(0, len(train) - 1, count).astype(int) if spread else np.arange(count)
    few = np.array_split(places, max(1, count // TOGETHER))  # as many as take little memory, however large
    return hue_concentration(np.concatenate([train.images[some].mean((2, 3), dtype=np.float64) for some in few]))


def grey(x: Tensor) -> Tensor:
    """(B, 1, H, W) of colors (B, 3, H, W); grey images are that already."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.split(1, 1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def blend(x: Tensor, other: Tensor | float, factor: Tensor) -> Tensor:
    """Between the other image (0) and this one (1), or beyond it."""
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Colors in [0, 1] with their hue moved by a part of the circle."""
    value, least = x.amax(1), x.amin(1)
    chroma = value - least
    red, green, blue = x.unbind(1)
    safe = torch.where(chroma > 0, chroma, 1.0)
    hue = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    hue = torch.where(value == red, (green - blue) / safe, hue) / 6 + turns[:, 0]
    # A channel falls below the value by its distance, in sixths, from where on the circle it is the largest.
    # From 5, 3 and 1: made on the device, as a captured step can copy no numbers from the host.
    sector = (torch.arange(5, 0, -2, device=x.device)[:, None, None] + 6 * hue[:, None]) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(sector, 4 - sector).clamp(0, 1)


@register("augmentation", "color_jitter")
class ColorJitter:
    """Brightness, contrast and saturation times 1 plus or minus at most their strength, and another hue.

    Grey images have neither saturation nor hue, so of them brightness and contrast alone change.
    """

    on_pixels, in_color, noise = True, True, 5

    def __init__(
        self,
        *,
        brightness: NonNegative = 0.4,
        contrast: NonNegative = 0.4,
        saturation: NonNegative = 0.4,
        hue: Hue = 0.1,
        p: UpToOne = 0.8,
    ) -> None:
        self.strengths, self.hue, self.p = (brightness, contrast, saturation), hue, p

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        spread = 2 * noise[:, :, None, None, None] - 1
        light, contrast, color = ((1 + s * spread[:, i]).clamp(min=0) for i, s in enumerate(self.strengths))
        y = blend(x.clamp(0, 1), 0.0, light)
        y = blend(y, grey(y).mean((2, 3), keepdim=True), contrast)
        if x.shape[1] > 1:
            y = turn_hue(blend(y, grey(y), color), self.hue * spread[:, 3])
        return torch.where(noise[:, 4, None, None, None] < self.p, y, x)


@register("augmentation", "grayscale")
class Grayscale:
    """Some of the images without their colors; grey ones stay as they are."""

    on_pixels, in_color, noise = True, True, 1

    def __init__(self, *, p: UpToOne = 0.2) -> None:
        self.p = p

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        return torch.where(noise[:, :, None, None] < self.p, grey(x).expand_as(x), x)


def gaussian_blur(x: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Images (B, C, H, W), each blurred by its own standard deviation (B,) over `kernel` pixels; edges are mirrored."""
    for _ in range(2):  # rows, then columns
        radius = min(kernel // 2, x.shape[3] - 1)
        offset = torch.arange(-radius, radius + 1, device=x.device)
        weight = (-0.5 * (offset / sigma[:, None]).square()).softmax(1)[:, None, None, None]
        windows = functional.pad(x, (radius, radius, 0, 0), mode="reflect").unfold(3, 2 * radius + 1, 1)
        x = (windows * weight).sum(4).mT
    return x


@register("augmentation", "blur")
class Blur:
    """Gaussian blur of some of the images, its standard deviation in pixels uniform between two."""

    on_pixels, noise = True, 2

    def __init__(self, *, sigma: Sigmas = (0.1, 2.0), kernel: OddCount = 9, p: UpToOne = 0.5) -> None:
        self.sigma, self.kernel, self.p = sigma, kernel, p

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        low, high = self.sigma
        y = gaussian_blur(x, low + (high - low) * noise[:, 0], self.kernel)
        return torch.where(noise[:, 1, None, None, None] < self.p, y, x)


@register("augmentation", "solarize")
class Solarize:
    """Some of the images with what is brighter than a threshold inverted."""

    on_pixels, noise = True, 1

    def __init__(self, *, threshold: UpToOne = 0.5, p: UpToOne = 0.2) -> None:
        self.threshold, self.p = threshold, p

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        chosen = (noise[:, :, None, None] < self.p) & (x >= self.threshold)
        return torch.where(chosen, 1 - x, x)
