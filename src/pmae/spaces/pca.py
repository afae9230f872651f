"""Principal components: all of them, exact, from a streamed covariance, or leading ones and the rest as one group."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import require
from pmae.spaces import moments
from pmae.spaces.base import FitCost, Space
from pmae.spaces.moments import ONE_PROCESS, DistributedFit

EXACT = 4096
"""Up to so many pixels leading components come from the covariance; above, iterating costs less than solving."""
OVERSAMPLE = 32
"""Directions beyond those wanted: the last wanted ones would otherwise converge slowly."""
PASSES = 4
"""Multiplications by the covariance before the last one; each is a pass over the images."""
EIGH, QR = 25, 35
"""Operations of torch.linalg.eigh per side cubed, and of torch.linalg.qr per row and side squared, both in float64, as
many as a float32 GEMM does in the time; measured on a CPU for sides of 512 to 2,048: 24 to 33, and 34."""
MOST = 128
"""How many leading components are recombined where the settings do not say."""
WHOLE = 16_384
"""Up to so many pixels the components that are not recombined stay apart; above, they are one mask group, the rest."""


class Components(NamedTuple):
    """Mean (D,), variances (K,) and axes (K, D) of the leading components, and the variance (D,) that is left."""

    mean: Tensor
    variance: Tensor
    axes: Tensor
    rest: Tensor


def exact_components(batches: Iterable[Tensor], count: int, distributed: DistributedFit = ONE_PROCESS) -> Components:
    """The `count` leading principal components of images, in one pass, from the whole covariance."""
    mean, covariance = moments.covariance_of((batch.flatten(1) for batch in distributed.part(batches)), distributed)
    pixels = covariance.diagonal().clone()
    variance, axes = moments.principal_axes(covariance)
    if count == len(pixels):
        return Components(mean, variance, axes, torch.zeros_like(pixels))
    variance, axes = variance[:count], axes[:count]
    return Components(mean, variance, axes, (pixels - variance @ axes.square()).clamp(min=0))


def leading_components(batches: Iterable[Tensor], count: int, distributed: DistributedFit = ONE_PROCESS) -> Components:
    """The same by subspace iteration, in six passes over the images and without a D x D matrix.

    Where variances lie close together the axes are a mixture of near neighbours; their variances and what they leave
    are those of the axes returned, whatever these are.
    """
    mean, pixels = moments.mean_and_variance((batch.flatten(1) for batch in distributed.part(batches)), distributed)
    wide = min(len(mean), count + OVERSAMPLE)
    start = torch.randn(len(mean), wide, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start.double()).Q.to(mean.device)
    for _ in range(PASSES):
        basis = torch.linalg.qr(_covariance_times(basis, batches, mean, distributed)).Q
    image = _covariance_times(basis, batches, mean, distributed)
    variance, turn = moments.principal_axes(basis.T @ image)
    variance, turn = variance[:count], turn[:count]
    axes, images = turn @ basis.T, turn @ image.T
    # Of x - A^T A x, where A C A^T is diagonal: the variance of each pixel, less twice what the axes share with it.
    rest = pixels - 2 * (axes * images).sum(0) + variance @ axes.square()
    return Components(mean, variance, axes.mul_(moments.signs(axes)), rest.clamp(min=0))


def _covariance_times(basis: Tensor, batches: Iterable[Tensor], mean: Tensor, distributed: DistributedFit) -> Tensor:
    """The covariance of the images times a basis (D, M), in one pass."""
    count, total = 0, torch.zeros_like(basis)
    for batch in distributed.part(batches):
        x = moments.centred(batch.flatten(1), mean)
        total += x.T @ (x @ basis.to(x.dtype))
        count += len(x)
    return distributed.all_reduce(total) / (distributed.total_images(count, total) - 1)


def cost_of_exact(images: int, size: int) -> FitCost:
    """The covariance, its eigenvectors and a workspace of twice that, all float64; half of x^T x, and `eigh`."""
    return FitCost(4 * 8 * size * size, images * size**2 + EIGH * size**3)


def cost_of_leading(images: int, size: int, count: int) -> FitCost:
    """At its peak the fit holds basis, product and the orthogonalization's copies, with float32 ones on a CPU."""
    wide = min(size, count + OVERSAMPLE)
    operations = (PASSES + 1) * 4 * images * size * wide + PASSES * QR * size * wide**2 + EIGH * wide**3
    return FitCost(6 * 8 * size * wide, operations)


class PCA(Space):
    """The orthonormal basis of eigenvectors of the data's covariance, largest variance first.

    `components` (K, D) has one eigenvector a row. The sign of each is fixed by making its largest entry positive.
    With `space.components` = K < D the coefficients are K and the D numbers of what the leading components leave of an
    image, which are one mask group: so the map stays exact where a D x D basis does not fit.
    """

    mean: Tensor
    components: Tensor
    components_bf16: Tensor | None
    tolerance = 1e-4

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.kept = self.config.components or self.size
        self.all = self.kept == self.size
        require(self.kept <= self.size, "space.components", f"at most the number of pixels, {self.size}", self.kept)
        self.exact = self.all or self.size <= EXACT
        way = "keep leading ones alone (space.components)" if self.all else "lower space.components"
        self.way_out = f"{way}, or use space.name patch_pca, cosine or wavelet, or smaller images (data.resize)"
        self.refuse_beyond_memory(f"{self.kept} components of {self.size} pixels", self.fit_cost(0).bytes)
        self.register_buffer("mean", torch.zeros(self.size))
        self.register_buffer("components", torch.eye(self.kept, self.size))
        self.register_buffer("variance", torch.ones(self.size if self.all else self.kept + self.size))
        self.register_buffer("components_bf16", None, persistent=False)
        if not self.all:
            self.set_mask_groups(torch.arange(self.kept + self.size).clamp(max=self.kept), self.kept + 1)

    def fit_cost(self, images: int) -> FitCost:
        exact = cost_of_exact(images, self.size)
        return exact if self.exact else cost_of_leading(images, self.size, self.kept)

    def fit(self, batches: Iterable[Tensor]) -> None:
        find = exact_components if self.exact else leading_components
        found = find(batches, self.kept, self.distributed)
        self.mean.copy_(found.mean)
        self.components.copy_(found.axes)
        self.variance.copy_(found.variance if self.all else torch.cat([found.variance, found.rest]))

    def project(self, x: Tensor) -> Tensor:
        centred = x.flatten(1) - self.mean
        z = centred @ self.components.T
        return z if self.all else torch.cat([z, centred - z @ self.components], 1)

    def reconstruct(self, z: Tensor) -> Tensor:
        x = z[:, : self.kept] @ self.components + self.mean
        return (x if self.all else x + z[:, self.kept :]).unflatten(1, self.shape)

    def allow_bf16(self) -> None:
        self.components_bf16 = self.components.bfloat16() if self.all else None

    def project_bf16(self, x: Tensor) -> Tensor:
        if self.components_bf16 is None:
            return self.project(x)
        return ((x.flatten(1) - self.mean).bfloat16() @ self.components_bf16.T).float()

    def reconstruct_bf16(self, z: Tensor) -> Tensor:
        if self.components_bf16 is None:
            return self.reconstruct(z)
        return ((z.bfloat16() @ self.components_bf16).float() + self.mean).unflatten(1, self.shape)


class Recombined(Space):
    """The `count` leading coefficients of PCA multiplied by an invertible matrix; the others stay as they are."""

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        self.count = self.config.components or min(MOST, self.size)
        require(self.count <= self.size, "space.components", f"at most the number of pixels, {self.size}", self.count)
        self.pca = PCA(shape, SpaceConfig("pca", components=None if self.size <= WHOLE else self.count))
        self.tolerance = self.pca.tolerance
        if self.pca.mask_groups is not None:
            self.set_mask_groups(self.pca.mask_groups, self.pca.mask_group_count)

    @abstractmethod
    def recombination(self) -> tuple[Tensor, Tensor]:
        """(count, count) from leading principal coefficients to recombined ones, and its inverse."""

    def project(self, x: Tensor) -> Tensor:
        z = self.pca.project(x)
        return torch.cat([z[:, : self.count] @ self.recombination()[0].T, z[:, self.count :]], 1)

    def reconstruct(self, z: Tensor) -> Tensor:
        leading = z[:, : self.count] @ self.recombination()[1].T
        return self.pca.reconstruct(torch.cat([leading, z[:, self.count :]], 1))
