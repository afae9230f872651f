"""Principal components: all, exact, from a streamed covariance; leading ones and the rest; or those of patches."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError, require
from pmae.spaces import moments
from pmae.spaces.base import FitCost, Space
from pmae.spaces.fixed import Orthonormal
from pmae.spaces.moments import ONE_PROCESS, DistributedFit

EXACT = 4096
"""Up to so many pixels leading components come from the covariance; above, iterating costs less than solving."""
OVERSAMPLE = 32  # directions beyond those wanted: the last wanted ones would otherwise converge slowly
PASSES = 4  # multiplications by the covariance before the last one; each is a pass over the images
EIGH, QR = 25, 35
"""Operations of torch.linalg.eigh per side cubed, and of torch.linalg.qr per row and side squared, both in float64, as
many as a float32 GEMM does in the time; measured on a CPU for sides of 512 to 2,048: 24 to 33, and 34."""
LARGEST_PATCH = 16


class Components(NamedTuple):
    """Mean (D,), variances (K,) and axes (K, D) of the leading components, and the variance (D,) that is left."""

    mean: Tensor
    variance: Tensor
    axes: Tensor
    rest: Tensor


def exact_components(batches: Iterable[Tensor], count: int, distributed: DistributedFit = ONE_PROCESS) -> Components:
    """The `count` leading principal components of images, in one pass, from the whole covariance."""
    flat = (batch.flatten(1) for batch in distributed.part(batches))
    mean, covariance, images = moments.covariance_of(flat, distributed)
    pixels = covariance.diagonal().clone()
    variance, axes = moments.principal_axes(covariance, rank=images - 1)
    if count == len(pixels):
        return Components(mean, variance, axes, torch.zeros_like(pixels))
    variance, axes = variance[:count], axes[:count]
    return Components(mean, variance, axes, (pixels - variance @ axes.square()).clamp(min=0))


def leading_components(batches: Iterable[Tensor], count: int, distributed: DistributedFit = ONE_PROCESS) -> Components:
    """The same by subspace iteration, in six passes over the images and without a D x D matrix."""
    mean, pixels = moments.mean_and_variance((batch.flatten(1) for batch in distributed.part(batches)), distributed)
    wide = min(len(mean), count + OVERSAMPLE)
    start = torch.randn(len(mean), wide, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start.double()).Q.to(mean.device)
    for _ in range(PASSES):
        basis = torch.linalg.qr(_covariance_times(basis, batches, mean, distributed)).Q
    image = _covariance_times(basis, batches, mean, distributed)
    variance, turn = moments.principal_axes(basis.T @ image)
    variance, turn = variance[:count], turn[:count]
    # Where variances lie close together these axes are a mixture of near neighbours; what follows is theirs.
    axes, images = turn @ basis.T, turn @ image.T
    # Of x - A^T A x, where A C A^T is diagonal: the variance of each pixel, less twice what the axes share with it.
    rest = pixels - 2 * (axes * images).sum(0) + variance @ axes.square()
    return Components(mean, variance, axes.mul_(moments.signs(axes)), rest.clamp(min=0))


def _covariance_times(basis: Tensor, batches: Iterable[Tensor], mean: Tensor, distributed: DistributedFit) -> Tensor:
    count, total = 0, torch.zeros_like(basis)
    for batch in distributed.part(batches):
        x = moments.centred(batch.flatten(1), mean)
        total += x.T @ (x @ basis.to(x.dtype))
        count += len(x)
    return distributed.all_reduce(total) / (distributed.total_images(count, total) - 1)


def cost_of_exact(images: int, size: int) -> FitCost:
    """The covariance, its eigenvectors and a workspace of twice that, all float64; half of x^T x, and its solution."""
    rank, solve = min(images, size), EIGH * size**3
    if moments.is_low(rank, size):
        solve = 8 * size**2 * rank + QR * size * rank**2 + EIGH * rank**3
    return FitCost(4 * 8 * size * size, images * size**2 + solve)


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


class PatchPCA(Orthonormal):
    """Principal components of patches: one small basis for all places of a large image.

    Coefficients are (component, place): grouped, a component is hidden over the whole image; else each alone.
    """

    components: Tensor
    """(C p p, C p p) one component of a patch a row, largest variance first."""
    tolerance = 1e-4
    way_out = "lower space.patch"

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        channels, height, width = shape
        self.patch = patch_side(height, width, self.config.patch)
        # Of a signal, which is one row, a patch is one row too.
        self.sides = (1 if height == 1 else self.patch, self.patch)
        numbers = channels * self.sides[0] * self.sides[1]
        self.places = self.size // numbers
        self.refuse_beyond_memory(f"patches of {numbers} numbers", cost_of_exact(0, numbers).bytes)
        self.register_buffer("components", torch.eye(numbers))
        if self.config.grouped:
            self.group_by(np.repeat(np.arange(numbers), self.places))

    def fit_cost(self, images: int) -> FitCost:
        return cost_of_exact(images * self.places, len(self.components))

    def learn(self, batches: Iterable[Tensor]) -> None:
        patches = (self.patches(x).movedim(1, 2).flatten(0, 1) for x in self.distributed.part(batches))
        self.components.copy_(moments.principal_axes(moments.covariance_of(patches, self.distributed)[1])[1])

    def forward_transform(self, x: Tensor) -> Tensor:
        return self.components @ self.patches(x)

    def inverse_transform(self, z: Tensor) -> Tensor:
        (channels, height, width), (rows, columns) = self.shape, self.sides
        patches = self.components.T @ z.unflatten(1, (len(self.components), -1))
        grid = (channels, rows, columns, height // rows, width // columns)
        return patches.reshape(-1, *grid).permute(0, 1, 4, 2, 5, 3).reshape(-1, *self.shape)

    def patches(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) as patches (B, C p p, places): `functional.unfold`, which takes images one by one."""
        (channels, height, width), (rows, columns) = self.shape, self.sides
        cut = x.reshape(-1, channels, height // rows, rows, width // columns, columns)
        return cut.permute(0, 1, 3, 5, 2, 4).reshape(len(x), len(self.components), -1)


def patch_side(height: int, width: int, wanted: int | None) -> int:
    """The side wanted, or the largest from 2 to 16, that divides both sides of the image, or a signal's length."""
    common = width if height == 1 else math.gcd(height, width)
    divisors = [side for side in range(1, common + 1) if common % side == 0]
    what = f"space.patch must divide both sides of {height}x{width} images"
    if wanted is None and not any(2 <= side <= LARGEST_PATCH for side in divisors):
        none = f"which have no common divisor from 2 to {LARGEST_PATCH}, got none; set space.patch or data.resize"
        raise UserError(f"{what}, {none}")
    if wanted is not None and wanted not in divisors:
        raise UserError(f"{what} ({', '.join(map(str, divisors))}), got {wanted}")
    return wanted or max(side for side in divisors if side <= LARGEST_PATCH)
