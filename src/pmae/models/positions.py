"""Fixed sine-cosine positions on a grid of patches."""

import torch
from torch import Tensor

from pmae.errors import require


def sine_cosine(width: int, rows: int, columns: int, prefix: int = 1) -> Tensor:
    """(1, prefix + rows * columns, width): half of the width encodes the column, half the row; prefix tokens get 0."""
    require(width % 4 == 0, "width", "a multiple of 4 for sine-cosine positions", width)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    grid = torch.cat([_waves(column.flatten(), width // 2), _waves(row.flatten(), width // 2)], dim=1)
    return torch.cat([torch.zeros(prefix, width), grid])[None]


def _waves(position: Tensor, width: int) -> Tensor:
    """(N, width) sines and cosines with wavelengths from 2 pi to 10,000 times that."""
    frequency = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angle = position.double()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()
