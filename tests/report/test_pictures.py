"""Arrays of any channel count and range as colours, and sheets of them."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from pmae.report.pictures import sheet, view_of


def test_captions_say_how_channels_are_shown() -> None:
    rng = np.random.default_rng(0)
    notes = {c: view_of(rng.random((4, c, 5, 5)), "float32").note for c in (1, 2, 3, 5)}
    assert notes[1] == notes[3] == "Black is 0 and white 1 in the data's units."
    assert "Of 2 channels the first is shown" in notes[2]
    assert "The 5 channels are shown as their three principal directions" in notes[5]
    assert view_of(rng.random((4, 3, 5, 5)) * 255, "uint8").note == ""


def test_principal_directions_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    images = np.einsum("nchw,cd->ndhw", rng.normal(size=(4, 6, 9, 9)), rng.normal(size=(6, 6)))
    pixels = np.moveaxis(images, 1, -1).reshape(-1, 6)
    pixels = (pixels - pixels.mean(0)) / pixels.std(0)
    expected = PCA(3).fit(pixels).components_
    np.testing.assert_allclose(np.abs(view_of(images, "float32").mix.T), np.abs(expected), atol=1e-8)


def test_differences_are_grey_at_zero_and_share_a_scale() -> None:
    images = np.array([-2.0, 0.0, 1.0, 2.0, 4.0]).reshape(1, 1, 1, 5)
    shown = view_of(np.zeros((1, 1, 1, 5)), "uint8").differences(images, 2.0)
    np.testing.assert_allclose(shown[0, 0, :, 0], [0, 0.5, 0.75, 1, 1])


def test_a_sheet_holds_every_picture_in_its_place() -> None:
    columns = {"a": np.full((3, 4, 6, 3), 0.25), "b": np.full((3, 4, 6, 3), 0.75)}
    made = sheet(columns)
    for i, row in enumerate(made.rows):
        for j, column in enumerate(made.columns):
            assert made.image[round(row), round(column)].tolist() == [0.25 + 0.5 * j] * 3 + [1.0], i
    assert (made.image[..., 3] == 0).sum() == made.image[..., 3].size - 2 * 3 * 24


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float64"])
def test_digits_of_0_to_16_are_drawn_from_black_to_white(dtype: str) -> None:
    digits = load_digits().images[:20, None].astype(dtype)
    view = view_of(digits.astype(np.float64), dtype)
    shown = view.pictures(digits)
    assert (shown.min(), shown.max()) == (0, 1)
    np.testing.assert_allclose(shown[..., 0], digits[:, 0] / 16.0)
    assert view.note == "Black is 0 and white 16 in the data's units."


def test_bytes_that_use_their_range_are_shown_as_they_are() -> None:
    images = np.array([0.0, 51.0, 102.0]).reshape(1, 1, 1, 3)
    np.testing.assert_allclose(view_of(images, "uint8").pictures(images)[0, 0, :, 0], [0, 0.2, 0.4])
