"""What each tab of the explorer shows, as HTML, for an image (C, H, W) in the data's units."""

import base64
import html
import io
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pmae.app import hiding
from pmae.app.material import BANK, Material
from pmae.errors import UserError
from pmae.method import MAE
from pmae.report.samples import PARTS
from pmae.report.style import NEUTRAL, PALETTE, WIDTH, as_inline_svg, minus, styled, variance_bar
from pmae.spaces import Pixels, Space

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASIS, NEIGHBOURS = 16, 12
LEAST = 0.01
"""Of the image is hidden, and stays visible, whatever share is asked for."""
MID_GREY = "Mid-grey is 0, black and white are ∓{:.2g} standard deviations of a pixel."
BAR = "In the bar each is as wide as its share of the variance, the largest first."
MEETING = (
    "Top, middle and bottom meet at 80% and 95% of the variance.",
    "Parts without the largest are differences from the mean image, each on a scale of its own.",
)
DRAWING = threading.Lock()
"""Panels are made in threads, and matplotlib's settings belong to all of them."""
BORROWED = "To be seen, predicted patches borrow the mean and contrast of the true ones; R² is without that loan."


def masks(material: Material, image: np.ndarray, name: str, share: float | None, seed: int | None) -> str:
    """The image, its visible and its hidden part, what the run predicts, and which part of the spectrum is hidden."""
    if share is None or seed is None or not 0 <= seed < 2**63:
        wrong = ("masked share", "number", share) if share is None else ("seed", "whole number", seed)
        raise UserError("{} must be a {} from 0, got {}".format(*wrong))
    space, x, model = material.space(name), material.standardized(image), material.model
    draw = hiding.draw_for(space, min(max(share, LEAST), 1 - LEAST), seed)
    masked = hiding.hide(space, x, draw, model.config.masking.prefix if model else "closest")
    prediction, told = None, ""
    if model is not None and name == material.own_space:
        prediction, r2 = hiding.predict(model, x, draw)
        told = f"R² {r2:.2f}: the share of the hidden part that the run predicts; 0 is predicting the mean."
        told += f" {BORROWED}" * (isinstance(model, MAE) and model.config.objective.normalize_patches)
    elif model is not None:
        told = f"The run predicts in the space that it was trained in: {material.offered()[material.own_space]}."
    pictures, scale = _parts(material, space, x, masked, prediction)
    count, achieved = int(masked.units.sum()), float(space.mask_group_share[masked.units].sum())
    things = things_of(space)
    hidden = f"{count:,} of {space.mask_group_count:,} {things} are hidden, with {achieved:.1%} of the variance"
    hidden += "." if isinstance(space, Pixels) else f" ({share:.0%} asked for)."
    figure = spectrum(space.mask_group_share.numpy(), masked.units.numpy(), things, "hidden")
    label = f"share of variance of each of the {things}, the hidden ones marked"
    differences = f"The hidden part is a difference. {MID_GREY.format(scale)}" * (not isinstance(space, Pixels))
    notes = [note for note in (hidden, BAR, differences, material.view.note) if note]
    score = words(minus(told), kind="score") if told else ""
    return row(pictures) + score + chart(figure, "masks", label, *notes)


def walk(material: Material, image: np.ndarray, name: str, low: float, high: float) -> str:
    """What a band of the spectrum shows alone, what is left without it, and some of its basis images."""
    if low >= high:
        raise UserError(f"from must be below to ({high:.1%} of the variance), got {low:.1%}")
    space, x = material.space(name), material.standardized(image)
    found, things = hiding.band(space, x, low, high), things_of(space)
    if not found.units.any():
        return words(f"None of the {things} begins between {low:.1%} and {high:.1%} of the variance.")
    pictures = {"image": _picture(material, x), "the band alone": _alone(material, space, found, low)}
    pictures["without it"] = _picture(material, found.others)
    for part, (first, last) in PARTS.items():
        pictures[part] = _alone(material, space, hiding.band(space, x, first, last), first)
    figure = spectrum(space.mask_group_share.numpy(), found.units.numpy(), things, "in the band")
    label = f"share of variance of each of the {things}, those in the band marked"
    said = f"{int(found.units.sum()):,} of {space.mask_group_count:,} {things} lie in the band."
    drawn = chart(figure, "walk", label, said, BAR, *MEETING)
    return row(pictures) + drawn + _basis(material, space, found.units)


def _basis(material: Material, space: Space, units: Tensor) -> str:
    """Some of the units in a band, from its largest to its smallest."""
    ranks, images = hiding.basis_images(space, units, BASIS)
    shares = 100 * space.mask_group_share.sort(descending=True).values[ranks]
    captions = [f"{rank + 1:,}: {share:.2g}%" for rank, share in zip(ranks.tolist(), shares.tolist(), strict=True)]
    pictures = [_difference(material, one[None], material.view.scale(one[None].numpy())) for one in images]
    heading = f"Some of these {things_of(space)} as images, each with its rank and its share of the variance"
    return words(heading, kind="score") + grid(pictures, captions)


def neighbours(material: Material, image: np.ndarray) -> str:
    """The training images whose features point most nearly the same way, with their classes or names."""
    if material.model is None:
        return words(
            "Neighbours are found by a trained encoder, and none was given.",
            "Start the explorer with a run folder: pmae explore runs/a",
        )
    places, similarity = material.neighbours(image, NEIGHBOURS)
    train, total = material.train, len(material.train)
    pictures = material.view.pictures(train.images[places].astype(np.float64))
    captions = [
        f"{like:.2f} {_called(material, place)}" for like, place in zip(similarity, places.tolist(), strict=True)
    ]
    among = f"all {total:,}" if total <= BANK else f"{BANK:,} of the {total:,}"
    said = f"The {len(places)} nearest among {among} training images, by the cosine of their mean-pooled features."
    query = row({"image": _picture(material, material.standardized(image))}, "single")
    return query + words(said, "The image itself is left out.") + grid(list(pictures), captions)


def things_of(space: Space) -> str:
    """What a space hides one of, in the plural."""
    if isinstance(space, Pixels):
        return "patches"
    if space.mask_groups is not None and space.config.grouped:
        return "bands"
    return "components" if "pca" in space.config.name or space.config.name in ("ica", "learned") else "coefficients"


def _parts(
    material: Material, space: Space, x: Tensor, masked: hiding.Masked, prediction: Tensor | None
) -> tuple[dict[str, np.ndarray], float]:
    """The pictures of a mask by their names, and the scale of those that are differences."""
    scale, image = material.view.scale(masked.hidden.numpy()), _picture(material, x)
    restored = None if prediction is None else _picture(material, masked.visible + prediction)
    pictures = {"image": image, "visible": _picture(material, masked.visible)}
    if isinstance(space, Pixels):
        gaps = space.expand_mask(masked.units[None]).unflatten(1, space.shape)[0, 0, :, :, None].numpy()
        pictures |= {"visible": np.where(gaps, 0.5, image), "hidden": np.where(gaps, image, 0.5)}
        pictures |= {} if restored is None else {"predicted": np.where(gaps, restored, 0.5)}
    else:
        pictures["hidden"] = _difference(material, masked.hidden, scale)
        pictures |= {} if prediction is None else {"predicted": _difference(material, prediction, scale)}
    return pictures | ({} if restored is None else {"visible + predicted": restored}), scale


def _alone(material: Material, space: Space, found: hiding.Band, low: float) -> np.ndarray:
    """A band by itself: with the largest units it is an image about the mean image, without them a difference."""
    if low == 0:
        return _picture(material, found.alone + space.reconstruct(torch.zeros(1, len(space.variance))))
    return _difference(material, found.alone, material.view.scale(found.alone.numpy()))


def _picture(material: Material, x: Tensor) -> np.ndarray:
    shown: np.ndarray = material.view.pictures(material.standardize.invert(x).numpy())[0]
    return shown


def _difference(material: Material, x: Tensor, scale: float) -> np.ndarray:
    shown: np.ndarray = material.view.differences(x.numpy(), scale)[0]
    return shown


def _called(material: Material, place: int) -> str:
    train = material.train
    if train.labels is not None and train.classes:
        return train.classes[int(train.labels[place])]
    return train.names[place] if train.names else f"number {place + 1:,}"


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
    variance_bar(below, share, marked, 0.5, 0.5)
    below.set(xlim=(0, 100), ylim=(0, 1), yticks=(), xlabel=f"% of variance, cumulated over the {things}")
    below.grid(False)
    below.spines["left"].set_visible(False)
    return figure


def _draw_dots(axes: "Axes", share: np.ndarray, marked: np.ndarray, meaning: str) -> None:
    ranks = np.arange(1, len(share) + 1)
    # A logarithm has no place for the zeros of a basis that is wider than the data.
    seen = share > 1e-9
    inks = np.where(marked, PALETTE[0], NEUTRAL)[seen].tolist()
    # In the order of their ranks: drawn kind by kind, the last one would cover the crowded end.
    axes.scatter(ranks[seen], 100 * share[seen], s=9, color=inks, linewidths=0, rasterized=True)
    for ink, label in ((PALETTE[0], meaning), (NEUTRAL, "the others")):
        axes.scatter([], [], s=20, color=ink, label=label, linewidths=0)
    axes.set(xscale="log", yscale="log", xlim=(0.9, 1.1 * len(share)))
    axes.legend(loc="lower left", handletextpad=0.1)


def _figure(picture: np.ndarray, caption: str) -> str:
    text = html.escape(caption, quote=True)
    return f'<figure><img alt="{text}" src="{_address(picture)}"><figcaption>{text}</figcaption></figure>'


def _address(picture: np.ndarray) -> str:
    """The picture itself, as an address that asks nobody for it."""
    buffer = io.BytesIO()
    Image.fromarray((255 * picture).round().astype(np.uint8)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
