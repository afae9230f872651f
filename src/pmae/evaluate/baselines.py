"""What an encoder must beat, seen through the same door: random weights, raw pixels, principal components."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmae.config import Config
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.errors import require
from pmae.evaluate.features import NOISE, Representation, mixed
from pmae.evaluate.protocols import Protocols, only
from pmae.models import Encoder, build_encoder
from pmae.spaces.pca import EXACT, exact_components, leading_components

PIXELS = 16_384


def baselines(
    config: Config, splits: Splits, standardize: Standardize, protocols: Protocols
) -> Iterator[tuple[str, Representation, Protocols]]:
    """Name, representation and protocols of each; from scratch is fine-tuning of random weights."""
    shape, device = splits.train.shape, standardize.mean.device
    untrained = random_weights(lambda: build_encoder(config.encoder, shape), config.train.seed).to(device)
    frozen = only(protocols, [kind for kind in protocols.kinds if kind != "finetune"])
    if protocols.finetune:
        yield "from scratch", untrained, replace(only(protocols, ["finetune"]), few=None)
    if frozen.kinds or frozen.few:
        pca = fit_pca(Batches(splits.train.images, device), standardize, shape, untrained.width)
        yield "random weights", untrained, frozen
        yield "raw pixels", RawPixels(shape, untrained.width), frozen
        yield "pca features", pca.to(device), frozen


def random_weights(build: Callable[[], Encoder], seed: int = 0) -> Encoder:
    """An encoder as it is before any training, a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed(seed, NOISE))
        return build()


class RawPixels(nn.Module):
    """The standardized image itself as a vector, shrunk by averaging only where it has more than 16,384 values."""

    def __init__(self, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, height, across = shape
        self.width, self.size = width, (height, across)
        self.notes: tuple[str, ...] = ()
        scale = (PIXELS / (channels * height * across)) ** 0.5
        if scale < 1:
            height = max(1, int(height * scale))  # a signal has one row, and only its length can shrink
            across = max(1, min(int(across * scale), PIXELS // (channels * height)))
            self.size = height, across
            self.notes = (f"raw pixels are averaged down to {height}x{across} to have at most {PIXELS} values",)

    def features(self, x: Tensor) -> dict[str, Tensor]:
        small = x if self.size == tuple(x.shape[-2:]) else F.adaptive_avg_pool2d(x, self.size)
        return {"pixels": small.flatten(1)}


class PcaFeatures(nn.Module):
    """The leading principal components of the raw pixels, as many as the encoder's representation has dimensions."""

    mean: Tensor
    basis: Tensor

    def __init__(self, pixels: RawPixels, mean: Tensor, basis: Tensor) -> None:
        super().__init__()
        self.pixels, self.width, self.notes = pixels, pixels.width, pixels.notes
        self.register_buffer("mean", mean)
        self.register_buffer("basis", basis)

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """Coefficients on the components, in float32 even where the networks run in bfloat16."""
        with torch.autocast(x.device.type, enabled=False):
            return {"pca": (self.pixels.features(x.float())["pixels"] - self.mean) @ self.basis}


def fit_pca(batches: Batches, standardize: Standardize, shape: tuple[int, int, int], width: int) -> PcaFeatures:
    """Fit on the training images: exactly up to 4,096 pixels, by subspace iteration above."""
    pixels = RawPixels(shape, width)
    require(len(batches) >= 2, "data", "at least two images for principal components", len(batches))
    size = shape[0] * pixels.size[0] * pixels.size[1]
    fit = exact_components if size <= EXACT else leading_components
    found = fit(_PixelBatches(batches, standardize, pixels), min(width, size, len(batches) - 1))
    return PcaFeatures(pixels, found.mean.float(), found.axes.T.float().contiguous())


class _PixelBatches:
    """Standardized pixels (B, D) in float64, batch after batch, as often as they are asked for."""

    def __init__(self, batches: Batches, standardize: Standardize, pixels: RawPixels) -> None:
        self.batches, self.standardize, self.pixels = batches, standardize, pixels

    def __iter__(self) -> Iterator[Tensor]:
        return (self.pixels.features(self.standardize(batch))["pixels"].double() for batch in self.batches.passes(512))
