"""What a reader must know of a table or figure beside its numbers: the data, the chosen ratios, what is not there."""

from collections.abc import Iterator, Sequence

from pmae.experiments.evaluations import Need, lacking_kinds
from pmae.experiments.fill import Filled
from pmae.experiments.library import Library
from pmae.experiments.paper import Item, Plan, jobs_of
from pmae.report import published
from pmae.runs import Run


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
