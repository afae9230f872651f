"""PCA against scikit-learn, and the promises that are its own."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA as Reference

from pmae.errors import UserError
from pmae.spaces import PCA
from pmae.spaces.pca import covariance_of


def data(count: int, size: int, offset: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, size)) @ rng.normal(size=(size, size)) * np.geomspace(1, 1e-2, size) + offset


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_equals_scikit_learn(offset: float) -> None:
    x = data(500, 48, offset)
    reference = Reference(svd_solver="full").fit(x)
    space = PCA((3, 4, 4)).double()
    space.fit(torch.from_numpy(part).unflatten(1, (3, 4, 4)) for part in np.array_split(x, 7))
    np.testing.assert_allclose(space.variance, reference.explained_variance_, rtol=1e-6)
    np.testing.assert_allclose(space.mean, reference.mean_, rtol=1e-9)
    # Both fix signs, by different rules: compare up to sign, then check ours.
    cosines = np.sum(space.components.numpy() * reference.components_, axis=1)
    np.testing.assert_allclose(np.abs(cosines), 1, atol=1e-6)
    z = space.project(torch.from_numpy(x).unflatten(1, (3, 4, 4))).numpy()
    np.testing.assert_allclose(z * np.sign(cosines), reference.transform(x), rtol=1e-5, atol=1e-6 * np.abs(z).max())


def test_float32_batches_lose_nothing_that_float32_could_tell() -> None:
    x = data(2000, 48, offset=50.0)
    single, double = PCA((3, 4, 4)), PCA((3, 4, 4)).double()
    single.fit(torch.from_numpy(part).float().unflatten(1, (3, 4, 4)) for part in np.array_split(x, 7))
    double.fit([torch.from_numpy(x).unflatten(1, (3, 4, 4))])
    np.testing.assert_allclose(single.mean, double.mean, rtol=1e-6)
    np.testing.assert_allclose(single.variance, double.variance, rtol=1e-4, atol=1e-6 * float(double.variance[0]))


def test_signs_are_fixed_by_the_largest_entry() -> None:
    space = PCA((3, 4, 4))
    space.fit([torch.from_numpy(data(200, 48)).float().unflatten(1, (3, 4, 4))])
    largest = space.components.gather(1, space.components.abs().argmax(1, keepdim=True))
    assert bool((largest > 0).all())


def test_basis_is_orthonormal_even_with_fewer_images_than_pixels() -> None:
    space = PCA((3, 4, 4))
    space.fit([torch.from_numpy(data(10, 48)).float().unflatten(1, (3, 4, 4))])
    torch.testing.assert_close(space.components @ space.components.T, torch.eye(48), atol=1e-5, rtol=0)
    assert int((space.variance > 1e-6 * space.variance[0]).sum()) == 9


def test_covariance_equals_numpy_across_block_borders() -> None:
    x = np.random.default_rng(3).normal(size=(60, 1500)) + 5
    mean, covariance = covariance_of(torch.from_numpy(part) for part in np.array_split(x, 4))
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(np.tril(covariance), np.tril(np.cov(x.T)), atol=1e-12)


def test_too_many_pixels_name_the_bytes() -> None:
    with pytest.raises(UserError, match=r"150528 pixels need 725,\d+,\d+,\d+ bytes"):
        PCA((3, 224, 224))


def test_rounded_products_stay_near_and_only_where_they_may() -> None:
    x = torch.tensor(data(300, 48), dtype=torch.float32).view(300, 3, 4, 4)
    space = PCA((3, 4, 4))
    space.fit([x])
    z = space.project(x)
    assert torch.equal(space.project_bf16(x), z)
    assert torch.equal(space.reconstruct_bf16(z), space.reconstruct(z))
    space.allow_bf16()
    assert torch.equal(space.project(x), z)
    # Factors have eight bits, which costs every component a 2^-9 of the image's typical number; so has the result.
    whole, own = z.square().mean().sqrt(), z.square().mean(0).sqrt()
    assert ((space.project_bf16(x) - z).square().mean(0).sqrt() < 2**-8 * (whole + own)).all()
    assert (space.reconstruct_bf16(z) - x).square().mean().sqrt() < 2**-8 * whole
    assert "components_bf16" not in space.state_dict()


def test_a_prediction_learns_through_rounded_products() -> None:
    x = torch.tensor(data(100, 48), dtype=torch.float32).view(100, 3, 4, 4)
    space = PCA((3, 4, 4))
    space.fit([x])
    space.allow_bf16()
    weights = torch.randn(100, 48, generator=torch.Generator().manual_seed(0))
    y = x.clone().requires_grad_()
    (space.project_bf16(y) * weights).sum().backward()
    expected = (weights @ space.components).view_as(x)
    torch.testing.assert_close(y.grad, expected, atol=0.05, rtol=0.02)
