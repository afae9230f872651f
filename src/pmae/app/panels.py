"""What each tab of the explorer shows, as HTML; `units` are what a space hides: coefficients, or groups of them."""

import html
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pmae import masking
from pmae.app.chart import spectrum
from pmae.app.material import BANK, Material
from pmae.errors import UserError
from pmae.masking import Draw
from pmae.method import MAE, MaskedAutoencoder, PrincipalMAE
from pmae.models.maps import attention_maps, colours, token_maps
from pmae.report.pictures import enlarged, lit
from pmae.report.style import data_url, minus
from pmae.spaces import Pixels, Space
from pmae.train.monitor import hidden_parts, visualize

BASIS, NEIGHBOURS = 16, 12
NOTICED = 0.02  # of the variance, missing from the share that was asked for
LEAST = 0.01  # of the image is hidden, and stays visible, whatever share is asked for
BAR = "In the bar each is as wide as its share of the variance, the largest first."
DIFFERENCE = "The hidden part is a difference: mid-grey is 0, black and white ∓{:.2g} standard deviations of a pixel."
BORROWED = " To be seen, predicted patches borrow the mean and contrast of the true ones; R² is without that loan."


class Parts(NamedTuple):
    """Some units (units,) as booleans, the image that they add, and the one that the others make."""

    units: Tensor
    inside: Tensor
    outside: Tensor


@torch.no_grad()
def take_apart(space: Space, x: Tensor, units: Tensor) -> Parts:
    """An image as the sum of two: what some units (units,) add, and the rest."""
    z = space.project(x)
    whole, outside = space.reconstruct(z), space.reconstruct(z.masked_fill(space.expand_mask(units[None]), 0.0))
    # What such a space cannot express stays with the visible part, as in training.
    return Parts(units, whole - outside, outside + x - whole if space.keeps_rest else outside)


def draw_for(space: Space, share: float, seed: int) -> Draw:
    """The randomness of one mask, in the form that the method takes."""
    noise = torch.rand(1, space.mask_group_count, generator=torch.Generator().manual_seed(seed))
    return Draw(noise, torch.tensor(share), masking.visible_patches(space.mask_group_count, share))


def hide(space: Space, x: Tensor, draw: Draw) -> Parts:
    """Hide a share of the patches in pixel space, and of the variance in any other, as a model would by default."""
    if isinstance(space, Pixels):
        units = masking.hide_patches(draw.noise, draw.visible).hidden
    else:
        units = masking.hide_components(draw.noise, space.mask_group_share, draw.ratio)
    return take_apart(space, x, units[0])


@torch.no_grad()
def predict(model: MaskedAutoencoder, x: Tensor, draw: Draw) -> tuple[Parts, Tensor, float]:
    """What a run hides, its picture of that, and the share of its energy that is right, as training counts it."""
    outcome, shown = model(x, draw), visualize(model, x, draw)
    units = model.hidden_groups(draw) if isinstance(model, PrincipalMAE) else hidden_parts(model, draw)
    r2 = float(1 - outcome.error / outcome.energy.clamp(min=1e-12))
    return Parts(units[0], shown.target, shown.visible), shown.prediction, r2


@torch.no_grad()
def basis_images(space: Space, units: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ranks in the spectrum (0 is the largest) of some units, from first to last, and their images about the mean."""
    order = space.mask_group_share.argsort(descending=True, stable=True)
    ranks = units[order].nonzero()[:, 0]
    ranks = ranks[torch.linspace(0, len(ranks) - 1, min(count, len(ranks))).round().long()]
    chosen = order[ranks][:, None] == torch.arange(space.mask_group_count)
    # Every coefficient of a unit at one standard deviation.
    z = space.expand_mask(chosen) * space.variance.sqrt()
    return ranks, space.reconstruct(z) - space.reconstruct(torch.zeros_like(z[:1]))


def masks(material: Material, image: np.ndarray, name: str, share: float | None, seed: int | None) -> str:
    """The image, its visible and its hidden part, what the run predicts, and which part of the spectrum is hidden."""
    if share is None or seed is None or not 0 <= seed < 2**63:
        name, rule, value = ("masked share", "number", share) if share is None else ("seed", "whole number", seed)
        raise UserError(f"{name} must be a {rule} from 0, got {'nothing' if value is None else value}")
    space, x, model = material.space(name), material.standardized(image), material.model
    draw = draw_for(space, min(max(share, LEAST), 1 - LEAST), seed)
    prediction, told = None, ""
    predicts = model is not None and model.config.masking.enabled
    if model is not None and predicts and name == material.own_space:
        found, prediction, r2 = predict(model, x, draw)
        told = f"R² {r2:.0%}: the share of the hidden part that the run predicts; 0 is predicting the mean."
        told += BORROWED * (isinstance(model, MAE) and model.config.objective.normalize_patches)
    else:
        found = hide(space, x, draw)
    if predicts and prediction is None:
        told = f"The run predicts in the space that it was trained in: {material.offered()[material.own_space]}."
    scale, achieved = material.view.scale(found.inside.numpy()), float(space.mask_group_share[found.units].sum())
    hidden = f"{_count(space, found)} are hidden ({share:.0%} asked for), with {achieved:.1%} of the variance."
    hidden += _why_not(space, draw, found.units, share - achieved)
    grey = DIFFERENCE.format(scale) * (not isinstance(space, Pixels))
    shown = _mask_pictures(material, space, x, found, prediction, scale)
    score = words(minus(told), kind="score") if told else ""
    return pictures(shown.items()) + score + chart(space, found.units, "hidden", hidden, BAR, grey, material.view.note)


def _mask_pictures(
    material: Material, space: Space, x: Tensor, found: Parts, prediction: Tensor | None, scale: float
) -> dict[str, np.ndarray]:
    shown = {"image": _picture(material, x), "visible": _picture(material, found.outside)}
    shown["hidden"] = _difference(material, found.inside, scale)
    if prediction is not None:
        shown["predicted"] = _difference(material, prediction, scale)
        shown["visible + predicted"] = _picture(material, found.outside + prediction)
    if isinstance(space, Pixels):
        # Patches are no differences: they have their own colours, and grey is where there are none.
        gaps = space.expand_mask(found.units[None]).unflatten(1, space.shape)[0, 0, :, :, None].numpy()
        own = {"visible": ("image", ~gaps), "hidden": ("image", gaps), "predicted": ("visible + predicted", gaps)}
        shown |= {name: np.where(at, shown[source], 0.5) for name, (source, at) in own.items() if name in shown}
    return shown


def _why_not(space: Space, draw: Draw, units: Tensor, missing: float) -> str:
    """Why the share that was asked for is not reached: the mask consists of whole units in a random order."""
    if isinstance(space, Pixels) or abs(missing) < NOTICED:
        return ""
    order, count = draw.noise[0].argsort(), int(units.sum())
    next_one = order[count if missing > 0 else count - 1]
    share, what = float(space.mask_group_share[next_one]), things_of(space).removesuffix("s")
    step = f"the next {what} of this order holds {share:.1%} alone" if missing > 0 else f"one {what} holds {share:.1%}"
    return f" It cannot come closer: {things_of(space)} are hidden whole, and {step}. Another mask has another order."


def walk(material: Material, image: np.ndarray, name: str, low: float | None, high: float | None) -> str:
    """What a band of the spectrum shows alone, what is left without it, and some of its basis images."""
    if low is None or high is None:
        raise UserError("from and to must be shares of the variance, got nothing")
    if low >= high:
        raise UserError(f"from must be below to ({high:.1%} of the variance), got {low:.1%}")
    space, x = material.space(name), material.standardized(image)
    found = take_apart(space, x, space.band(low, high))
    if not found.units.any():
        return words(f"None of the {things_of(space)} begins between {low:.1%} and {high:.1%} of the variance.")
    # With the largest units a band is an image about the mean image, without them a difference.
    alone = _difference(material, found.inside, material.view.scale(found.inside.numpy()))
    if low == 0:
        alone = _picture(material, found.inside + space.reconstruct(torch.zeros(1, len(space.variance))))
    shown = {"image": _picture(material, x), "the band alone": alone, "without it": _picture(material, found.outside)}
    mean = "A band without the largest is a difference from the mean image, on a scale of its own."
    drawn = chart(space, found.units, "in the band", f"{_count(space, found)} lie in the band.", BAR, mean)
    ranks, basis = basis_images(space, found.units, BASIS)
    shares = 100 * space.mask_group_share.sort(descending=True).values[ranks]
    captions = [f"{rank + 1:,}: {share:.2g}%" for rank, share in zip(ranks.tolist(), shares.tolist(), strict=True)]
    each = [_difference(material, one[None], material.view.scale(one[None].numpy())) for one in basis]
    heading = f"Some of these {things_of(space)} as images, each with its rank and its share of the variance"
    grid = pictures(zip(captions, each, strict=True), "small")
    return pictures(shown.items()) + drawn + words(heading, kind="score") + grid


def neighbours(material: Material, image: np.ndarray) -> str:
    """The training images whose features point most nearly the same way, with their classes or names."""
    if material.model is None:
        none = "Neighbours are found by a trained encoder, and none was given."
        return words(none, "Start with a run folder: pmae explore runs/a")
    places, similarity = material.neighbours(image, NEIGHBOURS)
    train, total = material.train, len(material.train)
    if train.labels is not None and train.classes:
        called = [train.classes[int(train.labels[place])] for place in places]
    else:
        called = [train.names[place] if train.names else f"number {place + 1:,}" for place in places.tolist()]
    captions = [f"{like:.2f} {name}" for like, name in zip(similarity, called, strict=True)]
    found = material.view.pictures(train.images[places].astype(np.float64))
    among = f"all {total:,}" if total <= BANK else f"{BANK:,} of the {total:,}"
    said = f"The {len(places)} nearest among {among} training images, by the cosine of their mean-pooled features."
    query = pictures([("image", _picture(material, material.standardized(image)))], "single")
    return query + words(said, "The image itself is left out.") + pictures(zip(captions, found, strict=True), "small")


@torch.no_grad()
def patches(material: Material, image: np.ndarray) -> str:
    """The image, its tokens as colours, and the attention of [CLS] over all heads and head by head."""
    if material.model is None:
        return words("Patch tokens are those of a trained encoder, and none was given.", "pmae explore runs/a has one.")
    encoder, x = material.model.encoder, material.standardized(image)
    picture = material.view.pictures(image[None].astype(np.float64))
    size, maps = picture.shape[1:3], token_maps(encoder, x)
    shown = {"image": picture[0], "patch tokens": enlarged(colours(maps).numpy(), size)[0]}
    said = "Patches of one colour are alike to the encoder: red, green and blue are their principal components."
    attention = attention_maps(encoder, x)
    if attention is None:
        return pictures(shown.items()) + words(said)
    shown["[CLS] looks at"] = lit(picture, attention.mean(1).numpy())[0]
    heads = {f"head {i + 1}": lit(picture, one[None].numpy())[0] for i, one in enumerate(attention[0])}
    told = words(said, "Where [CLS] attends to a patch in the last block, the image is bright.")
    return pictures(shown.items()) + told + pictures(heads.items(), "small")


def things_of(space: Space) -> str:
    """What a space hides one of, in the plural."""
    return "patches" if isinstance(space, Pixels) else "bands" if space.config.grouped else "components"


def _count(space: Space, found: Parts) -> str:
    return f"{int(found.units.sum()):,} of {space.mask_group_count:,} {things_of(space)}"


def _picture(material: Material, x: Tensor) -> np.ndarray:
    return material.view.pictures(material.standardize.invert(x).numpy())[0]


def _difference(material: Material, x: Tensor, scale: float) -> np.ndarray:
    return material.view.differences(x.numpy(), scale)[0]


def pictures(named: Iterable[tuple[str, np.ndarray]], size: str = "large") -> str:
    """Pictures (H, W, 3) from 0 to 1 beside each other, each with a caption that need not be unique."""
    made = []
    for caption, picture in named:
        text = html.escape(caption, quote=True)
        source = data_url(Image.fromarray((255 * picture).round().astype(np.uint8)), "png")
        made.append(f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>')
    return f'<div class="pictures {size}">{"".join(made)}</div>'


def words(*sentences: str, kind: str = "note") -> str:
    """A paragraph; what it says is text, never markup."""
    return f'<p class="{kind}">{html.escape(" ".join(sentences))}</p>'


def chart(space: Space, units: Tensor, meaning: str, *sentences: str) -> str:
    """The spectrum with some units marked, in the page's own colours, and sentences beside it."""
    svg = spectrum(space.mask_group_share.numpy(), units.numpy(), things_of(space), meaning)
    notes = "".join(words(sentence) for sentence in sentences if sentence)
    return f'<div class="beside"><div class="chart">{svg}</div><div>{notes}</div></div>'
