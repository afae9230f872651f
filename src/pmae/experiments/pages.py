"""What an item of the paper becomes, by its kind: tables and figures made of the runs that fill it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pmae import api
from pmae.experiments.evaluations import Need
from pmae.experiments.fill import Filled
from pmae.experiments.paper import Item
from pmae.report import (
    charts,
    galleries,
    paper_bars,
    paper_cells,
    paper_curves,
    paper_pictures,
    paper_ratio,
    published,
)
from pmae.report.contents import Contents, load
from pmae.report.figures import save_drawing
from pmae.report.paper_cells import Measured, epochs_scored, measure
from pmae.report.style import Drawing
from pmae.report.tables import Table, to_csv, to_markdown
from pmae.runs import Run, disk_errors, write_text


@dataclass(frozen=True)
class Page:
    """The tables and figures of an item; the first table is what a terminal shows."""

    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def page_of(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    """The page of an item from its filled cells."""
    return PAGES[item.kind](item, filled, need)


def write_page(item: Item, page: Page, notes: Sequence[str], folder: Path) -> list[Path]:
    """One Markdown file with everything, a CSV file a table, and PNG and SVG of the figures; returns their paths."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in page.tables:
        paths.append(write_text(folder / f"{table.name}.csv", to_csv(table)))
    for drawing in page.drawings:
        paths += [save_drawing(drawing, folder / f"{drawing.name}.{kind}") for kind in ("png", "svg")]
    parts = [f"## {item.title}: {item.labels}\n"]
    parts += [to_markdown(table) for table in page.tables]
    parts += [f"![{drawing.title}]({drawing.name}.png)\n\n{drawing.caption}\n" for drawing in page.drawings]
    parts += ["\n".join(f"- {note}" for note in notes) + "\n"] if notes else []
    return [write_text(folder / f"{item.name}.md", "\n".join(parts)), *paths]


def _measured(filled: Sequence[Filled], need: Need) -> list[Measured]:
    """Every protocol and preset of every filled cell, protocols outermost as in the paper."""
    wanted = [(kind, protocols.name, need.pooling) for protocols in need.protocols for kind in api.kinds(protocols)]
    return [
        measure(one.runs, (one.cell.data, one.cell.row.key), how, one.ratio, one.note)
        for how in wanted
        for one in filled
    ]


def _table(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    cells = _measured(filled, need)
    tables = [paper_cells.grid(item.name, item.title, cells), paper_cells.comparison(item.name, item.title, cells)]
    return Page(tables)


def _ratio(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    cells = _measured(filled, need)
    tables = [paper_ratio.ratio_grid(cells), paper_ratio.ratio_table(cells)]
    tables.append(paper_cells.comparison("ratio-cells", item.title, cells))
    return Page(tables, paper_ratio.ratio_curves(cells))


def _spread(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    over = paper_bars.over_ratios(_measured(filled, need))
    return Page([paper_bars.spread_table(over)], paper_bars.spread_bars(over, need.protocols[0].name))


def _epochs(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    name = need.protocols[0].name
    how = ("linear", name, need.pooling)
    cells = [
        measure(one.runs, (one.cell.data, one.cell.row.key), how, one.ratio, one.note, epoch)
        for one in filled
        for epoch in sorted({epoch for run in one.runs for epoch in epochs_scored(run, "linear", name)})
    ]
    if not cells:
        return Page([paper_curves.epoch_table(cells)])
    tables = [paper_curves.epoch_table(cells), paper_cells.comparison("epochs-cells", item.title, cells)]
    return Page(tables, [paper_curves.epoch_curves(cells)])


def _time(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    def name(one: Filled) -> str:
        return "PMAE" if one.cell.row.method == "pmae" else f"MAE {100 * (one.ratio or 0):.0f}%"

    made = [timed for one in filled if (timed := paper_bars.timed(one.runs, one.cell.data, name(one)))]
    return Page([paper_bars.time_table(made)], [paper_bars.time_bars(made)] if made else [])


def _masks(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    drawings = []
    for data in dict.fromkeys(one.cell.data for one in filled):
        shown = [(one, run) for one in filled if one.cell.data == data for run in _pictured(one.runs)[:1]]
        drawn = [paper_pictures.mask_designs({_design(one): run for one, run in shown})] if shown else []
        drawn += [galleries.masks(run) for one, run in shown if _design(one) == "PMAE 20%"]
        drawings += [_named(drawing, data) for drawing in drawn]
    return Page([], drawings)


def _spectrum(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    drawings = []
    for one in filled:
        for run in _pictured(one.runs)[:1]:
            drawings += [_named(draw(run), one.cell.data) for draw in (galleries.spectrum_parts, charts.spectrum)]
    return Page([], drawings)


def _examples(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    titles = published.paper()["data"]
    named = {titles[one.cell.data]: run for one in filled for run in _pictured(one.runs)[:1]}
    return Page([], [paper_pictures.examples(named)] if named else [])


def _reconstructions(item: Item, filled: Sequence[Filled], need: Need) -> Page:
    pictured = [(one, run) for one in filled for run in _pictured(one.runs)[:1]]
    drawn = [_named(galleries.reconstructions(run), f"{one.cell.data}-{one.cell.row.method}") for one, run in pictured]
    return Page([], drawn)


def _pictured(runs: Sequence[Run]) -> list[Contents]:
    """Runs whose sample pictures are there."""
    return [load(run.path) for run in runs if (run.path / "samples.safetensors").is_file()]


def _design(one: Filled) -> str:
    return f"{one.cell.row.method.upper()} {'random' if one.ratio is None else f'{100 * one.ratio:.0f}%'}"


def _named(drawing: Drawing, suffix: str) -> Drawing:
    return Drawing(f"{drawing.name}-{suffix}", drawing.title, drawing.caption, drawing.figure)


PAGES: dict[str, Callable[[Item, Sequence[Filled], Need], Page]] = {
    "table": _table,
    "ratio": _ratio,
    "spread": _spread,
    "epochs": _epochs,
    "time": _time,
    "masks": _masks,
    "spectrum": _spectrum,
    "examples": _examples,
    "reconstructions": _reconstructions,
}
