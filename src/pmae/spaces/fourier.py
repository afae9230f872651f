"""Fourier space: the real orthonormal two-dimensional Fourier basis of every channel."""

import numpy as np

from pmae.spaces.separable import Separable


class Fourier(Separable):
    """Cosine and sine of every frequency in turn: 1, cos 1, sin 1, cos 2, sin 2, and so on.

    A product of two of them is the real or imaginary part of sums of the complex waves (f, g) and (f, -g): what each
    pair of frequencies spans is the same, in real numbers.
    """

    @staticmethod
    def waves(size: int) -> np.ndarray:
        index = np.arange(size)[:, None]
        angle = 2 * np.pi * ((index + 1) // 2) * np.arange(size) / size
        waves = np.sqrt(2 / size) * np.where(index % 2 == 1, np.cos(angle), np.sin(angle))
        waves[0] = size**-0.5
        if size % 2 == 0:
            # The highest frequency of an even number of samples has no sine: it alternates.
            waves[-1] = size**-0.5 * (-1.0) ** np.arange(size)
        return waves

    @staticmethod
    def frequencies(size: int) -> np.ndarray:
        return (np.arange(size) + 1) // 2 / size
