"""What a prediction is compared with.

Each comparison returns the squared error and the energy of the hidden, per image: R2 = 1 - error / energy is the share
of hidden variance that is predicted; 0 is the score of predicting the mean.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pmae.config import ObjectiveConfig
from pmae.errors import UserError, require
from pmae.plugins import build

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A registered objective: prediction, target and what of it was hidden, (B, N) each, to a loss per image (B,)."""


class Comparison(NamedTuple):
    """Squared error and squared norm of the hidden part, and how many numbers it has; each (B,)."""

    error: Tensor
    energy: Tensor
    size: Tensor
    loss: Tensor | None = None
    """(B,) what is trained on, where it is not the squared error."""


def build_loss(config: ObjectiveConfig) -> Loss | None:
    """The registered objective that the settings name; None for the squared error."""
    return None if config.loss == "squared" else build("objective", config.loss, "objective.loss")


def _own(loss: Loss | None, predicted: Tensor, target: Tensor, hidden: Tensor | None = None) -> Tensor | None:
    """(B,) what a registered objective says; without `hidden`, nothing but what is hidden is compared."""
    if loss is None:
        return None
    predicted, target = predicted.flatten(1), target.flatten(1)
    hidden = torch.ones_like(target, dtype=torch.bool) if hidden is None else hidden.expand(target.shape)
    found = loss(predicted, target, hidden)
    require(found.shape == target.shape[:1], "objective.loss", f"of shape ({len(target)},)", tuple(found.shape))
    return found


def on_components(predicted_BK: Tensor, z_BK: Tensor, hidden_BK: Tensor, loss: Loss | None = None) -> Comparison:
    """Squared error on the hidden coefficients alone."""
    error = ((predicted_BK - z_BK).square() * hidden_BK).sum(1)
    energy, size = (z_BK.square() * hidden_BK).sum(1), hidden_BK.sum(1).expand(len(z_BK))
    return Comparison(error, energy, size, _own(loss, predicted_BK, z_BK, hidden_BK))


def on_pixels(predicted: Tensor, hidden_image: Tensor, loss: Loss | None = None) -> Comparison:
    """Squared error against the image of the hidden coefficients; (B, C, H, W) both."""
    error = (predicted - hidden_image).square().flatten(1).sum(1)
    size = error.new_full((len(error),), hidden_image[0].numel())
    return Comparison(error, hidden_image.square().flatten(1).sum(1), size, _own(loss, predicted, hidden_image))


def on_patches(predicted_BHP: Tensor, patches_BHP: Tensor, normalize: bool, loss: Loss | None = None) -> Comparison:
    """Squared error on the H hidden patches, against pixels that are standardized within each patch or raw."""
    if normalize:
        mean, variance = patches_BHP.mean(2, keepdim=True), patches_BHP.var(2, keepdim=True)
        patches_BHP = (patches_BHP - mean) / (variance + 1e-6).sqrt()
    error = (predicted_BHP - patches_BHP).square().sum((1, 2))
    size = error.new_full((len(error),), patches_BHP[0].numel())
    return Comparison(error, patches_BHP.square().sum((1, 2)), size, _own(loss, predicted_BHP, patches_BHP))


def scaled(
    comparison: Comparison, scale: Literal["constant", "sum", "mean", "hidden"], constant: Tensor | float
) -> Tensor:
    """The loss: the batch's mean error, or what a registered objective says, over a constant, over nothing, over
    the batch's count of hidden numbers, or over the hidden energy.

    The third is the released code's. With one mask per batch it explodes when a leading component is hidden alone,
    because the count is then 1 and the error that of the largest variance. The last is 1 - R2 of the batch: a space
    that learns cannot raise or lower it by hiding more or less energy.
    """
    loss = comparison.error if comparison.loss is None else comparison.loss
    if scale == "hidden":
        return loss.sum() / comparison.energy.sum()
    if scale == "mean":
        return loss.sum() / comparison.size.sum()
    return loss.mean() / (constant if scale == "constant" else 1.0)


def require_inverse(space: str, preimage_error: float | None) -> None:
    """Refuse pixels as target where the hidden image is known only up to the error of pre-images."""
    if preimage_error is not None:
        rule = "must have a space with an exact inverse, or space.keep_rest"
        told = f"space.name {space!r} has none, its pre-images have a relative error of {preimage_error:.4f}"
        raise UserError(f"objective.target 'pixels' {rule}; {told}; choices without the rest: components")
