"""Wavelet space: orthogonal wavelets of every channel, periodised, over several levels."""

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces.daubechies import filter_bank
from pmae.spaces.orthonormal import FixedBasis


class Wavelet(FixedBasis):
    """Each level splits what the last one averaged into an average, in the upper left quarter, and three details."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        _, height, width = shape
        self.levels = _levels(height, width, self.config.levels)
        for side in {max(1, side >> level) for side in (height, width) for level in range(self.levels)}:
            bank = torch.tensor(filter_bank(self.config.wavelet, side), dtype=torch.float32)
            self.register_buffer(f"bank_{side}", bank, persistent=False)
        self.hide_bands(subbands(height, width, self.levels))

    def analyse(self, x: Tensor, level: int = 0) -> Tensor:
        if level == self.levels:
            return x
        z = self._bank(x.shape[-2]) @ (x @ self._bank(x.shape[-1]).T)
        return _with_average(z, self.analyse(_average(z), level + 1))

    def synthesize(self, z: Tensor, level: int = 0) -> Tensor:
        if level == self.levels:
            return z
        z = _with_average(z, self.synthesize(_average(z), level + 1))
        return self._bank(z.shape[-2]).T @ (z @ self._bank(z.shape[-1]))

    def _bank(self, side: int) -> Tensor:
        bank: Tensor = getattr(self, f"bank_{side}")
        return bank


def subbands(height: int, width: int, levels: int) -> np.ndarray:
    """(H, W) of the subband that each coefficient is in: 0 is the last average, then three details a level."""
    band = np.zeros((height, width), np.int64)
    for level in range(levels):
        down, across = max(1, height >> (level + 1)), width >> (level + 1)
        band[:down, across : 2 * across] = 3 * level + 1
        band[down : 2 * down, :across] = 3 * level + 2
        band[down : 2 * down, across : 2 * across] = 3 * level + 3
    return band


def _average(z: Tensor) -> Tensor:
    return z[..., : max(1, z.shape[-2] // 2), : z.shape[-1] // 2]


def _with_average(z: Tensor, average: Tensor) -> Tensor:
    """The coefficients with another upper left quarter."""
    down, across = average.shape[-2:]
    upper = torch.cat([average, z[..., :down, across:]], -1)
    return torch.cat([upper, z[..., down:, :]], -2)


def _levels(height: int, width: int, wanted: int | None) -> int:
    """How many levels: those wanted, or as many as both sides can be halved; of a signal, one row, only the length."""
    sides = width if height == 1 else height | width
    deepest = (sides & -sides).bit_length() - 1
    if deepest == 0 or (wanted or 0) > deepest:
        asked = "at least 1" if wanted is None else str(wanted)
        raise UserError(
            f"space.levels must be at most {deepest} for images of {height}x{width}, because each level halves both "
            f"sides, got {asked}; use data.resize, or space.name 'cosine', which takes any size"
        )
    return wanted or deepest
