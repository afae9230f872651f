"""Leading components and the rest as one more: against scikit-learn, and at sizes where no D x D matrix fits."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA as Reference

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import PCA, pca
from pmae.spaces.pca import leading_components

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


def test_equals_scikit_learn(space: PCA) -> None:
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
    with pytest.raises(UserError, match="at least 2 images in every pass, got 0: fit takes a list, not an iterator"):
        leading_components(iter([images()]), 5)
