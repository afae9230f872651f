"""Cheap orthonormal spaces: closed forms against SciPy and NumPy, colours, mask groups, and images of 224x224."""

import time

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from sklearn.decomposition import PCA as Reference

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import SPACES, Cosine, Fourier, build_space
from pmae.spaces.fixed import RINGS, FixedBasis, Orthonormal, cosines, fourier_waves, rings

NAMES = sorted(name for name, kind in SPACES.items() if issubclass(kind, Orthonormal))
FIXED = [name for name in NAMES if issubclass(SPACES[name], FixedBasis)]


def images(shape: tuple[int, int, int], count: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(shape[0], shape[0], generator=generator)
    x = torch.randn(count, *shape, generator=generator).cumsum(2).cumsum(3)
    return torch.einsum("dc,bchw->bdhw", mix, x) + 2


@pytest.mark.parametrize("shape", [(3, 4, 6), (1, 8, 8), (2, 6, 2), (5, 4, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_map_is_orthonormal(name: str, shape: tuple[int, int, int]) -> None:
    size = int(np.prod(shape))
    space = build_space(SpaceConfig(name), shape)
    space.fit([images(shape)])
    basis = space.project(torch.eye(size).unflatten(1, shape)) - space.project(torch.zeros(1, *shape))
    torch.testing.assert_close(basis @ basis.T, torch.eye(size), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", FIXED)
def test_colours_turn_to_their_principal_axes(name: str) -> None:
    x = images((4, 8, 8))
    space = build_space(SpaceConfig(name), (4, 8, 8))
    space.fit(x.split(50))
    reference = Reference().fit(x.movedim(1, -1).flatten(0, 2).numpy())
    cosines = (space.state_dict()["colour"].numpy() * reference.components_).sum(1)
    np.testing.assert_allclose(abs(cosines), 1, atol=1e-4)


@pytest.mark.parametrize("name", FIXED)
def test_one_channel_is_not_turned(name: str) -> None:
    space = build_space(SpaceConfig(name), (1, 8, 8))
    space.fit([-images((1, 8, 8))])
    assert space.state_dict()["colour"].tolist() == [[1.0]]


@pytest.mark.parametrize("name", NAMES)
def test_an_iterator_that_is_spent_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="got 0"):
        build_space(SpaceConfig(name), (3, 8, 8)).fit(iter([images((3, 8, 8))]))


@pytest.mark.parametrize("name", NAMES)
def test_hiding_groups_is_one_graph(name: str) -> None:
    x = images((3, 8, 8), 20)
    space = build_space(SpaceConfig(name, grouped=True), (3, 8, 8))
    space.fit([x])
    hidden = torch.rand(20, space.mask_group_count, generator=torch.Generator().manual_seed(0)) < 0.2

    def visible(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return space.reconstruct(space.project(v).masked_fill(space.expand_mask(hidden), 0.0)), space.mask_group_share

    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(visible, fullgraph=True, backend="eager")(x), visible(x))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_images_of_224_pixels(name: str, grouped: bool) -> None:
    shape = (3, 224, 224)
    x = torch.randn(6, 3, 14, 14, generator=torch.Generator().manual_seed(0)).repeat_interleave(16, 2)
    x = x.repeat_interleave(16, 3)
    space = build_space(SpaceConfig(name, grouped=grouped), shape)
    space.fit(x.split(3))
    start = time.perf_counter()
    z = space.project(x)
    again = space.reconstruct(z)
    spent = (time.perf_counter() - start) / len(x)
    print(f"{name}: {1e3 * spent:.0f} ms an image there and back, {space.mask_group_count:,} mask groups")
    assert float((again - x).norm() / x.norm()) <= space.tolerance
    assert (space.mask_group_count == 150_528) == (not grouped)
    # No buffer is anywhere near D x D.
    assert max(buffer.numel() for buffer in space.buffers()) <= max(150_528, 768**2)
    assert space.mask_group_count >= 10
    torch.testing.assert_close(space.mask_group_share.sum(), torch.ones(()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", sorted(set(SPACES) - set(NAMES)))
def test_groups_are_refused_where_there_are_no_bands(name: str) -> None:
    with pytest.raises(UserError, match=rf"space\.grouped must be off for space\.name '{name}'.*cosine, fourier"):
        build_space(SpaceConfig(name, grouped=True), (1, 8, 8))


SHAPES = [(1, 8, 8), (1, 7, 12), (3, 16, 10), (1, 1, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cosine_equals_scipy(shape: tuple[int, int, int]) -> None:
    x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Not fitted: the mean is zero and the channels are not turned.
    z = Cosine(shape).double().project(x).unflatten(1, shape)
    np.testing.assert_allclose(z, dctn(x.numpy(), axes=(2, 3), norm="ortho"), atol=1e-6)


def test_rings_hold_equal_frequencies_and_the_mean_is_alone() -> None:
    ring = rings(cosines(32)[1], cosines(48)[1])
    radius = np.hypot(np.arange(32)[:, None] / 64, np.arange(48) / 96)
    assert int((ring == 0).sum()) == 1
    assert ring[0, 0] == 0
    assert ring.max() == RINGS - 1
    # Sorted by radius, ring numbers never fall: no ring reaches into another.
    assert bool((np.diff(ring.ravel()[radius.ravel().argsort(kind="stable")]) >= 0).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channels_have_rings_of_their_own(shape: tuple[int, int, int]) -> None:
    space = Cosine(shape, SpaceConfig("cosine", grouped=True))
    assert space.mask_groups is not None
    apart = space.mask_groups.unflatten(0, shape).flatten(1)
    each = [set(channel.tolist()) for channel in apart]
    assert sum(map(len, each)) == space.mask_group_count == len(set.union(*each))
    assert {len(numbers) for numbers in each} == {space.mask_group_count // shape[0]}


def test_rings_of_photographs_share_the_variance() -> None:
    # Power that falls with the square of the frequency, as that of photographs does, over 224 pixels a side.
    ring = rings(cosines(224)[1], cosines(224)[1])
    radius = np.hypot(np.arange(224)[:, None], np.arange(224))
    power = np.divide(1, radius**2, where=radius > 0, out=np.zeros_like(radius))
    share = np.bincount(ring.ravel(), power.ravel()) / power.sum()
    assert share.max() < 0.25
    assert 16 <= len(np.unique(ring)) <= 32


FOURIER_SHAPES = [(1, 8, 8), (1, 7, 12), (2, 5, 9), (1, 1, 2), (1, 1, 1)]


def coefficients(shape: tuple[int, int, int]) -> tuple[torch.Tensor, np.ndarray]:
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, Fourier(shape).double().project(x).unflatten(1, shape).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_waves_are_orthonormal_and_have_their_frequency(size: int) -> None:
    waves, frequencies = fourier_waves(size)
    np.testing.assert_allclose(waves @ waves.T, np.eye(size), atol=1e-12)
    # All energy of a wave lies where NumPy says its frequency is.
    power = abs(np.fft.fft(waves, axis=1)) ** 2
    off = power * (abs(abs(np.fft.fftfreq(size))[None] - frequencies[:, None]) > 1e-12)
    np.testing.assert_allclose(off, 0, atol=1e-12)


@pytest.mark.parametrize("shape", FOURIER_SHAPES, ids=str)
def test_energy_is_that_of_the_image_and_of_each_pair_of_frequencies(shape: tuple[int, int, int]) -> None:
    x, z = coefficients(shape)
    np.testing.assert_allclose((z**2).sum((1, 2, 3)), x.square().sum((1, 2, 3)), rtol=1e-6)
    # NumPy's complex waves at (+-f, +-g) span what our products of waves with frequencies f and g do.
    _, height, width = shape
    power = abs(np.fft.fft2(x.numpy(), norm="ortho")) ** 2
    theirs = np.hypot(1000 * abs(np.fft.fftfreq(height))[:, None], abs(np.fft.fftfreq(width)))
    ours = np.hypot(1000 * fourier_waves(height)[1][:, None], fourier_waves(width)[1])
    for pair in np.unique(ours):
        found = (z**2 * np.isclose(ours, pair, rtol=1e-12)).sum((2, 3))
        np.testing.assert_allclose(found, (power * np.isclose(theirs, pair, rtol=1e-12)).sum((2, 3)), atol=1e-5)


def test_first_coefficient_is_the_mean() -> None:
    x, z = coefficients((2, 5, 9))
    np.testing.assert_allclose(z[:, :, 0, 0], x.mean((2, 3)) * np.sqrt(45), rtol=1e-6)
