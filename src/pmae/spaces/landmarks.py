"""Landmarks: a sample of the images that stands for all of them, and the width of the Gaussian kernel around each."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmae.errors import UserError
from pmae.spaces.base import AddUp, unchanged
from pmae.spaces.moments import added, principal_axes

SEED = 0
"""Of the draw: a space is a function of the images and its settings, so runs that differ in their seed share it."""
POOL = 4
"""k-means++ looks at every image for every landmark, so it chooses among so many times the landmarks, not among all."""
EDGE = 1e-3
"""How near to 0 or to 1 the mean kernel value of two landmarks may come: beyond, float32 keeps under three digits."""


def choose_landmarks(batches: Iterable[Tensor], count: int, choice: Literal["random", "kmeans++"]) -> Tensor:
    """(M, D) images, M = `count` or all there are, in one pass; the same however the images are batched."""
    rng = np.random.default_rng(SEED)
    pool = _sample(batches, count if choice == "random" else POOL * count, rng)
    return pool if len(pool) <= count else pool[_apart(pool, count, rng)]


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """(A, B) of rows (A, D) and (B, D)."""
    products = torch.addmm(y.square().sum(1), x, y.T, alpha=-2)
    return (products + x.square().sum(1, keepdim=True)).clamp(min=0)


def settled_gamma(gamma: float | None, distances: Tensor) -> float:
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


def _sample(batches: Iterable[Tensor], size: int, rng: np.random.Generator) -> Tensor:
    """(S, D) images whose random keys are the smallest, in the order of their keys.

    NumPy's stream of keys does not depend on how many are asked for at a time, so neither does the sample.
    """
    count, keys, pool = 0, np.empty(0), torch.empty(0)
    for batch in batches:
        rows, fresh = batch.flatten(1), rng.random(len(batch))
        keys, pool = np.concatenate([keys, fresh]), torch.cat([pool.to(rows), rows]) if count else rows
        order = keys.argsort()[:size]
        count, keys, pool = count + len(rows), keys[order], pool[torch.from_numpy(order).to(rows.device)]
    if count < 2:
        raise UserError(f"data must be at least 2 images to choose landmarks, got {count}")
    return pool


def _apart(pool: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """(count,) positions in the pool, each drawn with odds by the squared distance to those before (k-means++)."""
    chosen = torch.zeros(count, dtype=torch.long, device=pool.device)
    draws = torch.from_numpy(rng.random(count)).to(pool.device)
    norms = pool.square().sum(1)
    nearest = torch.full_like(norms, torch.inf)
    for step in range(1, count):
        last = chosen[step - 1]
        nearest = torch.minimum(nearest, (norms - 2 * (pool @ pool[last]) + norms[last]).clamp(min=0))
        total = nearest.double().cumsum(0)
        chosen[step] = torch.searchsorted(total, draws[step : step + 1] * total[-1])[0].clamp(max=len(pool) - 1)
    return chosen


# Pre-images, the way back to pixels where a map has no inverse: ridge regression, solved from streamed sums.

NEGLIGIBLE = 1e-12
"""Share of the largest variance below which a direction of the coefficients counts as constant."""
SLACK = 1.01
"""The largest ridge is taken whose score is so near to the best: the best is flat, and rounding would choose there."""


class Moments(NamedTuple):
    """Of N images (D,) and M features of each: means, covariances over N - 1 and mean squared norms."""

    images: int
    mean: Tensor
    feature_mean: Tensor
    covariance: Tensor
    """(M, M) of the features."""
    cross: Tensor
    """(M, D) of features and pixels."""
    spread: float
    """Mean squared distance from the mean image."""
    energy: float
    """Mean squared norm of an image."""


class Preimage(NamedTuple):
    """(K, D) image of one unit of each coefficient; its relative error on the images of the fit, and on others."""

    images: Tensor
    error: float
    error_unseen: float


class Sums:
    """Float64 sums over batches of images about `shift` (D,) and of their M features, which are to be near 0."""

    def __init__(self, shift: Tensor, features: int) -> None:
        self.shift, self.count, self.squares = shift, 0, shift.new_zeros(())
        self.images, self.features = torch.zeros_like(shift), shift.new_zeros(features)
        self.products, self.cross = shift.new_zeros(features, features), shift.new_zeros(features, len(shift))

    def add(self, x: Tensor, f: Tensor) -> None:
        """Count a batch of images (B, D) and features (B, M)."""
        self.count += len(x)
        self.squares += x.square().sum(dtype=torch.float64)
        self.images += x.sum(0, dtype=torch.float64)
        self.features += f.sum(0, dtype=torch.float64)
        self.products += f.T @ f
        self.cross += f.T @ x

    def moments(self, add_up: AddUp = unchanged) -> Moments:
        """What the sums of all processes say; they are used up, as a copy of the products would double the memory."""
        n = added(self.count, self.shift, add_up)
        if n < 2:
            raise UserError(f"data must be at least 2 images in every pass, got {n}: fit takes a list, not an iterator")
        x, f = add_up(self.images) / n, add_up(self.features) / n
        covariance = add_up(self.products).addr_(f, f, alpha=-n).div_(n - 1)
        cross = add_up(self.cross).addr_(f, x, alpha=-n).div_(n - 1)
        spread, mean = float(add_up(self.squares) / n - x.square().sum()), self.shift + x
        return Moments(n, mean, f, covariance, cross, spread, spread + float(mean.square().sum()))


def fit_preimage(covariance: Tensor, cross: Tensor, moments: Moments) -> Preimage:
    """Ridge regression of images on coefficients, from their covariance (K, K) and the one with the pixels (K, D).

    The ridge is chosen by generalized cross-validation, whose score estimates the error on new images; it comes out a
    little low where most images are landmarks, as these would lose their own kernels too if they were left out.
    """
    values, turn = principal_axes(covariance)
    along, floor = turn @ cross, NEGLIGIBLE * values[0]
    each = torch.where(values > floor, along.square().sum(1) / values.clamp(min=floor), 0.0)
    explained = each * (1 - 1 / moments.images)
    left = max(moments.spread - float(explained.sum()), 0.0)
    ridges = values[0] * torch.logspace(-6, 0, 25, dtype=values.dtype, device=values.device)[:, None]
    shrinkage = ridges / (values + ridges)
    seen = left + (explained * shrinkage.square()).sum(1)
    freedom = 1 + (1 - shrinkage).sum(1)
    unseen = seen / (1 - freedom / moments.images).square()
    best = int((unseen <= SLACK * unseen.min()).nonzero()[-1])
    images = turn.T @ (along / (values + ridges[best])[:, None])
    return Preimage(images, *(float(error[best] / moments.energy) ** 0.5 for error in (seen, unseen)))
