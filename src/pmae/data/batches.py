"""Images held on the device when they fit, else on the host; statistics and passes over them in fixed order."""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pmae.data.augment import Standardize
from pmae.data.images import as_tensor
from pmae.errors import UserError

NUMBERS = 2**26
"""How many numbers a batch of a pass may have: a quarter of a gigabyte in float32."""
Share = tuple[int, int]
"""Which part of the images, and of how many parts."""


class Batches:
    """Indexed access to images in batches on one device, without a host sync when they are resident."""

    def __init__(self, images: np.ndarray, device: torch.device, keep_on: Literal["auto", "device", "host"] = "auto"):
        self.device = device
        self.resident = device.type == "cpu" or _belongs_on_device(images.nbytes, device, keep_on)
        self._array = images
        # A file mapped into memory stays on the disk for the CPU, and goes to another device whole.
        mapped = device.type == "cpu" and isinstance(images, np.memmap)
        self._images = as_tensor(images).to(device) if self.resident and not mapped else None

    def __len__(self) -> int:
        return len(self._array)

    def take(self, index: Tensor) -> Tensor:
        """The images at `index`, on the device, in their own dtype."""
        if self._images is not None:
            return self._images[index]
        rows = as_tensor(self._array[index.cpu().numpy()])
        if self.device.type == "cpu":
            return rows
        return rows.pin_memory().to(self.device, non_blocking=True)

    def passes(self, size: int = 1024, share: Share = (0, 1)) -> Iterator[Tensor]:
        """All images of a share once, in order, at most `size` at a time and fewer where they are large."""
        size = max(1, min(size, NUMBERS // math.prod(self._array.shape[1:])))
        part, parts = share
        first, last = len(self) * part // parts, len(self) * (part + 1) // parts
        for start in range(first, last, size):
            yield self.take(torch.arange(start, min(start + size, last), device=self.device))


class Standardized:
    """Standardized batches of all images in order, a new pass at every iteration: what a space is fitted on."""

    def __init__(self, batches: Batches, standardize: Standardize, share: Share = (0, 1)) -> None:
        self.batches, self.standardize, self.share = batches, standardize, share

    def __iter__(self) -> Iterator[Tensor]:
        return (self.standardize(batch) for batch in self.batches.passes(2048, self.share))


def _belongs_on_device(need: int, device: torch.device, keep_on: str) -> bool:
    if keep_on != "auto":
        return keep_on == "device"
    free, _ = torch.cuda.mem_get_info(device)
    return need <= free // 2


def fit_standardize(
    batches: Batches,
    per: Literal["channel", "pixel"],
    share: Share = (0, 1),
    add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Standardize:
    """Mean and deviation of the training images, in float64 in one pass; of a share, if `add_up` adds the others."""
    axes = (0, 2, 3) if per == "channel" else (0,)
    count, total, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    shift: Tensor | None = None
    for batch in batches.passes(share=share):
        x = batch.to(torch.float64)
        # Sums about the first batch's mean, so that 16-bit data with a large offset loses no digits.
        shift = _mean_of_first(x.mean(axes, keepdim=True), add_up) if shift is None else shift
        x = x - shift
        count += x.numel() // x.mean(axes).numel()
        total = total.to(x.device) + x.sum(axes, keepdim=True)
        squares = squares.to(x.device) + x.square().sum(axes, keepdim=True)
    if shift is None:
        raise UserError("data must be at least one image, got none")
    images = add_up(shift.new_tensor(count))
    mean, squares = add_up(total) / images, add_up(squares)
    std = (squares / images - mean.square()).clamp(min=0).sqrt()
    if not bool(torch.isfinite(mean).all()):
        raise UserError("data must be finite numbers, got NaN or infinity in the training images")
    # A constant channel or pixel carries nothing: dividing by 1 leaves it at 0.
    floor = 1e-6 * std.max().clamp(min=1e-30)
    std = torch.where(std > floor, std, torch.ones_like(std))
    return Standardize((shift + mean)[0], std[0])


def _mean_of_first(mean: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over processes of the means of their first batches: the same in all, so that sums about it add up."""
    return add_up(mean) / add_up(torch.ones_like(mean))
