"""Masking spaces as pictures: each is fitted, nothing is trained, and shows its basis, its masks and its spectrum."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pmae import masking
from pmae.config import Config
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.data.images import as_tensor
from pmae.data.sets import with_held_out
from pmae.derive import resolve
from pmae.errors import require
from pmae.report.page import Page
from pmae.report.pictures import View, hidden_pixels, view_of
from pmae.report.samples import MARKS
from pmae.report.style import WHOLE, Array, Drawing, color, dash, gallery, legend, panels, styled
from pmae.report.tables import Cell, Table
from pmae.runs import PARTS
from pmae.spaces import Space, build_space
from pmae.sweep.find import splits
from pmae.sweep.spaces import SpaceGrid, decimals, is_mae, space_label
from pmae.train.environment import pick_device

SEED = 0  # of the masks and of the draws of bands
SEEN = 64  # held-out images from which the range of colours is taken
EACH = 3  # basis images of a part
MARGIN = 0.9  # inches beside a gallery for the names of spaces


@dataclass(frozen=True)
class FittedSpace:
    """A fitted space and what it shows: its spectrum, images of its components, and one image under its masks."""

    space: str  # its name with its settings
    seconds: float  # the fit took
    share: Array  # (groups,) of the variance, largest first, that each mask group holds
    basis: Array  # (`EACH` for each of `PARTS`, C, H, W) images of single mask groups; NaN where a part has fewer
    ratios: tuple[float, ...]
    visible: Array  # (ratios, C, H, W) one image in the units of the data without its hidden part
    hidden: Array  # (ratios, C, H, W) that part, standardized
    preimage_error: float | None  # share of the norm of new images that the way back misses, where it is no inverse


def figures_page(grid: SpaceGrid, images: int | None = None, picture: int = 0) -> Page:
    """Fit every space that does not learn, on all training images or so many of them, and draw them together.

    Masks are shown on one held-out image, `picture` of them. Signals have no pictures: only their spectra are drawn.
    """
    whole, device = with_held_out(splits(grid.data)), pick_device(grid.device)
    train, shown = whole.train, whole.test or whole.val or whole.train
    seen = len(train), grid.shape, train.vectors, device.type == "cuda", str(train.images.dtype)
    # As pretraining would have them: of large images a CPU keeps leading components alone.
    configs = {space: resolve(grid.config(space), *seen)[0] for space in grid.spaces}
    count = min(len(train) if images is None else images, len(train))
    require(count >= 2, "images", "at least 2", images)
    require(0 <= picture < len(shown), "picture", f"the number of a held-out image, 0 to {len(shown) - 1}", picture)
    # Spread evenly over the set, which may be sorted by class.
    part = train if count == len(train) else train.take(np.linspace(0, len(train) - 1, count).astype(np.int64))
    batches = Batches(part.images, device, grid.data.keep_on)
    standardize = fit_standardize(batches, grid.data.standardize).to(device)
    fitted_on = Standardized(batches, standardize)
    image = as_tensor(np.asarray(shown.images[picture : picture + 1])).to(device)
    made = [one for name in configs if (one := _fitted_space(grid, name, configs[name], fitted_on, image)) is not None]
    require(bool(made), "spaces", "at least one that is fitted and not learned", grid.spaces)
    threads = torch.get_num_threads()
    machine = f"a CPU with {threads} thread{'s' * (threads > 1)}"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else machine
    part_of = "all" if count == len(train) else f"{count:,} of the"
    said = f"Fitted on {part_of} {len(train):,} training images of {whole.name}, on {machine}."
    learned = [space for space in grid.spaces if space not in {one.space for one in made}]
    said += "".join(f" Not shown: {space}, which begins as PCA." for space in learned)
    drawings = []
    if grid.shape[1] > 1:
        view = view_of(np.asarray(shown.images[:SEEN]).astype(np.float64), str(train.images.dtype))
        based = [one for one in made if not is_mae(one.space)]
        drawings += [basis_figure(based, view, said)] if based else []
        drawings += [hidden_figure(made, image.cpu().numpy(), view, said)]
    return Page([fit_table(made, said)], [*drawings, spectra_figure(made, said)])


@torch.no_grad()
def _fitted_space(
    grid: SpaceGrid, name: str, config: Config, fitted_on: Standardized, image: Tensor
) -> FittedSpace | None:
    """A space fitted and shown; None if it learns, as without training there is nothing of its own to see."""
    space = build_space(config.space, grid.shape).to(image.device)
    if space.learns:
        return None
    print(f"{name}: fitting", flush=True)
    began = time.monotonic()
    space.fit(fitted_on)
    space.variance.cpu()  # Waits for the device.
    seconds = time.monotonic() - began
    print(f"{name}: fitted in {seconds:.1f} s", flush=True)
    x, patch = fitted_on.standardize(image), config.encoder.patch_size or 1
    ratios = grid.shares(name)
    seen = torch.cat([_visible(space, x, ratio, patch if is_mae(name) else None) for ratio in ratios])
    return FittedSpace(
        name,
        seconds,
        share=_numpy(space.mask_group_share.sort(descending=True).values),
        basis=_numpy(_basis(space)),
        ratios=ratios,
        visible=_numpy(fitted_on.standardize.invert(seen)),
        hidden=_numpy(x - seen),
        preimage_error=space.measured().get("preimage_error_unseen"),
    )


def _visible(space: Space, x: Tensor, ratio: float, patch: int | None) -> Tensor:
    """The image (1, C, H, W) without random components, or patches if their side is given.

    A larger ratio hides what a smaller one does and more.
    """
    generator = torch.Generator().manual_seed(SEED)
    if patch is not None:
        rows, columns = (1 if x.shape[2] == 1 else x.shape[2] // patch), x.shape[3] // patch
        noise = torch.rand(1, rows * columns, generator=generator)
        hidden = masking.hide_patches(noise, masking.visible_patches(rows * columns, ratio)).hidden
        gaps = hidden.view(1, 1, rows, columns).to(x.dtype)
        return x * (1 - torch.nn.functional.interpolate(gaps, x.shape[2:]).to(x.device))
    noise = torch.rand(1, space.mask_group_count, generator=generator).to(x.device)
    return space.hide(x, space.expand_mask(masking.hide_components(noise, space.mask_group_share, ratio)))[1]


def _basis(space: Space) -> Tensor:
    """(`EACH` for each of `PARTS`, C, H, W) what mask groups of each part add to an image; NaN for none."""
    generator, nothing = torch.Generator().manual_seed(SEED), space.reconstruct(torch.zeros_like(space.variance)[None])
    order = space.mask_group_share.argsort(descending=True, stable=True)
    images = []
    for low, high in PARTS.values():
        inside = order[space.band(low, high)[order]]
        # The first ones of the top, which hold the most; of the other parts, some spread evenly.
        places = torch.arange(EACH) if low == 0 else (torch.arange(1, EACH + 1) * len(inside)) // (EACH + 1)
        chosen = inside[places[places < len(inside)].unique().to(inside.device)]
        images += [space.reconstruct(_group(space, int(group), generator)) - nothing for group in chosen]
        images += [torch.full_like(nothing, torch.nan)] * (EACH - len(chosen))
    return torch.cat(images)


def _group(space: Space, group: int, generator: torch.Generator) -> Tensor:
    """(1, K) one coefficient, or a random draw of those in a mask group; 0 elsewhere."""
    z, groups = torch.zeros_like(space.variance)[None], space.mask_groups
    inside = torch.tensor([group], device=z.device) if groups is None else (groups == group).nonzero()[:, 0]
    # Alone a coefficient is 1, as one that never varies has an image too.
    drawn = torch.randn(len(inside), generator=generator).to(z) * space.variance[inside].sqrt()
    z[0, inside] = drawn if len(inside) > 1 else 1.0
    return z


def _numpy(tensor: Tensor) -> Array:
    return np.asarray(tensor.double().cpu().numpy())


def fit_table(fitted: Sequence[FittedSpace], note: str) -> Table:
    """A row a space: how long its fit took, and how few mask groups hold most of the variance."""
    rows: list[list[Cell]] = []
    for one in fitted:
        total = one.share.cumsum()
        # In float32 the whole may come to a little less than 1.
        counts: list[Cell] = [int((total < mark * total[-1]).sum()) + 1 for mark in MARKS]
        rows.append([one.space, decimals(one.seconds, 2), len(one.share), *counts, decimals(one.preimage_error, 3)])
    header = ["space", "fit, s", "units", *(f"hold {mark:.0%}" for mark in MARKS), "pre-image error"]
    return Table("space-fits", "Fits", header, rows, note)


@styled
def basis_figure(fitted: Sequence[FittedSpace], view: View, said: str) -> Drawing:
    """A row a space of images of single mask groups: of the top, the middle and the bottom of its spectrum."""
    rows = []
    for one in fitted:
        pictures = [view.differences(image[None], view.scale(image[None]))[0] for image in np.nan_to_num(one.basis)]
        # White where there is none.
        rows.append([np.where(np.isnan(one.basis[j]).any(), 1.0, picture) for j, picture in enumerate(pictures)])
    # A part's name stands over the second of its columns; blanks over the others differ, as names of columns must.
    titles = [list(PARTS)[j // EACH] if j % EACH == 1 else " " * (j + 1) for j in range(len(PARTS) * EACH)]
    columns = {title: np.stack([row[j] for row in rows]) for j, title in enumerate(titles)}
    figure, _ = gallery(columns, [space_label(one.space) for one in fitted], margin=MARGIN)
    cuts = ", ".join(f"{name} up to {high:.0%}" for name, (_, high) in PARTS.items())
    caption = f"What single components add to an image, each at its own contrast, mid-grey is 0; {cuts} of the "
    caption += "cumulated variance, the largest first. What is hidden as one (a band, a rest) is shown as a random "
    caption += f"draw of its coefficients; a part without any stays empty. {said} {view.note}"
    return Drawing("basis", "Basis images", caption.strip(), figure)


@styled
def hidden_figure(fitted: Sequence[FittedSpace], image: Array, view: View, said: str) -> Drawing:
    """One image, a row a space: what is left and what is hidden at each ratio."""
    picture, usual = view.pictures(image), fitted[0].ratios
    count = min(len(one.ratios) for one in fitted)
    rows, labels = [], []
    for one in fitted:
        seen, lost = view.pictures(one.visible), view.differences(one.hidden, view.scale(one.hidden))
        if is_mae(one.space):
            gaps = hidden_pixels(one.hidden)
            seen, lost = np.where(gaps, 0.5, seen), np.where(gaps, picture, 0.5)
        rows.append([picture[0], *(each[k] for k in range(count) for each in (seen, lost))])
        shares = "/".join(f"{100 * ratio:.0f}" for ratio in one.ratios)
        labels.append(space_label(one.space) + ("" if one.ratios == usual else f" {shares}%"))
    titles = ["image", *(f"{share:.0%}\n{kind}" for share in usual[:count] for kind in ("visible", "hidden"))]
    columns = {title: np.stack([row[j] for row in rows]) for j, title in enumerate(titles)}
    figure, _ = gallery(columns, labels, margin=MARGIN)
    caption = "What the encoder sees and what it must predict, one draw at each share of the variance. Hidden parts "
    caption += "are differences around mid-grey, those of a row on one scale; hidden patches are grey, and their "
    caption += f"shares stand beside the row. {said} {view.note}"
    return Drawing("hidden", "What is hidden", caption.strip(), figure)


@styled
def spectra_figure(fitted: Sequence[FittedSpace], said: str) -> Drawing:
    """Cumulated share of the variance against the mask groups of all spaces, the largest first."""
    figure, (axes,) = panels((4.6,))
    for position, one in enumerate(fitted):
        look = {"color": color(position), "linestyle": dash(position), "label": space_label(one.space)}
        axes.semilogx(np.arange(1, len(one.share) + 1), 100 * one.share.cumsum(), **look)
    axes.set(title="Cumulated share of the variance (%)", xlabel="components or bands, largest first", ylim=(0, 102))
    axes.set_xlim(0.9, 1.1 * max(len(one.share) for one in fitted))
    axes.xaxis.set_major_formatter(WHOLE)
    legend(figure, [axes])
    caption = "The higher a curve, the fewer components or bands hold the variance. That of kernel PCA and diffusion "
    caption += f"is of their own coefficients, not of pixels. {said}"
    return Drawing("spectra", "Spectra", caption.strip(), figure)
