"""The cosine basis against SciPy's DCT, and the rings of its frequencies."""

import numpy as np
import pytest
import torch
from scipy.fft import dctn

from pmae.config import SpaceConfig
from pmae.spaces import Cosine
from pmae.spaces.fixed import RINGS, rings

SHAPES = [(1, 8, 8), (1, 7, 12), (3, 16, 10), (1, 1, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_scipy(shape: tuple[int, int, int]) -> None:
    x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Not fitted: the mean is zero and the channels are not turned.
    z = Cosine(shape).double().project(x).unflatten(1, shape)
    np.testing.assert_allclose(z, dctn(x.numpy(), axes=(2, 3), norm="ortho"), atol=1e-6)


def test_rings_hold_equal_frequencies_and_the_mean_is_alone() -> None:
    ring = rings(Cosine.waves(32)[1], Cosine.waves(48)[1])
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
    ring = rings(Cosine.waves(224)[1], Cosine.waves(224)[1])
    radius = np.hypot(np.arange(224)[:, None], np.arange(224))
    power = np.divide(1, radius**2, where=radius > 0, out=np.zeros_like(radius))
    share = np.bincount(ring.ravel(), power.ravel()) / power.sum()
    assert share.max() < 0.25
    assert 16 <= len(np.unique(ring)) <= 32
