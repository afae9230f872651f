"""Figures drawn from synthetic run folders of every kind of image, and what they say about them."""

import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sklearn.decomposition import PCA

from pmae.errors import UserError
from pmae.report import charts, comparisons, galleries
from pmae.report.charts import save_figures
from pmae.report.contents import load
from pmae.report.galleries import _hidden_components, hidden_pixels
from pmae.report.pictures import sheet, view_of
from pmae.report.style import as_inline_svg
from pmae.runs import Run

Suite = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Run]
PICTURES = {"reconstructions", "masks", "learning-curves"}
SPECTRAL = {"spectrum", "spectrum-parts", "r2-by-band"}


@pytest.mark.parametrize(
    ("shape", "dtype", "space"),
    [
        ((3, 8, 8), "uint8", "pca"),
        ((1, 6, 10), "uint16", "pca"),
        ((5, 8, 6), "float32", "pca"),
        ((2, 8, 8), "int16", "pixels"),
    ],
)
def test_every_kind_of_image_is_drawn(make_run: MakeRun, shape: tuple[int, int, int], dtype: str, space: str) -> None:
    run = make_run(shape=shape, dtype=dtype, space=space)
    paths = save_figures(run)
    assert {path.stem for path in paths} == PICTURES | (SPECTRAL if space == "pca" else set())
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.parent == run.path / "figures" for path in paths)
    assert not list((run.path / "figures").glob(".*"))
    assert load(run.path).problems == []


def test_evaluated_runs_get_bars_curves_confusion_and_a_map(make_run: MakeRun, suite: Suite) -> None:
    scores = {"linear/cls/test": 0.7, "knn/mean/test": 0.6}
    evaluation = {"pmae epoch 1": suite(scores), "pmae epoch 3": suite(scores), "random weights": suite(scores)}
    paths = save_figures(make_run(evaluation=evaluation, features=True), ("png", "svg"))
    found = {path.name for path in paths}
    assert {"accuracy-test.png", "accuracy-by-epoch-test.svg", "confusion.png", "feature-map.svg"} <= found


def test_settings_of_matplotlib_are_left_as_they_were(make_run: MakeRun) -> None:
    before = dict(matplotlib.rcParams)
    save_figures(make_run(), ("svg",))
    assert dict(matplotlib.rcParams) == before


def test_an_unknown_format_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match="formats: unknown name 'bmp'"):
        save_figures(make_run(), ("bmp",))


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


def test_hidden_components_are_found_again_from_the_target(make_run: MakeRun) -> None:
    run = load(make_run().path)
    found = _hidden_components(run, run.samples["target"])
    expected = np.random.default_rng(0)
    expected.normal(size=(8, 3, 8, 8)), expected.normal(size=(192, 192))
    np.testing.assert_array_equal(found, expected.random((8, 192)) < 0.2)


def test_hidden_patches_are_found_again_from_the_target(make_run: MakeRun) -> None:
    run = load(make_run(space="pixels").path)
    changed = np.abs(run.samples["original"] - run.samples["visible"]).max(1) > 1e-3
    np.testing.assert_array_equal(hidden_pixels(run.samples["target"])[..., 0], changed)


def test_spectrum_counts_components(make_run: MakeRun) -> None:
    run = make_run()
    tensors = load_file(run.path / "samples.safetensors")
    tensors["variance"] = np.array([4.0, 2.0, 2.0, 1.0, 1.0] + [0.0] * 187, np.float32)
    save_file(tensors, run.path / "samples.safetensors")
    caption = charts.spectrum(load(run.path)).caption
    assert caption.startswith("The first of 192 components holds 40.0%")
    assert "2 hold 50%, 3 hold 80%, 5 hold 95%" in caption


def test_bars_stand_at_the_accuracies(make_run: MakeRun, suite: Suite) -> None:
    evaluation = {"pmae epoch 3": suite({"linear/cls/test": 0.7}), "raw pixels": suite({"linear/pixels/test": 0.4})}
    (axes,) = comparisons.accuracy_bars([load(make_run(evaluation=evaluation).path)], "test").figure.axes
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [70.0, 40.0]
    assert {text.get_text() for text in axes.texts} == {"pmae epoch 3 (CLS)", "raw pixels", "70.0", "40.0"}


def test_predictions_that_borrow_contrast_claim_no_r2(make_run: MakeRun) -> None:
    borrowed = galleries.reconstructions(load(make_run("a", space="pixels").path))
    raw = galleries.reconstructions(load(make_run("b", space="pixels", objective__normalize_patches=False).path))
    assert "borrow" in borrowed.caption
    assert not [t for t in borrowed.figure.axes[0].texts if "R²" in t.get_text()]
    assert [t.get_text() for t in raw.figure.axes[0].texts if "R²" in t.get_text()] == ["R²\n0.75"] * 6


@pytest.mark.parametrize(("count", "width"), [(2, 5), (10, 5), (40, 1), (40, 5)])
def test_feature_maps_of_few_flat_or_unlabelled_features(make_run: MakeRun, count: int, width: int) -> None:
    run = make_run()
    values = np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)
    values[:, 0] = 1.0
    save_file({"features": values}, run.path / "features.safetensors")
    drawing = comparisons.feature_map(load(run.path))
    assert np.isfinite(drawing.figure.axes[0].collections[0].get_offsets()).all()


def test_inline_svg_takes_the_colours_of_the_page_and_keeps_ids_apart(make_run: MakeRun) -> None:
    run = load(make_run().path)
    drawing = charts.learning_curves([run])
    one, two = (as_inline_svg(drawing.figure, name, 'a "label" <b>') for name in ("one", "two"))
    assert one.startswith("<svg ")
    assert "currentColor" in one
    assert "var(--line)" in one
    assert 'aria-label="a &quot;label&quot; &lt;b&gt;"' in one
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', one))
    assert used
    assert used <= ids[0]
