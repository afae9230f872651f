"""Principal components: all of them, exact, from a streamed covariance, or the leading ones and the rest as one."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import require
from pmae.spaces.base import Space
from pmae.spaces.cost import FitCost, cost_of_exact
from pmae.spaces.leading import Leading, cost_of_leading, leading_axes
from pmae.spaces.moments import covariance_of, principal_axes, refuse_beyond_memory
from pmae.spaces.together import Together

EXACT = 4096
"""Up to so many pixels leading components come from the covariance; above, iterating costs less than solving."""


class PCA(Space):
    """The orthonormal basis of eigenvectors of the data's covariance, largest variance first.

    `components` (K, D) has one eigenvector a row. The sign of each is fixed by making its largest entry positive.
    With `space.components` = K < D the coefficients are K and the D numbers of what the leading components leave of an
    image, which are hidden as one: so the map stays exact where a D x D basis does not fit.
    """

    mean: Tensor
    components: Tensor
    rounded: Tensor | None
    tolerance = 1e-4

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.size = shape[0] * shape[1] * shape[2]
        self.kept, self.all = self.config.components or self.size, self.config.components is None
        rule = f"below the number of pixels, {self.size}, or unset for all"
        require(self.all or self.kept < self.size, "space.components", rule, self.kept)
        self.exact = self.all or self.size <= EXACT
        way = "keep leading ones alone (space.components)" if self.all else "lower space.components"
        self.way_out = f"{way}, or use space.name patch_pca, cosine or wavelet, or smaller images (data.resize)"
        need = self.fit_cost(0).bytes
        refuse_beyond_memory(f"space 'pca': {self.kept} components of {self.size} pixels", need, self.way_out)
        self.register_buffer("mean", torch.zeros(self.size))
        self.register_buffer("components", torch.eye(self.kept, self.size))
        self.register_buffer("variance", torch.ones(self.size if self.all else self.kept + self.size))
        self.register_buffer("rounded", None, persistent=False)
        if not self.all:
            self.groups = torch.arange(self.kept + self.size).clamp(max=self.kept)
            self.group_count = self.kept + 1

    def fit_cost(self, images: int) -> FitCost:
        exact = cost_of_exact(images, self.size)
        return exact if self.exact else cost_of_leading(images, self.size, self.kept)

    def fit(self, batches: Iterable[Tensor]) -> None:
        found = (_exact_axes if self.exact else leading_axes)(batches, self.kept, self.together)
        self.mean.copy_(found.mean)
        self.components.copy_(found.axes)
        self.variance.copy_(found.variance if self.all else torch.cat([found.variance, found.rest]))

    def allow_rounding(self) -> None:
        self.rounded = self.components.bfloat16() if self.all else None

    def rough_project(self, x: Tensor) -> Tensor:
        if self.rounded is None:
            return self.project(x)
        return ((x.flatten(1) - self.mean).bfloat16() @ self.rounded.T).float()

    def rough_reconstruct(self, z: Tensor) -> Tensor:
        if self.rounded is None:
            return self.reconstruct(z)
        return ((z.bfloat16() @ self.rounded).float() + self.mean).unflatten(1, self.shape)

    def project(self, x: Tensor) -> Tensor:
        centred = x.flatten(1) - self.mean
        z = centred @ self.components.T
        return z if self.all else torch.cat([z, centred - z @ self.components], 1)

    def reconstruct(self, z: Tensor) -> Tensor:
        x = z[:, : self.kept] @ self.components + self.mean
        return (x if self.all else x + z[:, self.kept :]).unflatten(1, self.shape)


def _exact_axes(batches: Iterable[Tensor], count: int, together: Together) -> Leading:
    """The same as `leading_axes`, in one pass, from the whole covariance."""
    mean, covariance = covariance_of((batch.flatten(1) for batch in together.share(batches)), together.add_up)
    pixels = covariance.diagonal().clone()
    variance, axes = principal_axes(covariance)
    if count == len(pixels):
        return Leading(mean, variance, axes, torch.zeros_like(pixels))
    variance, axes = variance[:count], axes[:count]
    return Leading(mean, variance, axes, (pixels - variance @ axes.square()).clamp(min=0))
