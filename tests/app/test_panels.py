"""What the tabs show: the right marks, the right words, and text that stays text."""

import base64
import copy
import dataclasses
import io
import re

import numpy as np
import pytest
from PIL import Image

from pmae.app import chart, panels
from pmae.app.material import Material
from pmae.data.images import Splits
from pmae.errors import UserError


def pictures(page: str) -> dict[str, np.ndarray]:
    """The pictures of a panel by their captions."""
    found = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)"', page)
    return {name: np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for name, data in found}


def test_the_marked_diamonds_are_the_hidden_units_and_the_bar_holds_their_share(material: Material) -> None:
    space, x = material.space("cosine"), material.standardized(material.picked.images[0])
    units, share = panels.hide(space, x, panels.draw_for(space, 0.3, 2)).units.numpy(), space.mask_group_share.numpy()
    svg = chart.spectrum(share, units, "coefficients", "hidden")
    paths = dict(re.findall(r'<path class="(dots|marked|filled)" d="([^"]*)"/>', svg)[:3])
    ranks = {tuple(map(int, place)) for place in re.findall(r"M(\d+) (\d+)", paths["marked"])}
    order = np.argsort(-share, kind="stable")
    seen = np.flatnonzero(units[order] & (share[order] > chart.SMALLEST))
    low, high = np.floor(np.log10(share[share > chart.SMALLEST].min())), np.ceil(np.log10(share.max()))
    across = chart.LEFT + (chart.WIDTH - chart.LEFT - chart.RIGHT) * np.log(seen + 1) / np.log(len(share))
    down = chart.BOTTOM - (chart.BOTTOM - chart.TOP) * (np.log10(share[order][seen]) - low) / (high - low)
    assert ranks == set(zip(across.round().astype(int), down.round().astype(int), strict=True))
    wide = sum(float(width) for width in re.findall(r"h(\d+\.\d+)V", paths["filled"]))
    whole = chart.WIDTH - chart.LEFT - chart.RIGHT
    assert wide / whole == pytest.approx(share[units].sum(), abs=0.01)


def test_a_share_that_whole_components_cannot_reach_is_explained(material: Material) -> None:
    image, space = material.picked.images[0], material.space("pca")
    pages = [panels.masks(material, image, "pca", 0.5, seed) for seed in range(12)]
    told = [float(re.search(r"with ([\d.]+)% of the variance", page)[1]) for page in pages]  # type: ignore[index]
    assert [abs(share - 50) >= 2.05 for share in told] == ["It cannot come closer" in page for page in pages] or any(
        1.95 < abs(share - 50) < 2.05 for share in told
    )
    assert any("It cannot come closer" in page for page in pages)
    largest = f"{100 * float(space.mask_group_share.max()):.1f}%"
    assert any(f"holds {largest}" in page for page in pages), "the component that is too large is named by its share"


def test_masks_without_a_run_show_the_image_and_its_two_parts(material: Material) -> None:
    image = material.picked.images[1]
    page = panels.masks(material, image, "pixels", 0.5, 0)
    shown = pictures(page)
    assert list(shown) == ["image", "visible", "hidden"]
    np.testing.assert_array_equal(shown["image"], image.transpose(1, 2, 0))
    grey = (shown["hidden"] == 128).all(-1)
    np.testing.assert_array_equal(shown["visible"][grey], shown["image"][grey])
    np.testing.assert_array_equal(shown["hidden"][~grey], shown["image"][~grey])
    assert "12 of 24 patches are hidden" in page
    assert "R²" not in page


def test_a_run_predicts_in_its_own_space_alone(trained: Material) -> None:
    own = panels.masks(trained, trained.picked.images[0], "pca", 0.2, 0)
    assert list(pictures(own)) == ["image", "visible", "hidden", "predicted", "visible + predicted"]
    assert re.search(r"R² −?\d+%: the share", own)
    other = panels.masks(trained, trained.picked.images[0], "cosine", 0.2, 0)
    assert list(pictures(other)) == ["image", "visible", "hidden"]
    assert "trained in: principal components" in other


def test_the_walk_shows_the_band_and_refuses_an_empty_one(material: Material) -> None:
    page = panels.walk(material, material.picked.images[0], "cosine", 0.0, 0.8)
    shown = pictures(page)
    assert list(shown)[:3] == ["image", "the band alone", "without it"]
    assert sum(": " in name for name in shown) == panels.BASIS
    with pytest.raises(UserError, match="from must be below to"):
        panels.walk(material, material.picked.images[0], "cosine", 0.5, 0.5)
    with pytest.raises(UserError, match="from and to must be shares of the variance, got nothing"):
        panels.walk(material, material.picked.images[0], "cosine", None, 0.5)
    assert "None of the" in panels.walk(material, material.picked.images[0], "pca", 0.001, 0.002)


def test_neighbours_need_a_run_and_class_names_stay_text(trained: Material, splits: Splits) -> None:
    assert "none was given" in panels.neighbours(Material(splits), splits.train.images[0])
    named = copy.copy(trained)
    named.train = dataclasses.replace(splits.train, classes=("<script>alert(1)</script>", '"><b>'))
    page = panels.neighbours(named, splits.train.images[0])
    assert page.count("<figure>") == 1 + panels.NEIGHBOURS
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page


def test_a_share_that_is_being_typed_draws_a_mask_and_an_empty_field_is_named(material: Material) -> None:
    image = material.picked.images[0]
    for share in (0, 0.35, 1):
        assert list(pictures(panels.masks(material, image, "cosine", share, 0))) == ["image", "visible", "hidden"]
    assert "(35% asked for)" in panels.masks(material, image, "cosine", 0.35, 0)
    for seed in (None, -1, 2**64):
        with pytest.raises(
            UserError, match=f"seed must be a whole number from 0, got {'nothing' if seed is None else seed}"
        ):
            panels.masks(material, image, "cosine", 0.35, seed)
    with pytest.raises(UserError, match="masked share must be a number from 0, got nothing"):
        panels.masks(material, image, "cosine", None, 0)


def test_patches_are_colours_and_what_every_head_looks_at(trained: Material, material: Material) -> None:
    shown = panels.patches(trained, trained.picked.images[0])
    assert shown.count("<img") == 3 + 4
    assert "head 4" in shown
    assert "pmae explore runs/a" in panels.patches(material, material.picked.images[0])
