"""Wavelet space: Daubechies' orthogonal wavelets of every channel, periodised, over several levels."""

from math import comb

import numpy as np

from pmae.errors import UserError, unknown_name
from pmae.spaces.fixed import FixedBasis

MOMENTS = {"haar": 1, **{f"db{moments}": moments for moments in range(2, 9)}}
"""Vanishing moments of each wavelet; a filter has twice as many taps."""


class Wavelet(FixedBasis):
    """Each level splits what the last one averaged into an average, in the upper left quarter, and three details."""

    def basis(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        _, height, width = self.shape
        levels, name = count_levels(height, width, self.config.levels), self.config.wavelet
        sides = [(max(1, height >> level), width >> level) for level in range(levels)]
        return [(filter_bank(name, down), filter_bank(name, across)) for down, across in sides], subbands(sides)


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


def subbands(sides: list[tuple[int, int]]) -> np.ndarray:
    """(H, W) of the subband that each coefficient is in, from the sides (h, w) that each level splits.

    The last average is 0; then come three details a level.
    """
    band = np.zeros(sides[0], np.int64)
    for level, (height, width) in enumerate(sides):
        down, across = max(1, height // 2), width // 2
        band[:down, across:width] = 3 * level + 1
        band[down:height, :across] = 3 * level + 2
        band[down:height, across:width] = 3 * level + 3
    return band


def count_levels(height: int, width: int, wanted: int | None) -> int:
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
