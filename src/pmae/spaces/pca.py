"""Principal components: all of them, exact, from a streamed covariance, or the leading ones and the rest as one."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError, require
from pmae.spaces.base import ALONE, EIGH, QR, FitCost, Space, Together, cost_of_exact
from pmae.spaces.moments import (
    added,
    centred,
    covariance_of,
    mean_and_variance,
    principal_axes,
    refuse_beyond_memory,
    signs,
)

# The leading principal components where a covariance would be too large: subspace iteration, streamed.

OVERSAMPLE = 32
"""Directions beyond those wanted: the last wanted ones would otherwise converge slowly."""
PASSES = 4
"""Products with the covariance before the last one; each is a pass over the images."""


class Leading(NamedTuple):
    """Mean (D,), variances (K,) and axes (K, D) of the leading components, and the variance (D,) that is left."""

    mean: Tensor
    variance: Tensor
    axes: Tensor
    rest: Tensor


def leading_axes(batches: Iterable[Tensor], count: int, together: Together = ALONE) -> Leading:
    """The `count` leading principal components of images, in six passes over them and without a D x D matrix.

    Where variances lie close together the axes are a mixture of near neighbours; their variances and what they leave
    are those of the axes returned, whatever these are.
    """
    mean, pixels = mean_and_variance((batch.flatten(1) for batch in together.share(batches)), together.add_up)
    basis = _start(len(mean), count).to(mean.device)
    for _ in range(PASSES):
        basis = torch.linalg.qr(_covariance_times(basis, batches, mean, together)).Q
    image = _covariance_times(basis, batches, mean, together)
    variance, turn = principal_axes(basis.T @ image)
    variance, turn = variance[:count], turn[:count]
    axes, images = turn @ basis.T, turn @ image.T
    # Of x - A^T A x, where A C A^T is diagonal: the variance of each pixel, less twice what the axes share with it.
    rest = pixels - 2 * (axes * images).sum(0) + variance @ axes.square()
    return Leading(mean, variance, axes.mul_(signs(axes)), rest.clamp(min=0))


def cost_of_leading(images: int, size: int, count: int) -> FitCost:
    """At its peak the fit holds basis, product and the orthogonalization's copies, with float32 ones on a CPU."""
    wide = min(size, count + OVERSAMPLE)
    operations = (PASSES + 1) * 4 * images * size * wide + PASSES * QR * size * wide**2 + EIGH * wide**3
    return FitCost(6 * 8 * size * wide, operations)


def _start(size: int, count: int) -> Tensor:
    """A random orthonormal basis (D, count and some more), the same at every call."""
    draw = torch.randn(size, min(size, count + OVERSAMPLE), generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(draw.double()).Q


def _covariance_times(basis: Tensor, batches: Iterable[Tensor], mean: Tensor, together: Together) -> Tensor:
    """The covariance of the images times a basis (D, M), in one pass."""
    count, total = 0, torch.zeros_like(basis)
    for batch in together.share(batches):
        x = centred(batch.flatten(1), mean)
        total += x.T @ (x @ basis.to(x.dtype))
        count += len(x)
    count = added(count, total, together.add_up)
    if count < 2:
        raise UserError(f"data must be at least 2 images in every pass, got {count}: fit takes a list, not an iterator")
    return together.add_up(total) / (count - 1)


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


# Principal components of which the leading ones are recombined, linearly and invertibly, into others.

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
