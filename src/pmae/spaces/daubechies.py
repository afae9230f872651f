"""Daubechies' orthogonal filters, computed, and the periodised matrices that filter with them."""

from math import comb

import numpy as np

from pmae.errors import unknown_name

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
