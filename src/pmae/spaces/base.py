"""The contract of a masking space: an invertible map between standardized images and K coefficients."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor, nn


class Space(nn.Module, ABC):
    """Images (B, C, H, W) to coefficients (B, K) and back, with the variance that each coefficient carries.

    Whatever `fit` learns lives in buffers, so a space is saved with its state dict, moves with `.to(device)`, and works
    under gradients and `torch.compile`.
    """

    variance: Tensor
    """(K,) variance of each coefficient over the training images."""
    tolerance: float
    """Largest relative error of `reconstruct(project(x))` that counts as exact."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape

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
