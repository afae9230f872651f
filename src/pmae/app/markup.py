"""Pictures and figures as HTML that needs no file and no server: images in the page, charts in the page's ink."""

import base64
import html
import io
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from pmae.report.style import FAINT, NEUTRAL, PALETTE, WIDTH, as_inline_svg, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STRIP = 800
MARK = PALETTE[0]
DRAWING = threading.Lock()
"""Panels are made in threads, and matplotlib's settings belong to all of them."""


def row(pictures: Mapping[str, np.ndarray], size: str = "large") -> str:
    """Pictures (H, W, 3) from 0 to 1 beside each other, with their names below."""
    made = [_figure(picture, name) for name, picture in pictures.items()]
    return f'<div class="pictures {size}">{"".join(made)}</div>'


def grid(pictures: Sequence[np.ndarray], captions: Sequence[str]) -> str:
    """Many small pictures, each with a caption that need not be unique."""
    made = [_figure(picture, caption) for picture, caption in zip(pictures, captions, strict=True)]
    return f'<div class="pictures small">{"".join(made)}</div>'


def words(*sentences: str, kind: str = "note") -> str:
    """A paragraph; what it says is text, never markup."""
    return f'<p class="{kind}">{html.escape(" ".join(sentence for sentence in sentences if sentence))}</p>'


def chart(figure: "Figure", name: str, label: str, *sentences: str) -> str:
    """A figure in the page's own colours, with sentences beside it, or below it where the page is narrow."""
    with DRAWING:
        svg = as_inline_svg(figure, name, label)
    return f'<div class="beside"><div class="chart">{svg}</div><div>{"".join(map(words, sentences))}</div></div>'


def spectrum(share: np.ndarray, marked: np.ndarray, things: str, meaning: str) -> "Figure":
    """The share of variance of each unit, largest first, and all of them as one bar; those marked in colour."""
    with DRAWING:
        return _spectrum(share, marked, things, meaning)


@styled
def _spectrum(share: np.ndarray, marked: np.ndarray, things: str, meaning: str) -> "Figure":
    from matplotlib.figure import Figure

    order = np.argsort(-share, kind="stable")
    share, marked = share[order], marked[order]
    # Dots are drawn as one picture within the SVG; at the usual resolution it would be blurred.
    figure = Figure(figsize=(1.2 * WIDTH, 2.9), dpi=200, layout="constrained")
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": (5, 1)})
    _draw_dots(above, share, marked, meaning)
    above.set(xlabel=f"{things}, by their rank", ylabel="% of variance")
    _draw_bar(below, share, marked)
    below.set(xlabel=f"% of variance, cumulated over the {things}")
    return figure


def _draw_dots(axes: "Axes", share: np.ndarray, marked: np.ndarray, meaning: str) -> None:
    ranks = np.arange(1, len(share) + 1)
    # A logarithm has no place for the zeros of a basis that is wider than the data.
    seen = share > 1e-9
    inks = np.where(marked, MARK, NEUTRAL)[seen].tolist()
    # In the order of their ranks: drawn kind by kind, the last one would cover the crowded end.
    axes.scatter(ranks[seen], 100 * share[seen], s=9, color=inks, linewidths=0, rasterized=True)
    for ink, label in ((MARK, meaning), (NEUTRAL, "the others")):
        axes.scatter([], [], s=20, color=ink, label=label, linewidths=0)
    axes.set(xscale="log", yscale="log", xlim=(0.9, 1.1 * len(share)))
    axes.legend(loc="lower left", handletextpad=0.1)


def _draw_bar(axes: "Axes", share: np.ndarray, marked: np.ndarray) -> None:
    """One bar of the whole variance; where units are narrower than a pixel, colour is as strong as they are many."""
    ends = np.concatenate([[0.0], share.cumsum()])
    taken = np.concatenate([[0.0], (share * marked).cumsum()])
    filled = np.diff(np.interp(np.linspace(0, ends[-1], STRIP + 1), ends, taken)) * STRIP / ends[-1]
    red, green, blue = (int(MARK[i : i + 2], 16) / 255 for i in (1, 3, 5))
    bar = np.broadcast_to([red, green, blue, 0.0], (1, STRIP, 4)).copy()
    bar[0, :, 3] = filled.clip(0, 1)
    axes.barh(0.5, 100, height=1, color=FAINT, linewidth=0)
    axes.imshow(bar, extent=(0, 100, 0, 1), aspect="auto", interpolation="none", zorder=3)
    axes.set(xlim=(0, 100), ylim=(0, 1), yticks=())
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def _figure(picture: np.ndarray, caption: str) -> str:
    text = html.escape(caption, quote=True)
    return f'<figure><img alt="{text}" src="{_address(picture)}"><figcaption>{text}</figcaption></figure>'


def _address(picture: np.ndarray) -> str:
    """The picture itself, as an address that asks nobody for it."""
    buffer = io.BytesIO()
    Image.fromarray((255 * picture).round().astype(np.uint8)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
