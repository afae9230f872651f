"""Principal components, exact, from a covariance streamed in one pass with float64 accumulation."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces.base import Space

BLOCK = 1024


class PCA(Space):
    """The orthonormal basis of eigenvectors of the data's covariance, largest variance first.

    `components` (K, D) has one eigenvector a row. The sign of each is fixed by making its largest entry positive.
    """

    mean: Tensor
    components: Tensor
    tolerance = 1e-4

    def __init__(self, shape: tuple[int, int, int], config: SpaceConfig | None = None) -> None:
        super().__init__(shape, config)
        size = shape[0] * shape[1] * shape[2]
        _refuse_if_too_large(size)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("components", torch.eye(size))
        self.register_buffer("variance", torch.ones(size))

    def fit(self, batches: Iterable[Tensor]) -> None:
        mean, covariance = covariance_of(batch.flatten(1) for batch in batches)
        variance, vectors = _eigh(covariance)
        vectors = vectors.flip(1).T
        self.mean.copy_(mean)
        self.components.copy_(vectors * _signs(vectors))
        self.variance.copy_(variance.flip(0).clamp(min=0))

    def project(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.mean) @ self.components.T

    def reconstruct(self, z: Tensor) -> Tensor:
        return (z @ self.components + self.mean).unflatten(1, self.shape)


def covariance_of(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean (D,) and the lower triangle of the covariance (D, D) of batches (B, D), float64, over N - 1.

    Sums are taken about the first batch's mean: a large common offset would otherwise cancel digits.
    """
    count, shift, total, products = 0, None, None, None
    for batch in batches:
        if shift is None or total is None or products is None:
            shift = batch.mean(0).double()
            total, products = torch.zeros_like(shift), shift.new_zeros(len(shift), len(shift))
        x = _centred(batch, shift)
        count += len(x)
        total += x.sum(0, dtype=torch.float64)
        _add_lower_products(products, x)
    if count < 2 or shift is None or total is None or products is None:
        raise UserError(f"data must be at least 2 images to fit principal components, got {count}")
    mean = total / count
    return shift + mean, products.addr_(mean, mean, alpha=-count).div_(count - 1)


def _add_lower_products(products: Tensor, x: Tensor) -> None:
    """Add x^T x to the lower triangle block by block: little over half the work of the full product."""
    for start in range(0, x.shape[1], BLOCK):
        products[start:, start : start + BLOCK].add_(x[:, start:].T @ x[:, start : start + BLOCK])


def _centred(batch: Tensor, shift: Tensor) -> Tensor:
    """The batch about `shift`. A CPU multiplies float32 batches in float32, sums stay float64: twice as fast as float64
    products and within 2e-7 of them, as the shift keeps numbers small. A GPU may round float32 to TF32, so not there.
    """
    keep = batch.device.type == "cpu" and batch.dtype == torch.float32
    return batch - shift.to(torch.float32) if keep else batch.double() - shift


def _eigh(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a lower triangle, rising; on the host where the device's solver gives up.

    Seen on CUDA for covariances with many equal eigenvalues, such as images with constant borders.
    """
    try:
        values, vectors = torch.linalg.eigh(covariance)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = (part.to(covariance.device) for part in torch.linalg.eigh(covariance.cpu()))
    return values, vectors


def _signs(vectors: Tensor) -> Tensor:
    """(K, 1) of +-1 that make the entry of largest magnitude in each row positive."""
    largest = vectors.abs().argmax(1, keepdim=True)
    return torch.where(vectors.gather(1, largest) < 0, -1.0, 1.0)


def _refuse_if_too_large(size: int, limit: int = 64 * 2**30) -> None:
    """The fit holds the covariance, its eigenvectors and a workspace of twice that, all float64."""
    need = 4 * 8 * size * size
    if need > limit:
        raise UserError(
            f"space 'pca' must have a basis that fits in memory: {size} pixels need {need:,} bytes for the fit, "
            f"more than {limit:,}; use smaller images (data.resize)"
        )
