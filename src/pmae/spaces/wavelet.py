"""Wavelet space: Daubechies' orthogonal wavelets of every channel, periodised, over several levels."""

from math import comb

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError, unknown_name
from pmae.spaces.fixed import FixedBasis

MOMENTS = {"haar": 1, **{f"db{moments}": moments for moments in range(2, 9)}}
"""Vanishing moments of each wavelet; a filter has twice as many taps."""


def low_pass(name: str) -> np.ndarray:
    """The low-pass filter of smallest phase with `MOMENTS[name]` zeros at the highest frequency.

    Its power is cos^2p times a polynomial in y = sin^2 of half the frequency. Each root y is a pair z, 1/z with
    y = (2 - z - 1/z) / 4; the filter takes the one inside the unit circle.
    """
    if name not in MOMENTS:
        raise unknown_name("space.wavelet", name, MOMENTS)
    moments = MOMENTS[name]
    roots = np.roots([comb(moments - 1 + k, k) for k in reversed(range(moments))]).astype(complex)
    middle, apart = 1 - 2 * roots, 2 * np.sqrt(roots * (roots - 1))
    inside = np.where(abs(middle + apart) < 1, middle + apart, middle - apart)
    taps = np.poly(np.concatenate([-np.ones(moments), inside])).real
    return np.asarray(np.sqrt(2) * taps / taps.sum())


def filter_bank(name: str, size: int) -> np.ndarray:
    """(size, size) orthonormal: the upper half averages an even number of periodic samples, the lower takes details.

    A single sample stays as it is: across a signal, which is one row, there is nothing to filter.
    """
    if size == 1:
        return np.eye(1)
    low = low_pass(name)
    high = low[::-1] * (-1.0) ** np.arange(len(low))
    bank = np.zeros((2, size // 2, size))
    step = np.arange(size // 2)
    for tap, (average, detail) in enumerate(zip(low, high, strict=True)):
        # A filter longer than the signal wraps around and meets the same sample again.
        place = (2 * step + tap + 1 - len(low) // 2) % size
        bank[0, step, place] += average
        bank[1, step, place] += detail
    return bank.reshape(size, size)


class Wavelet(FixedBasis):
    """Each level splits what the last one averaged into an average, in the upper left quarter, and three details."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        _, height, width = shape
        self.levels = _levels(height, width, self.config.levels)
        for side in {max(1, side >> level) for side in (height, width) for level in range(self.levels)}:
            bank = torch.tensor(filter_bank(self.config.wavelet, side), dtype=torch.float32)
            self.register_buffer(f"bank_{side}", bank, persistent=False)
        self.group_bands(subbands(height, width, self.levels))

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
