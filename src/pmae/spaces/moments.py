"""Means, variances and covariances of batches in one pass with float64 sums, and the axes of a covariance."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.errors import UserError
from pmae.spaces.base import AddUp, unchanged

BLOCK = 1024
LIMIT = 64 * 2**30


def mean_and_variance(batches: Iterable[Tensor], add_up: AddUp = unchanged) -> tuple[Tensor, Tensor]:
    """Mean (K,) and variance (K,) over N - 1 of batches (B, K), float64, summed about the first batch's mean."""
    count, shift, total, squares = 0, None, None, None
    for batch in batches:
        if shift is None or total is None or squares is None:
            shift = _mean_of_first(batch, add_up)
            total, squares = torch.zeros_like(shift), torch.zeros_like(shift)
        x = centred(batch, shift)
        count += len(x)
        total += x.sum(0, dtype=torch.float64)
        squares += x.square().sum(0, dtype=torch.float64)
    if shift is None or total is None or squares is None or (count := added(count, shift, add_up)) < 2:
        raise UserError(f"data must be at least 2 images to measure a variance, got {count}")
    total, squares = add_up(total), add_up(squares)
    variance = (squares - total.square() / count) / (count - 1)
    return shift + total / count, variance.clamp(min=0)


def covariance_of(batches: Iterable[Tensor], add_up: AddUp = unchanged) -> tuple[Tensor, Tensor]:
    """Mean (D,) and the lower triangle of the covariance (D, D) of batches (B, D), float64, over N - 1.

    Sums are taken about the first batch's mean: a large common offset would otherwise cancel digits.
    """
    count, shift, total, products = 0, None, None, None
    for batch in batches:
        if shift is None or total is None or products is None:
            shift = _mean_of_first(batch, add_up)
            total, products = torch.zeros_like(shift), shift.new_zeros(len(shift), len(shift))
        x = centred(batch, shift)
        count += len(x)
        total += x.sum(0, dtype=torch.float64)
        _add_lower_products(products, x)
    if shift is None or total is None or products is None or (count := added(count, shift, add_up)) < 2:
        raise UserError(f"data must be at least 2 images to fit principal components, got {count}")
    mean, products = add_up(total) / count, add_up(products)
    return shift + mean, products.addr_(mean, mean, alpha=-count).div_(count - 1)


def added(count: int, like: Tensor, add_up: AddUp) -> int:
    """A number of images over all processes; `like` says on which device they talk."""
    return int(add_up(like.new_tensor(count, dtype=torch.float64)))


def _mean_of_first(batch: Tensor, add_up: AddUp) -> Tensor:
    """The mean of the first batch of every process, float64: the same in all, so that sums about it can be added."""
    images = batch.new_tensor(len(batch), dtype=torch.float64)
    return add_up(batch.mean(0).double() * len(batch)) / add_up(images)


def principal_axes(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Variances (D,), largest first, and the axes (D, D), one a row, of the lower triangle of a covariance.

    The sign of an axis is fixed by making its largest entry positive. The host solves where the device's solver gives
    up: seen on CUDA for covariances with many equal eigenvalues, such as images with constant borders.
    """
    try:
        values, vectors = torch.linalg.eigh(covariance)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = (part.to(covariance.device) for part in torch.linalg.eigh(covariance.cpu()))
    axes = vectors.flip(1).T
    return values.flip(0).clamp(min=0), axes * signs(axes)


def signs(axes: Tensor) -> Tensor:
    """(K, 1) of +-1 that make the entry of largest magnitude in each row positive."""
    largest = axes.abs().argmax(1, keepdim=True)
    return torch.where(axes.gather(1, largest) < 0, -1.0, 1.0)


def refuse_beyond_memory(what: str, need: int, way: str) -> None:
    """Stop before a fit that would need too many bytes, and name them and a way out."""
    if need > LIMIT:
        raise UserError(f"{what} need {need:,} bytes for the fit, more than {LIMIT:,}; {way}")


def _add_lower_products(products: Tensor, x: Tensor) -> None:
    """Add x^T x to the lower triangle block by block: little over half the work of the full product."""
    for start in range(0, x.shape[1], BLOCK):
        products[start:, start : start + BLOCK].add_(x[:, start:].T @ x[:, start : start + BLOCK])


def centred(batch: Tensor, shift: Tensor) -> Tensor:
    """The batch about `shift`. A CPU multiplies float32 batches in float32, sums stay float64: twice as fast as float64
    products and within 2e-7 of them, as the shift keeps numbers small. A GPU may round float32 to TF32, so not there.
    """
    keep = batch.device.type == "cpu" and batch.dtype == torch.float32
    return batch - shift.to(torch.float32) if keep else batch.double() - shift
