"""Batches and statistics, against NumPy."""

from typing import Literal

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from pmae.data import batches as module
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.data.images import DTYPES, ImageSet, as_tensor
from pmae.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", ["channel", "pixel"])
def test_statistics_equal_numpy_for_every_dtype(dtype: str, per: str) -> None:
    scale = 60_000 if dtype == "uint16" else 200
    images = (np.random.default_rng(0).random((3000, 2, 4, 6)) * scale).astype(dtype)
    axes = (0, 2, 3) if per == "channel" else 0
    found = fit_standardize(Batches(images, CPU), per)  # type: ignore[arg-type]
    double = images.astype(np.float64)
    np.testing.assert_allclose(found.mean, double.mean(axes, keepdims=True).reshape(found.mean.shape), rtol=1e-5)
    np.testing.assert_allclose(found.std, double.std(axes, keepdims=True).reshape(found.std.shape), rtol=1e-5)


def test_a_constant_channel_becomes_zero() -> None:
    images = np.random.default_rng(0).random((50, 2, 4, 4)).astype(np.float32)
    images[:, 1] = 7.25
    standardize = fit_standardize(Batches(images, CPU), "channel")
    x = standardize(torch.from_numpy(images))
    assert float(x[:, 1].abs().max()) == 0
    assert float(x[:, 0].std()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("per", ["channel", "pixel"])
def test_units_of_different_size_are_standardized_each_by_itself(per: Literal["channel", "pixel"]) -> None:
    scale = np.array([1e8, 1.0, 1e-4])
    table = np.random.default_rng(0).normal(2, 1, (200, 3)) * scale
    images = table[:, :, None, None] if per == "channel" else table[:, None, None]
    found = fit_standardize(Batches(images, CPU), per)(torch.from_numpy(images)).flatten(1)
    np.testing.assert_allclose(found, StandardScaler().fit_transform(table), atol=1e-4)


def test_values_survive_the_way_to_the_device() -> None:
    for dtype in DTYPES:
        images = np.arange(2 * 3 * 4).reshape(2, 1, 3, 4).astype(dtype)
        taken = Batches(images, CPU).take(torch.tensor([1, 0]))
        np.testing.assert_array_equal(taken.numpy().astype(np.float64), images[[1, 0]].astype(np.float64))
    big = np.full((1, 1, 1, 1), 65_535, np.uint16)
    assert int(as_tensor(big)) == 65_535


def test_a_memory_map_is_read_in_pieces(tmp_path: object) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 3, 4, 4), dtype=np.uint8)
    np.save(f"{tmp_path}/x.npy", images)
    batches = Batches(np.load(f"{tmp_path}/x.npy", mmap_mode="r"), CPU)
    np.testing.assert_array_equal(torch.cat(list(batches.passes(16))).numpy(), images)


def test_large_images_come_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMBERS", 100)
    images = np.arange(7 * 48).reshape(7, 3, 4, 4).astype(np.float32)
    assert [len(batch) for batch in Batches(images, CPU).passes()] == [2, 2, 2, 1]
    assert [len(batch) for batch in Batches(images.repeat(4, axis=3), CPU).passes()] == [1] * 7


def test_standardized_images_can_be_passed_over_again() -> None:
    images = np.random.default_rng(0).random((40, 2, 4, 4)).astype(np.float32)
    batches = Batches(images, CPU)
    standardized = Standardized(batches, fit_standardize(batches, "channel"))
    first, again = (torch.cat(list(standardized)) for _ in range(2))
    assert torch.equal(first, again)
    torch.testing.assert_close(first.mean((0, 2, 3)), torch.zeros(2), atol=1e-6, rtol=0)


def test_not_a_number_is_refused() -> None:
    images = np.zeros((4, 1, 2, 2), np.float32)
    images[2] = np.nan
    with pytest.raises(UserError, match="data must be finite"):
        fit_standardize(Batches(images, CPU), "channel")


def test_an_image_set_checks_itself() -> None:
    with pytest.raises(UserError, match=r"\(N, C, H, W\)"):
        ImageSet(np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(UserError, match="dtype among"):
        ImageSet(np.zeros((3, 1, 4, 4), np.complex64))
    with pytest.raises(UserError, match="2 labels for 3 images"):
        ImageSet(np.zeros((3, 1, 4, 4), np.uint8), np.zeros(2, np.int64))


@pytest.mark.parametrize("per", ["channel", "pixel"])
@pytest.mark.parametrize(
    "images",
    [
        np.full((20, 3, 4, 4), 7, np.uint8),
        np.arange(48, dtype=np.uint8).reshape(1, 3, 4, 4).repeat(20, 0),
        np.random.default_rng(0).random((20, 1, 4, 4)).astype(np.float32) * np.float32(1e-42),
        1e9 + 1e-3 * np.random.default_rng(0).random((20, 1, 4, 4)),
        np.zeros((1, 1, 4, 4), np.float32),
    ],
    ids=["one colour", "one image", "denormal", "tiny on an offset", "a single image"],
)
def test_images_that_do_not_vary_are_refused(images: np.ndarray, per: Literal["channel", "pixel"]) -> None:
    with pytest.raises(UserError, match="data must be images that vary, got images that are all alike"):
        fit_standardize(Batches(images, CPU), per)


def test_a_little_variation_is_enough() -> None:
    images = np.full((20, 2, 4, 4), 30_000, np.uint16)
    images[7, 0, 1, 2] += 1
    fitted = fit_standardize(Batches(images, CPU), "channel")
    expected = images[:, 0].astype(np.float64).std()
    np.testing.assert_allclose(fitted.std.ravel().numpy(), [expected, 1.0], rtol=1e-6)
