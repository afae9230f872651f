"""Figures under the house style: matplotlib left as it was, and SVG in the colours of the page."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from skimage.color import deltaE_ciede2000, rgb2lab

from pmae.report import charts
from pmae.report.contents import load
from pmae.report.page import save_figures
from pmae.report.style import PALETTE, as_bytes, inline_svg
from pmae.runs import Run

MakeRun = Callable[..., Run]


def test_settings_of_matplotlib_are_left_as_they_were(make_run: MakeRun) -> None:
    before = dict(matplotlib.rcParams)
    save_figures(make_run())
    assert dict(matplotlib.rcParams) == before


def test_letters_that_no_font_has_are_no_warning(make_run: MakeRun) -> None:
    """A box in a picture file stands for each; a browser finds a font for them in a page."""
    run = load(make_run().path)
    drawing = charts.learning_curves([replace(run, name="検査 \U00013000"), replace(run, name="other")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_bytes(drawing.figure, "png")
    assert "検査" in inline_svg(drawing, "page")


def test_inline_svg_takes_the_colours_of_the_page_and_keeps_ids_apart(make_run: MakeRun) -> None:
    run = load(make_run().path)
    drawing = replace(charts.learning_curves([run]), title='a "label" <b>', caption="c")
    one, two = (inline_svg(drawing, place) for place in ("one", "two"))
    assert one.startswith("<svg ")
    assert "currentColor" in one
    assert "fill: #ffffff" not in one
    assert "var(--line)" in one
    assert 'aria-label="a &quot;label&quot; &lt;b&gt;. c"' in one
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', one))
    assert used
    assert used <= ids[0]


SEEN = {  # linear RGB as people without one kind of cone see it (Machado et al. 2009, severity 1)
    "all": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def linear(colours: tuple[str, ...]) -> np.ndarray:
    """(N, 3) linear light of #rrggbb."""
    shown = np.array([[int(one[i : i + 2], 16) / 255 for i in (1, 3, 5)] for one in colours])
    return np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("eyes", SEEN)
def test_every_two_colours_differ_to_all_eyes(eyes: str) -> None:
    light = (linear(PALETTE) @ SEEN[eyes].T).clip(0, 1)
    shown = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    colours = rgb2lab(shown[None])[0]
    apart = [deltaE_ciede2000(colours[i], colours[j]) for i, j in combinations(range(len(PALETTE)), 2)]
    assert min(apart) > 10


def test_colours_stand_out_on_white_and_on_dark() -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    own = linear(PALETTE) @ weights + 0.05
    white, dark = linear(("#ffffff", "#191d23")) @ weights + 0.05
    assert (white / own).min() >= 3
    assert (own / dark).min() >= 3
