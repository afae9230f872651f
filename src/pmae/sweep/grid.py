"""A grid of settings: one run for each combination and seed, their table and plot, and the best by validation."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pmae.config import Config, replace
from pmae.config_file import to_dict, with_settings
from pmae.data.sets import settled
from pmae.errors import UserError, require, require_known
from pmae.intervals import NORMAL
from pmae.plugins import require_plugins
from pmae.report.page import Page
from pmae.report.style import PALETTE, Drawing, color, marker, panels, short, styled
from pmae.report.tables import Cell, Table
from pmae.runs import Run
from pmae.sweep.execute import Asha, InOrder, check_missing, run_all
from pmae.sweep.find import RunIndex, RunSpec, logged_speeds, validation_images
from pmae.sweep.workers import Workers

RATIO = "ratio"  # a short name for the masked share, whichever of the two the masking space takes
SEARCHES: dict[str, type[InOrder]] = {"grid": InOrder, "asha": Asha}
"""All runs to their end, or most of them stopped early."""
HOW = (
    "Validation is the linear probe that pretraining ends with (logistic regression on mean-pooled features), on the "
    "val split or, without one, on a fifth of the training images. R2 is of held-out images, if there are any; no "
    "test label is used."
)
Grid = dict[str, list[str]]


def parse_grid(words: Sequence[str], base: Config) -> Grid:
    """`encoder.patch_size 2 4 decoder.depth 1 2` as settings by name, each with its values."""
    ratio = f"masking.masked_{'patches' if base.method == 'mae' else 'variance'}"
    grid: Grid = {}
    values: list[str] | None = None
    for word in words:
        section, dot, _ = word.partition(".")
        if word == RATIO or (dot and section in to_dict(base)):
            values = grid.setdefault(ratio if word == RATIO else word, [])
        elif values is None:
            raise UserError(f"a sweep must begin with a setting such as ratio or encoder.patch_size, got {word!r}")
        else:
            values.append(word)
    for name, given in grid.items():
        require(len(set(given)) == len(given) > 0, name, "followed by its values, no two alike", " ".join(given))
    return grid


def grid_specs(base: Config, grid: Grid, seeds: Sequence[int]) -> list[tuple[dict[str, str], list[RunSpec]]]:
    """Every combination of values, with a run for each seed; all are checked before any is trained."""
    require(len(set(seeds)) == len(seeds) > 0, "seeds", "at least one number, no two alike", seeds)
    planned = []
    read = functools.cache(settled)
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        named = "-".join(f"{name.partition('.')[2]}={value.replace('/', '_')}" for name, value in chosen.items())
        configs = [with_settings(replace(base, train__seed=seed), chosen) for seed in seeds]
        configs = [dataclasses.replace(one, data=read(one.data)) for one in configs]
        for one in configs:
            require_plugins(one)
        planned.append((chosen, [RunSpec(f"{named}-seed{one.train.seed}", one) for one in configs]))
    return planned


def sweep(
    base: Config,
    grid: Grid,
    seeds: Sequence[int],
    out: Path,
    search: str = "grid",
    workers: AbstractContextManager[Workers] | None = None,
    folders: Sequence[Path] = (),
) -> Page:
    """Run the grid, by `workers` or here, below `out`, reusing runs that are there or in other folders."""
    require_known("--search", [search], SEARCHES)
    planned = grid_specs(base, grid, seeds)
    every, index = [spec for _, specs in planned for spec in specs], RunIndex([out / "runs", *folders])
    scheduler = SEARCHES[search](every)
    if not check_missing(every, index):
        print("runs of all these settings are there; the images are not read again", flush=True)
    # Entered when all settings are checked: a cluster takes a while to meet.
    with workers or nullcontext(Workers()) as entered:
        runs = run_all(scheduler, out / "runs", index, entered)
    trials = [trial_of(chosen, [runs[spec.config] for spec in specs]) for chosen, specs in planned]
    drawings = [sweep_plot(trials)] if any(trial.validation is not None for trial in trials) else []
    return Page([sweep_table(trials)], drawings, [verdict(trials)])


@dataclass(frozen=True)
class Trial:
    """One combination of settings over its seeds; accuracies in percent, None without labels."""

    settings: dict[str, str]
    validation: float | None = None
    std: float | None = None  # standard deviation of the validation accuracy between seeds of pretraining
    knn: float | None = None
    r2: float | None = None
    effective_rank: float | None = None
    speed: float | None = None
    runs: tuple[str, ...] = ()
    images: int | None = None  # that the validation accuracy is of
    stopped: int | None = None  # the epoch after which a search gave it up; None if it came to its end

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def trial_of(settings: Mapping[str, str], runs: Sequence[Run]) -> Trial:
    """What the runs of one combination say when they end."""
    ends = [run.results.get("pretrain", {}) for run in runs]
    speeds = [speed for run in runs for speed in logged_speeds(run)]
    linear = [100 * end["linear"] for end in ends if end.get("linear") is not None]
    reached = [(end.get("epoch"), run.config.train.epochs) for end, run in zip(ends, runs, strict=True)]
    return Trial(
        dict(settings),
        validation=mean(linear),
        std=statistics.stdev(linear) if len(linear) > 1 else None,
        knn=mean([100 * end["knn"] for end in ends if end.get("knn") is not None]),
        r2=mean([end.get("held_out_r2", end.get("train_r2")) for end in ends]),
        effective_rank=mean([end.get("effective_rank") for end in ends]),
        speed=statistics.median(speeds) if speeds else None,
        runs=tuple(run.path.name for run in runs),
        images=validation_images(runs[0]) if runs else None,
        stopped=min((int(epoch) for epoch, last in reached if epoch is not None and epoch != last), default=None),
    )


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the numbers that there are."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def best_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with the best validation accuracy, as it is shown, of those that ended: several where they tie."""
    ended = [trial for trial in trials if trial.validation is not None and trial.stopped is None]
    best = max((trial.validation or 0.0 for trial in ended), default=0.0)
    return [trial for trial in ended if f"{trial.validation:.1f}" == f"{best:.1f}"]


def verdict(trials: Sequence[Trial]) -> str:
    """The best settings in one sentence, all of them if they tie, or why there are none."""
    best = best_of(trials)
    if not best:
        why = "R2 does not compare between ratios or spaces. Give a small labelled set with --set probe.data=NAME."
        return f"The data has no labels, so nothing says which settings are best: {why}"
    stopped = sum(trial.stopped is not None for trial in trials)
    early = f" {stopped} of {len(trials)} were stopped early." if stopped else ""
    start = "Tied for the best by validation:" if len(best) > 1 else "The best by validation is"
    named = " and ".join(trial.name for trial in best)
    return f"{start} {named} ({best[0].validation:.1f}%).{early}{_unsure(best, trials)}"


def _unsure(best: Sequence[Trial], trials: Sequence[Trial]) -> str:
    """How many of the others the validation images cannot tell from the best, as if their answers were independent."""
    share, images = (best[0].validation or 0.0) / 100, best[0].images
    others = [trial for trial in trials if trial.stopped is None and trial.validation is not None and trial not in best]
    if not images or not others:
        return ""
    share = (share * images + 2) / (images + 4)  # Agresti and Coull: no image wrong is no certainty
    margin = 100 * NORMAL * (2 * share * (1 - share) / images) ** 0.5
    close = sum((best[0].validation or 0.0) - (trial.validation or 0.0) < margin for trial in others)
    said = f"less than {margin:.1f} points may be chance: {close} of {len(others)} other{'s' * (len(others) > 1)}"
    return f" On {images:,} validation images {said} {'is' if 1 in (close, len(others)) else 'are'} that close."


def sweep_table(trials: Sequence[Trial]) -> Table:
    names, early = list(trials[0].settings), any(trial.stopped is not None for trial in trials)
    rows: list[list[Cell]] = []
    for trial in trials:
        # R2 lies between 0 and 1, where one decimal says too little.
        r2 = None if trial.r2 is None else f"{trial.r2:.3f}"
        speed = None if trial.speed is None else round(trial.speed)
        scores: list[Cell] = [trial.validation, trial.std, trial.knn, r2, trial.effective_rank]
        scores += [trial.stopped] * early
        rows.append([*(trial.settings[name] for name in names), *scores, speed, " ".join(trial.runs)])
    header = [*names, "validation %", "± seeds", "k-NN %", "R2", "effective rank"]
    header += [*["stopped at epoch"] * early, "images/s", "runs"]
    return Table("sweep", f"Sweep over {' and '.join(names)}", header, rows, HOW)


@styled
def sweep_plot(trials: Sequence[Trial]) -> Drawing:
    """Validation accuracy against the first setting, a line for each combination of the others; a ring is the best."""
    first, *others = trials[0].settings
    values = list(dict.fromkeys(trial.settings[first] for trial in trials))
    try:
        place = {value: float(value) for value in values}
    except ValueError:  # names, one after the other
        place = {value: float(position) for position, value in enumerate(values)}
    figure, (axes,) = panels((2.9,))
    lines: dict[str, list[tuple[float, float, Trial]]] = {}
    for trial in sorted(trials, key=lambda trial: place[trial.settings[first]]):
        if trial.validation is not None:
            label = ", ".join(f"{name}={trial.settings[name]}" for name in others)
            lines.setdefault(label, []).append((place[trial.settings[first]], trial.validation, trial))
    for position, (label, points) in enumerate(lines.items()):
        ended = [(x, y, trial.std or 0.0) for x, y, trial in points if trial.stopped is None]
        stopped = [(x, y) for x, y, trial in points if trial.stopped is not None]
        look: dict[str, Any] = {"color": color(position), "marker": marker(position), "markersize": 4.5}
        axes.errorbar(*np.reshape(ended, (-1, 3)).T, label=short(label, 44), elinewidth=1, **look)
        # Hollow and apart: an accuracy of an earlier epoch is not one to compare with.
        axes.plot(*np.reshape(stopped, (-1, 2)).T, linestyle="none", markerfacecolor="none", **look)
    ring: dict[str, Any] = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": PALETTE[3]}
    for best in best_of(trials):
        axes.plot(place[best.settings[first]], best.validation or 0.0, "o", **ring)
    axes.set_xticks([place[value] for value in values], labels=[short(value, 12) for value in values])
    axes.set(xlabel=first, title="Linear probe on validation images (%)")
    if others:
        figure.legend(loc="outside lower center", ncols=1)
    early = " Hollow: stopped early." if any(trial.stopped is not None for trial in trials) else ""
    return Drawing("sweep", f"Sweep over {first}", f"{verdict(trials)} {HOW}{early}", figure)
