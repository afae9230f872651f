"""The kernels that cut and resize crops, run by Triton's interpreter, against torch's operations."""

import numpy as np
import pytest
import torch
from tests.fast.interpreter import interpreted, print_json

from pmae.config import AugmentConfig
from pmae.data.augment import boxes_of, draw_crops
from pmae.data.ragged import ragged

CASES = [(3, torch.uint8, "bicubic"), (1, torch.uint8, "bilinear"), (2, torch.float32, "bicubic")]


def interpret(patch: pytest.MonkeyPatch) -> list[float]:
    """How far the crops of each case are from those by torch's operations, at most."""
    from pmae.data import crops

    rng, apart = np.random.default_rng(0), []
    for channels, dtype, interpolation in CASES:
        sizes = np.column_stack([rng.integers(20, 60, 5), rng.integers(20, 70, 5), np.full(5, channels)])
        pixels = torch.from_numpy(rng.integers(0, 256, int(sizes.prod(1).sum()))).to(dtype)
        images, places = ragged(pixels, sizes), np.tile(np.arange(5), 2)
        heights, widths = torch.from_numpy(images.sizes[places]).float().T
        noise = draw_crops(10, torch.Generator().manual_seed(0), torch.device("cpu"))
        given = (images, places, boxes_of(noise, heights, widths, AugmentConfig()), (16, 24), interpolation)
        ours, plain = crops.by_gemm(*given), crops.by_gemm(*given, plain=True)
        assert ours.dtype == plain.dtype == dtype
        apart.append(float((ours.float() - plain.float()).abs().max()))
    return apart


def test_crops_are_those_of_torch() -> None:
    by_case = interpreted(interpret)
    assert by_case[0] <= 1
    assert by_case[1] <= 1
    assert by_case[2] <= 2e-2


if __name__ == "__main__":
    print_json(interpret)
