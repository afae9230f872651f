"""Masking spaces side by side: what runs in each came to, and what fitted spaces look like."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pmae.report.pictures import Array, View, gallery
from pmae.report.samples import hidden_pixels
from pmae.report.style import FAINT, Drawing, color, dash, panels, plain_log_ticks, styled
from pmae.report.tables import Cell, Table
from pmae.results import scores_of
from pmae.runs import Run

PARTS = {"top": (0.0, 0.8), "middle": (0.8, 0.95), "low": (0.95, 1.01)}
"""The shares of cumulated variance between which basis images are taken."""
EACH = 3
"""Basis images of a part."""
MARKS = (0.5, 0.8, 0.95)
MARGIN = 0.9
"""Inches beside a gallery for the names of spaces."""


@dataclass(frozen=True)
class Portrait:
    """What a fitted space shows of itself."""

    space: str
    """Its name with its settings."""
    label: str
    """The same in short; it may break at blanks."""
    seconds: float
    """The fit took."""
    share: Array
    """(units,) of the variance, largest first, of what is hidden as one."""
    basis: Array
    """(`EACH` for each of `PARTS`, C, H, W) images of single units; NaN where a part has fewer."""
    ratios: tuple[float, ...]
    visible: Array
    """(ratios, C, H, W) one image in the units of the data without its hidden part."""
    hidden: Array
    """(ratios, C, H, W) that part, standardized."""
    patches: bool = False
    """Whether patches are hidden: this is MAE."""
    preimage_error: float | None = None
    """Share of the norm of new images that the way back misses, where there is no inverse."""


def run_row(space: str, ratio: float, runs: Sequence[Run], preset: str) -> list[Cell]:
    """Space, ratio, share really hidden, R2, accuracies, speed and fit time of the runs that repeat a cell."""
    ends = [run.results.get("pretrain", {}) for run in runs]
    r2 = _mean([end.get("held_out_r2", end.get("train_r2")) for end in ends])
    lines = [line for run in runs for line in run.metrics() if "images_per_second" in line]
    speed = round(statistics.median(line["images_per_second"] for line in lines)) if lines else None
    share = _digits(_mean([line.get("masked_share") for line in lines]), 3)
    seconds = _mean([run.environment.get("fit_seconds") for run in runs])
    missed = _mean([end.get("preimage_error_unseen") for end in ends])
    accuracies = [_mean([_accuracy(run, kind, preset) for run in runs]) for kind in ("linear", "knn")]
    return [space, f"{ratio:g}", share, _digits(r2, 3), *accuracies, speed, _digits(seconds, 2), _digits(missed, 3)]


def run_table(rows: Sequence[Sequence[Cell]], title: str, note: str) -> Table:
    """A row a space and ratio."""
    header = ["space", "ratio", "hidden", "R2", "linear %", "k-NN %", "images/s", "fit, s", "pre-image error"]
    return Table("spaces", title, header, rows, note)


@styled
def scores_figure(rows: Sequence[Sequence[Cell]], labels: Mapping[str, str]) -> Drawing:
    """Accuracies of the rows of `run_table`: a line a space, the best linear probe at the top, a dot a ratio."""
    known = [
        (str(space), linear, knn)
        for space, _, _, _, linear, knn, *_ in rows
        if isinstance(linear, float) and isinstance(knn, float)
    ]
    best = {space: max(linear for one, linear, _ in known if one == space) for space, _, _ in known}
    order = sorted(best, key=lambda space: best[space])
    figure, axes = panels([0.6 + 0.24 * len(order)] * 2)
    for panel, (title, score) in zip(axes, (("Linear probe (%)", 1), ("k-NN (%)", 2)), strict=True):
        for height, space in enumerate(order):
            values, mae = [float(row[score]) for row in known if row[0] == space], space == "pixels"
            panel.plot([min(values), max(values)], [height, height], color=FAINT, linewidth=3, zorder=1)
            for number, value in enumerate(values):
                panel.scatter(value, height, 12 + 16 * number, color=color(1 if mae else 0), zorder=2)
        panel.set_yticks(range(len(order)), [labels[space].replace("\N{NO-BREAK SPACE}", " ") for space in order])
        panel.set(title=title)
    caption = "A dot a ratio, the larger the more is hidden; the space with the best linear probe at the top."
    return Drawing("spaces-scores", "Accuracy by masking space", caption, figure)


def fit_table(portraits: Sequence[Portrait], note: str) -> Table:
    """A row a space: how long its fit took, and how few units hold most of the variance."""
    rows: list[list[Cell]] = []
    for one in portraits:
        total = one.share.cumsum()
        # In float32 the whole may come to a little less than 1.
        counts: list[Cell] = [int((total < mark * total[-1]).sum()) + 1 for mark in MARKS]
        rows.append([one.space, _digits(one.seconds, 2), len(one.share), *counts, _digits(one.preimage_error, 3)])
    header = ["space", "fit, s", "units", *(f"hold {mark:.0%}" for mark in MARKS), "pre-image error"]
    return Table("space-fits", "Fits", header, rows, note)


@styled
def basis_figure(portraits: Sequence[Portrait], view: View, said: str) -> Drawing:
    """A row a space of images of single units: of the top, the middle and the low end of its spectrum."""
    shown = [one for one in portraits if not one.patches]
    rows = [_basis_pictures(one.basis, view) for one in shown]
    # A part's name stands over the second of its columns; blanks over the others differ, as names of columns must.
    titles = [list(PARTS)[j // EACH] if j % EACH == 1 else " " * (j + 1) for j in range(len(PARTS) * EACH)]
    columns = {title: np.stack([row[j] for row in rows]) for j, title in enumerate(titles)}
    figure, _ = gallery(columns, [one.label for one in shown], margin=MARGIN)
    cuts = ", ".join(f"{name} up to {min(high, 1):.0%}" for name, (_, high) in PARTS.items())
    caption = (
        f"What single components add to an image, each at its own contrast, mid-grey is 0; {cuts} of the cumulated "
        "variance, the largest first. What is hidden as one (a band, a rest) is shown as a random draw of its "
        f"coefficients; a part without any stays empty. {said} {view.note}"
    )
    return Drawing("basis", "Basis images", caption.strip(), figure)


@styled
def hidden_figure(portraits: Sequence[Portrait], image: Array, view: View, said: str) -> Drawing:
    """One image, a row a space: what is left and what is hidden at each ratio."""
    picture = view.pictures(image)
    rows, count = [], min(len(one.ratios) for one in portraits)
    for one in portraits:
        gaps, scale = hidden_pixels(one.hidden), view.scale(one.hidden)
        seen, lost = view.pictures(one.visible), view.differences(one.hidden, scale)
        seen = np.where(gaps, 0.5, seen) if one.patches else seen
        lost = np.where(gaps, picture, 0.5) if one.patches else lost
        rows.append([picture[0], *(each[k] for k in range(count) for each in (seen, lost))])
    shares = portraits[0].ratios[:count]
    titles = ["image", *(f"{share:.0%}\n{kind}" for share in shares for kind in ("visible", "hidden"))]
    columns = {title: np.stack([row[j] for row in rows]) for j, title in enumerate(titles)}
    usual = portraits[0].ratios
    labels = [one.label + ("" if one.ratios == usual else f" {_shares(one.ratios)}") for one in portraits]
    figure, _ = gallery(columns, labels, margin=MARGIN)
    caption = (
        "What the encoder sees and what it must predict, one draw at each share of the variance. Hidden parts are "
        "differences around mid-grey, those of a row on one scale; hidden patches are grey, and their shares stand "
        f"beside the row. {said} {view.note}"
    )
    return Drawing("hidden", "What is hidden", caption.strip(), figure)


@styled
def spectra_figure(portraits: Sequence[Portrait], said: str) -> Drawing:
    """Cumulated share of the variance against the units of all spaces, the largest first."""
    figure, (axes,) = panels((4.6,))
    for position, one in enumerate(portraits):
        number, total = np.arange(1, len(one.share) + 1), one.share.cumsum()
        look = {"color": color(position), "linestyle": dash(position)}
        axes.semilogx(number, 100 * total, label=one.label, **look)
    axes.set(title="Cumulated share of the variance (%)", xlabel="components or bands, largest first", ylim=(0, 102))
    axes.set_xlim(0.9, 1.1 * max(len(one.share) for one in portraits))
    plain_log_ticks(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    caption = (
        "The higher a curve, the fewer components or bands hold the variance. That of kernel PCA and diffusion is of "
        f"their own coefficients, not of pixels. {said}"
    )
    return Drawing("spectra", "Spectra", caption.strip(), figure)


def _basis_pictures(basis: Array, view: View) -> list[Array]:
    """Each at its own contrast; white where there is none."""
    blank = np.ones((*basis.shape[2:], 3))
    return [blank if np.isnan(one).any() else view.differences(one[None], _peak(one, view))[0] for one in basis]


def _peak(image: Array, view: View) -> float:
    return max(view.scale(image[None]), 1e-12)


def _accuracy(run: Run, protocol: str, preset: str) -> float | None:
    """Test accuracy of the mean of the patch tokens at the last epoch."""
    wanted = (protocol, "mean", "test", preset, run.config.train.epochs)
    scores = [score for score in scores_of(run.evaluations) if not score.is_baseline]
    found = [s for s in scores if (s.protocol, s.pooling, s.split, s.preset, s.epoch) == wanted]
    return found[0].accuracy.value if found else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _digits(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}".replace("-", "−")


def _shares(ratios: Sequence[float]) -> str:
    return "/".join(f"{100 * ratio:.0f}" for ratio in ratios) + "%"
