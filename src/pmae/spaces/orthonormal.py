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
