"""How the paper's curves are drawn from cells, and those of accuracy against the epochs of pretraining."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pmae.report import published
from pmae.report.paper_cells import Measured
from pmae.report.style import NEUTRAL, PALETTE, Drawing, panels, styled
from pmae.report.tables import Cell, Table

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
