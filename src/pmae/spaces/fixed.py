"""Orthonormal maps that are cheap at any size: the cosine and the Fourier basis, and what others build on."""

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.spaces.base import Space
from pmae.spaces.moments import covariance_of, mean_and_variance, principal_axes

RINGS = 24


class Orthonormal(Space):
    """Coefficients of an orthonormal map of the image, about their mean over the training images."""

    mean: Tensor
    tolerance = 1e-5
    has_bands = True

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("mean", torch.zeros(self.size))
        self.register_buffer("variance", torch.ones(self.size))

    def learn(self, batches: Iterable[Tensor]) -> None:
        """Fit whatever of the map depends on the data; nothing, where it is fixed."""

    @abstractmethod
    def forward_transform(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) to as many numbers, flattened or not."""

    @abstractmethod
    def inverse_transform(self, z: Tensor) -> Tensor:
        """The inverse, which is the transpose: images of coefficients (B, C H W)."""

    def fit(self, batches: Iterable[Tensor]) -> None:
        """One pass for the map, where it depends on the data, and one for the moments of its coefficients."""
        self.learn(batches)
        part, dtype = self.distributed.part(batches), self.mean.dtype
        numbers = (self.forward_transform(batch.to(dtype)).flatten(1) for batch in part)
        mean, variance = mean_and_variance(numbers, self.distributed)
        self.mean.copy_(mean)
        self.variance.copy_(variance)

    def project(self, x: Tensor) -> Tensor:
        return self.forward_transform(x).flatten(1) - self.mean

    def reconstruct(self, z: Tensor) -> Tensor:
        return self.inverse_transform(z + self.mean)

    def group_by(self, labels: np.ndarray) -> None:
        """One mask group a label; labels have one number a coefficient, in any order and with gaps."""
        kinds, index = np.unique(labels, return_inverse=True)
        self.set_mask_groups(torch.as_tensor(index.reshape(-1)), len(kinds))


class FixedBasis(Orthonormal):
    """A fixed basis for each channel, after the channels are turned to their principal axes."""

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

    def group_bands(self, band: np.ndarray) -> None:
        """If the settings ask for it, a mask group a band and channel; `band` (H, W) numbers the bands."""
        if self.config.grouped:
            self.group_by(band + (band.max() + 1) * np.arange(self.shape[0])[:, None, None])

    def learn(self, batches: Iterable[Tensor]) -> None:
        if self.shape[0] > 1:
            pixels = (batch.movedim(1, -1).flatten(0, 2) for batch in self.distributed.part(batches))
            self.colour.copy_(principal_axes(covariance_of(pixels, self.distributed)[1])[1])

    def forward_transform(self, x: Tensor) -> Tensor:
        return self.analyse(torch.einsum("dc,bchw->bdhw", self.colour, x))

    def inverse_transform(self, z: Tensor) -> Tensor:
        return torch.einsum("dc,bdhw->bchw", self.colour, self.synthesize(z.unflatten(1, self.shape)))


class Separable(FixedBasis):
    """Products of a wave down the image and a wave across it: two matrix multiplications, and rings of frequency."""

    down: Tensor
    across: Tensor

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        (down, per_row), (across, per_column) = (self.waves(side) for side in shape[1:])
        self.register_buffer("down", torch.tensor(down, dtype=torch.float32), persistent=False)
        self.register_buffer("across", torch.tensor(across, dtype=torch.float32), persistent=False)
        self.group_bands(rings(per_row, per_column))

    @staticmethod
    @abstractmethod
    def waves(size: int) -> tuple[np.ndarray, np.ndarray]:
        """(size, size) an orthonormal basis of `size` samples, one wave a row, and (size,) their cycles per pixel."""

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


class Cosine(Separable):
    """The orthonormal two-dimensional DCT-II of every channel: half-waves that end flat at the borders."""

    @staticmethod
    def waves(size: int) -> tuple[np.ndarray, np.ndarray]:
        order, place = np.arange(size)[:, None], np.arange(size) + 0.5
        waves = np.sqrt(2 / size) * np.cos(np.pi * order * place / size)
        waves[0] = size**-0.5
        return waves, np.arange(size) / (2 * size)


class Fourier(Separable):
    """The real orthonormal Fourier basis: cosine and sine of every frequency in turn, 1, cos 1, sin 1, cos 2, sin 2.

    A product of two of them is the real or imaginary part of sums of the complex waves (f, g) and (f, -g): what each
    pair of frequencies spans is the same, in real numbers.
    """

    @staticmethod
    def waves(size: int) -> tuple[np.ndarray, np.ndarray]:
        index = np.arange(size)[:, None]
        angle = 2 * np.pi * ((index + 1) // 2) * np.arange(size) / size
        waves = np.sqrt(2 / size) * np.where(index % 2 == 1, np.cos(angle), np.sin(angle))
        waves[0] = size**-0.5
        if size % 2 == 0:
            # The highest frequency of an even number of samples has no sine: it alternates.
            waves[-1] = size**-0.5 * (-1.0) ** np.arange(size)
        return waves, (np.arange(size) + 1) // 2 / size
