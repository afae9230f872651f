"""What an encoder must beat, seen through the same door: random weights, raw pixels, principal components.

Supervised training from scratch is `finetune` on an encoder with random weights.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.errors import require
from pmae.evaluate.splits import NOISE, generator, mixed

Module = TypeVar("Module", bound=nn.Module)
PIXELS = 16_384
EXACT = 4_096
OVERSAMPLE, PASSES = 32, 6


def random_weights(build: Callable[[], Module], seed: int = 0) -> Module:
    """An encoder as it is before any training, a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed(seed, NOISE))
        return build()


class RawPixels(nn.Module):
    """The standardized image itself as a vector, shrunk by averaging only where it has more than 16,384 values."""

    def __init__(self, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.width = width
        self.size = shrunk_size(shape)
        self.notes: tuple[str, ...] = ()
        if self.size != shape[1:]:
            height, across = self.size
            self.notes = (f"raw pixels are averaged down to {height}x{across} to have at most {PIXELS} values",)

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """Flattened pixels."""
        small = x if self.size == tuple(x.shape[-2:]) else F.adaptive_avg_pool2d(x, self.size)
        return {"pixels": small.flatten(1)}


class PcaFeatures(nn.Module):
    """The leading principal components of the raw pixels, as many as the encoder's representation has dimensions."""

    mean: Tensor
    basis: Tensor

    def __init__(self, pixels: RawPixels, mean: Tensor, basis: Tensor) -> None:
        super().__init__()
        self.pixels = pixels
        self.width = pixels.width
        self.notes = pixels.notes
        self.register_buffer("mean", mean)
        self.register_buffer("basis", basis)

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """Coefficients on the components, in float32 even where the networks run in bfloat16."""
        with torch.autocast(x.device.type, enabled=False):
            return {"pca": (self.pixels.features(x.float())["pixels"] - self.mean) @ self.basis}


def fit_pca(batches: Batches, standardize: Standardize, shape: tuple[int, int, int], width: int) -> PcaFeatures:
    """Fit on the training images in float64: exactly up to 4,096 pixels, by subspace iteration above."""
    pixels = RawPixels(shape, width)
    require(len(batches) >= 2, "data", "at least two images for principal components", len(batches))

    def rows() -> Iterator[Tensor]:
        return (pixels.features(standardize(batch))["pixels"].double() for batch in batches.passes(512))

    mean = _total(part.sum(0) for part in rows()) / len(batches)
    count = min(width, len(mean), len(batches) - 1)
    if len(mean) <= EXACT:
        covariance = _total((part - mean).T @ (part - mean) for part in rows())
        basis = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :count]
    else:
        basis = _subspace(lambda q: _total((part - mean).T @ ((part - mean) @ q) for part in rows()), mean, count)
    return PcaFeatures(pixels, mean.float(), basis.float().contiguous())


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _subspace(spread: Callable[[Tensor], Tensor], mean: Tensor, count: int) -> Tensor:
    """The leading eigenvectors: a random subspace a little larger than wanted, multiplied and made orthogonal again."""
    draw = generator(torch.device("cpu"), len(mean), count)
    start = torch.randn(len(mean), min(len(mean), count + OVERSAMPLE), generator=draw, dtype=torch.float64)
    basis = torch.linalg.qr(start.to(mean.device)).Q
    for _ in range(PASSES):
        basis = torch.linalg.qr(spread(basis)).Q
    inner = torch.linalg.eigh(basis.T @ spread(basis)).eigenvectors.flip(1)
    leading: Tensor = basis @ inner[:, :count]
    return leading


def shrunk_size(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Height and width at which an image has at most 16,384 values; its own where it already has."""
    channels, height, width = shape
    if channels * height * width <= PIXELS:
        return height, width
    scale = (PIXELS / (channels * height * width)) ** 0.5
    return max(1, int(height * scale)), max(1, int(width * scale))
