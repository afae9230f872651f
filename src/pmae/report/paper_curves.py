"""The paper's curves drawn from cells: accuracy against the masking ratio and against the epochs of pretraining."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pmae.report import published
from pmae.report.paper_cells import Measured
from pmae.report.style import PALETTE, Drawing, panels, styled
from pmae.report.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "mae_oracle": ("MAE", PALETTE[1], "s"),
    "pmae_oracle_components": ("PMAE", PALETTE[0], "o"),
    "pmae_oracle_pixels": ("PMAE, pixel objective", PALETTE[2], "^"),
}
"""How a family of runs is called and drawn, by its key among the published methods."""


@styled
def ratio_curves(cells: Sequence[Measured]) -> Drawing:
    """Accuracy against the masked share, one panel a data set, one line a method and preset."""
    groups = by_data(cells)
    figure, axes = panels([2.2] * len(groups))
    presets = list(dict.fromkeys(cell.preset for cell in cells))
    for panel, (data, found) in zip(axes, groups.items(), strict=True):
        panel.set_title(f"{published.paper()['data'][data]}, linear probe, test accuracy (%)")
        for (method, preset), line in lines(found).items():
            name, colour, marker = LOOKS[method]
            style = "--" if presets.index(preset) else "-"
            label = f"{name}, {_probe(preset)}" if len(presets) > 1 else name
            points = [(100 * (c.ratio or 0), c.value, c.spread or 0.0) for c in line if c.value is not None]
            _plot(panel, points, label, color=colour, marker=marker, linestyle=style)
            _mark_choice(panel, line, colour)
        _published_levels(panel, found)
        panel.set(xlim=(5, 95), xticks=range(10, 100, 10))
        panel.margins(y=0.12)
    axes[-1].set_xlabel("hidden: % of patches (MAE), % of variance (PMAE)")
    legend(figure, axes)
    caption = (
        "Linear probe against the share that is hidden. A ring is the ratio that is best on validation images, which "
        "are no test images; a dotted line is the paper's best (oracle) in the colour of its method. Bars are "
        "deviations between runs, or between the heads of one run."
    )
    return Drawing("ratio", "Accuracy against the masking ratio", caption, figure)


def ratio_table(cells: Sequence[Measured]) -> Table:
    """A row a data set, method and preset: the ratio that validation chooses, the accuracy there and the paper's."""
    header = ["data", "method", "preset", "ratios run", "best ratio by validation", "accuracy there", "published best"]
    header += ["difference", "accuracy at 20%", "best of all ratios on test"]
    rows: list[list[Cell]] = []
    for data, found in by_data(cells).items():
        for (method, preset), line in lines(found).items():
            best = chosen(line)
            known = [cell.value for cell in line if cell.value is not None]
            fifth = next((cell.value for cell in line if cell.ratio == 0.2), None)
            row: list[Cell] = [published.paper()["data"][data], LOOKS[method][0], preset, str(len(known))]
            row += [None, None, None, None] if best is None else _choice(best)
            rows.append([*row, fifth, max(known, default=None)])
    note = (
        f"The paper: {published.paper()['claims']['ratio']}. Its best ratios are not printed; its best accuracies are."
    )
    return Table("ratio-comparison", "Masking ratio: published and ours", header, rows, note)


def chosen(line: Sequence[Measured]) -> Measured | None:
    """The cell whose quick probe on validation images is best, among those that were measured."""
    known = [cell for cell in line if cell.validation is not None and cell.value is not None]
    return max(known, key=lambda cell: cell.validation or 0, default=None)


@styled
def epoch_curves(cells: Sequence[Measured]) -> Drawing:
    """Accuracy at the checkpoints of pretraining, one panel a data set."""
    groups = by_data(cells)
    figure, axes = panels([2.0] * len(groups))
    for panel, (data, found) in zip(axes, groups.items(), strict=True):
        panel.set_title(f"{published.paper()['data'][data]}, linear probe, test accuracy (%)")
        for (method, _), line in lines(found).items():
            name, colour, marker = LOOKS[method]
            points = [(cell.epoch, cell.value, cell.spread or 0.0) for cell in line if cell.value is not None]
            _plot(panel, points, name, color=colour, marker=marker)
        _published_levels(panel, found)
        panel.set_xlim(left=0)
    axes[-1].set_xlabel("epoch of pretraining")
    legend(figure, axes)
    caption = "Linear probe at the checkpoints of pretraining; a dotted line is the paper's number after 800 epochs."
    return Drawing("epochs", "Accuracy against the epochs of pretraining", caption, figure)


def epoch_table(cells: Sequence[Measured]) -> Table:
    """A row a data set: when PMAE passes what MAE ends with."""
    header = ["data", "MAE at the end", "PMAE at the end", "PMAE first above it at epoch", "of epochs"]
    rows: list[list[Cell]] = []
    for data, found in by_data(cells).items():
        mae, pmae = ([c for c in found if c.method.startswith(m) and c.value is not None] for m in ("mae", "pmae"))
        last = max(mae, key=lambda c: c.epoch, default=None)
        end = max(pmae, key=lambda c: c.epoch, default=None)
        above = [c.epoch for c in pmae if last and (c.value or 0) > (last.value or 0)]
        ends: list[Cell] = [None if one is None else one.value for one in (last, end)]
        when: list[Cell] = [str(min(above)) if above else None, str(end.epoch) if end else None]
        rows.append([published.paper()["data"][data], *ends, *when])
    note = f"The paper: {published.paper()['claims']['epochs']}."
    return Table("epochs-comparison", "Epochs: published and ours", header, rows, note)


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


def _choice(best: Measured) -> list[Cell]:
    ratio = None if best.ratio is None else f"{best.ratio:g}"
    # The published best was found with augmentation on: it says nothing about probes without.
    plain = best.preset.startswith("plain")
    return [ratio, best.value, None if plain else best.published, None if plain else best.difference]


def _probe(preset: str) -> str:
    """What sets the probes of a preset apart."""
    augmented = preset.startswith(("paper", "released"))
    return "probe augmented" if augmented else "not augmented" if preset.startswith("plain") else preset


def _plot(axes: "Axes", points: Sequence[tuple[float, float, float]], label: str, **look: Any) -> None:
    x, y, spread = zip(*sorted(points), strict=True) if points else ((), (), ())
    axes.errorbar(x, y, spread if any(spread) else None, label=label, markersize=4, elinewidth=1, **look)


def _mark_choice(axes: "Axes", line: Sequence[Measured], colour: str) -> None:
    best = chosen(line)
    if best is not None and best.ratio is not None and best.value is not None:
        axes.plot(100 * best.ratio, best.value, "o", markersize=10, markerfacecolor="none", markeredgecolor=colour)


def _published_levels(axes: "Axes", cells: Sequence[Measured]) -> None:
    for method in dict.fromkeys(cell.method for cell in cells):
        level = published.accuracy("linear", method, cells[0].data)
        if level is not None:
            axes.axhline(level, color=LOOKS[method][1], linestyle=":", linewidth=1.1)


def legend(figure: "Figure", axes: "Sequence[Axes]", ncols: int = 1) -> None:
    """One legend under all panels, each name once."""
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols)
