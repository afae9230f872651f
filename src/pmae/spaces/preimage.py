"""Pre-images, the way back to pixels where a map has no inverse: ridge regression, solved from streamed sums."""

from typing import NamedTuple

import torch
from torch import Tensor

from pmae.errors import UserError
from pmae.spaces.moments import added, principal_axes
from pmae.spaces.together import AddUp, unchanged

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
