"""Diffusion maps: coordinates in which images are close when a random walk between landmarks joins them quickly."""

import torch
from torch import Tensor

from pmae.spaces.landmark_space import LandmarkSpace
from pmae.spaces.moments import principal_axes

FLOOR = 1e-6
"""Eigenvalue of the walk below which a coordinate is left out: it is lost in the rounding of float32."""


class DiffusionMaps(LandmarkSpace):
    """The eigenfunctions of one step of a random walk from an image to landmarks, each times its eigenvalue.

    The walk's odds are Gaussian kernels over the landmarks' densities, so that where images lie counts and not how many
    lie there. An eigenfunction's value at any image is its mean after one step, over the eigenvalue (Nystroem), which
    cancels the factor: a coordinate is the mean of the eigenvector over the landmarks that one step leads to.
    """

    @staticmethod
    def features(scores: Tensor) -> Tensor:
        return scores.softmax(1)

    @staticmethod
    def density(kernel: Tensor) -> Tensor:
        return kernel.sum(0)

    @staticmethod
    def leading_axes(kernel: Tensor, covariance: Tensor) -> Tensor:
        density = kernel.sum(0)
        walk = kernel / density / density[:, None]
        root = walk.sum(0).sqrt()
        # The constant eigenfunction, in the symmetric form of the walk. Taken out by name: where the landmarks fall
        # apart into clusters it shares its eigenvalue 1 with others, and a solver may mix them.
        constant = root / root.norm()
        values, vectors = principal_axes(walk / root / root[:, None] - torch.outer(constant, constant))
        return vectors[values > FLOOR] / constant
