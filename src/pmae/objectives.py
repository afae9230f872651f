"""What a prediction is compared with: each function returns the squared error and the energy of the hidden, per image.

R2 = 1 - error / energy is the share of hidden variance that is predicted; 0 is the score of predicting the mean.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Comparison(NamedTuple):
    """Squared error and squared norm of the hidden part, and how many numbers it has; each (B,)."""

    error: Tensor
    energy: Tensor
    size: Tensor


def on_components(predicted_BK: Tensor, z_BK: Tensor, hidden_BK: Tensor) -> Comparison:
    """Squared error on the hidden coefficients alone."""
    error = ((predicted_BK - z_BK).square() * hidden_BK).sum(1)
    return Comparison(error, (z_BK.square() * hidden_BK).sum(1), hidden_BK.sum(1).expand(len(z_BK)))


def on_pixels(predicted: Tensor, hidden_image: Tensor) -> Comparison:
    """Squared error against the image of the hidden coefficients; (B, C, H, W) both."""
    error = (predicted - hidden_image).square().flatten(1).sum(1)
    size = error.new_full((len(error),), hidden_image[0].numel())
    return Comparison(error, hidden_image.square().flatten(1).sum(1), size)


def on_patches(predicted_BHP: Tensor, patches_BHP: Tensor, normalize: bool) -> Comparison:
    """Squared error on the H hidden patches, against pixels that are standardized within each patch or raw."""
    if normalize:
        mean, variance = patches_BHP.mean(2, keepdim=True), patches_BHP.var(2, keepdim=True)
        patches_BHP = (patches_BHP - mean) / (variance + 1e-6).sqrt()
    error = (predicted_BHP - patches_BHP).square().sum((1, 2))
    size = error.new_full((len(error),), patches_BHP[0].numel())
    return Comparison(error, patches_BHP.square().sum((1, 2)), size)


def unexplained(comparison: Comparison) -> Tensor:
    """1 - R2 of the batch: a space that learns cannot raise or lower it by hiding more or less energy."""
    return comparison.error.sum() / comparison.energy.sum()


def scaled(comparison: Comparison, scale: Literal["constant", "sum", "mean"], constant: Tensor | float) -> Tensor:
    """The loss: the batch's mean error over a constant, over nothing, or over the batch's count of hidden numbers.

    The last is the released code's. With one mask per batch it explodes when a leading component is hidden alone,
    because the count is then 1 and the error that of the largest variance.
    """
    if scale == "mean":
        return comparison.error.sum() / comparison.size.sum()
    return comparison.error.mean() / (constant if scale == "constant" else 1.0)


def contrast(points: Tensor, temperature: float) -> Tensor:
    """How badly each of 2B points on the unit sphere finds its partner, B rows away, among all others."""
    count, device = len(points), points.device
    near = points @ points.t() / temperature
    itself = torch.eye(count, dtype=torch.bool, device=device)
    partner = torch.arange(count, device=device).roll(count // 2)
    return functional.cross_entropy(near.masked_fill(itself, float("-inf")), partner)
