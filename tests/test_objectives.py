"""Objectives against a few lines of NumPy."""

import numpy as np
import pytest
import torch

from pmae.objectives import Comparison, on_components, on_patches, on_pixels, scaled

RNG = np.random.default_rng(0)


def test_components_count_hidden_ones_alone() -> None:
    predicted, z, hidden = RNG.normal(size=(4, 9)), RNG.normal(size=(4, 9)), RNG.random((4, 9)) < 0.4
    found = on_components(*map(torch.from_numpy, (predicted, z, hidden)))
    np.testing.assert_allclose(
        found.error, [((p - t)[h] ** 2).sum() for p, t, h in zip(predicted, z, hidden, strict=True)]
    )
    np.testing.assert_allclose(found.energy, [(t[h] ** 2).sum() for t, h in zip(z, hidden, strict=True)])
    np.testing.assert_array_equal(found.size, hidden.sum(1))


def test_a_mask_for_the_whole_batch_is_one_row() -> None:
    predicted, z, hidden = RNG.normal(size=(4, 9)), RNG.normal(size=(4, 9)), RNG.random((1, 9)) < 0.4
    one = on_components(*map(torch.from_numpy, (predicted, z, hidden)))
    many = on_components(*map(torch.from_numpy, (predicted, z, hidden.repeat(4, 0))))
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b)


def test_pixels_count_the_whole_image() -> None:
    predicted, target = RNG.normal(size=(2, 3, 4, 5)), RNG.normal(size=(2, 3, 4, 5))
    found = on_pixels(torch.from_numpy(predicted), torch.from_numpy(target))
    np.testing.assert_allclose(found.error, ((predicted - target) ** 2).sum((1, 2, 3)))
    np.testing.assert_allclose(found.size, 60)


@pytest.mark.parametrize("normalize", [True, False])
def test_patches_are_normalized_each_on_its_own(normalize: bool) -> None:
    predicted, patches = RNG.normal(size=(2, 6, 12)), 5 + 3 * RNG.normal(size=(2, 6, 12))
    target = patches
    if normalize:
        target = (patches - patches.mean(2, keepdims=True)) / np.sqrt(patches.var(2, ddof=1, keepdims=True) + 1e-6)
    found = on_patches(torch.from_numpy(predicted), torch.from_numpy(patches), normalize)
    np.testing.assert_allclose(found.error, ((predicted - target) ** 2).sum((1, 2)))
    np.testing.assert_allclose(found.energy, (target**2).sum((1, 2)))
    np.testing.assert_array_equal(found.size, [72, 72])


def test_scales() -> None:
    comparison = Comparison(torch.tensor([6.0, 2.0]), torch.tensor([8.0, 4.0]), torch.tensor([1, 3]))
    assert float(scaled(comparison, "sum", 0.5)) == 4
    assert float(scaled(comparison, "constant", 0.5)) == 8
    assert float(scaled(comparison, "mean", 0.5)) == 2
