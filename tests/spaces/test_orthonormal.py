"""What all cheap orthonormal spaces promise: closed forms, colours, groups, and images of 224x224."""

import time

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA as Reference

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import SPACES, build_space
from pmae.spaces.fixed import FixedBasis, Orthonormal

NAMES = sorted(name for name, kind in SPACES.items() if issubclass(kind, Orthonormal))
FIXED = [name for name in NAMES if issubclass(SPACES[name], FixedBasis)]


def images(shape: tuple[int, int, int], count: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(shape[0], shape[0], generator=generator)
    x = torch.randn(count, *shape, generator=generator).cumsum(2).cumsum(3)
    return torch.einsum("dc,bchw->bdhw", mix, x) + 2


@pytest.mark.parametrize("shape", [(3, 4, 6), (1, 8, 8), (2, 6, 2)], ids=str)
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
