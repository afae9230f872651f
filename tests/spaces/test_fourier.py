"""The real Fourier basis against NumPy's FFT: what it spans, its energies and its frequencies."""

import numpy as np
import pytest
import torch

from pmae.spaces import Fourier

SHAPES = [(1, 8, 8), (1, 7, 12), (2, 5, 9), (1, 1, 2), (1, 1, 1)]


def coefficients(shape: tuple[int, int, int]) -> tuple[torch.Tensor, np.ndarray]:
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, Fourier(shape).double().project(x).unflatten(1, shape).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_waves_are_orthonormal_and_have_their_frequency(size: int) -> None:
    waves, frequencies = Fourier.waves(size)
    np.testing.assert_allclose(waves @ waves.T, np.eye(size), atol=1e-12)
    # All energy of a wave lies where NumPy says its frequency is.
    power = abs(np.fft.fft(waves, axis=1)) ** 2
    off = power * (abs(abs(np.fft.fftfreq(size))[None] - frequencies[:, None]) > 1e-12)
    np.testing.assert_allclose(off, 0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_energy_is_that_of_the_image_and_of_each_pair_of_frequencies(shape: tuple[int, int, int]) -> None:
    x, z = coefficients(shape)
    np.testing.assert_allclose((z**2).sum((1, 2, 3)), x.square().sum((1, 2, 3)), rtol=1e-6)
    # NumPy's complex waves at (+-f, +-g) span what our products of waves with frequencies f and g do.
    _, height, width = shape
    power = abs(np.fft.fft2(x.numpy(), norm="ortho")) ** 2
    theirs = np.hypot(1000 * abs(np.fft.fftfreq(height))[:, None], abs(np.fft.fftfreq(width)))
    ours = np.hypot(1000 * Fourier.waves(height)[1][:, None], Fourier.waves(width)[1])
    for pair in np.unique(ours):
        found = (z**2 * np.isclose(ours, pair, rtol=1e-12)).sum((2, 3))
        np.testing.assert_allclose(found, (power * np.isclose(theirs, pair, rtol=1e-12)).sum((2, 3)), atol=1e-5)


def test_first_coefficient_is_the_mean() -> None:
    x, z = coefficients((2, 5, 9))
    np.testing.assert_allclose(z[:, :, 0, 0], x.mean((2, 3)) * np.sqrt(45), rtol=1e-6)
