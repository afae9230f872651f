"""One image taken apart: what a mask hides, what a model makes of it, what a band of the spectrum shows.

Shapes: images (1, C, H, W), standardized; a space hides `units`, which are coefficients or groups of them.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pmae import masking
from pmae.masking import Draw
from pmae.method import MaskedAutoencoder
from pmae.spaces import Pixels, Space
from pmae.train.monitor import visualize


class Masked(NamedTuple):
    """Which units are hidden (units,), and the image as the sum of what stays and what is hidden."""

    units: Tensor
    visible: Tensor
    hidden: Tensor


class Band(NamedTuple):
    """Which units lie in a band (units,), the image that they make alone, and the one that the others make."""

    units: Tensor
    alone: Tensor
    others: Tensor


def draw_for(space: Space, share: float, seed: int) -> Draw:
    """The randomness of one mask, in the form that the method takes."""
    noise = torch.rand(1, space.mask_group_count, generator=torch.Generator().manual_seed(seed))
    return Draw(noise, torch.tensor(share), masking.visible_patches(space.mask_group_count, share))


@torch.no_grad()
def hide(space: Space, x: Tensor, draw: Draw, prefix: Literal["closest", "shorter"] = "closest") -> Masked:
    """Hide a share of the patches in pixel space, and of the variance in any other."""
    if isinstance(space, Pixels):
        units = masking.hide_patches(draw.noise, draw.visible).hidden
    else:
        units = masking.hide_components(draw.noise, space.mask_group_share, draw.ratio, prefix)
    visible, hidden = _apart(space, x, units)
    return Masked(units[0], visible, hidden)


@torch.no_grad()
def predict(model: MaskedAutoencoder, x: Tensor, draw: Draw) -> tuple[Tensor, float]:
    """The model's picture of the hidden part, and the share of its energy that is right, as training counts it."""
    outcome = model(x, draw)
    r2 = 1 - outcome.error / outcome.energy.clamp(min=1e-12)
    return visualize(model, x, draw).prediction, float(r2)


@torch.no_grad()
def band(space: Space, x: Tensor, low: float, high: float) -> Band:
    """The units that begin between two shares of the cumulated variance, largest first; up to 1 means all the rest."""
    before = space.share_before
    units = (before >= low) & ((before < high) | (high >= 1))
    others, alone = _apart(space, x, units[None])
    return Band(units, alone, others)


@torch.no_grad()
def basis_images(space: Space, units: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ranks in the spectrum (0 is the largest) of some of these units, evenly from first to last, and their images.

    Every coefficient of a unit is at one standard deviation; the images are differences from the mean image.
    """
    order = space.mask_group_share.argsort(descending=True, stable=True)
    inside = units[order].nonzero()[:, 0]
    ranks = inside[torch.linspace(0, len(inside) - 1, min(count, len(inside))).round().long()]
    chosen = torch.zeros(len(ranks), space.mask_group_count, dtype=torch.bool)
    chosen[torch.arange(len(ranks)), order[ranks]] = True
    z = space.expand_mask(chosen) * space.variance.sqrt()
    return ranks, space.reconstruct(z) - space.reconstruct(torch.zeros_like(z[:1]))


def _apart(space: Space, x: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """The image of the coefficients outside some units (1, units), and what those inside add to it."""
    z = space.project(x)
    whole, outside = space.reconstruct(z), space.reconstruct(z.masked_fill(space.expand_mask(units), 0.0))
    # What such a space cannot express stays with the visible part, as in training.
    return (outside + x - whole if space.keeps_rest else outside), whole - outside
