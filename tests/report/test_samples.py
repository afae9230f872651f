"""Figures of sample images: what they show and what their captions say about it."""

from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file, save_file

from pmae.report import samples
from pmae.report.contents import load
from pmae.runs import Run

MakeRun = Callable[..., Run]


def test_hidden_patches_are_found_again_from_the_target(make_run: MakeRun) -> None:
    run = load(make_run(space="pixels").path)
    changed = np.abs(run.samples["original"] - run.samples["visible"]).max(1) > 1e-3
    np.testing.assert_array_equal(samples.hidden_pixels(run.samples["target"])[..., 0], changed)


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


def test_hidden_components_are_found_again_from_the_target(make_run: MakeRun) -> None:
    run = load(make_run().path)
    rng = np.random.default_rng(0)
    rng.normal(size=(8, 3, 8, 8)), rng.normal(size=(192, 192))
    hidden, share = rng.random((8, 192)) < 0.2, run.samples["variance"] / run.samples["variance"].sum()
    _, strip = samples.masks(run).figure.axes
    expected = [f"{(share * mask).sum():.0%} in {mask.sum()}" for mask in hidden[: samples.MASKS]]
    assert [text.get_text() for text in strip.texts] == expected
    drawn = [image.get_array()[0, :, 3].mean() for image in strip.images]
    np.testing.assert_allclose(drawn, [(share * mask).sum() for mask in hidden[: samples.MASKS]], atol=2e-3)


def test_signals_are_drawn_as_lines(make_run: MakeRun) -> None:
    run = load(make_run(shape=(5, 1, 12), dtype="float32").path)
    for draw, panels in ((samples.reconstructions, 4), (samples.masks, 4), (samples.spectrum_parts, 3)):
        drawing = draw(run)
        assert len(drawing.figure.axes) == panels
        assert len(drawing.figure.axes[0].get_images()) == 0
        assert drawing.caption.endswith("Of 5 channels the first 3 are drawn, a colour each.")
