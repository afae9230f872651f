"""What an item of the paper becomes, by its kind: tables and figures made of the runs that fill it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pmae import api
from pmae.paper import bars as paper_bars
from pmae.paper import bars as paper_pictures
from pmae.paper import cells as paper_cells
from pmae.paper import curves as paper_curves
from pmae.paper import curves as paper_ratio
from pmae.paper.cells import Measured, epochs_scored, measure
from pmae.paper.fill import Filled, Need, lacking_kinds
from pmae.paper.tables import Item, Plan, jobs_of
from pmae.report import charts, galleries, published
from pmae.report.charts import save_drawing
from pmae.report.contents import Contents, load
from pmae.report.style import Drawing
from pmae.report.tables import Table, to_csv, to_markdown
from pmae.runs import Run, disk_errors, write_text
from pmae.sweep.jobs import Library


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


# What a reader must know of a table or figure beside its numbers: the data, the chosen ratios, what is not there.


def notes_of(filled: Sequence[Filled], need: Need) -> list[str]:
    """A sentence each: about the data of the runs, how a ratio was chosen, and what was not found."""
    runs = list(dict.fromkeys(run for one in filled for run in one.runs))
    said = [f"{run.environment['data']['name']}: {note}" for run in runs for note in run.environment["data"]["notes"]]
    names = [str(run.environment["data"]["name"]) for run in runs]
    said += [f"{name}: published of validation images, ours of test images" for name in names if _on_others(name)]
    missing = sum(not one.runs for one in filled)
    counted = [f"{missing} of {len(filled)} places have no run yet"] if missing else []
    return [*dict.fromkeys(said), *_oracles(filled), *counted, *_unscored(runs, need), *_unpictured(runs, need)]


def _on_others(name: str) -> bool:
    known = published.data_name(name)
    return known is not None and published.split(known) != "test"


def nearest(item: Item, plan: Plan, library: Library) -> list[str]:
    """Which run comes nearest to one that an item needs, and in what it differs: a hint where none was found."""
    jobs = jobs_of(item, plan)
    found = [(job, *near) for job in jobs if (near := library.nearest(job.config, item.loosely)) is not None]
    if not found:
        data = ", ".join(dict.fromkeys(job.config.data.source for job in jobs))
        return [f"no run on {data} was found in {', '.join(map(str, library.places))}"]
    job, name, other = min(found, key=lambda one: len(one[2]))
    differs = ", ".join(f"{key}={value}" for key, value in other.items())
    hint = f"it has {differs}; --recipe, --epochs and --set choose settings" if differs else "it is not finished"
    return [f"nearest to {job.name} is the run {name}: {hint}"]


def _oracles(filled: Sequence[Filled]) -> Iterator[str]:
    """The ratios that were chosen, and among how many."""
    titles = published.paper()
    for one in filled:
        if one.cell.row.ratio == "oracle" and one.runs:
            method = titles["methods"][one.cell.row.key]
            yield f"{titles['data'][one.cell.data]}, {method}: {one.ratio:g}, {one.note}"


def _unscored(runs: Sequence[Run], need: Need) -> list[str]:
    """Runs that were found but not evaluated in the way that was asked for."""
    said = []
    for protocols in need.protocols:
        open_ = {run: epochs for run in runs if (epochs := need.missing(run).get(protocols))}
        kinds = dict.fromkeys(kind for run in open_ for kind in lacking_kinds(run, protocols, open_[run]))
        suites = [suite for run in open_ for suite in run.results.get("evaluation", {}).values()]
        others = ", ".join(sorted({str(suite["preset"]) for suite in suites} - {protocols.name})) or "none"
        counted = f"{len(open_)} of {len(runs)} runs have no {', '.join(kinds)} under the preset {protocols.name}"
        said += [f"{counted}; other presets they have: {others}"] if open_ else []
    return said


def _unpictured(runs: Sequence[Run], need: Need) -> list[str]:
    lacking = sum(not need.has_pictures(run) for run in runs)
    said = "published results leave them out, and without --only-found they are made"
    return [f"{lacking} of {len(runs)} runs have no sample pictures: {said}"] if lacking else []
