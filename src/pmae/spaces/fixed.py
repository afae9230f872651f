"""Maps that are cheap at any size: pixels as they are, the cosine and the Fourier basis, and what others build on."""

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.spaces.base import Space
from pmae.spaces.moments import covariance_of, mean_and_variance, principal_axes

RINGS = 24


class Pixels(Space):
    """Every pixel of every channel is its own coefficient, as in MAE; fitting measures their variances."""

    tolerance = 0.0

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("variance", torch.ones(self.size))

    def fit(self, batches: Iterable[Tensor]) -> None:
        pixels = (batch.flatten(1) for batch in self.distributed.part(batches))
        self.variance.copy_(mean_and_variance(pixels, self.distributed)[1])

    def project(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def reconstruct(self, z: Tensor) -> Tensor:
        return z.unflatten(1, self.shape)


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

    def principal_rotation(self, samples: Iterable[Tensor]) -> Tensor:
        """(D, D) principal axes, largest variance first, of this process's samples (N, D) and the others'."""
        return principal_axes(covariance_of(samples, self.distributed)[1])[1]

    def project(self, x: Tensor) -> Tensor:
        return self.forward_transform(x).flatten(1) - self.mean

    def reconstruct(self, z: Tensor) -> Tensor:
        return self.inverse_transform(z + self.mean)

    def group_by(self, labels: np.ndarray) -> None:
        """One mask group a label; labels have one number a coefficient, in any order and with gaps."""
        kinds, index = np.unique(labels, return_inverse=True)
        self.set_mask_groups(torch.as_tensor(index.reshape(-1)), len(kinds))


class FixedBasis(Orthonormal):
    """A fixed basis for each channel, after the channels are turned to their principal axes.

    Every level multiplies the upper left corner that the level before it left, down and across.
    """

    colour: Tensor
    """(C, C) the rotation, one axis a row, largest variance first."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.register_buffer("colour", torch.eye(shape[0]))
        matrices, bands = self.basis()
        self.levels = len(matrices)
        for level, (down, across) in enumerate(matrices):
            self.register_buffer(f"down_{level}", torch.tensor(down, dtype=torch.float32), persistent=False)
            self.register_buffer(f"across_{level}", torch.tensor(across, dtype=torch.float32), persistent=False)
        if self.config.grouped:
            self.group_by(bands + (bands.max() + 1) * np.arange(shape[0])[:, None, None])

    @abstractmethod
    def basis(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        """Orthonormal matrices (h, h) and (w, w) of every level, one basis vector a row, and bands (H, W) by number."""

    def learn(self, batches: Iterable[Tensor]) -> None:
        if self.shape[0] > 1:
            part = self.distributed.part(batches)
            self.colour.copy_(self.principal_rotation(batch.movedim(1, -1).flatten(0, 2) for batch in part))

    def forward_transform(self, x: Tensor) -> Tensor:
        z = torch.einsum("dc,bchw->bdhw", self.colour, x)
        for level in range(self.levels):
            down, across = self._matrices(level)
            z = _with_corner(z, down @ (z[..., : len(down), : len(across)] @ across.T))
        return z

    def inverse_transform(self, z: Tensor) -> Tensor:
        z = z.unflatten(1, self.shape)
        for level in reversed(range(self.levels)):
            down, across = self._matrices(level)
            z = _with_corner(z, down.T @ (z[..., : len(down), : len(across)] @ across))
        return torch.einsum("dc,bdhw->bchw", self.colour, z)

    def _matrices(self, level: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"down_{level}"), getattr(self, f"across_{level}")


def _with_corner(z: Tensor, corner: Tensor) -> Tensor:
    """The coefficients with another upper left corner."""
    if corner.shape == z.shape:
        return corner
    down, across = corner.shape[-2:]
    upper = torch.cat([corner, z[..., :down, across:]], -1)
    return torch.cat([upper, z[..., down:, :]], -2)


class Waves(FixedBasis):
    """Products of a wave down the image and a wave across it; bands are rings of frequency."""

    def basis(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        (down, per_row), (across, per_column) = (self.waves(side) for side in self.shape[1:])
        return [(down, across)], rings(per_row, per_column)

    @staticmethod
    @abstractmethod
    def waves(size: int) -> tuple[np.ndarray, np.ndarray]:
        """(size, size) an orthonormal basis of `size` samples, one wave a row, and (size,) their cycles per pixel."""


def rings(down: np.ndarray, across: np.ndarray) -> np.ndarray:
    """(H, W) of the ring that each pair of frequencies lies in: 0 is the mean alone, the others widen outwards.

    Radii grow by a constant factor, because the power of photographs falls with the square of the frequency: rings of
    equal width would leave nearly all variance in the innermost, these share it about evenly.
    """
    radius = np.hypot(down[:, None], across[None, :])
    lowest = radius.min(initial=1.0, where=radius > 0)
    octaves = np.log2(np.maximum(radius, lowest) / lowest)
    ring = 1 + np.floor((RINGS - 1) * octaves / max(octaves.max(), 1e-12))
    return np.where(radius > 0, ring.clip(max=RINGS - 1), 0).astype(np.int64)


class Cosine(Waves):
    """The orthonormal two-dimensional DCT-II of every channel: half-waves that end flat at the borders."""

    @staticmethod
    def waves(size: int) -> tuple[np.ndarray, np.ndarray]:
        order, place = np.arange(size)[:, None], np.arange(size) + 0.5
        waves = np.sqrt(2 / size) * np.cos(np.pi * order * place / size)
        waves[0] = size**-0.5
        return waves, np.arange(size) / (2 * size)


class Fourier(Waves):
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
