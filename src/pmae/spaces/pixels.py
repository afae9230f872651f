"""Pixel space: the identity, with patches as what is hidden. `t = identity` makes the method an MAE."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces.base import Space


class Pixels(Space):
    """Every pixel of every channel is its own coefficient; fitting measures their variances."""

    tolerance = 0.0

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        channels, height, width = shape
        self.register_buffer("variance", torch.ones(channels * height * width))

    def fit(self, batches: Iterable[Tensor]) -> None:
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        for batch in batches:
            x = batch.flatten(1).double()
            count += len(x)
            total, squares = total.to(x.device) + x.sum(0), squares.to(x.device) + x.square().sum(0)
        if count < 2:
            raise UserError(f"data must be at least 2 images to measure a variance, got {count}")
        self.variance.copy_(((squares - total.square() / count) / (count - 1)).clamp(min=0))

    def project(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def reconstruct(self, z: Tensor) -> Tensor:
        return z.unflatten(1, self.shape)
