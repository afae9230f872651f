"""Looks at a model: what they show and measure is what its forward compares."""

import pytest
import torch

from pmae.config import Config, replace
from pmae.derive import resolve
from pmae.method import MaskedAutoencoder, PrincipalMAE, build_method
from pmae.spaces import PCA
from pmae.train.monitor import component_errors, hidden_parts, visualize

SHAPE = (3, 16, 16)


def method(config: Config, **changes: object) -> MaskedAutoencoder:
    resolved, _ = resolve(replace(config, **changes), 100, SHAPE)
    space = None
    if resolved.space.name == "pca":
        noise = torch.randn(900, 768, generator=torch.Generator().manual_seed(0))
        space = PCA(SHAPE)
        space.fit([noise.mul(torch.linspace(2, 0.1, 768)).unflatten(1, SHAPE)])
    torch.manual_seed(0)
    return build_method(resolved, SHAPE, space).eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(5))


def test_component_errors_add_up_to_the_error(tiny: Config, x: torch.Tensor) -> None:
    model = method(tiny)
    assert isinstance(model, PrincipalMAE)
    draw = model.draw(len(x), 0.3, torch.Generator().manual_seed(1))
    error, energy = component_errors(model, x, draw)
    outcome = model(x, draw)
    torch.testing.assert_close(error.sum(), outcome.error.sum(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(energy.sum(), outcome.energy.sum(), rtol=1e-3, atol=1e-3)


def test_a_visualization_shows_what_forward_compares(tiny: Config, x: torch.Tensor) -> None:
    for space in ("pca", "pixels"):
        model = method(
            tiny, space__name=space, **({"objective__normalize_patches": False} if space == "pixels" else {})
        )
        draw = model.draw(len(x), 0.5, torch.Generator().manual_seed(1))
        shown, outcome = visualize(model, x, draw), model(x, draw)
        torch.testing.assert_close(shown.visible + shown.target, x, atol=1e-4, rtol=1e-4)
        error = (shown.prediction - shown.target).square().flatten(1).sum(1)
        torch.testing.assert_close(error, outcome.error, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("space", ["pca", "pixels"])
def test_hidden_parts_hold_the_share_that_forward_reports(tiny: Config, x: torch.Tensor, space: str) -> None:
    model = method(tiny, space__name=space)
    draw = model.draw(len(x), 0.5, torch.Generator().manual_seed(1))
    hidden = hidden_parts(model, draw)
    weight = model.space.variance_share if isinstance(model, PrincipalMAE) else torch.full((16,), 1 / 16)
    torch.testing.assert_close((hidden * weight).sum(1), model(x, draw).masked_share)
