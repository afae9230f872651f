"""The kernel that hides components without sorting, against the sort, run by Triton's interpreter."""

import pytest
from tests.fast.interpreter import run_python

SCRIPT = """
import torch
from pmae import masking
from pmae.fast import mask_kernels as kernels
kernels.wrap_triton = lambda kernel: kernel
torch.manual_seed(0)
cases = [(150, 0.02, 0.2), (64, 0.0, 0.9), (17, 1.0, 0.1), (2, 0.0, 0.01), (5, 3.0, 0.99)]
for count, decay, ratio in cases:
    share = torch.exp(-decay * torch.arange(float(count)))
    share, noise, ratio = share / share.sum(), torch.rand(3, count), torch.tensor(ratio)
    expected = masking.hide_components(noise, share, ratio)
    for kernels.WIDEST, kernels.TILE in ((32768, 0), (1, 64)):  # rows that a program holds, and rows in tiles
        got = kernels.hide_closest(noise, share, ratio)
        assert torch.equal(got, expected), (count, decay, ratio, (got != expected).sum())
        assert got.any(1).all() and not got.all(1).any()
print("equal")
"""


def test_the_kernel_hides_what_the_sort_hides() -> None:
    pytest.importorskip("triton")
    assert run_python("-c", SCRIPT, TRITON_INTERPRET="1").strip() == "equal"
