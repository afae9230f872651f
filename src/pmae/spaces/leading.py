"""The leading principal components where a covariance would be too large: subspace iteration, streamed."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pmae.errors import UserError
from pmae.spaces.cost import EIGH, QR, FitCost
from pmae.spaces.moments import added, centred, mean_and_variance, principal_axes, signs
from pmae.spaces.together import ALONE, Together

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
