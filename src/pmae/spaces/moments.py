"""Means, variances and covariances of batches in one pass with float64 sums, and the eigenvectors of a covariance."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmae.errors import require

BLOCK = 1024
SEED = 0
"""Of samples: a space is a function of the images and its settings, so runs that differ in their seed share it."""
ENOUGH = "at least 2 images in every pass: fit takes a list, not an iterator"


class DistributedFit(NamedTuple):
    """Several processes that fit one space: each passes over its part of the images, and their sums are added up."""

    part: Callable[[Iterable[Tensor]], Iterable[Tensor]]
    """This process's part of the batches, at least one."""
    all_reduce: Callable[[Tensor], Tensor]
    """A tensor to its sum over all processes, which call it in the same order."""

    def total_images(self, images: int, like: Tensor) -> int:
        """The images of a pass over all processes, at least 2; `like` says on which device they communicate."""
        total = int(self.all_reduce(like.new_tensor(images, dtype=torch.float64)))
        require(total >= 2, "data", ENOUGH, total)
        return total


ONE_PROCESS = DistributedFit(lambda batches: batches, lambda tensor: tensor)


def mean_and_variance(batches: Iterable[Tensor], distributed: DistributedFit = ONE_PROCESS) -> tuple[Tensor, Tensor]:
    """Mean (K,) and variance (K,) over N - 1 of this process's batches (B, K) and those of the others, float64."""
    count, shift, total, squares = _sums(batches, distributed, products=False)
    variance = (squares - total.square() / count) / (count - 1)
    return shift + total / count, variance.clamp(min=0)


def covariance_of(batches: Iterable[Tensor], distributed: DistributedFit = ONE_PROCESS) -> tuple[Tensor, Tensor, int]:
    """Mean (D,), the lower triangle of the covariance (D, D) over N - 1 of batches (B, D), as above, float64, and N."""
    count, shift, total, products = _sums(batches, distributed, products=True)
    mean = total / count
    return shift + mean, products.addr_(mean, mean, alpha=-count).div_(count - 1), count


def _sums(batches: Iterable[Tensor], distributed: DistributedFit, products: bool) -> tuple[int, Tensor, Tensor, Tensor]:
    """Over all processes: images, the shift (D,), and sums about it of images and of their squares (D,) or products."""
    stream = iter(batches)
    first = next(stream, torch.empty(0))
    require(len(first) > 0, "data", ENOUGH, 0)
    # The mean of the processes' first batches: a large common offset would otherwise cancel digits.
    weight = distributed.all_reduce(first.new_tensor(len(first), dtype=torch.float64))
    shift = distributed.all_reduce(first.mean(0).double() * len(first)) / weight
    count, total, size = 0, torch.zeros_like(shift), len(shift)
    second = shift.new_zeros(size, size) if products else torch.zeros_like(shift)
    for batch in chain([first], stream):
        x = centred(batch, shift)
        count += len(x)
        total += x.sum(0, dtype=torch.float64)
        if not products:
            second += x.square().sum(0, dtype=torch.float64)
            continue
        # In the lower triangle alone: little over half the work.
        for start in range(0, size, BLOCK):
            second[start:, start : start + BLOCK].add_(x[:, start:].T @ x[:, start : start + BLOCK])
    return distributed.total_images(count, shift), shift, distributed.all_reduce(total), distributed.all_reduce(second)


def sample(batches: Iterable[Tensor], size: int) -> Tensor:
    """(S, D) of batches (B, D): the rows whose random keys are the smallest, in the order of their keys."""
    # NumPy's stream of keys does not depend on how many are asked for at a time, so neither does the sample.
    rng, count, keys, pool = np.random.default_rng(SEED), 0, np.empty(0), torch.empty(0)
    for rows in batches:
        keys = np.concatenate([keys, rng.random(len(rows))])
        order = keys.argsort()[:size]
        pool = torch.cat([pool, rows])[torch.from_numpy(order).to(rows.device)] if count else rows[order]
        keys = keys[order]
        count += len(rows)
    require(count >= 2, "data", ENOUGH, count)
    return pool


def centred(batch: Tensor, shift: Tensor) -> Tensor:
    """The batch about `shift`. A CPU multiplies float32 batches in float32, sums stay float64: twice as fast as float64
    and within 2e-7 of it, as the shift keeps numbers small. A GPU may round float32 to TF32, so not there.
    """
    keep = batch.device.type == "cpu" and batch.dtype == torch.float32
    return batch - shift.to(torch.float32) if keep else batch.double() - shift


def is_low(rank: int, size: int) -> bool:
    """Whether a covariance of this rank is solved in a subspace: five times as fast at a tenth, hardly at a quarter."""
    return 4 * rank < size


def principal_axes(covariance: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Variances (D,), largest first, and axes (D, D), a row each, largest entry positive, of a lower triangle.

    A `rank` that is known, as that of a few images' covariance, saves most of the work.
    """
    if rank is not None and is_low(rank, len(covariance)):
        return _axes_of_low_rank(covariance, rank)
    try:
        values, vectors = torch.linalg.eigh(covariance)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Seen on CUDA for covariances with many equal eigenvalues, such as images with constant borders.
        values, vectors = (part.to(covariance.device) for part in torch.linalg.eigh(covariance.cpu()))
    axes = vectors.flip(1).T
    return values.flip(0).clamp(min=0), axes * signs(axes)


def _axes_of_low_rank(covariance: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The same from the subspace of all that varies; whatever axes are orthogonal to it have no variance."""
    whole = covariance.tril() + covariance.tril(-1).T
    start = torch.randn(len(whole), rank, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    basis = torch.linalg.qr(whole @ start.to(whole)).Q
    values, turn = torch.linalg.eigh(basis.T @ whole @ basis)
    varying = basis @ turn.flip(1)
    still = torch.linalg.qr(varying, mode="complete").Q[:, rank:]
    axes = torch.cat([varying, still], 1).T
    return torch.cat([values.flip(0).clamp(min=0), values.new_zeros(len(whole) - rank)]), axes * signs(axes)


def signs(axes: Tensor) -> Tensor:
    """(K, 1) of +-1 that make the entry of largest magnitude in each row positive."""
    largest = axes.abs().argmax(1, keepdim=True)
    return torch.where(axes.gather(1, largest) < 0, -1.0, 1.0)
