"""The figures of `galleries` for data of one row: signals and vectors are drawn as lines, since a strip of pixels is
unreadable.
"""

from typing import TYPE_CHECKING

import numpy as np

from pmae.report.contents import Contents
from pmae.report.galleries import BORROWED, EXPLAINED, PARTS, r2_of_each
from pmae.report.pictures import Array
from pmae.report.style import NEUTRAL, WIDTH, Drawing, color, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 4
HEIGHT = 1.0
CHANNELS = 3


def is_one_row(run: Contents) -> bool:
    """Whether the samples of a run are signals or vectors."""
    return "original" in run.samples and run.samples["original"].shape[2] == 1


@styled
def reconstructions(run: Contents) -> Drawing:
    """The hidden part of each signal and what the model predicted for it."""
    samples = _first(run)
    target, prediction = samples["target"], samples["prediction"]
    borrowed = run.method == "MAE" and run.config.objective.normalize_patches
    titles = [f"R² {value:.2f}".replace("-", "−") for value in r2_of_each(prediction, target)]
    figure = _lines({"hidden": target, "predicted": prediction}, None if borrowed else titles)
    caption = "What was hidden (solid) and what was predicted for it (dashed), in standard deviations."
    caption = " ".join([caption, BORROWED if borrowed else EXPLAINED, _note(run)])
    return Drawing("reconstructions", "Reconstructions", caption.strip(), figure)


@styled
def masks(run: Contents) -> Drawing:
    """Each signal and the part of it that the encoder saw."""
    samples = _first(run)
    figure = _lines({"whole": samples["original"], "visible": samples["visible"]}, None)
    hidden = "patches, which it replaces by their mean" if run.method == "MAE" else run.units
    caption = f"Signals (solid) and what is left of them without the hidden {hidden} (dashed), in the data's units."
    return Drawing("masks", "Examples of masks", f"{caption} {_note(run)}".strip(), figure)


@styled
def spectrum_parts(run: Contents) -> Drawing:
    """What the top, the middle and the bottom of the spectrum add to the first signal."""
    signals = np.concatenate([run.samples[name][:1] for name in PARTS])
    titles = [f"{name}, {low:.0%} to {high:.0%} of the variance" for name, (low, high) in PARTS.items()]
    figure = _lines({"part": signals}, titles)
    caption = (
        f"A signal made of its largest {run.units} alone, of those in the middle and of the smallest, cut by cumulated "
        "share of the variance, in standard deviations about the mean."
    )
    return Drawing("spectrum-parts", "What the parts of the spectrum show", f"{caption} {_note(run)}".strip(), figure)


def _lines(kinds: dict[str, Array], titles: list[str] | None) -> "Figure":
    """One panel a signal (C, 1, L): the first kind solid, the second dashed, a colour a channel."""
    from matplotlib.figure import Figure

    count = len(next(iter(kinds.values())))
    figure = Figure(figsize=(WIDTH, HEIGHT * count + 0.3), layout="constrained")
    axes = figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0]
    for i, panel in enumerate(axes):
        panel.axhline(0, color=NEUTRAL, linewidth=0.5)
        for style, (name, signals) in zip(("-", "--"), kinds.items(), strict=False):
            for channel, line in enumerate(signals[i, :CHANNELS, 0]):
                # Two lines of one colour must differ in more than their dashes to be told apart where they cross.
                width, label = (0.8 if style == "-" else 1.4), name if channel == 0 else None
                panel.plot(line, style, color=color(channel), linewidth=width, label=label)
        panel.set_title(titles[i] if titles else "")
    if len(kinds) > 1:
        axes[0].legend(loc="upper right", ncols=2)
    return figure


def _first(run: Contents) -> dict[str, Array]:
    return {key: value[:ROWS] for key, value in run.samples.items()}


def _note(run: Contents) -> str:
    channels = run.samples["original"].shape[1]
    return f"Of {channels} channels the first {CHANNELS} are drawn, a colour each." if channels > CHANNELS else ""
