"""Spaces whose map is orthonormal and cheap at any size; the mean and variance of every coefficient are measured."""

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.spaces.base import Space
from pmae.spaces.moments import covariance_of, mean_and_variance, principal_axes


class Orthonormal(Space):
    """Coefficients of an orthonormal map of the image, about their mean over the training images."""

    mean: Tensor
    tolerance = 1e-5
    has_bands = True

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        size = shape[0] * shape[1] * shape[2]
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))

    @abstractmethod
    def learn(self, batches: Iterable[Tensor]) -> None:
        """Whatever of the map depends on the data."""

    @abstractmethod
    def forward_transform(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) to as many numbers, flattened or not."""

    @abstractmethod
    def inverse_transform(self, z: Tensor) -> Tensor:
        """The inverse, which is the transpose: images of coefficients (B, C H W)."""

    def fit(self, batches: Iterable[Tensor]) -> None:
        """One pass for the map, where it depends on the data, and one for the moments of its coefficients."""
        self.learn(batches)
        dtype, (share, add_up) = self.mean.dtype, self.together
        numbers = (self.forward_transform(batch.to(dtype)).flatten(1) for batch in share(batches))
        mean, variance = mean_and_variance(numbers, add_up)
        self.mean.copy_(mean)
        self.variance.copy_(variance)

    def project(self, x: Tensor) -> Tensor:
        return self.forward_transform(x).flatten(1) - self.mean

    def reconstruct(self, z: Tensor) -> Tensor:
        return self.inverse_transform(z + self.mean)

    def group(self, labels: np.ndarray) -> None:
        """Hide as one what has the same label; labels have one number a coefficient, in any order and with gaps."""
        kinds, index = np.unique(labels, return_inverse=True)
        self.groups, self.group_count = torch.as_tensor(index.reshape(-1)), len(kinds)


class FixedBasis(Orthonormal):
    """A fixed basis for each channel, after the channels are turned to the axes along which their pixels vary most."""

    colour: Tensor
    """(C, C) the rotation, one axis a row, largest variance first."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("colour", torch.eye(shape[0]))

    @abstractmethod
    def analyse(self, x: Tensor) -> Tensor:
        """Coefficients (B, C, H, W) of channels (B, C, H, W)."""

    @abstractmethod
    def synthesize(self, z: Tensor) -> Tensor:
        """The inverse of `analyse`."""

    def hide_bands(self, band: np.ndarray) -> None:
        """If the settings ask for it, hide bands as one, those of each channel apart; `band` (H, W) numbers them."""
        if self.config.grouped:
            self.group(band + (band.max() + 1) * np.arange(self.shape[0])[:, None, None])

    def learn(self, batches: Iterable[Tensor]) -> None:
        if self.shape[0] > 1:
            share, add_up = self.together
            _, covariance = covariance_of((batch.movedim(1, -1).flatten(0, 2) for batch in share(batches)), add_up)
            self.colour.copy_(principal_axes(covariance)[1])

    def forward_transform(self, x: Tensor) -> Tensor:
        return self.analyse(turned(self.colour, x))

    def inverse_transform(self, z: Tensor) -> Tensor:
        return turned(self.colour.T, self.synthesize(z.unflatten(1, self.shape)))


def turned(rotation: Tensor, x: Tensor) -> Tensor:
    """Channels (B, C, H, W) mixed by a matrix (C, C)."""
    return torch.einsum("dc,bchw->bdhw", rotation, x)


# Bases of waves: a basis of columns times one of rows, two matrix products an image, and rings of equal frequency.

RINGS = 24


class Separable(FixedBasis):
    """Products of a wave down the image and a wave across it."""

    down: Tensor
    across: Tensor

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        _, height, width = shape
        self.register_buffer("down", torch.tensor(self.waves(height), dtype=torch.float32), persistent=False)
        self.register_buffer("across", torch.tensor(self.waves(width), dtype=torch.float32), persistent=False)
        self.hide_bands(rings(self.frequencies(height), self.frequencies(width)))

    @staticmethod
    @abstractmethod
    def waves(size: int) -> np.ndarray:
        """(size, size) an orthonormal basis of `size` samples, one wave a row."""

    @staticmethod
    @abstractmethod
    def frequencies(size: int) -> np.ndarray:
        """(size,) cycles per pixel of each wave."""

    def analyse(self, x: Tensor) -> Tensor:
        return self.down @ (x @ self.across.T)

    def synthesize(self, z: Tensor) -> Tensor:
        return self.down.T @ (z @ self.across)


def rings(down: np.ndarray, across: np.ndarray, count: int = RINGS) -> np.ndarray:
    """(H, W) of the ring that each pair of frequencies lies in: 0 is the mean alone, the others widen outwards.

    Radii grow by a constant factor, because the power of photographs falls with the square of the frequency: rings of
    equal width would leave nearly all variance in the innermost, these share it about evenly.
    """
    radius = np.hypot(down[:, None], across[None, :])
    lowest = radius.min(initial=1.0, where=radius > 0)
    octaves = np.log2(np.maximum(radius, lowest) / lowest)
    ring = 1 + np.floor((count - 1) * octaves / max(octaves.max(), 1e-12))
    return np.where(radius > 0, ring.clip(max=count - 1), 0).astype(np.int64)


# Cosine space: the orthonormal two-dimensional DCT-II of every channel.


class Cosine(Separable):
    """Half-waves that end flat at the borders, so that opposite borders need not match."""

    @staticmethod
    def waves(size: int) -> np.ndarray:
        order, place = np.arange(size)[:, None], np.arange(size) + 0.5
        waves = np.sqrt(2 / size) * np.cos(np.pi * order * place / size)
        waves[0] = size**-0.5
        return waves

    @staticmethod
    def frequencies(size: int) -> np.ndarray:
        return np.arange(size) / (2 * size)


# Fourier space: the real orthonormal two-dimensional Fourier basis of every channel.


class Fourier(Separable):
    """Cosine and sine of every frequency in turn: 1, cos 1, sin 1, cos 2, sin 2, and so on.

    A product of two of them is the real or imaginary part of sums of the complex waves (f, g) and (f, -g): what each
    pair of frequencies spans is the same, in real numbers.
    """

    @staticmethod
    def waves(size: int) -> np.ndarray:
        index = np.arange(size)[:, None]
        angle = 2 * np.pi * ((index + 1) // 2) * np.arange(size) / size
        waves = np.sqrt(2 / size) * np.where(index % 2 == 1, np.cos(angle), np.sin(angle))
        waves[0] = size**-0.5
        if size % 2 == 0:
            # The highest frequency of an even number of samples has no sine: it alternates.
            waves[-1] = size**-0.5 * (-1.0) ** np.arange(size)
        return waves

    @staticmethod
    def frequencies(size: int) -> np.ndarray:
        return (np.arange(size) + 1) // 2 / size
