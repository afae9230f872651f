"""Masks: shares, prefixes, non-empty sides and their distribution, against a plain loop and closed forms."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pmae.config import MaskingConfig
from pmae.masking import draw_ratio, hide_components, hide_patches, nominal_ratio, visible_patches


def by_loop(noise: np.ndarray, share: np.ndarray, ratio: float) -> np.ndarray:
    """The definition, one image at a time: the shortest prefix whose sum is closest to the ratio, never all or none."""
    hidden = np.zeros_like(noise, dtype=bool)
    for row, values in enumerate(noise):
        order = np.argsort(values)
        sums = np.cumsum(share[order].astype(np.float64))
        count = min(max(int(np.argmin(np.abs(sums - ratio))) + 1, 1), len(share) - 1)
        hidden[row, order[:count]] = True
    return hidden


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 200), st.floats(0.02, 0.98), st.floats(0.1, 3.0), st.integers(0, 2**31))
def test_components_equal_the_definition(count: int, ratio: float, decay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    share = torch.arange(1, count + 1, dtype=torch.float64) ** -decay
    share = share / share.sum()
    noise = torch.rand(5, count, generator=generator, dtype=torch.float64)
    hidden = hide_components(noise, share, ratio)
    np.testing.assert_array_equal(hidden.numpy(), by_loop(noise.numpy(), share.numpy(), ratio))
    shorter = hide_components(noise, share, ratio, "shorter")
    assert bool((shorter <= hidden).all())
    for mask in (hidden, shorter):
        assert bool(mask.any(1).all())
        assert bool((~mask).any(1).all())


def test_shorter_is_one_component_less_unless_it_would_be_empty() -> None:
    share, noise = torch.full((100,), 0.01), torch.rand(50, 100)
    closest, shorter = hide_components(noise, share, 0.2), hide_components(noise, share, 0.2, "shorter")
    assert bool((closest.sum(1) - shorter.sum(1) == 1).all())
    assert bool((hide_components(noise, share, 0.001, "shorter").sum(1) == 1).all())


def test_equal_shares_hide_each_component_equally_often() -> None:
    share = torch.full((20,), 0.05)
    hidden = hide_components(torch.rand(20_000, 20, generator=torch.Generator().manual_seed(0)), share, 0.2)
    frequency = hidden.float().mean(0)
    # 4 of 20 are hidden: a binomial with p = 0.2 has a deviation of 0.0028 here.
    assert float((frequency - 0.2).abs().max()) < 0.012


def test_a_spectrum_like_that_of_images_hides_close_to_the_ratio() -> None:
    share = torch.arange(1, 3073, dtype=torch.float32) ** -1.2
    share = share / share.sum()
    hidden = hide_components(torch.rand(512, 3072, generator=torch.Generator().manual_seed(0)), share, 0.2)
    assert float((hidden * share).sum(1).mean()) == pytest.approx(0.2, abs=0.02)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 100), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_patches_are_split_in_two(patches: int, ratio: float, seed: int) -> None:
    visible = visible_patches(patches, ratio)
    noise = torch.rand(4, patches, generator=torch.Generator().manual_seed(seed))
    mask = hide_patches(noise, visible)
    assert 1 <= visible < patches
    assert mask.keep.shape == (4, visible)
    assert bool((mask.hidden.sum(1) == patches - visible).all())
    assert not bool(mask.hidden.gather(1, mask.keep).any())
    assert bool(mask.hidden.gather(1, mask.drop).all())
    # Together they are every patch, once.
    together = torch.cat([mask.keep, mask.drop], dim=1)
    assert torch.equal(together, mask.order)
    assert torch.equal(together.sort(1).values, torch.arange(patches).expand(4, -1))


def test_ratios_are_fixed_or_uniform_in_their_range() -> None:
    assert draw_ratio(MaskingConfig(masked_variance=0.3), random.Random(0)) == 0.3
    uniform, stream = MaskingConfig(ratio_schedule="uniform", ratio_range=(0.1, 0.9)), random.Random(0)
    drawn = np.array([draw_ratio(uniform, stream) for _ in range(4000)])
    assert 0.1 <= drawn.min() < 0.12
    assert 0.88 < drawn.max() <= 0.9
    assert drawn.mean() == pytest.approx(nominal_ratio(uniform), abs=0.02)
