"""Principal components of which the leading ones are recombined, linearly and invertibly, into others."""

from abc import abstractmethod

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import require
from pmae.spaces.base import Space
from pmae.spaces.pca import PCA

MOST = 128
"""How many leading components are recombined where the settings do not say."""
WHOLE = 16_384
"""Up to so many pixels the other components stay apart; above, they are the one rest that `pca` makes of them."""


class Recombined(Space):
    """`count` leading coefficients c of PCA become `analysis` c, and come back through `synthesis`; the others stay."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        size = shape[0] * shape[1] * shape[2]
        self.count = self.config.components or min(MOST, size)
        require(self.count <= size, "space.components", f"at most the number of pixels, {size}", self.count)
        self.pca = PCA(shape, SpaceConfig("pca", components=None if size <= WHOLE else self.count))
        self.groups, self.group_count, self.tolerance = self.pca.groups, self.pca.group_count, self.pca.tolerance

    @property
    @abstractmethod
    def analysis(self) -> Tensor:
        """(count, count): from leading principal coefficients to recombined ones."""

    @property
    @abstractmethod
    def synthesis(self) -> Tensor:
        """(count, count): the inverse of `analysis`."""

    def project(self, x: Tensor) -> Tensor:
        z = self.pca.project(x)
        return torch.cat([z[:, : self.count] @ self.analysis.T, z[:, self.count :]], 1)

    def reconstruct(self, z: Tensor) -> Tensor:
        leading = z[:, : self.count] @ self.synthesis.T
        return self.pca.reconstruct(torch.cat([leading, z[:, self.count :]], 1))
