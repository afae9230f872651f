"""Principal components of patches: one small basis for all places of a large image."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces.base import FitCost
from pmae.spaces.fixed import Orthonormal
from pmae.spaces.pca import cost_of_exact

LARGEST = 16


class PatchPCA(Orthonormal):
    """Coefficients (component, place): grouped, a component is hidden over the whole image; else each alone."""

    components: Tensor
    """(C p p, C p p) one component of a patch a row, largest variance first."""
    tolerance = 1e-4
    way_out = "lower space.patch"

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        channels, height, width = shape
        self.patch = patch_side(height, width, self.config.patch)
        # Of a signal, which is one row, a patch is one row too.
        self.sides = (1 if height == 1 else self.patch, self.patch)
        numbers = channels * self.sides[0] * self.sides[1]
        self.places = self.size // numbers
        self.refuse_beyond_memory(f"patches of {numbers} numbers", cost_of_exact(0, numbers).bytes)
        self.register_buffer("components", torch.eye(numbers))
        if self.config.grouped:
            self.group_by(np.repeat(np.arange(numbers), self.places))

    def fit_cost(self, images: int) -> FitCost:
        return cost_of_exact(images * self.places, len(self.components))

    def learn(self, batches: Iterable[Tensor]) -> None:
        part = self.distributed.part(batches)
        self.components.copy_(self.principal_rotation(self.patches(x).movedim(1, 2).flatten(0, 1) for x in part))

    def forward_transform(self, x: Tensor) -> Tensor:
        return self.components @ self.patches(x)

    def inverse_transform(self, z: Tensor) -> Tensor:
        (channels, height, width), (rows, columns) = self.shape, self.sides
        patches = self.components.T @ z.unflatten(1, (len(self.components), -1))
        grid = (channels, rows, columns, height // rows, width // columns)
        return patches.reshape(-1, *grid).permute(0, 1, 4, 2, 5, 3).reshape(-1, *self.shape)

    def patches(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) as patches (B, C p p, places): `functional.unfold`, which takes images one by one."""
        (channels, height, width), (rows, columns) = self.shape, self.sides
        cut = x.reshape(-1, channels, height // rows, rows, width // columns, columns)
        return cut.permute(0, 1, 3, 5, 2, 4).reshape(len(x), len(self.components), -1)


def patch_side(height: int, width: int, wanted: int | None) -> int:
    """The side wanted, or the largest from 2 to 16, that divides both sides of the image, or a signal's length."""
    common = width if height == 1 else math.gcd(height, width)
    divisors = [side for side in range(1, common + 1) if common % side == 0]
    what = f"space.patch must divide both sides of {height}x{width} images"
    if wanted is None and not any(2 <= side <= LARGEST for side in divisors):
        none = f"which have no common divisor from 2 to {LARGEST}, got none; set space.patch or data.resize"
        raise UserError(f"{what}, {none}")
    if wanted is not None and wanted not in divisors:
        raise UserError(f"{what} ({', '.join(map(str, divisors))}), got {wanted}")
    return wanted or max(side for side in divisors if side <= LARGEST)
