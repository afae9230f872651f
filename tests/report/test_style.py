"""Figures under the house style: matplotlib left as it was, and SVG in the colours of the page."""

import re
from collections.abc import Callable

import matplotlib

from pmae.report import charts
from pmae.report.contents import load
from pmae.report.page import save_figures
from pmae.report.style import as_inline_svg
from pmae.runs import Run

MakeRun = Callable[..., Run]


def test_settings_of_matplotlib_are_left_as_they_were(make_run: MakeRun) -> None:
    before = dict(matplotlib.rcParams)
    save_figures(make_run(), ("svg",))
    assert dict(matplotlib.rcParams) == before


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
