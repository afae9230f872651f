"""The contract of a masking space: an invertible map between standardized images and K coefficients."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces.moments import ONE_PROCESS, DistributedFit
from pmae.system import lacks_float64

LIMIT = 64 * 2**30  # bytes beyond which a fit is refused whatever the machine has


class FitCost(NamedTuple):
    """Peak bytes of a fit beside the batch, and its operations, counted as float32 matrix multiplications do them."""

    bytes: int
    operations: int


class Space(nn.Module, ABC):
    """Images (B, C, H, W) to coefficients (B, K) and back, with the variance that each coefficient carries.

    Whatever `fit` learns lives in buffers, so a space is saved with its state dict, moves with `.to(device)`, and works
    under gradients and `torch.compile`. A mask group is what a mask hides as one: a coefficient, or several of them.
    """

    variance: Tensor
    """(K,) variance of each coefficient over the training images."""
    tolerance: float
    """Largest relative error of `reconstruct(project(x))` that counts as exact; infinite where no inverse exists."""
    mask_groups: Tensor | None
    """(K,) the mask group of each coefficient, 0 to G - 1; None where each coefficient is a group of its own."""
    has_bands: bool = False
    """Whether `space.grouped` has a meaning here."""
    keeps_rest: bool = False
    """Whether the part of an image that the coefficients cannot express stays visible: it makes any space exact."""
    learns: bool = False
    """Whether the space has parameters that train with the model; they are saved with every checkpoint."""
    way_out: str = "use smaller images (data.resize)"
    """What to do where the fit does not fit in memory."""
    distributed: DistributedFit = ONE_PROCESS
    """The processes among which `fit` may divide its work; a space that ignores them does all of it in each."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__()
        self.shape, self.config = shape, config or SpaceConfig()
        self.size = shape[0] * shape[1] * shape[2]
        # Follows from the settings, so it moves with the space but is not saved.
        self.register_buffer("mask_groups", None, persistent=False)
        self._groups = 0

    def set_mask_groups(self, groups: Tensor, count: int) -> None:
        """Hide as one the coefficients with the same number (K,) out of 0 to `count` - 1."""
        self.mask_groups, self._groups = groups, count

    @abstractmethod
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Learn from a list of batches of standardized images, in memory bounded by a batch and the basis."""

    def fit_distributed(self, batches: Iterable[Tensor], distributed: DistributedFit) -> None:
        """Fit in several processes at once, all with the same batches; what they find is the same in each."""
        parts = [part for part in self.modules() if isinstance(part, Space)]
        for part in parts:
            part.distributed = distributed
        try:
            self.fit(batches)
        finally:
            for part in parts:
                part.distributed = ONE_PROCESS

    def fit_cost(self, images: int) -> FitCost:
        """What `fit` will take for so many images, as far as it is more than a few passes over them."""
        return FitCost(0, 0)

    def refuse_beyond_memory(self, what: str, need: int) -> None:
        """Stop before a fit that would need too many bytes, and name them and a way out."""
        if need > LIMIT:
            told = f"space {self.config.name!r}: {what} need {need:,} bytes for the fit, more than {LIMIT:,}"
            raise UserError(f"{told}; {self.way_out}")

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """Coefficients (B, K) of images (B, C, H, W)."""

    @abstractmethod
    def reconstruct(self, z: Tensor) -> Tensor:
        """Images (B, C, H, W) of coefficients (B, K)."""

    def project_bf16(self, x: Tensor) -> Tensor:
        """`project` of what is rounded to bfloat16 anyway, such as a prediction; see `allow_bf16`."""
        return self.project(x)

    def reconstruct_bf16(self, z: Tensor) -> Tensor:
        """`reconstruct` for a network that rounds its input to bfloat16 anyway; see `allow_bf16`."""
        return self.reconstruct(z)

    def hide(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients (B, K) of images, and the images without those that are hidden, booleans (B, K)."""
        z = self.project(x)
        visible = self.reconstruct_bf16(z.masked_fill(hidden, 0.0))
        return z, visible + x - self.reconstruct(z) if self.keeps_rest else visible

    def allow_bf16(self) -> None:
        """Let the two above multiply in bfloat16; a space without large matrices gains nothing and ignores it."""

    def measured(self) -> dict[str, float]:
        """What the fit found out about itself that belongs into a run's results, by name."""
        return {}

    @property
    def variance_share(self) -> Tensor:
        """(K,) fraction of the total variance that each coefficient carries."""
        variance = self.variance  # once: a learned basis computes it
        return variance / variance.sum()

    @property
    def mask_group_count(self) -> int:
        """G, the number of mask groups; K where each coefficient is one."""
        return int(self.variance.shape[0]) if self.mask_groups is None else self._groups

    @property
    def mask_group_share(self) -> Tensor:
        """(G,) share of the variance of each mask group."""
        return self.sum_by_mask_group(self.variance_share)

    def band(self, low: float, high: float) -> Tensor:
        """(G,) which mask groups begin between two shares of the cumulated variance, the largest first.

        A band up to 1 holds all the rest, those without any variance too.
        """
        share = self.mask_group_share
        order = share.argsort(descending=True, stable=True)
        before = torch.zeros_like(share).scatter(0, order, share[order].cumsum(0) - share[order])
        return (before >= low) & ((before < high) | (high >= 1))

    def sum_by_mask_group(self, values: Tensor) -> Tensor:
        """Numbers (..., K) summed over each mask group, (..., G)."""
        if self.mask_groups is None:
            return values
        # In float64, so that the order in which a GPU adds does not show: masks depend on every bit of these sums.
        wide = values.dtype if lacks_float64(values.device) else torch.float64
        sums = values.new_zeros(*values.shape[:-1], self.mask_group_count, dtype=wide)
        return sums.index_add(-1, self.mask_groups, values.to(wide)).to(values.dtype)

    def expand_mask(self, hidden: Tensor) -> Tensor:
        """Booleans of mask groups (B, G) as booleans of coefficients (B, K)."""
        return hidden if self.mask_groups is None else hidden[:, self.mask_groups]
