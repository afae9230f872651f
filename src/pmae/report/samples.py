"""Figures of a run's sample images: reconstructions, masks, parts of the spectrum, and the spectrum itself.

Data of one row (signals, vectors) is drawn as lines, since a strip of pixels is unreadable.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from pmae.report.contents import Contents
from pmae.report.pictures import Array, View, gallery, view_of
from pmae.report.style import NEUTRAL, PALETTE, Drawing, color, minus, panels, plain_log_ticks, styled, variance_bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS, MASKS = 6, 4
SIGNAL_HEIGHT, SIGNAL_CHANNELS = 1.1, 3
PARTS = {"top": (0.0, 0.8), "middle": (0.8, 0.95), "bottom": (0.95, 1.0)}
"""The shares of cumulated variance between which samples.safetensors cuts the spectrum."""
MARKS = (0.5, 0.8, 0.95)
BORROWED = (
    "The model predicts patches standardized within themselves; to be seen, its predictions borrow the mean and "
    "contrast of the true patches, so they look better than they are."
)
EXPLAINED = "R² is the share of the hidden part that was predicted; 0 is no better than predicting the mean."


@styled
def reconstructions(run: Contents) -> Drawing:
    """What was hidden and what the model predicted for it; of images also what it saw, and the two put together."""
    samples = _first(run, MASKS if is_signal(run) else ROWS)
    target, prediction = samples["target"], samples["prediction"]
    borrowed = run.method == "MAE" and run.config.objective.normalize_patches
    labels = None if borrowed else [minus(f"R² {value:.0%}") for value in r2_of_each(prediction, target)]
    if is_signal(run):
        figure = _lines({"hidden": target, "predicted": prediction}, labels)
        said = "What was hidden (solid) and what was predicted for it (dashed), in standard deviations."
    else:
        columns, said = _reconstructed(run, samples)
        figure, _ = gallery(columns, labels)
    caption = f"{said} {BORROWED if borrowed else EXPLAINED} {_note(run)}"
    return Drawing("reconstructions", "Reconstructions", caption.strip(), figure)


def _reconstructed(run: Contents, samples: dict[str, Array]) -> tuple[dict[str, Array], str]:
    """Image, visible, hidden, predicted and restored pictures by their names, and what a caption says of them."""
    view, target, prediction = view_for(run), samples["target"], samples["prediction"]
    columns, std = _visible(run, view, samples), run.fitted.get("standardize.std")
    restored = None if std is None else view.pictures(samples["visible"] + prediction * std)
    said = f"What was hidden and what the model predicted for it, on {run.measured_on}."
    if run.method == "MAE" and restored is not None:
        gaps = hidden_pixels(target)
        columns |= {"hidden": np.where(gaps, columns["image"], 0.5), "predicted": np.where(gaps, restored, 0.5)}
    else:
        scale = view.scale(target)
        columns |= {"hidden": view.differences(target, scale), "predicted": view.differences(prediction, scale)}
        said += f" Both share one scale: mid-grey is 0, black and white are ∓{scale:.2g} standard deviations."
    if restored is not None:
        columns["restored"] = restored
        said += " Restored is visible plus predicted."
    return columns, said


@styled
def masks(run: Contents) -> Drawing:
    """What masks hide: components along the spectrum, or patches of the image."""
    samples = _first(run, MASKS)
    if is_signal(run):
        figure = _lines({"whole": samples["original"], "visible": samples["visible"]}, None)
        hidden = "patches, which it replaces by their mean" if run.method == "MAE" else run.units
        said = f"Signals (solid) and what is left of them without the hidden {hidden} (dashed), in the data's units."
    else:
        figure, said = _masked(run, samples)
    return Drawing("masks", "Examples of masks", f"{said} {_note(run)}".strip(), figure)


def _masked(run: Contents, samples: dict[str, Array]) -> "tuple[Figure, str]":
    """Images, their visible and their hidden part and, where components are hidden, which of the spectrum these are."""
    view, target = view_for(run), samples["target"]
    columns = _visible(run, view, samples)
    if run.method == "MAE":
        columns["hidden"] = np.where(hidden_pixels(target), columns["image"], 0.5)
        said = "Four masks: the encoder gets the visible patches alone; hidden ones are grey."
        return gallery(columns, None)[0], said
    columns["hidden"] = view.differences(target, view.scale(target))
    said = f"Four masks: an image is the sum of its visible and its hidden {run.units}."
    # Runs from before masks were kept: the basis tells what they hid.
    hidden = samples["hidden"] if "hidden" in samples else _hidden_components(run, target)
    figure, strip = gallery(columns, None, strip=hidden is not None)
    if hidden is None or strip is None:
        return figure, said
    _draw_strips(strip, hidden, run.samples["variance"])
    return figure, f"{said} A bar is the whole variance, the largest first, each as wide as its share; blue is hidden."


@styled
def spectrum_parts(run: Contents) -> Drawing:
    """What the top, the middle and the bottom of the spectrum show on their own."""
    if is_signal(run):
        titles = [f"{name}, {low:.0%} to {high:.0%} of the variance" for name, (low, high) in PARTS.items()]
        figure = _lines({"part": np.concatenate([run.samples[name][:1] for name in PARTS])}, titles)
        which, said = "A signal", "Values are standard deviations about the mean."
    else:
        columns, scales = _parts(run)
        figure, _ = gallery(columns, None)
        which, said = "The same images", f"Mid-grey is 0; black and white, in standard deviations, are: {scales}."
    caption = (
        f"{which} made of the largest {run.units} alone, of those in the middle and of the smallest, cut by cumulated "
        f"share of the variance. {said} {_note(run)}"
    )
    return Drawing("spectrum-parts", "What the parts of the spectrum show", caption.strip(), figure)


def _parts(run: Contents) -> tuple[dict[str, Array], str]:
    """Pictures of the parts by titles that count their components, and the scale of each in words."""
    view, samples = view_for(run), _first(run, ROWS)
    share = run.samples["variance"] / max(float(run.samples["variance"].sum()), 1e-12)
    before = share.cumsum() - share
    columns, scales = {"image": view.pictures(samples["original"])}, []
    for name, (low, high) in PARTS.items():
        scale = view.scale(samples[name])
        count = int(((before >= low) & ((before < high) | (high == 1))).sum())
        title = f"{name}\n{low:.0%} to {high:.0%}\n{count:,} {run.units.replace('components', 'comp.')}"
        columns[title] = view.differences(samples[name], scale)
        scales.append(f"{name} ±{scale:.2g}")
    return columns, ", ".join(scales)


@styled
def spectrum(run: Contents) -> Drawing:
    """Share of the variance per component and cumulated, with the components that 50, 80 and 95% take."""
    share = run.samples["variance"].astype(np.float64)
    share = share / max(share.sum(), 1e-300)
    number, cumulated, seen = np.arange(1, len(share) + 1), share.cumsum(), share > 1e-10
    counts = {mark: int(np.searchsorted(cumulated, mark)) + 1 for mark in MARKS}
    figure, (each, summed) = panels((2.3, 2.5))
    each.loglog(number[seen], share[seen], color=PALETTE[0])
    each.set(title=f"Share of the variance, each of the {run.units}", ylabel="share", xlim=(0.9, len(share) * 1.1))
    summed.semilogx(number, 100 * cumulated, color=PALETTE[0])
    for mark, count in counts.items():
        _draw_mark(summed, 100 * mark, count, count > len(share) ** 0.5)
    summed.set(title="Cumulated share (%)", xlabel=f"{run.units}, largest first", ylabel="%", ylim=(0, 106))
    summed.set_xlim(0.9, len(share) * 1.1)
    plain_log_ticks(each, summed)
    first = f"The first of {len(share):,} {run.units} holds {share[0]:.1%} of the variance of the training images"
    told = ", ".join(f"{count:,} hold {mark:.0%}" for mark, count in counts.items())
    leading = run.config.space.name == "pca" and run.config.space.components is not None
    rest = " One of them is all that the leading ones leave of an image." if leading else ""
    return Drawing("spectrum", "Spectrum of the data", f"{first}; {told}.{rest}", figure)


def _draw_mark(axes: "Axes", percent: float, count: int, left: bool) -> None:
    """How many components hold so much, where the curve is not: above it on the left, else under it."""
    axes.plot([0.9, count, count], [percent, percent, 0], color=PALETTE[1], linewidth=1, linestyle=":")
    axes.plot(count, percent, "o", color=PALETTE[1], markersize=4)
    place: dict[str, Any] = {"ha": "right", "va": "bottom"} if left else {"ha": "left", "va": "top"}
    offset = (-5, 2) if left else (6, -3)
    axes.annotate(f"{percent:.0f}%: {count:,}", (count, percent), offset, textcoords="offset points", **place)


def is_signal(run: Contents) -> bool:
    """Whether the samples of a run are signals or vectors: images of one row."""
    return "original" in run.samples and run.samples["original"].shape[2] == 1


def view_for(run: Contents) -> View:
    """How the images of a run become colours."""
    return view_of(run.samples["original"], str(run.data.get("dtype", "")))


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


def _visible(run: Contents, view: View, samples: dict[str, Array]) -> dict[str, Array]:
    seen = visible_part(run, view.pictures(samples["visible"]), samples["target"])
    return {"image": view.pictures(samples["original"]), "visible": seen}


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


def _draw_strips(axes: "Axes", hidden: Array, variance: Array) -> None:
    """One bar a mask, beside its image: the variance, and what of it is hidden."""
    share, centres = variance / variance.sum(), axes.get_yticks()
    half = 0.18 * abs(centres[1] - centres[0] if len(centres) > 1 else 2 * centres[0] + 1)
    lowest, highest = axes.get_ylim()
    for centre, mask in zip(centres, hidden, strict=True):
        variance_bar(axes, share, mask, centre, half)
        text = f"{float((share * mask).sum()):.0%} in {int(mask.sum()):,}"
        axes.text(0, centre - 1.3 * half, text, fontsize=8, va="bottom")
    ends = (max(centres[-1] + 3 * half, lowest), min(centres[0] - 3 * half, highest))
    axes.set(xlim=(0, 100), ylim=ends, xticks=(0, 50, 100), xlabel="% of variance")
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=False)


def _lines(kinds: dict[str, Array], titles: list[str] | None) -> "Figure":
    """One panel a signal (C, 1, L): the first kind solid, the second dashed, a colour a channel."""
    figure, axes = panels([SIGNAL_HEIGHT] * len(next(iter(kinds.values()))))
    for i, panel in enumerate(axes):
        panel.tick_params(labelbottom=i == len(axes) - 1)
        panel.axhline(0, color=NEUTRAL, linewidth=0.5)
        for style, (name, signals) in zip(("-", "--"), kinds.items(), strict=False):
            for channel, line in enumerate(signals[i, :SIGNAL_CHANNELS, 0]):
                # Two lines of one colour must differ in more than their dashes to be told apart where they cross.
                width, label = (0.8 if style == "-" else 1.4), name if channel == 0 else None
                panel.plot(line, style, color=color(channel), linewidth=width, label=label)
        panel.set_title(titles[i] if titles else "")
    if len(kinds) > 1:
        axes[0].legend(loc="upper right", ncols=2)
    return figure


def _first(run: Contents, count: int) -> dict[str, Array]:
    return {key: value[:count] for key, value in run.samples.items()}


def _note(run: Contents) -> str:
    """What a caption must say about the channels or the range that are shown."""
    if not is_signal(run):
        return view_for(run).note
    channels = run.samples["original"].shape[1]
    few = channels <= SIGNAL_CHANNELS
    return "" if few else f"Of {channels} channels the first {SIGNAL_CHANNELS} are drawn, a colour each."
