"""Cosine space: the orthonormal two-dimensional DCT-II of every channel."""

import numpy as np

from pmae.spaces.separable import Separable


class Cosine(Separable):
    """Half-waves that end flat at the borders, so that opposite borders need not match."""

    @staticmethod
    def waves(size: int) -> np.ndarray:
        order, place = np.arange(size)[:, None], np.arange(size) + 0.5
        waves = np.sqrt(2 / size) * np.cos(np.pi * order * place / size)
        waves[0] = size**-0.5
        return waves

    @staticmethod
    def frequencies(size: int) -> np.ndarray:
        return np.arange(size) / (2 * size)
