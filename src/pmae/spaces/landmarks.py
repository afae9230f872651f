"""Landmarks, a sample of images that stands for all, the kernel's width around them, and pre-images by regression."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmae.errors import UserError
from pmae.spaces.moments import DistributedFit, principal_axes

SEED = 0
"""Of the draw: a space is a function of the images and its settings, so runs that differ in their seed share it."""
POOL = 4
"""k-means++ looks at every image for every landmark, so it chooses among so many times the landmarks, not among all."""
EDGE = 1e-3
"""How near to 0 or to 1 the mean kernel value of two landmarks may come: beyond, float32 keeps under three digits."""
NEGLIGIBLE = 1e-12
"""Share of the largest variance below which a direction of the coefficients counts as constant."""
SLACK = 1.01
"""The largest ridge is taken whose score is so near to the best: the best is flat, and rounding would choose there."""


def choose_landmarks(batches: Iterable[Tensor], count: int, choice: Literal["random", "kmeans++"]) -> Tensor:
    """(M, D) images, M = `count` or all there are, in one pass; the same however the images are batched."""
    pool = _sample(batches, count if choice == "random" else POOL * count)
    if len(pool) <= count:
        return pool
    # Heavy to import, and most runs use another space.
    from sklearn.cluster import kmeans_plusplus

    return pool[kmeans_plusplus(pool.cpu().numpy(), count, random_state=SEED)[1]]


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """(A, B) of rows (A, D) and (B, D)."""
    products = torch.addmm(y.square().sum(1), x, y.T, alpha=-2)
    return (products + x.square().sum(1, keepdim=True)).clamp(min=0)


def log_kernel(x: Tensor, landmarks: Tensor, gamma: Tensor, log_density: Tensor) -> Tensor:
    """(B, M) logarithm of the Gaussian kernel between images (B, D) and landmarks, over the landmarks' densities."""
    return -gamma * squared_distances(x, landmarks) - log_density


def gaussian_kernel(landmarks: Tensor, gamma: float | None) -> tuple[Tensor, Tensor]:
    """Its coefficient, as given or chosen, and the kernel (M, M) between landmarks (M, D)."""
    distances = squared_distances(landmarks, landmarks)
    coefficient = distances.new_tensor(_gamma(gamma, distances))
    return coefficient, distances.mul_(-coefficient).exp_()


def _gamma(gamma: float | None, distances: Tensor) -> float:
    """The kernel's coefficient as given, or 1 over the median squared distance between landmarks.

    One at which all landmarks look alike, or each looks unlike all others, is refused.
    """
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
        raise UserError(
            f"space.gamma must tell images apart, got {gamma:g}: the mean kernel value between {count} landmarks is "
            f"{mean:.6g}, so the kernel is {kind}{hint}"
        )
    return gamma


def _sample(batches: Iterable[Tensor], size: int) -> Tensor:
    """(S, D) images whose random keys are the smallest, in the order of their keys.

    NumPy's stream of keys does not depend on how many are asked for at a time, so neither does the sample.
    """
    rng, count, keys, pool = np.random.default_rng(SEED), 0, np.empty(0), torch.empty(0)
    for batch in batches:
        rows, fresh = batch.flatten(1), rng.random(len(batch))
        keys, pool = np.concatenate([keys, fresh]), torch.cat([pool.to(rows), rows]) if count else rows
        order = keys.argsort()[:size]
        count, keys, pool = count + len(rows), keys[order], pool[torch.from_numpy(order).to(rows.device)]
    if count < 2:
        raise UserError(f"data must be at least 2 images to choose landmarks, got {count}")
    return pool


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
    batches: Iterable[Tensor],
    shift: Tensor,
    features: Callable[[Tensor], Tensor],
    count: int,
    distributed: DistributedFit,
) -> Moments:
    """Moments of images about `shift` (D,) and of their `count` features, which are to be near 0, in one pass."""
    n, squares, total = 0, shift.new_zeros(()), torch.zeros_like(shift)
    feature_total, products = shift.new_zeros(count), shift.new_zeros(count, count)
    cross = shift.new_zeros(count, len(shift))
    for batch in distributed.part(batches):
        x = batch.flatten(1).double() - shift
        f = features(x)
        n += len(x)
        squares += x.square().sum()
        total += x.sum(0)
        feature_total += f.sum(0)
        products += f.T @ f
        cross += f.T @ x
    n = distributed.total_images(n, shift)
    sums = map(distributed.all_reduce, (squares, total, feature_total, products, cross))
    squares, total, feature_total, products, cross = sums
    x, f = total / n, feature_total / n
    # In place, as a copy of the products would double the memory.
    products.addr_(f, f, alpha=-n).div_(n - 1)
    cross.addr_(f, x, alpha=-n).div_(n - 1)
    variance, mean = float(squares / n - x.square().sum()), shift + x
    return Moments(n, mean, f, products, cross, variance, variance + float(mean.square().sum()))


class Preimage(NamedTuple):
    """(K, D) image of one unit of each coefficient; its relative error on the images of the fit, and on others."""

    images: Tensor
    error: float
    error_unseen: float


def fit_preimage(covariance: Tensor, cross: Tensor, moments: Moments) -> Preimage:
    """Ridge regression of images on coefficients, from their covariance (K, K) and the one with the pixels (K, D).

    The ridge is chosen by generalized cross-validation, whose score estimates the error on new images; it comes out a
    little low where most images are landmarks, as these would lose their own kernels too if they were left out.
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
    return Preimage(images, *(float(error[best] / moments.energy) ** 0.5 for error in (seen, unseen)))
