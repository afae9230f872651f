"""Reproduce one table or figure of the paper: from whatever runs there are to its page of tables and figures."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pmae.config import Config, replace
from pmae.config_file import with_settings
from pmae.evaluate.protocols import Protocols, preset
from pmae.paper import comparisons, figures
from pmae.paper.comparisons import EPOCHS, CellRuns, measure, title
from pmae.paper.differences import differences, in_words
from pmae.paper.recipes import recipe
from pmae.paper.tables import ITEMS, PAIRS, PICTURES, Item, Row, RunChoices, ratios_of, resolved, spec_of, specs_of
from pmae.report import samples
from pmae.report.contents import Contents, load
from pmae.report.page import Page, write_page
from pmae.report.published import published, published_data, published_split
from pmae.report.style import Drawing
from pmae.report.tables import Cell, Table
from pmae.results import PROTOCOLS
from pmae.runs import Run
from pmae.sweep.execute import GetRuns, check_missing, get_runs
from pmae.sweep.find import finished, has_pictures, validation
from pmae.sweep.scoring import Requirements, Scoring, own_scores, shortened, unscored
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
        check_missing(specs, scoring.index, item.any_length)


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
        page.notes.extend(_notes(filled, needed))
        if not any(one.runs for one in filled):
            page.notes.append(_nearest_run(item, chosen, scoring))
    return page, write_page(item.name, item.heading, page, scoring.out)


def requirements(item: Item, chosen: RunChoices, scoring: Scoring) -> Requirements:
    """What runs must have been scored by for an item."""
    protocols = scoring.chosen(item.kept(scoring.protocols), item.with_plain)
    return Requirements(protocols, item.every_epoch, scoring.pooling, chosen.device, chosen.root, item.kind in PICTURES)


def fill_cells(item: Item, chosen: RunChoices, get: GetRuns, needed: Requirements) -> list[CellRuns]:
    """The evaluated runs of every cell; an oracle's ratio is first chosen on validation images, by runs of one seed."""
    spec = functools.partial(spec_of, item, chosen=chosen)
    cells, seeds = item.cells(chosen), chosen.seeds
    searched = [(row, data, r) for row, data in cells if row.ratio == "oracle" for r in chosen.ratios]
    tried = dict(zip(searched, get([spec(*one, seeds[0]) for one in searched], Requirements()), strict=True))
    wanted: list[tuple[Row, str, float | None, str]] = []
    for row, data in cells:
        if row.ratio == "oracle":
            found = {r: run for r in chosen.ratios if (run := tried[row, data, r]) is not None}
            wanted += [(row, data, *choice) for choice in _choose_ratio(found, len(chosen.ratios))]
        else:
            wanted += [(row, data, ratio, "") for ratio in ratios_of(row, chosen)]
    runs = iter(get([spec(row, data, ratio, seed) for row, data, ratio, _ in wanted for seed in seeds], needed))
    filled = []
    for row, data, ratio, note in wanted:
        group = [next(runs) for _ in seeds]
        filled.append(CellRuns(row, data, ratio, tuple(run for run in group if run is not None), note))
    known = {(one.row, one.data) for one in filled}
    filled += [CellRuns(*cell, None, (), "no run of any ratio was found") for cell in cells if cell not in known]
    return sorted(filled, key=lambda one: cells.index((one.row, one.data)))


def _choose_ratio(tried: dict[float, Run], planned: int) -> list[tuple[float, str]]:
    """The ratio whose probe is best on validation images, with a word on how many there were; nothing without runs."""
    scores = {ratio: score for ratio, run in tried.items() if (score := validation(run)) is not None}
    if not scores:
        return []
    best = max(scores, key=lambda ratio: scores[ratio])
    if planned == 1:
        return [(best, "the only ratio; no search")]
    if len(scores) == 1:
        return [(best, f"the only one of {planned} ratios that was found; no search")]
    return [(best, f"best of {len(scores)} of {planned} ratios on validation images ({scores[best]:.1f}%)")]


def page_of(item: Item, filled: Sequence[CellRuns], needed: Requirements) -> Page:
    """The page of an item from its filled cells: those of pictures, of training times and epochs, of accuracies."""
    if item.kind in PICTURES:
        return Page([], list(_pictures(item.kind, filled)))
    if item.kind == "time":
        table = comparisons.time_table(filled)
        return Page([table], figures.time_bars(table))
    if item.kind == "epochs":
        how = ("linear", needed.protocols[0].name)
        cells = [
            measure(one, *how, needed.pooling, epoch)
            for one in filled
            for epoch in sorted({score.epoch for run in one.runs for score in own_scores(run, *how)})
        ]
        details = [comparisons.comparison("epochs-cells", item.title, cells)] if cells else []
        return Page([comparisons.epoch_table(cells), *details], [figures.epoch_curves(cells)] if cells else [])
    # Protocols outermost, as in the paper.
    wanted = [(kind, protocols.name) for protocols in needed.protocols for kind in protocols.kinds]
    cells = [measure(one, *how, needed.pooling) for how in wanted for one in filled]
    if item.kind == "spread":
        return Page([comparisons.spread_table(cells)], figures.spread_bars(cells, needed.protocols[0].name))
    if item.kind == "ratio":
        tables = [comparisons.ratio_grid(cells), comparisons.ratio_table(cells)]
        return Page([*tables, comparisons.comparison("ratio-cells", item.title, cells)], figures.ratio_curves(cells))
    tables = [show(item.name, item.title, cells) for show in (comparisons.grid, comparisons.comparison)]
    between = differences(item.name, item.title, filled, wanted, needed.pooling)
    return Page([tables[0], *[between] * bool(between.rows), tables[1]], notes=list(in_words(between)))


def _pictures(kind: str, filled: Sequence[CellRuns]) -> Iterator[Drawing]:
    found = [(one, [run.path for run in one.runs if has_pictures(run)]) for one in filled]
    pictured = [(one, load(paths[0])) for one, paths in found if paths]
    if kind == "examples" and pictured:
        yield figures.examples({title("data", one.data): run for one, run in pictured})
    for one, run in pictured:
        if kind == "reconstructions":
            yield _named(samples.reconstructions(run), f"{one.data}-{one.row.method}")
        elif kind == "spectrum":
            yield _named(samples.spectrum_parts(run), one.data)
            yield _named(samples.spectrum(run), one.data)
    for data in dict.fromkeys(one.data for one, _ in pictured if kind == "masks"):
        shown: dict[str, Contents] = {}
        for one, run in pictured:
            if one.data == data:
                shown[f"{one.row.method.upper()} {'random' if one.ratio is None else f'{100 * one.ratio:.0f}%'}"] = run
        yield _named(figures.mask_designs(shown), data)
        if "PMAE 20%" in shown:
            yield _named(samples.masks(shown["PMAE 20%"]), data)


def _named(drawing: Drawing, suffix: str) -> Drawing:
    return dataclasses.replace(drawing, name=f"{drawing.name}-{suffix}")


def _notes(filled: Sequence[CellRuns], needed: Requirements) -> Iterator[str]:
    """What a reader must know beside the numbers: about the data, how ratios were chosen, and what was not found."""
    runs = list(dict.fromkeys(run for one in filled for run in one.runs))
    data = [run.environment["data"] for run in runs]
    yield from dict.fromkeys(f"{each['name']}: {note}" for each in data for note in each.get("notes", []))
    yield from dict.fromkeys(_shared(runs))
    for name in dict.fromkeys(str(each["name"]) for each in data):
        if published_split(published_data(name)) != "test":
            yield f"{name}: published of validation images, ours of test images"
    for one in filled:
        if one.row.ratio == "oracle" and one.runs:
            yield f"{title('data', one.data)}, {title('methods', one.row.key)}: {one.ratio:g}, {one.note}"
    if missing := sum(not one.runs for one in filled):
        yield f"{missing} of {len(filled)} places have no run yet"
    for protocols in needed.protocols:
        lacking = {run: epochs for run in runs if (epochs := needed.missing(run).get(protocols))}
        if lacking:
            kinds = dict.fromkeys(kind for run in lacking for kind in unscored(run, protocols, lacking[run]))
            presets = {evaluation.preset for run in lacking for evaluation in run.evaluations}
            others = ", ".join(sorted(presets - {protocols.name})) or "none"
            counted = f"{len(lacking)} of {len(runs)} runs have no {', '.join(kinds)} under the preset {protocols.name}"
            yield f"{counted}; other presets they have: {others}"
    if needed.pictures and (without := sum(not has_pictures(run) for run in runs)):
        said = "published results leave them out, and without --only-found they are made"
        yield f"{without} of {len(runs)} runs have no sample pictures: {said}"


def _shared(runs: Sequence[Run]) -> Iterator[str]:
    """What test images the training part holds too, as evaluation found."""
    for described in (evaluation.data for run in runs for evaluation in run.evaluations):
        for words in described.duplicates["test"].in_words("test") if "test" in described.duplicates else ():
            yield f"{described.name}: {words}"


def _nearest_run(item: Item, chosen: RunChoices, scoring: Scoring) -> str:
    """Which run comes nearest to one that an item needs, and in what it differs: a hint where none was found."""
    specs, index = specs_of(item, chosen), scoring.index
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
    lengths: dict[tuple[str, Row, str], list[int]] = {}
    for row, data in cells:
        specs = [spec_of(item, row, data, ratio, chosen.seeds[0], chosen) for ratio in ratios_of(row, chosen)]
        found = [run for spec in specs for run in scoring.index.find(spec.config, any_length=True) if finished(run)]
        ends = [(run, run.config.train.epochs or 0) for run in found]
        for protocol in protocols:
            presets = scoring.chosen([protocol])
            lengths[protocol, row, data] = [
                end for run, end in ends if any(not unscored(run, each, [end]) for each in presets)
            ]
    rows: list[list[Cell]] = []
    for protocol in protocols:
        for row in dict.fromkeys(row for row, _ in cells):
            counts = [Counter(lengths[protocol, row, data]) for data in datasets]
            said = [", ".join(f"{n} at {epochs}" for epochs, n in sorted(c.items(), reverse=True)) for c in counts]
            rows.append([PROTOCOLS[protocol], title("methods", row.key), *(text or None for text in said)])
    some, long = (sum(any(e >= least for e in epochs) for epochs in lengths.values()) for least in (0, EPOCHS))
    note = f"{some} of {len(lengths)} found, {long} at {EPOCHS} epochs. Runs at epochs: of recipe {chosen.recipe}, any "
    note += f"seed, scored under the preset {' or '.join(scoring.presets)}; an oracle's row counts every ratio of its "
    note += "search, and has found the best only when all are there."
    header = ["protocol", "method", *(title("data", name) for name in datasets)]
    return Table("status", f"{item.heading}: what was run", header, rows, note)


def settings_table(chosen: RunChoices, scoring: Scoring) -> Table:
    """The paper's tables of settings: a row a setting, the published value and ours on CIFAR-10."""
    mae, config = recipe(PAIRS[chosen.recipe][1]), with_settings(recipe(chosen.recipe), dict(chosen.settings))
    config, _ = resolved(replace(config, train__epochs=chosen.epochs or config.train.epochs), "cifar10")
    protocols = shortened(preset(scoring.presets[0]), scoring.head_epochs)
    ours = _settings(config, protocols)
    rows: list[list[Cell]] = []
    for part, settings in published()["settings"].items():
        for name, value in settings.items():
            found = (value, ours.get(part, {}).get(name, ""))
            there, here = (f"{one:g}" if isinstance(one, int | float) else str(one) for one in found)
            rows.append([part, name, there, here, "yes" if there == here else "no"])
    normalized = mae.objective.normalize_patches
    note = f"Ours: recipe {chosen.recipe}, preset {protocols.name}. The paper counts warm-up in steps; its "
    note += "evaluation's are epochs in the code it adapts. Normalized targets: there for MAE, not for PMAE; here "
    note += f"{'the same' if normalized else 'for neither'}."
    header = ["part", "setting", "published", "ours", "same"]
    return Table("settings-comparison", "Settings: published and ours", header, rows, note)


def _settings(config: Config, protocols: Protocols) -> dict[str, dict[str, Any]]:
    encoder, optim, train, probe, tune = config.encoder, config.optim, config.train, protocols.probe, protocols.finetune

    def training(epochs: int | None, batch: int, base_lrs: Sequence[float], decays: Sequence[float]) -> dict[str, Any]:
        """What all kinds of training have: the peak rate is in proportion to the batch."""
        rates = {"base rate": base_lrs, "rate": [lr * batch / 256 for lr in base_lrs], "weight decay": decays}
        several = {name: "one of " + ", ".join(f"{one:g}" for one in values) for name, values in rates.items()}
        shown = {name: values[0] if len(values) == 1 else several[name] for name, values in rates.items()}
        return {"epochs": epochs, "batch size": batch, **shown}

    width = encoder.width or 192
    shape = {"hidden size": width, "attention heads": encoder.heads or 12, "intermediate size": 4 * width}
    ours: dict[str, dict[str, Any]] = {"encoder": shape | {"patch size": encoder.patch_size}}
    steps = f"{optim.warmup_epochs:g} epochs" if optim.warmup_steps is None else f"{optim.warmup_steps} steps"
    ours["pretraining"] = training(train.epochs, train.batch_size or 1, [optim.base_lr or 0.0], [optim.weight_decay])
    kind = {"adamw": "AdamW", "muon": "Muon"}[optim.name or "adamw"]
    ours["pretraining"] |= {"optimizer": kind, "betas": ", ".join(map(str, optim.betas)), "warm-up": steps}
    if probe:
        ours["probes"] = training(probe.epochs, probe.batch_size, probe.base_lrs, probe.weight_decays)
        ours["probes"] |= {"optimizer": "SGD", "momentum": probe.momentum, "warm-up": f"{probe.warmup_epochs:g} epochs"}
    if tune:
        ours["fine-tuning"] = training(tune.epochs, tune.batch_size, [tune.base_lr], [tune.weight_decay])
        ours["fine-tuning"] |= {"optimizer": "AdamW", "betas": ", ".join(map(str, tune.betas))}
        ours["fine-tuning"]["warm-up"] = f"{tune.warmup_epochs:g} epochs"
    return ours
