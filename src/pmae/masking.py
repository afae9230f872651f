"""What to hide: a ratio, random patches, or components by share of variance, as functions of noise that was drawn."""

import random
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pmae.config import MaskingConfig


class Draw(NamedTuple):
    """The randomness of a mask: noise (B or 1, K or N), and the ratio, also as the number of visible patches."""

    noise: Tensor
    ratio: Tensor
    visible: int


class PatchMask(NamedTuple):
    """Positions of all patches (B, N), those that stay before those that are hidden, and how many stay."""

    order: Tensor
    visible: int

    @property
    def keep(self) -> Tensor:
        """Positions (B, V) of the patches that stay."""
        return self.order[:, : self.visible]

    @property
    def drop(self) -> Tensor:
        """Positions (B, N - V) of the hidden ones."""
        return self.order[:, self.visible :]

    @property
    def hidden(self) -> Tensor:
        """(B, N) booleans in the grid's order."""
        return torch.zeros_like(self.order, dtype=torch.bool).scatter(1, self.drop, True)


def nominal_ratio(config: MaskingConfig) -> float:
    """The ratio a run aims at: the fixed one, or the middle of the range."""
    if config.ratio_schedule == "uniform":
        return sum(config.ratio_range) / 2
    fixed = config.masked_patches if config.masked_patches is not None else config.masked_variance
    return 0.2 if fixed is None else fixed


def draw_ratio(config: MaskingConfig, stream: random.Random) -> float:
    """This batch's ratio. It is drawn on the host: the number of visible patches must be known there."""
    return stream.uniform(*config.ratio_range) if config.ratio_schedule == "uniform" else nominal_ratio(config)


def hide_components(
    noise_BK: Tensor, share_K: Tensor, ratio: Tensor | float, prefix: Literal["closest", "shorter"] = "closest"
) -> Tensor:
    """(B, K) booleans: components are taken in the noise's order until their share is closest to the ratio."""
    order = noise_BK.argsort(dim=1)
    distance = (share_K[order].cumsum(1) - ratio).abs()
    # "shorter" stops one component earlier, as the released code does. At least one is hidden and one visible.
    count = distance.argmin(1, keepdim=True) + (1 if prefix == "closest" else 0)
    count = count.clamp(1, share_K.shape[0] - 1)
    first = torch.arange(share_K.shape[0], device=noise_BK.device) < count
    return torch.zeros_like(first).scatter(1, order, first)


def hide_patches(noise_BN: Tensor, visible: int) -> PatchMask:
    """The `visible` patches of smallest noise stay."""
    return PatchMask(noise_BN.argsort(dim=1), visible)


def visible_patches(patches: int, ratio: float) -> int:
    """How many of the patches stay when a ratio of them is hidden: at least one, and one is hidden."""
    return min(max(int(patches * (1 - ratio)), 1), patches - 1)
