"""One suite over every masking space: round trip, shares, streamed fit, gradients, save and load, compile."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import SPACES, Space, build_space
from pmae.spaces.moments import DistributedFit

SHAPES = [(5, 2, 4), (1, 6, 10), (2, 1, 16)]
VARIANTS = {name: SpaceConfig(name) for name in sorted(SPACES)}
VARIANTS |= {f"{name} grouped": SpaceConfig(name, grouped=True) for name, kind in SPACES.items() if kind.has_bands}
VARIANTS |= {"pca and rest": SpaceConfig("pca", components=5)}


def images(shape: tuple[int, int, int], count: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = int(np.prod(shape))
    mixing = torch.randn(size, size, generator=generator) / size**0.5
    return (torch.randn(count, size, generator=generator) @ mixing + 0.3).unflatten(1, shape)


@pytest.fixture(scope="module", params=[(name, shape) for name in VARIANTS for shape in SHAPES], ids=str)
def fitted(request: pytest.FixtureRequest) -> tuple[Space, torch.Tensor]:
    name, shape = request.param
    space, x = build_space(VARIANTS[name], shape), images(shape)
    space.fit(x.split(64))
    return space, x


def test_round_trip_is_within_the_stated_tolerance(fitted: tuple[Space, torch.Tensor]) -> None:
    space, x = fitted
    error = (space.reconstruct(space.project(x)) - x).norm() / x.norm()
    assert float(error.detach()) <= space.tolerance
    if math.isinf(space.tolerance):
        # There is no inverse: the space says how far off it is, and what it misses stays visible.
        assert space.measured()["preimage_error"] == pytest.approx(float(error), rel=1e-2)
        assert space.keeps_rest


def test_variance_is_that_of_the_coefficients_and_shares_sum_to_one(fitted: tuple[Space, torch.Tensor]) -> None:
    space, x = fitted
    torch.testing.assert_close(space.variance, space.project(x).var(0), rtol=2e-3, atol=1e-5)
    assert float(space.variance_share.sum()) == pytest.approx(1, abs=1e-5)
    assert bool((space.variance_share >= 0).all())


def test_mask_groups_have_all_of_the_variance(fitted: tuple[Space, torch.Tensor]) -> None:
    space, _ = fitted
    assert space.mask_group_share.shape == (space.mask_group_count,)
    assert float(space.mask_group_share.sum()) == pytest.approx(1, abs=1e-5)
    hidden = torch.eye(space.mask_group_count, dtype=torch.bool)
    spread = space.expand_mask(hidden)
    assert spread.shape == (space.mask_group_count, len(space.variance))
    # Every coefficient belongs to one mask group, and each group has the share of its coefficients.
    assert bool((spread.sum(0) == 1).all())
    assert bool((spread.sum(1) >= 1).all())
    torch.testing.assert_close((spread * space.variance_share).sum(1), space.mask_group_share, atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def streamed(fitted: tuple[Space, torch.Tensor]) -> Space:
    """In float64, so that two orders of summation cannot turn eigenvectors of nearly equal variance into each other."""
    space = build_space(fitted[0].config, fitted[0].shape)
    space.fit(fitted[1].double().split(64))
    return space


def test_streamed_fit_equals_full_fit(fitted: tuple[Space, torch.Tensor], streamed: Space) -> None:
    whole = build_space(streamed.config, streamed.shape)
    whole.fit([fitted[1].double()])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(streamed.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_distributed_fit_equals_single_fit(fitted: tuple[Space, torch.Tensor], streamed: Space) -> None:
    # Three processes, played by threads, with parts of unequal size; float64 as above.
    x, parts = fitted[1].double(), [build_space(streamed.config, streamed.shape) for _ in range(3)]
    bounds, meeting, said = [0, 70, 201, len(x)], threading.Barrier(3, timeout=60), [torch.zeros(())] * 3

    def fit(rank: int) -> None:
        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            said[rank] = tensor.clone()
            meeting.wait()
            total = torch.stack(said).sum(0)
            meeting.wait()
            return tensor.copy_(total)

        mine = x[bounds[rank] : bounds[rank + 1]].split(64)
        parts[rank].fit_distributed(x.split(64), DistributedFit(lambda whole: mine, all_reduce))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fit, range(3)))
    for name, value in streamed.state_dict().items():
        for part in parts:
            torch.testing.assert_close(part.state_dict()[name], value, rtol=1e-6, atol=1e-6)


def test_gradients_flow_through_both_ways(fitted: tuple[Space, torch.Tensor]) -> None:
    space, x = fitted
    inputs = x[:2].clone().requires_grad_()
    space.project(inputs).square().sum().backward()
    assert inputs.grad is not None
    assert float(inputs.grad.abs().sum()) > 0
    z = space.project(x[:2]).detach().requires_grad_()
    space.reconstruct(z).square().sum().backward()
    assert z.grad is not None
    assert float(z.grad.abs().sum()) > 0


def test_save_and_load_keep_every_bit(fitted: tuple[Space, torch.Tensor], tmp_path: object) -> None:
    space, x = fitted
    save_file(space.state_dict(), f"{tmp_path}/space.safetensors")
    loaded = build_space(space.config, space.shape)
    loaded.load_state_dict(load_file(f"{tmp_path}/space.safetensors"))
    assert torch.equal(loaded.project(x), space.project(x))


def test_a_space_can_be_exported_to_one_graph(fitted: tuple[Space, torch.Tensor]) -> None:
    space, x = fitted
    torch.compiler.reset()  # else every space counts as one more recompilation of this line
    graph = torch.compile(lambda v: space.reconstruct(space.project(v)), fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(x), space.reconstruct(space.project(x)))


@pytest.mark.parametrize("name", sorted(SPACES))
def test_one_image_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="at least 2 images"):
        build_space(SpaceConfig(name), (1, 4, 4)).fit([torch.zeros(1, 1, 4, 4)])


def test_an_unknown_space_names_the_choices() -> None:
    with pytest.raises(UserError, match=r"space\.name: unknown name 'pac'; did you mean 'pca'"):
        build_space(SpaceConfig("pac"), (1, 4, 4))
