"""The contract of a masking space: an invertible map between standardized images and K coefficients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmae.config import SpaceConfig

# What the fit of a space takes, known before it starts.

EIGH, QR = 25, 35
"""Operations of torch.linalg.eigh per side cubed, and of torch.linalg.qr per row and side squared, both in float64, as
many as a float32 product does in the time; measured on a CPU for sides of 512 to 2,048: 24 to 33, and 34."""


class FitCost(NamedTuple):
    """Bytes that a fit holds at its peak beside the batch, and operations that it does, in those of large products."""

    bytes: int
    operations: int


def cost_of_exact(images: int, size: int) -> FitCost:
    """Half of the products of all pixels with all, summed over the images, and the axes of their covariance."""
    return FitCost(bytes_of_exact(size), images * size**2 + EIGH * size**3)


def bytes_of_exact(size: int) -> int:
    """What an exact fit holds: the covariance, its eigenvectors and a workspace of twice that, all float64."""
    return 4 * 8 * size * size


# Several processes that fit one space: each passes over its share of the images, and their sums are added up.

AddUp = Callable[[Tensor], Tensor]
"""A tensor to its sum over all processes, which call it in the same order."""


def unchanged(tensor: Tensor) -> Tensor:
    """The sum over one process."""
    return tensor


class Together(NamedTuple):
    """The part of the batches that is this process's, at least one, and the sum of a tensor over all processes."""

    share: Callable[[Iterable[Tensor]], Iterable[Tensor]]
    add_up: AddUp


ALONE = Together(lambda batches: batches, unchanged)


class Space(nn.Module, ABC):
    """Images (B, C, H, W) to coefficients (B, K) and back, with the variance that each coefficient carries.

    Whatever `fit` learns lives in buffers, so a space is saved with its state dict, moves with `.to(device)`, and works
    under gradients and `torch.compile`.
    """

    variance: Tensor
    """(K,) variance of each coefficient over the training images."""
    tolerance: float
    """Largest relative error of `reconstruct(project(x))` that counts as exact; infinite where no inverse exists."""
    groups: Tensor | None
    """(K,) which group each coefficient belongs to, 0 to G - 1, where whole groups are hidden; None: each alone."""
    has_bands: bool = False
    """Whether `space.grouped` has a meaning here."""
    group_count: int = 0
    """G, the number of groups, where there are any."""
    keeps_rest: bool = False
    """Whether the part of an image that the coefficients cannot express stays visible: it makes any space exact."""
    learns: bool = False
    """Whether the space has parameters that train with the model; they are saved with every checkpoint."""
    way_out: str = "use smaller images (data.resize)"
    """What to do where the fit does not fit in memory."""
    together: Together = ALONE
    """The processes among which `fit` may divide its work; a space that ignores them does all of it in each."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__()
        self.shape, self.config = shape, config or SpaceConfig()
        # Follows from the settings, so it moves with the space but is not saved.
        self.register_buffer("groups", None, persistent=False)

    @abstractmethod
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Learn from batches of standardized images, in memory bounded by a batch and the basis.

        A space that needs several passes iterates several times, so an iterator that is spent after one will not do.
        """

    def fit_together(self, batches: Iterable[Tensor], together: Together) -> None:
        """Fit in several processes at once, all with the same batches; what they find is the same in each."""
        parts = [part for part in self.modules() if isinstance(part, Space)]
        for part in parts:
            part.together = together
        try:
            self.fit(batches)
        finally:
            for part in parts:
                part.together = ALONE

    def fit_cost(self, images: int) -> FitCost:
        """What `fit` will take for so many images, as far as it is more than a few passes over them."""
        return FitCost(0, 0)

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """Coefficients (B, K) of images (B, C, H, W)."""

    @abstractmethod
    def reconstruct(self, z: Tensor) -> Tensor:
        """Images (B, C, H, W) of coefficients (B, K)."""

    def rough_project(self, x: Tensor) -> Tensor:
        """`project` of what is rounded to bfloat16 anyway, such as a prediction; see `allow_rounding`."""
        return self.project(x)

    def rough_reconstruct(self, z: Tensor) -> Tensor:
        """`reconstruct` for a network that rounds its input to bfloat16 anyway; see `allow_rounding`."""
        return self.reconstruct(z)

    def allow_rounding(self) -> None:
        """Let the two above multiply in bfloat16; a space without large products has nothing to gain and ignores it."""

    def measured(self) -> dict[str, float]:
        """What the fit found out about itself that belongs into a run's results, by name."""
        return {}

    @property
    def share(self) -> Tensor:
        """(K,) fraction of the total variance that each coefficient carries."""
        variance = self.variance
        return variance / variance.sum()

    @property
    def units(self) -> int:
        """How many things can be hidden: coefficients, or groups of them."""
        return int(self.variance.shape[0]) if self.groups is None else self.group_count

    @property
    def unit_share(self) -> Tensor:
        """(units,) share of the variance of what is hidden as one."""
        return self.by_unit(self.share)

    @property
    def before(self) -> Tensor:
        """(units,) share of the variance in larger units: where each begins in a spectrum that is sorted."""
        share = self.unit_share
        order = share.argsort(descending=True, stable=True)
        return torch.zeros_like(share).scatter(0, order, share[order].cumsum(0) - share[order])

    def by_unit(self, values: Tensor) -> Tensor:
        """Numbers (..., K) summed over what is hidden as one, (..., units)."""
        if self.groups is None:
            return values
        # In float64, so that the order in which a GPU adds does not show: masks depend on every bit of these sums.
        sums = values.new_zeros(*values.shape[:-1], self.units, dtype=torch.float64)
        return sums.index_add(-1, self.groups, values.double()).to(values.dtype)

    def spread(self, hidden: Tensor) -> Tensor:
        """Booleans (B, units) as booleans (B, K)."""
        return hidden if self.groups is None else hidden[:, self.groups]
