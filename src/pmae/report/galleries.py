"""Figures made of pictures: reconstructions, parts of the spectrum and masks, from a run's samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pmae.report.contents import Contents
from pmae.report.pictures import Array, sheet, view_of
from pmae.report.style import FAINT, PALETTE, WIDTH, Drawing, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 6
PARTS = {"top": (0.0, 0.8), "middle": (0.8, 0.95), "bottom": (0.95, 1.0)}
"""The shares of cumulated variance between which samples.safetensors cuts the spectrum."""
STRIP = 600
BORROWED = (
    "The model predicts patches standardized within themselves; to be seen, its predictions borrow the mean and "
    "contrast of the true patches, so they look better than they are."
)
EXPLAINED = "R² is the share of the hidden part that was predicted; 0 is no better than predicting the mean."


@styled
def reconstructions(run: Contents) -> Drawing:
    """Image, what the encoder saw, what was hidden, what was predicted, and the two put together."""
    samples = {key: value[:ROWS] for key, value in run.samples.items()}
    target, prediction, std = samples["target"], samples["prediction"], run.fitted.get("standardize.std")
    view = view_of(run.samples["original"], str(run.data.get("dtype", "")))
    image, scale = view.pictures(samples["original"]), view.scale(target)
    columns = {"image": image, "visible": visible_part(run, view.pictures(samples["visible"]), target)}
    restored = None if std is None else view.pictures(samples["visible"] + prediction * std)
    said = [f"What was hidden and what the model predicted for it, on {run.measured_on}."]
    if run.method == "MAE" and restored is not None:
        gaps = hidden_pixels(target)
        columns |= {"hidden": np.where(gaps, image, 0.5), "predicted": np.where(gaps, restored, 0.5)}
    else:
        columns |= {"hidden": view.differences(target, scale), "predicted": view.differences(prediction, scale)}
        said.append(f"Both share one scale: mid-grey is 0, black and white are ∓{scale:.2g} standard deviations.")
    if restored is not None:
        columns["restored"] = restored
        said.append("Restored is visible plus predicted.")
    borrowed = run.method == "MAE" and run.config.objective.normalize_patches
    labels = None if borrowed else [f"R² {value:.2f}".replace("-", "−") for value in r2_of_each(prediction, target)]
    figure, _ = gallery(columns, labels)
    caption = " ".join([*said, BORROWED if borrowed else EXPLAINED, view.note])
    return Drawing("reconstructions", "Reconstructions", caption.strip(), figure)


@styled
def spectrum_parts(run: Contents) -> Drawing:
    """What the top, the middle and the bottom of the spectrum show on their own."""
    samples = {key: value[:ROWS] for key, value in run.samples.items()}
    view = view_of(run.samples["original"], str(run.data.get("dtype", "")))
    share = run.samples["variance"] / max(float(run.samples["variance"].sum()), 1e-12)
    before = share.cumsum() - share
    columns, said = {"image": view.pictures(samples["original"])}, []
    for name, (low, high) in PARTS.items():
        scale = view.scale(samples[name])
        count = int(((before >= low) & ((before < high) | (high == 1))).sum())
        title = f"{name}\n{low:.0%} to {high:.0%}\n{count:,} {run.units.replace('components', 'comp.')}"
        columns[title] = view.differences(samples[name], scale)
        said.append(f"{name} ±{scale:.2g}")
    figure, _ = gallery(columns, None)
    caption = (
        f"The same images made of the largest {run.units} alone, of those in the middle and of the smallest, cut by "
        "cumulated share of the variance. Mid-grey is 0; black and white, in standard deviations, are: "
        f"{', '.join(said)}. {view.note}"
    )
    return Drawing("spectrum-parts", "What the parts of the spectrum show", caption.strip(), figure)


@styled
def masks(run: Contents) -> Drawing:
    """What masks hide: components along the spectrum, or patches of the image."""
    samples = {key: value[:4] for key, value in run.samples.items()}
    original, target = samples["original"], samples["target"]
    view = view_of(run.samples["original"], str(run.data.get("dtype", "")))
    visible = visible_part(run, view.pictures(samples["visible"]), target)
    columns = {"image": view.pictures(original), "visible": visible}
    if run.method == "MAE":
        columns["hidden"] = np.where(hidden_pixels(target), view.pictures(original), 0.5)
        figure, _ = gallery(columns, None)
        caption = f"Four masks: the encoder gets the visible patches alone; hidden ones are grey. {view.note}"
        return Drawing("masks", "Examples of masks", caption.strip(), figure)
    scale = view.scale(target)
    columns["hidden"] = view.differences(target, scale)
    hidden = samples.get("hidden")
    if hidden is None:
        # Runs from before masks were kept: the basis tells what they hid.
        hidden = _hidden_components(run, target)
    figure, strip = gallery(columns, None, strip=hidden is not None)
    if hidden is not None and strip is not None:
        _draw_strips(strip, hidden, run.samples["variance"])
    caption = f"Four masks: an image is the sum of its visible and its hidden {run.units}. {view.note}".strip()
    if hidden is not None:
        caption += " A bar is the whole variance, the largest first, each as wide as its share; blue is hidden."
    return Drawing("masks", "Examples of masks", caption.strip(), figure)


def gallery(
    columns: dict[str, Array], labels: Sequence[str] | None, strip: bool = False, margin: float = 0.55
) -> "tuple[Figure, Axes | None]":
    """A sheet of pictures with titles over its columns, labels in a margin (inches) beside its rows, and axes on the
    right if asked."""
    from matplotlib.figure import Figure

    made = sheet(columns)
    height, width = made.image.shape[:2]
    lines = 1 + max(title.count("\n") for title in columns)
    left, right, top = margin if labels else 0.04, 1.3 if strip else 0.04, 0.1 + 0.15 * lines
    across = WIDTH - left - right
    down = across * height / width
    bottom = 0.42 if strip else 0.04
    total = down + top + bottom
    figure = Figure(figsize=(WIDTH, total))
    axes = figure.add_axes((left / WIDTH, bottom / total, across / WIDTH, down / total))
    axes.imshow(made.image, interpolation="none", aspect="auto")
    axes.set_axis_off()
    above = -0.5 - 0.09 * height / down
    for centre, title in zip(made.columns, columns, strict=True):
        axes.text(centre, above, title, ha="center", va="baseline", fontsize=8.5, linespacing=1.15)
    for centre, label in zip(made.rows, labels or [], strict=False):
        axes.text(-0.5 - 0.05 * width / across, centre, label.replace(" ", "\n"), ha="right", va="center", fontsize=8.5)
    if not strip:
        return figure, None
    beside = figure.add_axes(((left + across + 0.12) / WIDTH, bottom / total, (right - 0.3) / WIDTH, down / total))
    beside.set_ylim(axes.get_ylim())
    beside.set_yticks(made.rows, labels=[""] * len(made.rows))
    return figure, beside


def _draw_strips(axes: "Axes", hidden: Array, variance: Array) -> None:
    """One bar a mask: the share of each slice of the variance that is hidden, as the strength of its colour."""
    share = variance / variance.sum()
    edges = np.linspace(0, 1, STRIP + 1)
    ends = np.concatenate([[0.0], share.cumsum()])
    centres = axes.get_yticks()
    half = 0.18 * abs(centres[1] - centres[0] if len(centres) > 1 else 2 * centres[0] + 1)
    rgb = tuple(int(PALETTE[0][i : i + 2], 16) / 255 for i in (1, 3, 5))
    for centre, mask in zip(centres, hidden, strict=True):
        filled = np.diff(np.interp(edges, ends, np.concatenate([[0.0], (share * mask).cumsum()]))) * STRIP
        bar = np.broadcast_to([*rgb, 0.0], (1, STRIP, 4)).copy()
        bar[0, :, 3] = filled.clip(0, 1)
        axes.barh(centre, 100, height=2 * half, color=FAINT, linewidth=0)
        axes.imshow(bar, extent=(0, 100, centre + half, centre - half), aspect="auto", interpolation="none", zorder=3)
        text = f"{float((share * mask).sum()):.0%} in {int(mask.sum()):,}"
        axes.text(0, centre - 1.3 * half, text, fontsize=8, va="bottom")
    top, bottom = centres[0] - 3 * half, centres[-1] + 3 * half
    axes.set(xlim=(0, 100), ylim=(max(bottom, axes.get_ylim()[0]), min(top, axes.get_ylim()[1])), xticks=(0, 50, 100))
    axes.set_xlabel("% of variance")
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=False)


def r2_of_each(prediction: Array, target: Array) -> Array:
    """(N,) share of each image's hidden part that is predicted."""
    error, energy = ((prediction - target) ** 2).sum((1, 2, 3)), (target**2).sum((1, 2, 3))
    return np.asarray(1 - error / np.maximum(energy, 1e-12))


def visible_part(run: Contents, pictures: Array, target: Array) -> Array:
    """The visible part as pictures; where patches are hidden, grey in their place."""
    return np.where(hidden_pixels(target), 0.5, pictures) if run.method == "MAE" else pictures


def hidden_pixels(target: Array) -> Array:
    """(N, H, W, 1) of an MAE's target, which is exactly 0 where a patch is visible."""
    return np.asarray((target != 0).any(1)[..., None])


def _hidden_components(run: Contents, target: Array) -> Array | None:
    """(N, K) of a PMAE's target: the components that it is made of; None without the fitted basis."""
    basis = run.fitted.get("space.components")
    if basis is None:
        return None
    flat = target.reshape(len(target), -1)
    coefficients = np.abs(flat @ basis.T)
    # Visible components come out as rounding errors, about a millionth of the whole.
    floor = 1e-5 * np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(coefficients > np.maximum(floor, 1e-3 * np.sqrt(run.samples["variance"])))
