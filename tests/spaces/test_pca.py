"""PCA against scikit-learn, all components and leading ones with the rest, and the promises that are its own."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA as Reference

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import PCA, build_space, pca
from pmae.spaces.moments import covariance_of
from pmae.spaces.pca import leading_components


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


@pytest.mark.parametrize("different", [40, 7])
def test_few_images_have_the_components_of_scikit_learn_and_others_without_variance(different: int) -> None:
    x = data(40, 300, offset=5.0)[np.arange(40) % different]  # some of them more than once
    reference, rank = Reference(svd_solver="full").fit(x), different - 1
    space = PCA((3, 10, 10)).double()
    space.fit(torch.from_numpy(part).unflatten(1, (3, 10, 10)) for part in np.array_split(x, 3))
    largest = reference.explained_variance_[0]
    np.testing.assert_allclose(space.variance[:rank], reference.explained_variance_[:rank], rtol=1e-8)
    np.testing.assert_allclose(space.variance[rank:], 0, atol=1e-12 * largest)
    cosines = np.sum(space.components[:rank].numpy() * reference.components_[:rank], axis=1)
    np.testing.assert_allclose(np.abs(cosines), 1, atol=1e-9)
    torch.testing.assert_close(space.components @ space.components.T, torch.eye(300).double(), atol=1e-9, rtol=0)


def test_covariance_equals_numpy_across_block_borders() -> None:
    x = np.random.default_rng(3).normal(size=(60, 1500)) + 5
    mean, covariance, _ = covariance_of(torch.from_numpy(part) for part in np.array_split(x, 4))
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(np.tril(covariance), np.tril(np.cov(x.T)), atol=1e-12)


def test_too_many_pixels_name_the_bytes() -> None:
    with pytest.raises(UserError, match=r"150528 pixels need 725,\d+,\d+,\d+ bytes"):
        PCA((3, 224, 224))


@pytest.mark.parametrize("name", ["pca", "patch_pca", "cosine", "fourier", "wavelet"])
def test_rounded_products_stay_near_and_only_where_they_may(name: str) -> None:
    x = torch.tensor(data(300, 192), dtype=torch.float32).view(300, 3, 8, 8)
    space = build_space(SpaceConfig(name), (3, 8, 8))
    space.fit([x])
    z = space.project(x)
    assert torch.equal(space.project_bf16(x), z)
    assert torch.equal(space.reconstruct_bf16(z), space.reconstruct(z))
    before = set(space.state_dict())
    space.allow_bf16()
    assert torch.equal(space.project(x), z)
    # Factors have eight bits, which costs every component a 2^-9 of the image's typical number; so has the result.
    whole, own = z.square().mean().sqrt(), z.square().mean(0).sqrt()
    rounded = space.project_bf16(x)
    assert rounded.dtype == torch.float32
    assert (rounded - z).abs().max() > 0
    assert ((rounded - z).square().mean(0).sqrt() < 2**-8 * (whole + own)).all()
    assert 0 < (space.reconstruct_bf16(z) - x).square().mean().sqrt() < 2**-8 * whole
    assert set(space.state_dict()) == before


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


SHAPE = (3, 10, 12)


def images(count: int = 600, decay: float = 1.0) -> torch.Tensor:
    """Images whose spectrum falls as a power of the rank, as that of photographs does."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(360, 360)))[0]
    scale = np.arange(1, 361) ** -decay
    return torch.from_numpy(rng.normal(size=(count, 360)) * scale @ axes + 0.5).unflatten(1, SHAPE)


@pytest.fixture(params=["exact", "iterated"])
def space(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PCA:
    if request.param == "iterated":
        monkeypatch.setattr(pca, "EXACT", 0)
    return PCA(SHAPE, SpaceConfig("pca", components=20)).double()


def test_leading_components_equal_scikit_learn(space: PCA) -> None:
    x = images()
    space.fit(x.split(100))
    reference = Reference(20, svd_solver="full").fit(x.flatten(1).numpy())
    angles = subspace_angles(space.components[:15].numpy().T, reference.components_[:15].T)
    assert np.rad2deg(angles.max()) < 0.5
    np.testing.assert_allclose(space.variance[:20], reference.explained_variance_, rtol=2e-3)
    np.testing.assert_allclose(space.mean, reference.mean_, atol=1e-9)


def test_the_rest_is_what_the_components_leave(space: PCA) -> None:
    x = images()
    space.fit(x.split(100))
    z, centred = space.project(x), x.flatten(1) - x.flatten(1).mean(0)
    v = space.components
    torch.testing.assert_close(v @ v.T, torch.eye(20, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(z[:, 20:], centred - centred @ v.T @ v)
    # The variances are those of the coefficients, however well the axes converged, and add up to that of the images.
    torch.testing.assert_close(space.variance, z.var(0), rtol=1e-5, atol=1e-9)
    assert float(space.variance.sum()) == pytest.approx(float(x.flatten(1).var(0).sum()), rel=1e-6)
    assert space.mask_group_count == 21
    assert float(space.mask_group_share[20]) == pytest.approx(float(z[:, 20:].var(0).sum() / z.var(0).sum()), rel=1e-5)


def test_hiding_the_rest_leaves_the_components_and_the_other_way_round(space: PCA) -> None:
    x = images()
    space.fit([x])
    z, hidden = space.project(x), space.expand_mask(torch.arange(21)[None] == 20)
    centred, v = x.flatten(1) - space.mean, space.components
    kept = space.reconstruct(z.masked_fill(hidden, 0)).flatten(1) - space.mean
    torch.testing.assert_close(kept, centred @ v.T @ v)
    rest = space.reconstruct(z.masked_fill(~hidden, 0)).flatten(1) - space.mean
    torch.testing.assert_close(kept + rest, centred)


def test_fewer_images_than_components_are_no_error(space: PCA) -> None:
    x = images(8)
    space.fit([x])
    v = space.components
    torch.testing.assert_close(v @ v.T, torch.eye(20, dtype=torch.float64), atol=1e-6, rtol=0)
    assert int((space.variance[:20] > 1e-9).sum()) == 7
    assert float(space.mask_group_share[20]) < 1e-6
    torch.testing.assert_close(space.reconstruct(space.project(x)), x)


def test_float32_images_give_the_same_axes() -> None:
    x = images(decay=0.7)
    single, double = leading_components(x.float().split(100), 10), leading_components(x.split(100), 10)
    np.testing.assert_allclose(single.variance, double.variance, rtol=1e-5)
    np.testing.assert_allclose(single.axes, double.axes, atol=1e-4)
    np.testing.assert_allclose(single.rest, double.rest, rtol=1e-4)


def test_images_of_224_pixels() -> None:
    x = torch.randn(12, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    x = x.repeat_interleave(16, 2).repeat_interleave(16, 3)
    space = PCA((3, 224, 224), SpaceConfig("pca", components=4))
    assert not space.exact
    space.fit(x.split(5))
    reference = Reference(4, svd_solver="full").fit(x[:, :, ::16, ::16].flatten(1).numpy())
    # Each pixel is there 256 times, and so is the variance of a component.
    np.testing.assert_allclose(space.variance[:4], 256 * reference.explained_variance_, rtol=1e-4)
    assert float((space.reconstruct(space.project(x)) - x).norm() / x.norm()) <= space.tolerance
    assert space.mask_group_count == 5


def test_as_many_as_there_are_pixels_are_all() -> None:
    space = PCA(SHAPE, SpaceConfig("pca", components=360))
    assert space.exact
    assert space.mask_groups is None
    assert space.variance.shape == (360,)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(UserError, match=r"space\.components must be at most the number of pixels, 360, got 361"):
        PCA(SHAPE, SpaceConfig("pca", components=361))
    with pytest.raises(UserError, match=r"20000 components of 150528 pixels need 144,\d+,\d+,\d+ bytes"):
        PCA((3, 224, 224), SpaceConfig("pca", components=20_000))
    with pytest.raises(UserError, match="at least 2 images in every pass: fit takes a list, not an iterator, got 0"):
        leading_components(iter([images()]), 5)
