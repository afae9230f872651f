"""Images of any kind as pictures, and figures of samples: what they show and what their captions say about it."""

from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from pmae.report import samples
from pmae.report.contents import load
from pmae.report.pictures import hidden_pixels, view_of
from pmae.report.style import sheet
from pmae.runs import Run

MakeRun = Callable[..., Run]


def test_hidden_patches_are_found_again_from_the_target(make_run: MakeRun) -> None:
    run = load(make_run(space="pixels").path)
    changed = np.abs(run.samples["original"] - run.samples["visible"]).max(1) > 1e-3
    np.testing.assert_array_equal(hidden_pixels(run.samples["target"])[..., 0], changed)


def test_spectrum_counts_components(make_run: MakeRun) -> None:
    run = make_run()
    tensors = load_file(run.path / "samples.safetensors")
    tensors["variance"] = np.array([4.0, 2.0, 2.0, 1.0, 1.0] + [0.0] * 187, np.float32)
    save_file(tensors, run.path / "samples.safetensors")
    caption = samples.spectrum(load(run.path)).caption
    assert caption.startswith("The first of 192 components holds 40.0%")
    assert "2 hold 50%, 3 hold 80%, 5 hold 95%" in caption


def test_predictions_that_borrow_contrast_claim_no_r2(make_run: MakeRun) -> None:
    borrowed = samples.reconstructions(load(make_run("a", space="pixels").path))
    raw = samples.reconstructions(load(make_run("b", space="pixels", objective__normalize_patches=False).path))
    assert "borrow" in borrowed.caption
    assert not [t for t in borrowed.figure.axes[0].texts if "R²" in t.get_text()]
    assert [t.get_text() for t in raw.figure.axes[0].texts if "R²" in t.get_text()] == ["R²\n75%"] * 6


def test_the_worst_r2_fits_into_the_margin(make_run: MakeRun) -> None:
    run = make_run()
    tensors = load_file(run.path / "samples.safetensors")
    tensors["prediction"][0] = 50 * tensors["target"][0]
    save_file(tensors, run.path / "samples.safetensors")
    figure = samples.reconstructions(load(run.path)).figure
    told = [text for text in figure.axes[0].texts if "R²" in text.get_text()]
    assert told[0].get_text() == "R²\n<−99%"
    assert all(text.get_window_extent().x0 >= 0 for text in told)


def test_bars_show_which_components_are_hidden(make_run: MakeRun) -> None:
    run = load(make_run().path)
    hidden, share = run.samples["hidden"] > 0, run.samples["variance"] / run.samples["variance"].sum()
    _, strip = samples.masks(run).figure.axes
    expected = [f"{(share * mask).sum():.0%} in {mask.sum()}" for mask in hidden[: samples.MASKS]]
    assert [text.get_text() for text in strip.texts] == expected
    drawn = [image.get_array()[0, :, 3].mean() for image in strip.images]
    np.testing.assert_allclose(drawn, [(share * mask).sum() for mask in hidden[: samples.MASKS]], atol=2e-3)


def test_masks_that_were_not_saved_have_no_bars(make_run: MakeRun) -> None:
    run = make_run()
    tensors = load_file(run.path / "samples.safetensors")
    save_file({key: value for key, value in tensors.items() if key != "hidden"}, run.path / "samples.safetensors")
    assert len(samples.masks(load(run.path)).figure.axes) == 1


def test_signals_are_drawn_as_lines(make_run: MakeRun) -> None:
    run = load(make_run(shape=(5, 1, 12), dtype="float32").path)
    for draw, panels in ((samples.reconstructions, 4), (samples.masks, 4), (samples.spectrum_parts, 3)):
        drawing = draw(run)
        assert len(drawing.figure.axes) == panels
        assert len(drawing.figure.axes[0].get_images()) == 0
        assert drawing.caption.endswith("Of 5 channels the first 3 are drawn, a colour each.")


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
    image, rows, columns = sheet([np.full((3, 4, 6, 3), 0.25), np.full((3, 4, 6, 3), 0.75)])
    for row in rows:
        for j, column in enumerate(columns):
            assert image[round(row), round(column)].tolist() == [0.25 + 0.5 * j] * 3 + [1.0]
    assert (image[..., 3] == 0).sum() == image[..., 3].size - 2 * 3 * 24


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
