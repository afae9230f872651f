"""The contract of a masking space: an invertible map between standardized images and K coefficients."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pmae.config import SpaceConfig


class Space(nn.Module, ABC):
    """Images (B, C, H, W) to coefficients (B, K) and back, with the variance that each coefficient carries.

    Whatever `fit` learns lives in buffers, so a space is saved with its state dict, moves with `.to(device)`, and works
    under gradients and `torch.compile`.
    """

    variance: Tensor
    """(K,) variance of each coefficient over the training images."""
    tolerance: float
    """Largest relative error of `reconstruct(project(x))` that counts as exact; infinite where no inverse exists."""
    groups: Tensor | None = None
    """(K,) which group each coefficient belongs to, 0 to G - 1, where whole groups are hidden; None: each alone."""
    group_count: int = 0
    """G, the number of groups, where there are any."""
    keeps_rest: bool = False
    """Whether the part of an image that the coefficients cannot express stays visible: it makes any space exact."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__()
        self.shape, self.config = shape, config or SpaceConfig()

    @abstractmethod
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Learn from one pass over batches of standardized images, in memory bounded by a batch and the basis."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """Coefficients (B, K) of images (B, C, H, W)."""

    @abstractmethod
    def reconstruct(self, z: Tensor) -> Tensor:
        """Images (B, C, H, W) of coefficients (B, K)."""

    @property
    def share(self) -> Tensor:
        """(K,) fraction of the total variance that each coefficient carries."""
        return self.variance / self.variance.sum()

    @property
    def units(self) -> int:
        """How many things can be hidden: coefficients, or groups of them."""
        return int(self.variance.shape[0]) if self.groups is None else self.group_count

    @property
    def unit_share(self) -> Tensor:
        """(units,) share of the variance of what is hidden as one."""
        if self.groups is None:
            return self.share
        return torch.zeros(self.units, device=self.share.device).index_add(0, self.groups, self.share)

    def spread(self, hidden: Tensor) -> Tensor:
        """Booleans (B, units) as booleans (B, K)."""
        return hidden if self.groups is None else hidden[:, self.groups]
