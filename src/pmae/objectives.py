"""What a prediction is compared with.

Each comparison returns the squared error and the energy of the hidden, per image: R2 = 1 - error / energy is the share
of hidden variance that is predicted; 0 is the score of predicting the mean.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from pmae.errors import UserError


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


def scaled(
    comparison: Comparison, scale: Literal["constant", "sum", "mean", "hidden"], constant: Tensor | float
) -> Tensor:
    """The loss: the batch's mean error over a constant, over nothing, over the batch's count of hidden numbers, or over
    the hidden energy.

    The third is the released code's. With one mask per batch it explodes when a leading component is hidden alone,
    because the count is then 1 and the error that of the largest variance. The last is 1 - R2 of the batch: a space
    that learns cannot raise or lower it by hiding more or less energy.
    """
    if scale == "hidden":
        return comparison.error.sum() / comparison.energy.sum()
    if scale == "mean":
        return comparison.error.sum() / comparison.size.sum()
    return comparison.error.mean() / (constant if scale == "constant" else 1.0)


def require_inverse(space: str, preimage_error: float | None) -> None:
    """Refuse pixels as target where the hidden image is known only up to the error of pre-images."""
    if preimage_error is not None:
        raise UserError(
            "objective.target 'pixels' must have a space with an exact inverse, or space.keep_rest; space.name "
            f"{space!r} has none, its pre-images have a relative error of {preimage_error:.4f}; "
            "choices without the rest: components"
        )
