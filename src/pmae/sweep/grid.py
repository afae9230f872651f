"""A grid of settings: one run for each combination and seed, and the best of them by validation."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pmae.config import Config, replace
from pmae.config_file import to_dict, with_settings
from pmae.errors import UserError, require, unknown_name
from pmae.report.style import save_drawing
from pmae.report.sweeps import Trial, sweep_plot, sweep_table, trial_of, verdict
from pmae.report.tables import to_csv, to_markdown
from pmae.runs import disk_errors, write_text
from pmae.sweep.halving import Halving
from pmae.sweep.jobs import Here, InTurn, Job, Library, Plan, Workers, carry_out

RATIO = "ratio"
"""A short name for the masked share, whichever of the two the masking space takes."""

SEARCHES: dict[str, Callable[[Sequence[Job]], Plan]] = {"grid": InTurn, "asha": Halving}
"""All runs to their end, or most of them stopped early."""

Grid = dict[str, list[str]]


def parse_grid(words: Sequence[str], base: Config) -> Grid:
    """`encoder.patch_size 2 4 decoder.depth 1 2` as settings by name, each with its values."""
    grid: Grid = {}
    values: list[str] | None = None
    for word in words:
        section, dot, _ = word.partition(".")
        if word == RATIO or (dot and section in to_dict(base)):
            values = grid.setdefault(ratio_setting(base) if word == RATIO else word, [])
        elif values is None:
            raise UserError(f"a sweep must begin with a setting such as ratio or encoder.patch_size, got {word!r}")
        else:
            values.append(word)
    for name, given in grid.items():
        require(len(set(given)) == len(given) > 0, name, "followed by its values, no two alike", " ".join(given))
    return grid


def ratio_setting(base: Config) -> str:
    """The dotted name of the masked share in the masking space of these settings."""
    return f"masking.masked_{'patches' if base.space.name == 'pixels' else 'variance'}"


def grid_jobs(base: Config, grid: Grid, seeds: Sequence[int]) -> list[tuple[dict[str, str], list[Job]]]:
    """Every combination of values, with a job for each seed; all are checked before any is run."""
    require(len(set(seeds)) == len(seeds) > 0, "seeds", "at least one number, no two alike", seeds)
    combined = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [(chosen, [_job(base, chosen, seed) for seed in seeds]) for chosen in combined]


def sweep(
    base: Config,
    grid: Grid,
    seeds: Sequence[int],
    out: Path,
    search: str = "grid",
    workers: AbstractContextManager[Workers] | None = None,
    places: Sequence[Path] = (),
) -> tuple[list[Trial], list[Path]]:
    """Run the grid, by `workers` or here, reusing what is there or in `places`; returns trials and files it wrote."""
    planned, folder = grid_jobs(base, grid, seeds), out / "runs"
    plan = plan_of(search, [job for _, jobs in planned for job in jobs])
    # Entered when all settings are checked: a cluster takes a while to meet.
    with workers or nullcontext(Here()) as hands:
        runs = carry_out(plan, folder, Library([folder, *places]), hands)
    trials = [trial_of(chosen, [runs[job.config] for job in jobs]) for chosen, jobs in planned]
    return trials, _write(trials, out)


def plan_of(search: str, jobs: Sequence[Job]) -> Plan:
    """The plan of a search by name."""
    if search not in SEARCHES:
        raise unknown_name("--search", search, SEARCHES)
    return SEARCHES[search](jobs)


def _write(trials: Sequence[Trial], out: Path) -> list[Path]:
    table = sweep_table(trials)
    files = {"sweep.csv": to_csv(table), "sweep.md": f"{to_markdown(table)}\n{verdict(trials)}\n"}
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(out / name, text)
    drawings = [sweep_plot(trials)] if any(trial.validation is not None for trial in trials) else []
    drawn = [save_drawing(drawing, out / f"sweep.{kind}") for drawing in drawings for kind in ("png", "svg")]
    return [*(out / name for name in files), *drawn]


def _job(base: Config, chosen: Mapping[str, str], seed: int) -> Job:
    named = "-".join(f"{name.partition('.')[2]}={value.replace('/', '_')}" for name, value in chosen.items())
    return Job(f"{named}-seed{seed}", with_settings(replace(base, train__seed=seed), chosen))
