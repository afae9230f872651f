"""The kernel that hides components without sorting, against the sort, run by Triton's interpreter."""

import pytest
import torch
from tests.fast.interpreter import interpreted, print_json

from pmae import masking

CASES = [(150, 0.02, 0.2), (64, 0.0, 0.9), (17, 1.0, 0.1), (2, 0.0, 0.01), (5, 3.0, 0.99)]
"""Components, decay of their variance, ratio."""


def interpret(patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each case equals the sort, by rows that a program holds and by rows in tiles."""
    from pmae.fast import mask_kernels as kernels

    patch.setattr(kernels, "wrap_triton", lambda kernel: kernel)
    torch.manual_seed(0)
    equal = []
    for count, decay, ratio in CASES:
        share = torch.exp(-decay * torch.arange(float(count)))
        given = torch.rand(3, count), share / share.sum(), torch.tensor(ratio)
        for widest, tile in ((32768, kernels.TILE), (1, 64)):
            patch.setattr(kernels, "WIDEST", widest)
            patch.setattr(kernels, "TILE", tile)
            hidden = kernels.hide_closest(*given)
            assert hidden.any(1).all()
            assert not hidden.all(1).any()
            equal.append(torch.equal(hidden, masking.hide_components(*given)))
    return equal


def test_the_kernel_hides_what_the_sort_hides() -> None:
    assert interpreted(interpret) == [True] * 2 * len(CASES)


if __name__ == "__main__":
    print_json(interpret)
