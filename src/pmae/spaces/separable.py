"""Bases of waves: a basis of columns times one of rows, two matrix products an image, and rings of equal frequency."""

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.spaces.orthonormal import FixedBasis

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
