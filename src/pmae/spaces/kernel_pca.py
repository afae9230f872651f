"""Kernel principal components (KMAE): the principal axes of the images as a Gaussian kernel sees them."""

import torch
from torch import Tensor

from pmae.spaces.landmark_space import LandmarkSpace
from pmae.spaces.moments import principal_axes

FLOOR = 1e-6
"""Share of the kernel's largest eigenvalue below which a direction is left out: float32 could not project on it."""
NOTHING = 1e-10
"""Share of the largest variance below which an axis is no axis but what float64 rounds off."""


class KernelPCA(LandmarkSpace):
    """Kernel PCA with the kernel exp(-gamma |x - y|^2), exact on up to as many images as there are landmarks.

    With more images it is Nystroem's: images are seen through the span of the landmarks, and the axes are those of
    largest variance of all images in it, about their mean there. Coefficients are uncorrelated, largest variance first.
    """

    @staticmethod
    def features(scores: Tensor) -> Tensor:
        return scores.exp()

    @staticmethod
    def density(kernel: Tensor) -> Tensor:
        return torch.ones_like(kernel[0])

    @staticmethod
    def leading_axes(kernel: Tensor, covariance: Tensor) -> Tensor:
        values, vectors = principal_axes(kernel)
        inside = values > FLOOR * values[0]
        # Rows that are orthonormal in the kernel's own metric, so that a turn of them finds the principal axes.
        basis = vectors[inside] / values[inside].sqrt()[:, None]
        variance, turn = principal_axes(basis @ covariance @ basis.T)
        # As many images as landmarks leave one direction in which nothing varies: their mean's.
        return turn[variance > NOTHING * variance[0]] @ basis
