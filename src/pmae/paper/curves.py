"""How the paper's curves are drawn from cells, and those of accuracy against the epochs of pretraining."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pmae.paper.cells import Measured, features_of
from pmae.report import published
from pmae.report.scores import PROTOCOLS
from pmae.report.style import NEUTRAL, PALETTE, Drawing, panels, styled
from pmae.report.tables import NOTHING, Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "mae_std": ("MAE 75%", PALETTE[4], "D"),
    "mae_oracle": ("MAE", PALETTE[1], "s"),
    "pmae_oracle_components": ("PMAE", PALETTE[0], "o"),
    "pmae_oracle_pixels": ("PMAE, pixel objective", PALETTE[2], "^"),
}
"""How a family of runs is called and drawn, by its key among the published methods."""
PUBLISHED = "published, 800 epochs"


@styled
def epoch_curves(cells: Sequence[Measured]) -> Drawing:
    """Accuracy at the checkpoints of pretraining, one panel a data set."""
    from matplotlib.ticker import MaxNLocator

    groups = by_data(cells)
    figure, axes = panels([2.3] * len(groups))
    for panel, (data, found) in zip(axes, groups.items(), strict=True):
        panel.set_title(f"{published.paper()['data'][data]}, linear probe, test accuracy (%)")
        for (method, _), line in lines(found).items():
            _, colour, marker = LOOKS[method]
            points = [(cell.epoch, cell.value, cell.spread or 0.0) for cell in line if cell.value is not None]
            plot(panel, points, label=_named(method), color=colour, marker=marker)
        published_levels(panel, found)
        panel.margins(y=0.12)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes[-1].set_xlabel("epoch of pretraining")
    legend(figure, axes, ncols=2)
    caption = "Linear probe at the checkpoints of pretraining; a dotted line is the paper's number after 800 epochs."
    return Drawing("epochs", "Accuracy against the epochs of pretraining", caption, figure)


def epoch_table(cells: Sequence[Measured]) -> Table:
    """A row a data set and kind of MAE: when PMAE passes what it ends with."""
    header = ["data", "MAE", "MAE at the end", "PMAE at the end", "PMAE first above it at epoch", "of epochs"]
    header += ["epochs of PMAE scored"]
    rows: list[list[Cell]] = []
    for data, found in by_data([cell for cell in cells if cell.value is not None]).items():
        curves = {method: sorted(line, key=lambda c: c.epoch) for (method, _), line in lines(found).items()}
        pmae = curves.pop("pmae_oracle_components", [])
        for method, mae in curves.items() or [("mae_oracle", [])]:
            last, end = (line[-1] if line else None for line in (mae, pmae))
            above = [cell.epoch for cell in pmae if last and (cell.value or 0) > (last.value or 0)]
            ends: list[Cell] = [None if one is None else one.value for one in (last, end)]
            # Of an end alone it cannot be said when it was passed.
            first = str(min(above)) if above and len(pmae) > 1 else None
            when: list[Cell] = [first, str(end.epoch) if end else None, len(pmae)]
            rows.append([published.paper()["data"][data], _named(method), *ends, *when])
    note = f"The paper: {published.paper()['claims']['epochs']}."
    return Table("epochs-comparison", "Epochs: published and ours", header, rows, note)


def _named(method: str) -> str:
    """A method by its name, and how its ratio came about."""
    return LOOKS[method][0] + (", chosen ratio" if "_oracle" in method else "")


def by_data(cells: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Cells by data set."""
    found: dict[str, list[Measured]] = {}
    for cell in cells:
        found.setdefault(cell.data, []).append(cell)
    return found


def lines(cells: Sequence[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """Cells by method and preset."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for cell in cells:
        found.setdefault((cell.method, cell.preset), []).append(cell)
    return found


def plot(axes: "Axes", points: Sequence[tuple[float, float, float]], **look: Any) -> None:
    """Points (x, y, spread) in their order, with a bar for each spread that there is."""
    x, y, spread = zip(*sorted(points), strict=True) if points else ((), (), ())
    axes.errorbar(x, y, spread if any(spread) else None, markersize=4, elinewidth=1, **look)


def published_levels(axes: "Axes", cells: Sequence[Measured]) -> None:
    """A dotted line at the published accuracy of each method that was measured and has one on this data."""
    for method in dict.fromkeys(cell.method for cell in cells if cell.value is not None):
        level = published.accuracy("linear", method, cells[0].data)
        if level is not None:
            axes.axhline(level, color=LOOKS[method][1], linestyle=":", linewidth=1.1)
            # Named once, in grey, for all colours.
            axes.plot([], [], color=NEUTRAL, linestyle=":", linewidth=1.1, label=PUBLISHED)


def legend(figure: "Figure", axes: "Sequence[Axes]", ncols: int) -> None:
    """One legend under all panels, each name once, the published last."""
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    handles |= {PUBLISHED: handles.pop(PUBLISHED)} if PUBLISHED in handles else {}
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols)


# The paper's figure of accuracy against the masking ratio, and its numbers, drawn from cells.

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANDOM = 101
"""Where a ratio that is drawn anew for each batch stands on the axis of shares in percent."""


@styled
def ratio_curves(cells: Sequence[Measured]) -> list[Drawing]:
    """Linear probes against the masked share: a panel a data set and preset, a line a method; none without a number."""
    cells = [cell for cell in cells if cell.protocol == "linear" and cell.value is not None]
    if not cells:
        return []
    groups = {
        (data, preset): line for data, found in by_data(cells).items() for preset, line in _presets(found).items()
    }
    figure, axes = panels([2.2] * len(groups))
    for panel, ((data, preset), found) in zip(axes, groups.items(), strict=True):
        for (family, _), line in families(found).items():
            _draw_line(panel, family, line)
        if augmented(preset):
            published_levels(panel, [cell for cell in found if cell.ratio is not None])
        kind = f"{preset}, {'' if augmented(preset) else 'not '}augmented"
        panel.set(title=f"{published.paper()['data'][data]} (%): {kind}", xlim=(6, RANDOM + 5))
        panel.set_xticks([*range(10, 100, 10), RANDOM], labels=[*map(str, range(10, 100, 10)), "random"])
        panel.margins(y=0.12)
    axes[-1].set_xlabel("hidden: % of patches (MAE), % of variance (PMAE)")
    legend(figure, axes, ncols=2)
    caption = (
        "Test accuracy of a linear probe, by data set and preset, against the share that is hidden; on the right a "
        "share drawn anew for each batch. A ring is the ratio that is best on validation images, which are no test "
        "images; a dotted line is the paper's best (oracle) in the colour of its method, whose probes are augmented. "
        f"Bars are deviations between runs, or between the heads of one run. {features_of(cells)}"
    )
    return [Drawing("ratio", "Accuracy against the masking ratio", caption, figure)]


def ratio_grid(cells: Sequence[Measured]) -> Table:
    """A row a data set, protocol, preset and method: the accuracy at every ratio, and at a random one."""
    ratios = sorted({cell.ratio for cell in cells if cell.ratio is not None})
    rows: list[list[Cell]] = []
    for data, found in by_data(cells).items():
        for protocol in dict.fromkeys(cell.protocol for cell in found):
            for (family, preset), line in families([c for c in found if c.protocol == protocol]).items():
                row: list[Cell] = [published.paper()["data"][data], PROTOCOLS[protocol], preset, LOOKS[family][0]]
                at = {cell.ratio: cell.value for cell in line if cell.value is not None}
                rows += [[*row, *(at.get(ratio) for ratio in (*ratios, None))]] if at else []
    header = ["data", "protocol", "preset", "method", *(f"{ratio:.0%}" for ratio in ratios), "random"]
    note = (
        f"Test accuracy in % by hidden share: of patches (MAE), of the variance (PMAE); {NOTHING} was not run, and "
        f"what has no number at all is left out. {features_of(cells)}"
    )
    return Table("ratio-grid", "Accuracy against the masking ratio", header, rows, note)


def ratio_table(cells: Sequence[Measured]) -> Table:
    """A row a data set, method and preset: the ratio that validation chooses, the accuracy there and the paper's."""
    header = ["data", "method", "preset", "ratios run", "best ratio by validation", "accuracy there", "published best"]
    header += ["difference", "accuracy at 20%", "best of all ratios on test"]
    rows: list[list[Cell]] = []
    for data, found in by_data([cell for cell in cells if cell.protocol == "linear"]).items():
        for (method, preset), line in lines([cell for cell in found if cell.ratio is not None]).items():
            best = chosen(line)
            known = [cell.value for cell in line if cell.value is not None]
            fifth = next((cell.value for cell in line if cell.ratio == 0.2), None)
            row: list[Cell] = [published.paper()["data"][data], LOOKS[method][0], preset, str(len(known))]
            row += [None, None, None, None] if best is None else _choice(best)
            rows += [[_rounded(cell) for cell in (*row, fifth, max(known))]] if known else []
    note = (
        f"The paper: {published.paper()['claims']['ratio']}. Its best ratios are not printed; its best accuracies are."
    )
    return Table("ratio-comparison", "Masking ratio: published and ours", header, rows, note)


def families(cells: Sequence[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """Cells by method and preset, a random ratio among the fixed ones of its method."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for cell in cells:
        found.setdefault((cell.method.replace("_random", "_oracle"), cell.preset), []).append(cell)
    return found


def chosen(line: Sequence[Measured]) -> Measured | None:
    """The cell whose quick probe on validation images is best, among those of one ratio that were measured."""
    known = [cell for cell in line if cell.ratio is not None and cell.validation is not None and cell.value is not None]
    return max(known, key=lambda cell: cell.validation or 0, default=None)


def augmented(preset: str) -> bool:
    """Whether a preset trains its probes on crops, as the paper does."""
    return preset.startswith(("paper", "released"))


def _presets(cells: Sequence[Measured]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for cell in cells:
        found.setdefault(cell.preset, []).append(cell)
    return found


def _draw_line(axes: "Axes", family: str, line: Sequence[Measured]) -> None:
    """A line through the fixed ratios, a point beside it for the random one, a ring around what validation chooses."""
    name, colour, marker = LOOKS[family]
    known = [cell for cell in line if cell.value is not None]
    points = [(100 * (cell.ratio or 0), cell.value or 0.0, cell.spread or 0.0) for cell in known]
    fixed = [point for point, cell in zip(points, known, strict=True) if cell.ratio is not None]
    drawn = [(RANDOM, *point[1:]) for point, cell in zip(points, known, strict=True) if cell.ratio is None]
    plot(axes, fixed, label=name, color=colour, marker=marker)
    plot(axes, drawn, color=colour, marker=marker, linestyle="none")
    best = chosen(line) if len(fixed) > 1 else None  # a single ratio is no choice
    if best is not None and best.ratio is not None and best.value is not None:
        axes.plot(100 * best.ratio, best.value, "o", markersize=10, markerfacecolor="none", markeredgecolor=colour)


def _rounded(cell: Cell) -> Cell:
    return round(cell, 6) if isinstance(cell, float) else cell


def _choice(best: Measured) -> list[Cell]:
    ratio = None if best.ratio is None else f"{best.ratio:g}"
    # The published best was found with augmentation on: it says nothing about probes without.
    return [ratio, best.value, *([best.published, best.difference] if augmented(best.preset) else [None, None])]
