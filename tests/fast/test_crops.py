"""The kernels that cut and resize crops, run by Triton's interpreter, against torch's operations."""

from typing import Any

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

    apart = []
    for case in CASES:
        given = ten_crops(*case)
        ours, plain = crops.by_gemm(*given), crops.by_gemm(*given, plain=True)
        assert ours.dtype == plain.dtype == case[1]
        apart.append(float((ours.float() - plain.float()).abs().max()))
    return apart


def ten_crops(channels: int, dtype: torch.dtype, interpolation: str) -> tuple[Any, ...]:
    """Two crops each of five images of random sizes, as arguments."""
    rng = np.random.default_rng(0)
    sizes = np.column_stack([rng.integers(20, 60, 5), rng.integers(20, 70, 5), np.full(5, channels)])
    pixels = torch.from_numpy(rng.integers(0, 256, int(sizes.prod(1).sum()))).to(dtype)
    images, places = ragged(pixels, sizes), np.tile(np.arange(5), 2)
    heights, widths = torch.from_numpy(images.sizes[places]).float().T
    noise = draw_crops(10, torch.Generator().manual_seed(0), torch.device("cpu"))
    return images, places, boxes_of(noise, heights, widths, AugmentConfig()), (16, 24), interpolation


def test_crops_are_those_of_torch() -> None:
    by_case = interpreted(interpret)
    assert by_case[0] <= 1
    assert by_case[1] <= 1
    assert by_case[2] <= 2e-2


def test_where_kernels_do_not_run_crops_are_cut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from pmae.data import crops

    def fails(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(crops, "_by_kernels", fails)
    crops._maker.cache_clear()
    with pytest.warns(UserWarning, match="crops are cut without kernels.*no compiler"):
        ours = crops.by_gemm(*ten_crops(*CASES[0]))
    crops._maker.cache_clear()
    torch.testing.assert_close(ours, crops.by_gemm(*ten_crops(*CASES[0]), plain=True), rtol=0, atol=0)


if __name__ == "__main__":
    print_json(interpret)
