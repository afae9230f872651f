"""Principal components of patches against scikit-learn's, and what is refused."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA as Reference

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import PatchPCA, build_space

SHAPE = (2, 8, 12)


def images(count: int = 400) -> torch.Tensor:
    rng = np.random.default_rng(0)
    coarse = rng.normal(size=(count, 2, 8, 12)) * np.geomspace(3, 0.3, 12) + 1
    return torch.from_numpy(coarse.cumsum(2))


def patches(x: torch.Tensor) -> np.ndarray:
    """(N, 6 places, 32) of patches of 4, written out by hand."""
    cut = [x[:, :, r : r + 4, c : c + 4].flatten(1) for r in (0, 4) for c in (0, 4, 8)]
    return torch.stack(cut, 1).numpy()


def test_equals_scikit_learn() -> None:
    x = images()
    space = PatchPCA(SHAPE).double()
    assert space.patch == 4
    space.fit(x.split(70))
    cut = patches(x)
    reference = Reference(svd_solver="full").fit(cut.reshape(-1, 32))
    cosines = np.sum(space.components.numpy() * reference.components_, axis=1)
    np.testing.assert_allclose(abs(cosines), 1, atol=1e-6)
    expected = reference.transform(cut.reshape(-1, 32)).reshape(cut.shape) * np.sign(cosines)
    # Ours are about the mean at each place, index first.
    z = space.project(x).unflatten(1, (32, 6)).movedim(1, 2).numpy()
    np.testing.assert_allclose(z, expected - expected.mean(0), atol=1e-5 * abs(expected).max())


def test_a_group_is_one_component_everywhere() -> None:
    space = PatchPCA(SHAPE, SpaceConfig("patch_pca", grouped=True)).double()
    space.fit([images()])
    assert space.mask_group_count == 32
    hidden = space.expand_mask(torch.arange(32)[None] == 3)
    part = space.reconstruct(hidden.double()) - space.reconstruct(torch.zeros(1, 192, dtype=torch.float64))
    shown = patches(part)[0]
    np.testing.assert_allclose(shown, np.broadcast_to(space.components[3].numpy(), (6, 32)), atol=1e-6)


@pytest.mark.parametrize(("sides", "patch"), [((224, 224), 16), ((6, 10), 2), ((96, 40), 8), ((5, 5), 5)])
def test_the_side_follows_from_the_image(sides: tuple[int, int], patch: int) -> None:
    assert PatchPCA((1, *sides)).patch == patch


def test_bad_sides_are_refused() -> None:
    with pytest.raises(UserError, match=r"space\.patch must divide both sides of 8x12 images \(1, 2, 4\), got 3"):
        build_space(SpaceConfig("patch_pca", patch=3), SHAPE)
    with pytest.raises(UserError, match=r"17x17 images, which have no common divisor from 2 to 16"):
        build_space(SpaceConfig("patch_pca"), (1, 17, 17))
    with pytest.raises(UserError, match=r"patches of 150528 numbers need 725,\d+,\d+,\d+ bytes"):
        build_space(SpaceConfig("patch_pca", patch=224), (3, 224, 224))
