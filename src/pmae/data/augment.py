"""Random resized crop, flip and standardization of a whole batch on its device, as two small GEMMs per image."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pmae.config import AugmentConfig
from pmae.data import color  # noqa: F401  # it registers its names
from pmae.errors import require
from pmae.plugins import build

ASPECT = (3 / 4, 4 / 3)
ATTEMPTS = 10
NOISE = 16  # uniform numbers an image for a registered augmentation that does not ask for another count

WHITE = {"uint8": 255.0, "uint16": 65535.0}  # the largest number of an image file

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""A registered one: standardized images (B, C, H, W) and noise (B, 16), all that is random, to images as large."""


class Boxes(NamedTuple):
    """One crop per image, in pixels, and whether to mirror it; each (B,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor


def draw_crops(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Noise (count, numbers) for `boxes_of`."""
    return torch.rand(count, 2 * ATTEMPTS + 3, generator=generator, device=device)


def draw_boxes(
    count: int, height: int, width: int, config: AugmentConfig, generator: torch.Generator, device: torch.device
) -> Boxes:
    return boxes_of(draw_crops(count, generator, device), height, width, config)


def boxes_of(noise: Tensor, height: int | Tensor, width: int | Tensor, config: AugmentConfig) -> Boxes:
    """Boxes as torchvision's RandomResizedCrop draws them: area uniform, aspect log-uniform, first of ten that fits.

    Images have one height and width, or (B,) of them.
    """
    count, device, is_signal = len(noise), noise.device, isinstance(height, int) and height == 1
    tall, wide = (noise.new_full((count,), n) if isinstance(n, int) else n for n in (height, width))
    # Of a signal, one row, the length is uniform, and it is never mirrored: backwards it is rarely natural.
    mirrored = config.flip and not is_signal
    flip = (noise[:, -1] < 0.5) if mirrored else torch.zeros(count, dtype=torch.bool, device=device)
    if not config.crop:
        zero = torch.zeros(count, device=device)
        return Boxes(zero, zero, tall, wide, flip)
    low, high = config.crop_scale
    area = (tall * wide)[:, None] * (low + (high - low) * noise[:, :ATTEMPTS])
    if is_signal:
        w, h = area[:, 0].round().clamp(min=1), torch.ones(count, device=device)
    else:
        w, h = _shapes(area, noise[:, ATTEMPTS : 2 * ATTEMPTS], tall, wide)
    top = (noise[:, -3] * (tall - h + 1)).floor().minimum(tall - 1)
    left = (noise[:, -2] * (wide - w + 1)).floor().minimum(wide - 1)
    return Boxes(top, left, h, w, flip)


def _shapes(area: Tensor, noise: Tensor, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Widths and heights (B,) of boxes of random aspect: the first of the attempts that fits, else the largest."""
    narrow, wide = map(math.log, ASPECT)  # on the host: a tensor made there would wait for the device at every step
    aspect = (narrow + (wide - narrow) * noise).exp()
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (w > 0) & (w <= width[:, None]) & (h > 0) & (h <= height[:, None])
    first, none = fits.to(torch.int32).argmax(1, keepdim=True), ~fits.any(1)
    nearest = (width / height).clamp(*ASPECT)
    return (
        torch.where(none, (height * nearest).round().minimum(width), w.gather(1, first).squeeze(1)),
        torch.where(none, (width / nearest).round().minimum(height), h.gather(1, first).squeeze(1)),
    )


def crop(images: Tensor, boxes: Boxes, interpolation: Literal["bicubic", "bilinear"] = "bicubic") -> Tensor:
    """Cut each image to its box, resize it to the full size with antialiasing and mirror where asked: float32."""
    height, width = images.shape[-2:]
    # Resizing is separable, `rows @ image @ columns^T` with weights of the box alone: no loop over images, one graph.
    rows = resize_weights(boxes.top, boxes.height, height, height, interpolation)
    columns = resize_weights(boxes.left, boxes.width, width, width, interpolation)
    columns = torch.where(boxes.flip[:, None, None], columns.flip(1), columns)
    return rows[:, None] @ images.float() @ columns.transpose(1, 2)[:, None]


def resize_weights(start: Tensor, length: Tensor, pixels: int, size: int, interpolation: str) -> Tensor:
    """(B, size, pixels): row i holds the weights that make output pixel i out of the input pixels of the box."""
    pixel = torch.arange(pixels, device=start.device, dtype=torch.float32)
    made = torch.arange(size, device=start.device, dtype=torch.float32)
    start, length = start[:, None, None], length[:, None, None]
    step = length / size
    centre = start + step * (made[None, :, None] + 0.5)
    stretch = step.clamp(min=1.0)
    distance = ((pixel[None, None, :] + 0.5 - centre) / stretch).abs()
    inside = (pixel >= start) & (pixel < start + length)
    if interpolation == "bicubic":
        # Keys' kernel with a = -1/2, the one that antialiased resizing uses.
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weight = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    else:
        weight = (1 - distance).clamp(min=0.0)
    weight = torch.where(inside, weight, 0.0)
    return weight / weight.sum(2, keepdim=True)


def build_augmentations(config: AugmentConfig, standardize: "Standardize", dtype: str) -> list[Augmentation]:
    """The augmentations that the settings name; those of pixels get images in [0, 1], not standardized."""
    found = []
    for name in config.extra or ():
        made = build("augmentation", name, "augment.extra")
        if getattr(made, "on_pixels", False):
            channels, in_color = len(standardize.mean), getattr(made, "in_color", False)
            fits = dtype in WHITE and (channels in (1, 3) or not in_color)
            rule = f"left out but for 8- and 16-bit images{' in color or grey' if in_color else ''}"
            found_one = f"{dtype} images with {channels} channel{'s' * (channels > 1)}"
            require(fits, f"augment.extra {name!r}", f"{rule} (without a name it adds nothing)", found_one)
            made = OnPixels(made, standardize, WHITE[dtype])
        found.append(made)
    return found


class OnPixels:
    """An augmentation of images in [0, 1] as one of standardized images."""

    def __init__(self, made: Augmentation, standardize: "Standardize", white: float) -> None:
        self._made, self._standardize, self._white = made, standardize, white
        self.noise = getattr(made, "noise", NOISE)

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        return self._standardize(self._white * self._made(self._standardize.invert(x) / self._white, noise))


def draw_noise(
    augmentations: list[Augmentation], count: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, ...]:
    """Noise (count, numbers) for each of them; one that needs other than 16 numbers an image says so as `noise`."""
    sizes = [int(getattr(each, "noise", NOISE)) for each in augmentations]
    return tuple(torch.rand(count, size, generator=generator, device=device) for size in sizes)


def augmented(x: Tensor, augmentations: Sequence[Augmentation], noise: tuple[Tensor, ...]) -> Tensor:
    """Images after every registered augmentation."""
    for each, drawn in zip(augmentations, noise, strict=True):
        before, x = x.shape, each(x, drawn)
        rule = f"augmentations that keep the shape {tuple(before)}"
        require(x.shape == before, "augment.extra", rule, tuple(x.shape))
    return x


class Standardize(nn.Module):
    """Subtract the training mean and divide by the training standard deviation; both are buffers of the checkpoint."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float())
        self.register_buffer("std", std.float())

    def forward(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean) / self.std

    def invert(self, images: Tensor) -> Tensor:
        """Back to the units of the data."""
        return images * self.std + self.mean
