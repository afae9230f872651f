"""Kernel PCA (KMAE) and diffusion maps: linear in Gaussian kernels around landmarks, pre-images by ridge regression."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError, require
from pmae.spaces.base import Space
from pmae.spaces.moments import DistributedFit, principal_axes, sample

LANDMARKS = 2048
EDGE = 1e-3
"""How near to 0 or to 1 the mean kernel value of two landmarks may come: beyond, float32 keeps under three digits."""
FLOOR = 1e-6
"""Share of the kernel's largest eigenvalue, or eigenvalue of the random walk, below which float32 loses a direction."""
NOTHING = 1e-10  # share of the largest variance below which an axis is no axis but what float64 rounds off
NEGLIGIBLE = 1e-12  # share of the largest variance below which a direction of the coefficients counts as constant
SLACK = 1.01
"""The largest ridge is taken whose score is so near to the best: the best is flat, and rounding would choose there."""


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
    way_out = f"lower space.landmarks or {Space.way_out}"

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        count, size = self.config.landmarks or LANDMARKS, self.size
        kept = self.config.components or count
        require(kept <= count, "space.components", f"at most the number of landmarks, {count}", kept)
        # The kernel, the covariance, their eigenvectors and workspaces, and four sets of landmarks.
        self.refuse_beyond_memory(f"{count} landmarks of {size} pixels", 8 * (8 * count**2 + 4 * count * size))
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
        distances = squared_distances(x.flatten(1) - self.mean, self.landmarks)
        return (self.features(-self.gamma * distances - self.log_density) - self.centre) @ self.axes.T

    def reconstruct(self, z: Tensor) -> Tensor:
        return (z @ self.preimage + self.mean).unflatten(1, self.shape)

    def fit(self, batches: Iterable[Tensor]) -> None:
        """One pass to choose the landmarks, one for the moments of their features."""
        # All of it in float64: the small axes are differences of kernels that float32 cannot tell apart.
        landmarks = sample((batch.flatten(1) for batch in batches), len(self.centre)).double()
        count, wanted = len(landmarks), self.config.components or 1
        require(wanted <= count, "space.components", f"at most the landmarks, here all {count} images", wanted)
        shift = landmarks.mean(0)
        landmarks -= shift
        distances = squared_distances(landmarks, landmarks)
        gamma = choose_gamma(self.config.gamma, distances)
        kernel = distances.mul_(-gamma).exp_()
        log_density = self.density(kernel).log()

        def features(x: Tensor) -> Tensor:
            return self.features(-gamma * squared_distances(x, landmarks) - log_density)

        moments = joint_moments(batches, shift, features, self.distributed)
        self._store(self.leading_axes(kernel, moments.covariance)[: len(self.axes)], moments)
        self.landmarks[:count] = landmarks + (shift - moments.mean)
        self.gamma.fill_(gamma)
        self.log_density.fill_(math.inf)[:count] = log_density

    def measured(self) -> dict[str, float]:
        if self.gamma.is_meta or not self.gamma:
            return {}
        seen, unseen = self.preimage_error.tolist()
        return {"gamma": float(self.gamma), "preimage_error": seen, "preimage_error_unseen": unseen}

    def _store(self, axes: Tensor, moments: "Moments") -> None:
        covariance = axes @ moments.covariance @ axes.T
        images, seen, unseen = fit_preimage(covariance, axes @ moments.cross, moments)
        kept, count = axes.shape
        for buffer in (self.axes, self.centre, self.variance, self.preimage, self.landmarks):
            buffer.zero_()
        self.axes[:kept, :count] = axes
        self.centre[:count] = moments.feature_mean
        self.variance[:kept] = covariance.diagonal().clamp(min=0)
        self.preimage[:kept] = images
        self.mean.copy_(moments.mean)
        self.preimage_error.copy_(torch.tensor([seen, unseen]))
        if not self.keeps_rest:
            told = f"its pre-images miss {seen:.1%} of the norm of training images, about {unseen:.1%} of others"
            rest = "space.keep_rest would carry that along"
            warnings.warn(f"space {self.config.name!r} has no exact inverse: {told}; {rest}", stacklevel=3)


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
        return vectors[values > FLOOR] / constant


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """(A, B) of rows (A, D) and (B, D)."""
    products = torch.addmm(y.square().sum(1), x, y.T, alpha=-2)
    return (products + x.square().sum(1, keepdim=True)).clamp(min=0)


def choose_gamma(gamma: float | None, distances: Tensor) -> float:
    """Gamma as given, or 1 over the median squared distance between landmarks; refused where it tells none apart."""
    count = len(distances)
    apart = distances[~torch.eye(count, dtype=torch.bool, device=distances.device)]
    median = float(apart.median())
    if gamma is None and median <= 0:
        raise UserError(f"data must differ: the median squared distance between {count} landmarks is {median}")
    gamma = 1 / median if gamma is None else gamma
    mean = float((apart * -gamma).exp().mean())
    if not EDGE < mean < 1 - EDGE:
        kind = "constant: all images look alike" if mean > 0.5 else "the identity: each image looks unlike all others"
        hint = f"; left unset it would be {1 / median:.3g}" if median > 0 else ""
        told = f"the mean kernel value between {count} landmarks is {mean:.6g}, so the kernel is {kind}{hint}"
        raise UserError(f"space.gamma must tell images apart, got {gamma:g}: {told}")
    return gamma


class Moments(NamedTuple):
    """Of N images (D,) and M features of each: means, covariances over N - 1 and mean squared norms."""

    images: int
    mean: Tensor
    feature_mean: Tensor
    covariance: Tensor  # (M, M) of the features
    cross: Tensor  # (M, D) of features and pixels
    total_variance: float  # mean squared distance from the mean image
    energy: float  # mean squared norm of an image


def joint_moments(
    batches: Iterable[Tensor], shift: Tensor, features: Callable[[Tensor], Tensor], distributed: DistributedFit
) -> Moments:
    """Moments of images about `shift` (D,) and of their features, which are to be near 0, in one pass."""
    n, sums = 0, list[Tensor]()
    for batch in distributed.part(batches):
        x = batch.flatten(1).double() - shift
        f = features(x)
        more = [x.square().sum(), x.sum(0), f.sum(0), f.T @ f, f.T @ x]
        sums = [total.add_(one) for total, one in zip(sums, more, strict=True)] if sums else more
        n += len(x)
    n = distributed.total_images(n, shift)
    squares, image_total, feature_total, products, cross = map(distributed.all_reduce, sums)
    x, f = image_total / n, feature_total / n
    # In place, as a copy of the products would double the memory.
    products.addr_(f, f, alpha=-n).div_(n - 1)
    cross.addr_(f, x, alpha=-n).div_(n - 1)
    variance, mean = float(squares / n - x.square().sum()), shift + x
    return Moments(n, mean, f, products, cross, variance, variance + float(mean.square().sum()))


def fit_preimage(covariance: Tensor, cross: Tensor, moments: Moments) -> tuple[Tensor, float, float]:
    """Ridge regression of images on coefficients, from their covariance (K, K) and the one with the pixels (K, D).

    Returns the image (K, D) of one unit of each coefficient, the relative error on the images of the fit, and on
    others. The ridge is chosen by generalized cross-validation, whose score estimates the error on new images; it comes
    out a little low where most images are landmarks, as these would lose their own kernels too if they were left out.
    """
    values, turn = principal_axes(covariance)
    along, floor = turn @ cross, NEGLIGIBLE * values[0]
    each = torch.where(values > floor, along.square().sum(1) / values.clamp(min=floor), 0.0)
    explained = each * (1 - 1 / moments.images)
    left = max(moments.total_variance - float(explained.sum()), 0.0)
    ridges = values[0] * torch.logspace(-6, 0, 25, dtype=values.dtype, device=values.device)[:, None]
    shrinkage = ridges / (values + ridges)
    seen = left + (explained * shrinkage.square()).sum(1)
    freedom = 1 + (1 - shrinkage).sum(1)
    unseen = seen / (1 - freedom / moments.images).square()
    best = int((unseen <= SLACK * unseen.min()).nonzero()[-1])
    images = turn.T @ (along / (values + ridges[best])[:, None])
    error, error_unseen = (float(score[best] / moments.energy) ** 0.5 for score in (seen, unseen))
    return images, error, error_unseen
