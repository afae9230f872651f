"""The figures of a run's sample images: masks, reconstructions, patch tokens, and what the parts of the spectrum show.

Data of one row (signals, vectors) is drawn as lines, since a strip of pixels is unreadable.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmae.report.contents import Contents
from pmae.report.pictures import enlarged, lit, masked_pictures, reconstructed_pictures, view_for
from pmae.report.style import (
    NEUTRAL,
    PALETTE,
    WHOLE,
    Array,
    Drawing,
    color,
    gallery,
    minus,
    panels,
    styled,
    variance_bar,
)
from pmae.runs import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS, MASKS, GALLERY = 6, 4, 6
SIGNAL_HEIGHT, SIGNAL_CHANNELS = 1.1, 3
MARKS = (0.5, 0.8, 0.95)
BORROWED = (
    "The model predicts patches standardized within themselves; to be seen, its predictions borrow the mean and "
    "contrast of the true patches, so they look better than they are."
)
EXPLAINED = "R² is the share of the hidden part that was predicted; 0 is no better than predicting the mean."


@styled
def reconstructions(run: Contents) -> Drawing:
    """What was hidden and what the model predicted for it; of images also what it saw, and the two put together."""
    count, is_mae = MASKS if is_signal(run) else ROWS, run.method == "MAE"
    target, prediction = (run.samples[name][:count] for name in ("target", "prediction"))
    error, energy = ((prediction - target) ** 2).sum((1, 2, 3)), (target**2).sum((1, 2, 3))
    borrowed = is_mae and run.config.objective.normalize_patches
    labels = None if borrowed else [_told(r2) for r2 in 1 - error / np.maximum(energy, 1e-12)]
    if is_signal(run):
        figure = _lines({"hidden": target, "predicted": prediction}, labels)
        said = "What was hidden (solid) and what was predicted for it (dashed), in standard deviations."
    else:
        columns = reconstructed_pictures(run, count)
        figure, _ = gallery(columns, labels)
        said = f"What was hidden and what the model predicted for it, on {run.measured_on}."
        if not (is_mae and "restored" in columns):
            scale = view_for(run).scale(target)
            said += f" Both share one scale: mid-grey is 0, black and white are ∓{scale:.2g} standard deviations."
        said += " Restored is visible plus predicted." if "restored" in columns else ""
    caption = f"{said} {BORROWED if borrowed else EXPLAINED} {_note(run)}"
    return Drawing("reconstructions", "Reconstructions", caption.strip(), figure)


def _told(r2: float) -> str:
    """For the margin, which has no room for the thousands of an image of which next to nothing is hidden."""
    return minus(f"R² {'<-99%' if r2 < -0.99 else f'{r2:.0%}'}".replace("-0%", "0%"))


@styled
def masks(run: Contents) -> Drawing:
    """What masks hide: components along the spectrum, or patches of the image."""
    if is_signal(run):
        figure = _lines({"whole": run.samples["original"][:MASKS], "visible": run.samples["visible"][:MASKS]})
        hidden = "patches, which it replaces by their mean" if run.method == "MAE" else run.units
        said = f"Signals (solid) and what is left of them without the hidden {hidden} (dashed), in the data's units."
    elif run.method == "MAE":
        figure, _ = gallery(masked_pictures(run, MASKS))
        said = "Four masks: the encoder gets the visible patches alone; hidden ones are grey."
    else:
        barred = "hidden" in run.samples  # older versions did not save the masks themselves
        figure, axes = gallery(masked_pictures(run, MASKS), strip=barred)
        said = f"Four masks: an image is the sum of its visible and its hidden {run.units}."
        if barred:
            _draw_strips(axes, run.samples["hidden"][:MASKS], run.samples["variance"])
            said += " A bar is the whole variance, the largest first, each as wide as its share; blue is hidden."
    return Drawing("masks", "Examples of masks", f"{said} {_note(run)}".strip(), figure)


def _draw_strips(axes: "Axes", hidden: Array, variance: Array) -> None:
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


@styled
def spectrum_parts(run: Contents) -> Drawing:
    """What the top, the middle and the bottom of the spectrum show on their own."""
    if is_signal(run):
        titles = [f"{name}, {low:.0%} to {high:.0%} of the variance" for name, (low, high) in PARTS.items()]
        figure = _lines({"part": np.concatenate([run.samples[name][:1] for name in PARTS])}, titles)
        which, said = "A signal", "Values are standard deviations about the mean."
    else:
        view, share = view_for(run), run.samples["variance"] / max(float(run.samples["variance"].sum()), 1e-12)
        before = share.cumsum() - share
        columns, scales = {"image": view.pictures(run.samples["original"][:ROWS])}, []
        for name, (low, high) in PARTS.items():
            images = run.samples[name][:ROWS]
            scale, count = view.scale(images), int(((before >= low) & ((before < high) | (high == 1))).sum())
            title = f"{name}\n{low:.0%} to {high:.0%}\n{count:,} {run.units.replace('components', 'comp.')}"
            columns[title] = view.differences(images, scale)
            scales.append(f"{name} ±{scale:.2g}")
        figure, _ = gallery(columns)
        which = "The same images"
        said = f"Mid-grey is 0; black and white, in standard deviations, are: {', '.join(scales)}."
    caption = f"{which} made of the largest {run.units} alone, of those in the middle and of the smallest, cut by "
    caption += f"cumulated share of the variance. {said} {_note(run)}"
    return Drawing("spectrum-parts", "What the parts of the spectrum show", caption.strip(), figure)


@styled
def token_figure(run: Contents) -> Drawing:
    """Sample images beside their tokens as colours and, of a ViT, what [CLS] attends to."""
    pictures = view_for(run).pictures(run.samples["original"][:ROWS])
    size = pictures.shape[1:3]
    columns = {"image": pictures, "patch tokens": enlarged(run.samples["token_colours"][:ROWS], size)}
    said = "Red, green and blue are the three leading principal components of the patch tokens of these images: "
    said += "patches of one colour are alike to the encoder."
    if "attention" in run.samples:
        columns["[CLS] looks at"] = lit(pictures, run.samples["attention"][:ROWS])
        said += " On the right, the brighter a patch, the more [CLS] attends to it in the last block (mean of all "
        said += "heads, each image on a scale of its own, its top twentieth fully bright)."
    figure, _ = gallery(columns)
    return Drawing("tokens", "What patches look like to the encoder", said, figure)


@styled
def over_epochs(run: Contents) -> Drawing:
    """What was predicted for the hidden part of the same images as training went on."""
    frames = {epoch: run.samples[f"epoch_{epoch}"] for epoch in epochs_kept(run)}
    count, view = len(next(iter(frames.values()))), view_for(run)
    target = run.samples["target"][:count]
    scale = view.scale(target)
    columns = {"hidden": view.differences(target, scale)}
    columns |= {f"epoch\n{epoch}": view.differences(frame, scale) for epoch, frame in frames.items()}
    figure, _ = gallery(columns)
    said = "The hidden part of the same images, and what was predicted for it after so many epochs, on one scale."
    return Drawing("over-epochs", "Reconstructions over the epochs", said, figure)


def epochs_kept(run: Contents) -> list[int]:
    """The epochs whose predictions were kept, in order."""
    names = [name.removeprefix("epoch_") for name in run.samples if name.startswith("epoch_")]
    return sorted(int(name) for name in names if name.isdecimal())


@styled
def components(run: Contents) -> Drawing:
    """The first principal components as images, each at one standard deviation, with its share of the variance."""
    basis = run.fitted["space.components"].reshape(-1, *run.samples["original"].shape[1:])
    variance = run.samples["variance"] / max(float(run.samples["variance"].sum()), 1e-300)
    view, count = view_for(run), len(basis) // GALLERY * GALLERY
    shown = np.stack([view.differences(one[None], view.scale(one[None]))[0] for one in basis[:count]])
    rows = shown.reshape(-1, GALLERY, *shown.shape[1:])
    figure, _ = gallery({f"{i + 1}": rows[:, i] for i in range(GALLERY)}, [f"+{GALLERY * i}" for i in range(len(rows))])
    said = f"The first {count} principal components, largest first: the first holds {variance[0]:.1%} of the variance, "
    said += f"all of these {variance[:count].sum():.1%}. Mid-grey is 0; each has its own scale, and a sign by chance."
    return Drawing("components", "Components", said, figure)


@styled
def spectrum(run: Contents) -> Drawing:
    """Share of the variance per component and cumulated, with the components that 50, 80 and 95% take."""
    share = run.samples["variance"].astype(np.float64)
    share = share / max(share.sum(), 1e-300)
    number, cumulated = np.arange(1, len(share) + 1), share.cumsum()
    # On a logarithm most components lie on a few pixels: a few hundred say the same.
    drawn = np.unique(np.geomspace(1, len(share), 300).round().astype(int)) - 1
    seen = drawn[share[drawn] > 1e-10]
    counts = {mark: int(np.searchsorted(cumulated, mark)) + 1 for mark in MARKS}
    figure, (each, summed) = panels((2.3, 2.5))
    each.loglog(number[seen], share[seen], color=PALETTE[0])
    each.set(title=f"Share of the variance, each of the {run.units}", ylabel="share", xlim=(0.9, len(share) * 1.1))
    summed.semilogx(number[drawn], 100 * cumulated[drawn], color=PALETTE[0])
    for mark, count in counts.items():
        summed.plot([0.9, count, count], [100 * mark, 100 * mark, 0], color=PALETTE[1], linewidth=1, linestyle=":")
        summed.plot(count, 100 * mark, "o", color=PALETTE[1], markersize=4)
        # Where the curve is not: above it on the left, else under it.
        left = count > len(share) ** 0.5
        place: dict[str, Any] = {"ha": "right", "va": "bottom"} if left else {"ha": "left", "va": "top"}
        place |= {"xytext": (-5, 2) if left else (6, -3), "textcoords": "offset points"}
        summed.annotate(f"{100 * mark:.0f}%: {count:,}", (count, 100 * mark), **place)
    summed.set(title="Cumulated share (%)", xlabel=f"{run.units}, largest first", ylabel="%", ylim=(0, 106))
    summed.set_xlim(0.9, len(share) * 1.1)
    for axes in (each, summed):
        axes.xaxis.set_major_formatter(WHOLE)
    first = f"The first of {len(share):,} {run.units} holds {share[0]:.1%} of the variance of the training images"
    told = ", ".join(f"{count:,} hold {mark:.0%}" for mark, count in counts.items())
    leading = run.config.space.name == "pca" and run.config.space.components is not None
    rest = " One of them is all that the leading ones leave of an image." if leading else ""
    return Drawing("spectrum", "Spectrum of the data", f"{first}; {told}.{rest}", figure)


def _lines(kinds: dict[str, Array], titles: Sequence[str] | None = None) -> "Figure":
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


def is_signal(run: Contents) -> bool:
    """Whether the data has one row, and is drawn as lines."""
    return "original" in run.samples and run.samples["original"].shape[2] == 1


def _note(run: Contents) -> str:
    channels = run.samples["original"].shape[1]
    if not is_signal(run):
        return view_for(run).note
    few = channels <= SIGNAL_CHANNELS
    return "" if few else f"Of {channels} channels the first {SIGNAL_CHANNELS} are drawn, a colour each."
