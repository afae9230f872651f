"""Reproduce one table or figure of the paper: from whatever runs there are to its page of tables and figures."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pmae.paper import comparisons, figures
from pmae.paper.cells import CellRuns, data_title, fill_cells, measure, measured, method_title
from pmae.paper.comparisons import EPOCHS
from pmae.paper.settings import settings_table
from pmae.paper.tables import ITEMS, Item, Row, RunChoices, ratios_of, spec_of, specs_of
from pmae.report import published, samples
from pmae.report.contents import Contents, load
from pmae.report.style import Drawing
from pmae.report.sweeps import Page, write_page
from pmae.report.tables import Cell, Table
from pmae.results import PROTOCOLS
from pmae.runs import Run
from pmae.sweep.execute import check_data
from pmae.sweep.find import RunIndex, finished
from pmae.sweep.scored import Requirements, Scoring, get_runs, own_scores, unscored
from pmae.sweep.workers import Workers

SCHEME = (
    "these figures are drawings of the method, not measurements: the method is one screen of code, pmae/method.py, and "
    "`pmae paper reconstructions` shows the same stages on images"
)


def check(item: Item, chosen: RunChoices, scoring: Scoring) -> None:
    """Refuse what cannot be done before anything is: protocols, methods, settings, and data that are not there."""
    item.kept(scoring.protocols)
    specs = specs_of(item, chosen)
    if not scoring.only_found:
        check_data(specs, scoring.index, item.any_length)


def reproduce(
    item: Item, chosen: RunChoices, scoring: Scoring, workers: Workers | None = None
) -> tuple[Page, list[Path]]:
    """Run what is missing, here or by `workers`, evaluate what is not evaluated, and write the item's files."""
    if item.kind == "scheme":
        page = Page(notes=[SCHEME])
    elif item.kind == "settings":
        page = Page([settings_table(chosen, scoring)])
    else:
        needed = requirements(item, chosen, scoring)
        filled = fill_cells(item, chosen, get_runs(scoring, item.any_length, workers), needed)
        page = page_of(item, filled, needed)
        page.notes.extend(notes_of(filled, needed))
        if not any(one.runs for one in filled):
            page.notes.append(nearest_run(item, chosen, scoring.index))
    return page, write_page(item.name, item.heading, page, scoring.out)


def requirements(item: Item, chosen: RunChoices, scoring: Scoring) -> Requirements:
    """What runs must have been scored by for an item."""
    protocols = scoring.chosen(item.kept(scoring.protocols), item.with_plain)
    return Requirements(protocols, item.every_epoch, scoring.pooling, chosen.device, chosen.root, item.pictures)


def page_of(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    """The page of an item from its filled cells."""
    return PAGES[item.kind](item, filled, needed)


def _table(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    cells = measured(filled, needed)
    return Page([show(item.name, item.title, cells) for show in (comparisons.grid, comparisons.comparison)])


def _ratio(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    cells = measured(filled, needed)
    tables = [comparisons.ratio_grid(cells), comparisons.ratio_table(cells)]
    tables.append(comparisons.comparison("ratio-cells", item.title, cells))
    return Page(tables, figures.ratio_curves(cells))


def _spread(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    over = comparisons.over_ratios(measured(filled, needed))
    return Page([comparisons.spread_table(over)], figures.spread_bars(over, needed.protocols[0].name))


def _epochs(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    how = ("linear", needed.protocols[0].name)
    cells = [
        measure(one, *how, needed.pooling, epoch)
        for one in filled
        for epoch in sorted({score.epoch for run in one.runs for score in own_scores(run, *how)})
    ]
    table = comparisons.epoch_table(cells)
    if not cells:
        return Page([table])
    tables = [table, comparisons.comparison("epochs-cells", item.title, cells)]
    return Page(tables, [figures.epoch_curves(cells)])


def _time(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    times = comparisons.training_times(filled)
    return Page([comparisons.time_table(times)], [figures.time_bars(times)] if times else [])


def _masks(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    drawings = []
    for data in dict.fromkeys(one.data for one in filled):
        shown = {_design(one): run for one, run in _pictured(filled) if one.data == data}
        drawn = [figures.mask_designs(shown)] if shown else []
        drawn += [samples.masks(shown["PMAE 20%"])] if "PMAE 20%" in shown else []
        drawings += [_named(drawing, data) for drawing in drawn]
    return Page([], drawings)


def _spectrum(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    draws = (samples.spectrum_parts, samples.spectrum)
    return Page([], [_named(draw(run), one.data) for one, run in _pictured(filled) for draw in draws])


def _examples(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    named = {data_title(one.data): run for one, run in _pictured(filled)}
    return Page([], [figures.examples(named)] if named else [])


def _reconstructions(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    pictured = _pictured(filled)
    return Page([], [_named(samples.reconstructions(r), f"{one.data}-{one.row.method}") for one, r in pictured])


PAGES: dict[str, Callable[[Item, Sequence[CellRuns], Requirements], Page]] = {
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


def _pictured(filled: Sequence[CellRuns]) -> list[tuple[CellRuns, Contents]]:
    """The cells that have a run with sample pictures, with the first such run."""
    found = []
    for one in filled:
        paths = [run.path for run in one.runs if (run.path / "samples.safetensors").is_file()]
        found += [(one, load(path)) for path in paths[:1]]
    return found


def _design(one: CellRuns) -> str:
    return f"{one.row.method.upper()} {'random' if one.ratio is None else f'{100 * one.ratio:.0f}%'}"


def _named(drawing: Drawing, suffix: str) -> Drawing:
    return dataclasses.replace(drawing, name=f"{drawing.name}-{suffix}")


def notes_of(filled: Sequence[CellRuns], needed: Requirements) -> list[str]:
    """What a reader must know beside the numbers: about the data, how ratios were chosen, and what was not found."""
    runs = list(dict.fromkeys(run for one in filled for run in one.runs))
    data = [run.environment["data"] for run in runs]
    said = [f"{each['name']}: {note}" for each in data for note in each["notes"]]
    names = [str(each["name"]) for each in data]
    said += [f"{name}: published of validation images, ours of test images" for name in names if _on_others(name)]
    missing = sum(not one.runs for one in filled)
    counted = [f"{missing} of {len(filled)} places have no run yet"] if missing else []
    return [*dict.fromkeys(said), *_oracles(filled), *counted, *_unscored(runs, needed), *_unpictured(runs, needed)]


def _on_others(name: str) -> bool:
    known = published.data_name(name)
    return known is not None and published.split(known) != "test"


def _oracles(filled: Sequence[CellRuns]) -> Iterator[str]:
    """The ratios that were chosen, and among how many."""
    for one in filled:
        if one.row.ratio == "oracle" and one.runs:
            yield f"{data_title(one.data)}, {method_title(one.row.key)}: {one.ratio:g}, {one.note}"


def _unscored(runs: Sequence[Run], needed: Requirements) -> Iterator[str]:
    """Runs that were found but not evaluated in the way that was asked for."""
    for protocols in needed.protocols:
        lacking = {run: epochs for run in runs if (epochs := needed.missing(run).get(protocols))}
        if lacking:
            kinds = dict.fromkeys(kind for run in lacking for kind in unscored(run, protocols, lacking[run]))
            presets = {evaluation.preset for run in lacking for evaluation in run.evaluations}
            others = ", ".join(sorted(presets - {protocols.name})) or "none"
            counted = f"{len(lacking)} of {len(runs)} runs have no {', '.join(kinds)} under the preset {protocols.name}"
            yield f"{counted}; other presets they have: {others}"


def _unpictured(runs: Sequence[Run], needed: Requirements) -> list[str]:
    lacking = sum(not needed.has_pictures(run) for run in runs)
    said = "published results leave them out, and without --only-found they are made"
    return [f"{lacking} of {len(runs)} runs have no sample pictures: {said}"] if lacking else []


def nearest_run(item: Item, chosen: RunChoices, index: RunIndex) -> str:
    """Which run comes nearest to one that an item needs, and in what it differs: a hint where none was found."""
    specs = specs_of(item, chosen)
    found = [(spec, *near) for spec in specs if (near := index.nearest(spec.config, item.any_length)) is not None]
    if not found:
        data = ", ".join(dict.fromkeys(spec.config.data.source for spec in specs))
        return f"no run on {data} was found in {', '.join(map(str, index.folders))}"
    spec, name, other = min(found, key=lambda one: len(one[2]))
    differs = ", ".join(f"{key}={value}" for key, value in other.items())
    hint = f"it has {differs}; --recipe, --epochs and --set choose settings" if differs else "it is not finished"
    return f"nearest to {spec.name} is the run {name}: {hint}"


def status(chosen: RunChoices, scoring: Scoring) -> Table:
    """The ledger of the main table: for every cell how many runs have been scored, and after how many epochs.

    Runs of any length and seed count, and for an oracle's row those of any ratio.
    """
    item = ITEMS["main"]
    protocols, cells = item.kept(scoring.protocols), item.cells(chosen)
    datasets = list(dict.fromkeys(data for _, data in cells))
    lengths = {(p, *cell): epochs for cell in cells for p, epochs in _scored_lengths(item, *cell, chosen, scoring)}
    rows: list[list[Cell]] = []
    for protocol in protocols:
        for row in dict.fromkeys(row for row, _ in cells):
            counts = [Counter(lengths[protocol, row, data]) for data in datasets]
            said = [", ".join(f"{n} at {epochs}" for epochs, n in sorted(c.items(), reverse=True)) for c in counts]
            rows.append([PROTOCOLS[protocol], method_title(row.key), *(text or None for text in said)])
    found, long = (sum(any(e >= least for e in epochs) for epochs in lengths.values()) for least in (0, EPOCHS))
    note = (
        f"{found} of {len(lengths)} found, {long} at {EPOCHS} epochs. Runs at epochs: of recipe {chosen.recipe}, any "
        f"seed, scored under the preset {' or '.join(scoring.presets)}; an oracle's row counts every ratio "
        "of its search, and has found the best only when all are there."
    )
    return Table(
        "status", f"{item.heading}: what was run", ["protocol", "method", *map(data_title, datasets)], rows, note
    )


def _scored_lengths(
    item: Item, row: Row, data: str, chosen: RunChoices, scoring: Scoring
) -> Iterator[tuple[str, list[int]]]:
    """For each protocol the lengths of the finished runs of a cell that it scored."""
    configs = [spec_of(item, row, data, ratio, chosen.seeds[0], chosen).config for ratio in ratios_of(row, chosen)]
    found = [run for config in configs for run in scoring.index.find(config, any_length=True) if finished(run)]
    for protocol in item.kept(scoring.protocols):
        presets = scoring.chosen([protocol])
        scored = [run for run in found if any(not unscored(run, each, [_length(run)]) for each in presets)]
        yield protocol, [_length(run) for run in scored]


def _length(run: Run) -> int:
    return run.config.train.epochs or 0
