"""Wavelets against PyWavelets, coefficient by coefficient, and what is refused."""

import numpy as np
import pytest
import pywt
import torch

from pmae.config import SpaceConfig
from pmae.errors import UserError
from pmae.spaces import Wavelet, build_space
from pmae.spaces.fixed import MOMENTS, filter_bank, low_pass, subbands


@pytest.mark.parametrize("name", MOMENTS)
def test_filters_equal_pywavelets(name: str) -> None:
    np.testing.assert_allclose(low_pass(name), pywt.Wavelet(name).rec_lo, atol=1e-12)


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("size", [2, 6, 32])
def test_filter_banks_are_orthonormal_however_short_the_signal(name: str, size: int) -> None:
    bank = filter_bank(name, size)
    np.testing.assert_allclose(bank @ bank.T, np.eye(size), atol=1e-12)


# PyWavelets warns where filters are longer than the signal; periodised ones wrap around and stay exact.
@pytest.mark.filterwarnings("ignore:Level value")
@pytest.mark.parametrize("name", ["haar", "db2", "db5", "db8"])
@pytest.mark.parametrize(("shape", "levels"), [((2, 32, 32), 5), ((1, 24, 40), 3), ((3, 6, 10), 1)], ids=str)
def test_equals_pywavelets(name: str, shape: tuple[int, int, int], levels: int) -> None:
    x = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    space = Wavelet(shape, SpaceConfig("wavelet", wavelet=name)).double()
    assert space.levels == levels
    z = space.project(x).unflatten(1, shape).numpy()
    found = pywt.wavedec2(x.numpy(), name, mode="periodization", level=levels, axes=(2, 3))
    expected, _ = pywt.coeffs_to_array(found, axes=(2, 3))
    np.testing.assert_allclose(z, expected, atol=2e-6)


def test_fewer_levels_leave_a_larger_average() -> None:
    x = torch.randn(1, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = Wavelet((1, 16, 16), SpaceConfig("wavelet", levels=1)).double().project(x).unflatten(1, (1, 16, 16))
    average, (down, across, both) = pywt.dwt2(x[0, 0].numpy(), "db2", mode="periodization")
    np.testing.assert_allclose(z[0, 0], np.block([[average, across], [down, both]]), atol=1e-6)


def test_subbands_are_the_blocks_of_pywavelets() -> None:
    found = pywt.wavedec2(np.zeros((24, 40)), "haar", mode="periodization", level=3)
    _, places = pywt.coeffs_to_array(found)
    band = subbands([(24, 40), (12, 20), (6, 10)])
    blocks = [places[0], *(places[level][kind] for level in (1, 2, 3) for kind in ("ad", "da", "dd"))]
    numbers = [np.unique(band[block]) for block in blocks]
    assert all(len(number) == 1 for number in numbers)
    assert len({int(number[0]) for number in numbers}) == len(blocks) == band.max() + 1
    grouped = Wavelet((3, 24, 40), SpaceConfig("wavelet", grouped=True))
    assert grouped.mask_group_count == 3 * len(blocks)


def test_bad_settings_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"space\.levels must be at most 3 for images of 24x40.*got 4"):
        build_space(SpaceConfig("wavelet", levels=4), (1, 24, 40))
    with pytest.raises(UserError, match=r"at most 0 for images of 7x8"):
        build_space(SpaceConfig("wavelet"), (1, 7, 8))
    with pytest.raises(UserError, match=r"space\.wavelet: unknown name 'db9'; did you mean 'db"):
        build_space(SpaceConfig("wavelet", wavelet="db9"), (1, 8, 8))
    with pytest.raises(UserError, match=r"space\.levels must be at least 1, got 0"):
        SpaceConfig("wavelet", levels=0)
    with pytest.raises(UserError, match=r"space\.levels must be left unset unless space\.name is 'wavelet'"):
        SpaceConfig("cosine", levels=2)
