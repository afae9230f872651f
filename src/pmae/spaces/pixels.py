"""Pixel space: the identity, with patches as what is hidden. `t = identity` makes the method an MAE."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.spaces.base import Space
from pmae.spaces.moments import mean_and_variance


class Pixels(Space):
    """Every pixel of every channel is its own coefficient; fitting measures their variances."""

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
