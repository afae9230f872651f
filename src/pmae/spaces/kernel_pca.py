"""Kernel PCA (KMAE) and diffusion maps: coefficients that are linear in Gaussian kernels around landmarks."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import require
from pmae.spaces.base import Space
from pmae.spaces.landmarks import Moments, choose_landmarks, fit_preimage, gaussian_kernel, joint_moments, log_kernel
from pmae.spaces.moments import principal_axes, refuse_beyond_memory

LANDMARKS = 2048
FLOOR = 1e-6
"""Share of the kernel's largest eigenvalue below which a direction is left out: float32 could not project on it."""
NOTHING = 1e-10
"""Share of the largest variance below which an axis is no axis but what float64 rounds off."""
LEAST_EIGENVALUE = 1e-6
"""Eigenvalue of the random walk below which a coordinate is left out: it is lost in the rounding of float32."""


class LandmarkSpace(Space):
    """z = axes (features(x) - centre), x about z preimage + mean, with features of the kernels around M landmarks.

    Buffers have the sizes of the settings. With fewer images than landmarks all images are landmarks, and the places
    left over have an infinite density, so no feature. The map back is a regression: the share of an image that it
    misses is measured, and with `space.keep_rest` it stays visible.
    """

    landmarks: Tensor  # (M, D) about the mean
    gamma: Tensor
    log_density: Tensor  # (M,) logarithm of what the kernel around each landmark is divided by
    centre: Tensor  # (M,) mean features of the training images
    axes: Tensor  # (K, M)
    preimage: Tensor  # (K, D)
    mean: Tensor
    preimage_error: Tensor  # relative error of `reconstruct(project(x))`: of the images of the fit, expected of others
    tolerance = math.inf

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        count, size = self.config.landmarks or LANDMARKS, self.size
        kept = self.config.components or count
        require(kept <= count, "space.components", f"at most the number of landmarks, {count}", kept)
        what, way = f"space {self.config.name!r}: {count} landmarks of {size} pixels", "lower space.landmarks"
        # The kernel, the covariance, their eigenvectors and workspaces, and four sets of landmarks.
        refuse_beyond_memory(what, 8 * (8 * count**2 + 4 * count * size), f"{way} or {self.way_out}")
        self.keeps_rest = self.config.keep_rest
        sizes = {"landmarks": (count, size), "log_density": (count,), "centre": (count,), "axes": (kept, count)}
        sizes |= {"preimage": (kept, size), "mean": (size,), "variance": (kept,), "gamma": (), "preimage_error": (2,)}
        for name, lengths in sizes.items():
            self.register_buffer(name, torch.zeros(lengths))

    @staticmethod
    @abstractmethod
    def features(scores: Tensor) -> Tensor:
        """(B, M) from logarithms of kernels over densities."""

    @staticmethod
    def density(kernel: Tensor) -> Tensor:
        """(M,) what to divide the kernel around each landmark by, from the kernel (M, M) between them."""
        return torch.ones_like(kernel[0])

    @staticmethod
    @abstractmethod
    def leading_axes(kernel: Tensor, covariance: Tensor) -> Tensor:
        """(at most M, M) axes, from the kernel between landmarks and the features' covariance, both (M, M)."""

    def project(self, x: Tensor) -> Tensor:
        scores = log_kernel(x.flatten(1) - self.mean, self.landmarks, self.gamma, self.log_density)
        return (self.features(scores) - self.centre) @ self.axes.T

    def reconstruct(self, z: Tensor) -> Tensor:
        return (z @ self.preimage + self.mean).unflatten(1, self.shape)

    def fit(self, batches: Iterable[Tensor]) -> None:
        """One pass to choose the landmarks, one for the moments of their features.

        All of it in float64: the small axes are differences of kernels that float32 cannot tell apart.
        """
        landmarks = choose_landmarks(batches, len(self.centre), self.config.landmark_choice).double()
        count, wanted = len(landmarks), self.config.components or 1
        require(wanted <= count, "space.components", f"at most the landmarks, here all {count} images", wanted)
        shift = landmarks.mean(0)
        landmarks -= shift
        gamma, kernel = gaussian_kernel(landmarks, self.config.gamma)
        log_density = self.density(kernel).log()

        def features(x: Tensor) -> Tensor:
            return self.features(log_kernel(x, landmarks, gamma, log_density))

        moments = joint_moments(batches, shift, features, count, self.distributed)
        self._store(self.leading_axes(kernel, moments.covariance)[: len(self.axes)], moments)
        self.landmarks[:count], self.gamma[()] = landmarks + (shift - moments.mean), gamma
        self.log_density.fill_(math.inf)[:count] = log_density

    def measured(self) -> dict[str, float]:
        if self.gamma.is_meta or not self.gamma:
            return {}
        seen, unseen = self.preimage_error.tolist()
        return {"gamma": float(self.gamma), "preimage_error": seen, "preimage_error_unseen": unseen}

    def _store(self, axes: Tensor, moments: Moments) -> None:
        """Keep the axes, the variances along them, and the regression back to pixels with what it misses."""
        covariance = axes @ moments.covariance @ axes.T
        back = fit_preimage(covariance, axes @ moments.cross, moments)
        kept, count = axes.shape
        for buffer in (self.axes, self.centre, self.variance, self.preimage, self.landmarks):
            buffer.zero_()
        self.axes[:kept, :count], self.centre[:count] = axes, moments.feature_mean
        self.variance[:kept], self.preimage[:kept] = covariance.diagonal().clamp(min=0), back.images
        self.mean.copy_(moments.mean)
        self.preimage_error.copy_(torch.tensor([back.error, back.error_unseen]))
        if not self.keeps_rest:
            warnings.warn(
                f"space {self.config.name!r} has no exact inverse: its pre-images miss {back.error:.1%} of the norm of "
                f"training images, about {back.error_unseen:.1%} of others; space.keep_rest would carry that along",
                stacklevel=3,
            )


class KernelPCA(LandmarkSpace):
    """Kernel PCA with the kernel exp(-gamma |x - y|^2), exact on up to as many images as there are landmarks.

    With more images it is Nystroem's: images are seen through the span of the landmarks, and the axes are those of
    largest variance of all images in it, about their mean there. Coefficients are uncorrelated, largest variance first.
    """

    @staticmethod
    def features(scores: Tensor) -> Tensor:
        return scores.exp()

    @staticmethod
    def leading_axes(kernel: Tensor, covariance: Tensor) -> Tensor:
        values, vectors = principal_axes(kernel)
        inside = values > FLOOR * values[0]
        # Rows that are orthonormal in the kernel's own metric, so that a turn of them finds the principal axes.
        basis = vectors[inside] / values[inside].sqrt()[:, None]
        variance, turn = principal_axes(basis @ covariance @ basis.T)
        # As many images as landmarks leave one direction in which nothing varies: their mean's.
        return turn[variance > NOTHING * variance[0]] @ basis


class DiffusionMaps(LandmarkSpace):
    """Diffusion maps: the eigenfunctions of one step of a random walk from an image to landmarks, times eigenvalues.

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
        return vectors[values > LEAST_EIGENVALUE] / constant
