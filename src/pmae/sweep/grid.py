"""A grid of settings: one run for each combination and seed, and the best of them by validation."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pmae.config import Config, replace
from pmae.config_file import to_dict, with_settings
from pmae.errors import UserError, require, unknown_name
from pmae.report.sweeps import Page, sweep_page, trial_of
from pmae.sweep.execute import Asha, InOrder, run_all
from pmae.sweep.find import RunIndex, RunSpec
from pmae.sweep.workers import Workers

RATIO = "ratio"
"""A short name for the masked share, whichever of the two the masking space takes."""
SEARCHES: dict[str, type[InOrder]] = {"grid": InOrder, "asha": Asha}
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


def grid_specs(base: Config, grid: Grid, seeds: Sequence[int]) -> list[tuple[dict[str, str], list[RunSpec]]]:
    """Every combination of values, with a run for each seed; all are checked before any is trained."""
    require(len(set(seeds)) == len(seeds) > 0, "seeds", "at least one number, no two alike", seeds)
    combined = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [(chosen, [_spec(base, chosen, seed) for seed in seeds]) for chosen in combined]


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
    if search not in SEARCHES:
        raise unknown_name("--search", search, SEARCHES)
    planned = grid_specs(base, grid, seeds)
    scheduler = SEARCHES[search]([spec for _, specs in planned for spec in specs])
    # Entered when all settings are checked: a cluster takes a while to meet.
    with workers or nullcontext(Workers()) as entered:
        runs = run_all(scheduler, out / "runs", RunIndex([out / "runs", *folders]), entered)
    return sweep_page([trial_of(chosen, [runs[spec.config] for spec in specs]) for chosen, specs in planned])


def _spec(base: Config, chosen: Mapping[str, str], seed: int) -> RunSpec:
    named = "-".join(f"{name.partition('.')[2]}={value.replace('/', '_')}" for name, value in chosen.items())
    return RunSpec(f"{named}-seed{seed}", with_settings(replace(base, train__seed=seed), chosen))
