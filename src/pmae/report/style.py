"""The look of all figures (palette, type, sizes, galleries), and figures as files or as SVG in the colours of a page.

matplotlib is imported where it is used, never through pyplot, and its settings are changed only inside `styled`.
"""

import base64
import functools
import html
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from pmae.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

P = ParamSpec("P")
R = TypeVar("R")
Array = np.ndarray

WIDTH = 4.1  # inches: at 9 points the text is still 10 pixels high where a phone shrinks the figure to its width
INK, FAINT, NEUTRAL = "#22262b", "#d4d8dd", "#87919c"
PALETTE = ("#0b74b6", "#d27900", "#6e9869", "#d20978", "#985844", "#0898fa", "#b183b0", "#d50807")
"""Found by search: every two at least 11 apart (CIEDE2000) to all kinds of colour blindness, 3 to 1 on white and on
dark. A test measures both. Dashes and markers say the same again, so that nothing is said by hue alone."""
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^DvPX*"
STRIP = 600  # slices of a bar of variance
FONTS = "'DejaVu Sans', Verdana, system-ui, sans-serif"
WHOLE = "{x:,.0f}"  # how an axis writes whole numbers
EAST_ASIAN = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Source Han Sans SC", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "PingFang SC", "Hiragino Sans",
    "Apple SD Gothic Neo", "Arial Unicode MS",
)  # fmt: skip
"""Fonts of systems that have the Chinese, Japanese and Korean letters which DejaVu lacks, for names of classes."""
SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.7,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "pmae",
}


@dataclass(frozen=True)
class Drawing:
    """A figure with the words that go with it; `name` is its file name."""

    name: str
    title: str
    caption: str
    figure: "Figure"

    @functools.cached_property
    def svg(self) -> bytes:
        """The file, made once: a page also compares it with those of other runs."""
        return as_bytes(self.figure, "svg")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function under the house style and put matplotlib's settings back."""

    @functools.wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib

        with matplotlib.rc_context(SETTINGS | {"font.family": _fonts()}):
            return draw(*args, **kwargs)

    return inside


@functools.cache
def _fonts() -> list[str]:
    from matplotlib.font_manager import get_font_names

    return ["DejaVu Sans", *sorted({*EAST_ASIAN} & {*get_font_names()}, key=EAST_ASIAN.index)]


def panels(heights: Sequence[float]) -> "tuple[Figure, list[Axes]]":
    """A figure as wide as all the others, with axes of these heights (inches) below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    return figure, list(axes[:, 0])


def legend(figure: "Figure", axes: "Sequence[Axes]", ncols: int = 2) -> None:
    """One legend under all panels, each name once."""
    named = [pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols)


def short(text: str, most: int) -> str:
    """A text that fits: the middle of a longer one gives way, since names differ at their ends."""
    head = (most - 1) // 2
    return text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"


def color(position: int) -> str:
    return PALETTE[position % len(PALETTE)]


def dash(position: int) -> str:
    """A line style that changes when the colours begin again."""
    return DASHES[position // len(PALETTE) % len(DASHES)]


def marker(position: int) -> str:
    return MARKERS[position % len(MARKERS)]


def minus(text: str) -> str:
    """Text with the sign for minus in place of hyphens."""
    return text.replace("-", "−")


def variance_bar(axes: "Axes", share: np.ndarray, marked: np.ndarray, middle: float, half: float) -> None:
    """A bar of all variance from 0 to 100%, the largest share first, where what is marked has the first colour.

    Where components are narrower than a slice of the bar, the colour is as strong as they are many.
    """
    ends, taken = (np.concatenate([[0.0], values.cumsum()]) for values in (share, share * marked))
    filled = np.diff(np.interp(np.linspace(0, ends[-1], STRIP + 1), ends, taken)) * STRIP / ends[-1]
    rgb = [int(PALETTE[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    bar = np.broadcast_to([*rgb, 0.0], (1, STRIP, 4)).copy()
    bar[0, :, 3] = filled.clip(0, 1)
    axes.barh(middle, 100, height=2 * half, color=FAINT, linewidth=0)
    axes.imshow(bar, extent=(0, 100, middle + half, middle - half), aspect="auto", interpolation="none", zorder=3)


def gallery(
    columns: Mapping[str, Array], labels: Sequence[str] | None = None, strip: bool = False, margin: float = 0.55
) -> "tuple[Figure, Axes]":
    """Pictures (N, H, W, 3) by the titles of their columns, one row an image, labels in a margin (inches) beside the
    rows; and its axes or, for a `strip`, those on the right of it, with a tick at each row."""
    from matplotlib.figure import Figure

    image, rows, centres = sheet(list(columns.values()))
    height, width = image.shape[:2]
    lines = 1 + max(title.count("\n") for title in columns)
    left, right = margin if labels else 0.04, 1.3 if strip else 0.04
    bottom, across = 0.42 if strip else 0.04, WIDTH - left - right
    down = across * height / width
    total = down + 0.1 + 0.15 * lines + bottom
    figure = Figure(figsize=(WIDTH, total))
    axes = figure.add_axes((left / WIDTH, bottom / total, across / WIDTH, down / total))
    axes.imshow(image, interpolation="none", aspect="auto")
    axes.set_axis_off()
    above = -0.5 - 0.09 * height / down
    for centre, title in zip(centres, columns, strict=True):
        axes.text(centre, above, title, ha="center", va="baseline", fontsize=8.5, linespacing=1.15)
    for centre, label in zip(rows, labels or [], strict=False):
        axes.text(-0.5 - 0.05 * width / across, centre, label.replace(" ", "\n"), ha="right", va="center", fontsize=8.5)
    if not strip:
        return figure, axes
    beside = figure.add_axes(((left + across + 0.12) / WIDTH, bottom / total, (right - 0.3) / WIDTH, down / total))
    beside.set_ylim(axes.get_ylim())
    beside.set_yticks(rows, labels=[""] * len(rows))
    return figure, beside


def sheet(columns: Sequence[Array]) -> tuple[Array, list[float], list[float]]:
    """One RGBA image of all pictures with clear gutters, and the centres of its rows and columns in pixels."""
    _, height, width, _ = columns[0].shape
    gap = max(1, round(0.06 * max(height, width)))
    tiles = np.pad(np.stack(columns, 1), ((0, 0),) * 4 + ((0, 1),), constant_values=1)  # (rows, columns, H, W, RGBA)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)))
    rows, across, high, wide, _ = tiles.shape
    image = tiles.swapaxes(1, 2).reshape(rows * high, across * wide, 4)[:-gap, :-gap]
    middles = [i * high + (height - 1) / 2 for i in range(rows)], [j * wide + (width - 1) / 2 for j in range(across)]
    return image, *middles


def save_drawing(drawing: Drawing, path: Path) -> Path:
    """Write one figure, whole or not at all, in the format that the file's suffix names."""
    kind = path.suffix.removeprefix(".")
    content = drawing.svg if kind == "svg" else as_bytes(drawing.figure, kind)
    write_whole(path, lambda temporary: temporary.write_bytes(content))
    return path


@styled
def as_bytes(figure: "Figure", kind: str) -> bytes:
    """The figure as a png or svg file on white."""
    buffer = io.BytesIO()
    # A date would make two reports of the same runs differ.
    how: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 200}
    with warnings.catch_warnings():
        # Once for every letter and every time it is drawn; it is a box where no font has it, in files alone.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")
        _settle(figure)
        figure.savefig(buffer, format=kind, facecolor="white", **how)
    return buffer.getvalue()


def inline_svg(drawing: Drawing, place: str) -> str:
    """An <svg> element without background whose ink and grid follow the page; `place` sets its ids apart."""
    text, name = drawing.svg.decode(), f"{place}-{drawing.name}"
    label = html.escape(f"{drawing.title}. {drawing.caption}", quote=True)
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--line)")
    # Figure and axes are painted white in a file, and nowhere else is a patch exactly so.
    text = re.sub(r'(<g id="patch_\d+">\s*<path [^>]*style="fill: )#ffffff', r"\1none", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)", lambda found: _as_webp(found[1]), text)
    text = text.replace("'DejaVu Sans'", FONTS)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _as_webp(png: str) -> str:
    """The address of the same pixels in fewer bytes."""
    from PIL import Image

    return data_url(Image.open(io.BytesIO(base64.b64decode(png))), "webp", lossless=True, quality=80)


def data_url(picture: "Image.Image", kind: str, **how: Any) -> str:
    """An address that is the picture itself, as a file of this kind."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _settle(figure: "Figure") -> None:
    """Find room for the labels once instead of again for every format."""
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
        for axes in figure.axes:
            # The solver's last digits vary from one time to the next, and with them the names of clip paths.
            left, bottom, width, height = (round(value, 6) for value in axes.get_position(original=True).bounds)
            axes.set_position((left, bottom, width, height))
