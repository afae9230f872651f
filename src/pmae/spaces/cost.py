"""What the fit of a space takes, known before it starts."""

from typing import NamedTuple

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
