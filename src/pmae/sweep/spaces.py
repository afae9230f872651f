"""Compare masking spaces at the same budget: the grid of spaces and ratios, its runs, their table and its figure."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from pmae.config import Config, DataConfig, replace
from pmae.config_file import with_settings
from pmae.derive import patch_for
from pmae.errors import require
from pmae.paper.recipes import recipe
from pmae.plugins import find
from pmae.report.difference import COLUMNS, NOTE, between, cells
from pmae.report.page import Page
from pmae.report.style import FAINT, Drawing, color, minus, panels, styled
from pmae.report.tables import Cell, Table
from pmae.results import PROTOCOLS as PROTOCOL_NAMES
from pmae.results import Score
from pmae.runs import Run
from pmae.spaces import build_space
from pmae.sweep.execute import check_missing, get_runs
from pmae.sweep.find import RunSpec, splits
from pmae.sweep.grid import mean, trial_of
from pmae.sweep.scoring import Requirements, Scoring, own_scores
from pmae.sweep.workers import Workers

CHOSEN = (
    "pca", "pca:components=256", "patch_pca", "cosine", "cosine:grouped=true", "fourier:grouped=true", "wavelet",
    "wavelet:grouped=true", "kernel_pca", "diffusion", "ica", "learned", "pixels",
)  # fmt: skip
"""The spaces that are compared if the caller does not say."""
PATCH = 8
PROTOCOLS = ("linear", "knn")
SpaceRatio = tuple[str, float]
TITLE = "Masking spaces at the same budget"


@dataclass(frozen=True)
class SpaceGrid:
    """Which spaces at which ratios, on which images; everything else is the same for all."""

    data: DataConfig
    spaces: tuple[str, ...] = CHOSEN  # `name` or `name:setting=value,...`, such as `kernel_pca:landmarks=1024`
    ratios: tuple[float, ...] = (0.1, 0.2, 0.4)
    mae_ratios: tuple[float, ...] = (0.5, 0.75, 0.9)  # of pixel space, where patches are hidden
    epochs: int = 50
    seeds: tuple[int, ...] = (0,)
    settings: tuple[tuple[str, str], ...] = ()  # further settings of all runs by dotted name, as text
    device: str = "auto"

    def __post_init__(self) -> None:
        require(len(set(self.spaces)) == len(self.spaces) > 0, "spaces", "at least one, no two alike", self.spaces)
        require(len(set(self.seeds)) == len(self.seeds) > 0, "seeds", "at least one number, no two alike", self.seeds)
        for name in ("ratios", "mae_ratios"):
            given = getattr(self, name)
            distinct = len(set(given)) == len(given) > 0
            require(distinct and all(0 < r < 1 for r in given), name, "different shares in (0, 1)", given)

    def shares(self, space: str) -> tuple[float, ...]:
        return self.mae_ratios if is_mae(space) else self.ratios

    def config(self, space: str) -> Config:
        """The settings of a space's runs but for ratio and seed; refused if the images cannot have such a space."""
        height, width = self.shape[1:]
        several = height % PATCH == width % PATCH == 0 and (height, width) != (PATCH, PATCH)
        patch = PATCH if several else patch_for(height, width)
        same = {"encoder__patch_size": patch, "decoder__name": "small"}
        same |= {"train__epochs": self.epochs, "train__device": self.device}
        base = replace(recipe("mae_masking" if is_mae(space) else "masking"), **same)
        base = dataclasses.replace(base, data=self.data)
        config = with_settings(with_settings(base, space_settings(space)), dict(self.settings))
        with torch.device("meta"):
            build_space(config.space, self.shape)
        return config

    @property
    def shape(self) -> tuple[int, int, int]:
        return splits(self.data).train.shape


def space_settings(text: str) -> dict[str, str]:
    """`pca:components=256` as settings by dotted name."""
    name, _, rest = text.partition(":")
    find("space", name, "spaces")
    parts = rest.split(",") if rest else []
    for part in parts:
        require("=" in part, "spaces", "name or name:setting=value,setting=value", text)
    return {"space.name": name} | {f"space.{key}": value for key, _, value in (part.partition("=") for part in parts)}


def space_label(text: str) -> str:
    """A short name for figures: `kernel_pca:landmarks=1024` as `kernel pca 1024`, `cosine:grouped=true` as `cosine
    grouped`; the first blanks do not break, so that a name takes two lines at most."""
    settings = space_settings(text)
    name = settings.pop("space.name").replace("_", "\N{NO-BREAK SPACE}")
    values = {key.removeprefix("space."): value for key, value in settings.items()}
    said = [key if value == "true" else value if value.isdigit() else f"{key}={value}" for key, value in values.items()]
    return " ".join([name + ("\N{NO-BREAK SPACE}(MAE)" if is_mae(text) else ""), *said])


def is_mae(space: str) -> bool:
    return space_settings(space)["space.name"] == "pixels"


def space_specs(grid: SpaceGrid) -> dict[SpaceRatio, list[RunSpec]]:
    """For each space and ratio a run a seed; all are checked before any is trained."""
    cells: dict[SpaceRatio, list[RunSpec]] = {}
    for space in grid.spaces:
        config, share = grid.config(space), "masked_patches" if is_mae(space) else "masked_variance"
        for ratio in grid.shares(space):
            named = f"{space.replace(':', '-').replace('/', '_')}-{ratio:g}"
            chosen = [replace(config, **{f"masking__{share}": ratio, "train__seed": seed}) for seed in grid.seeds]
            cells[space, ratio] = [RunSpec(f"{named}-seed{one.train.seed}", one) for one in chosen]
    return cells


def table_page(grid: SpaceGrid, scoring: Scoring, workers: Workers | None = None) -> Page:
    """Run what is missing, here or by `workers`, evaluate what is not evaluated, and compare."""
    cells, labelled = space_specs(grid), splits(grid.data).train.labels is not None
    protocols = scoring.chosen(PROTOCOLS)
    needed = Requirements(protocols if labelled else (), device=grid.device, root=grid.data.root)
    specs = [spec for some in cells.values() for spec in some]
    if not scoring.only_found:
        check_missing(specs, scoring.index)
    found = iter(get_runs(scoring, workers=workers)(specs, needed))
    runs = {cell: [run for run in islice(found, len(some)) if run is not None] for cell, some in cells.items()}
    table, apart = _run_table(grid, runs, protocols[0].name), _differences(runs, protocols[0].name)
    scored = any(row[4] is not None for row in table.rows)
    return Page([table, *[apart] * bool(apart.rows)], [scores_figure(table.rows)] if scored else [])


def _run_table(grid: SpaceGrid, runs: Mapping[SpaceRatio, Sequence[Run]], preset: str) -> Table:
    header = ["space", "ratio", "hidden", "R2", "linear %", "k-NN %", "images/s", "fit, s", "pre-image error"]
    rows = [_row(space, ratio, group, preset) for (space, ratio), group in runs.items()]
    devices = sorted({str(run.environment["device"]) for group in runs.values() for run in group})
    missing = sum(len(grid.seeds) - len(group) for group in runs.values())
    note = (
        f"Epochs: {grid.config(grid.spaces[0]).train.epochs}, seeds: {len(grid.seeds)}, data: "
        f"{splits(grid.data).name}, on {' and '.join(devices) or 'no machine yet'}. R2 is of held-out images and "
        f"compares within a space and ratio alone; accuracies are of mean-pooled tokens, preset {preset}. The ratio is "
        "a share of the variance, for MAE of the patches; hidden is what masks came to, which differs where one "
        "component holds much. The pre-image error is what a way back that is no inverse misses of new images."
    )
    note += f" {missing} of {len(runs) * len(grid.seeds)} runs are not there yet." if missing else ""
    return Table("spaces", TITLE, header, rows, note)


def _row(space: str, ratio: float, runs: Sequence[Run], preset: str) -> list[Cell]:
    trial, ends = trial_of({}, runs), [run.results.get("pretrain", {}) for run in runs]
    share = decimals(mean([line.get("masked_share") for run in runs for line in run.metrics()]), 3)
    seconds = decimals(mean([run.environment.get("fit_seconds") for run in runs]), 2)
    missed = decimals(mean([end.get("preimage_error_unseen") for end in ends]), 3)
    scored = [_scores(runs, protocol, preset) for protocol in PROTOCOLS]
    accuracies = [mean([score.accuracy.value for _, score in found]) for found in scored]
    speed = None if trial.speed is None else round(trial.speed)
    return [space, f"{ratio:g}", share, decimals(trial.r2, 3), *accuracies, speed, seconds, missed]


def _scores(runs: Sequence[Run], protocol: str, preset: str) -> list[tuple[Run, Score]]:
    """The test score of mean-pooled tokens of each run at its end."""
    found = [(run, score) for run in runs for score in own_scores(run, protocol, preset, pooling="mean")]
    return [(run, s) for run, s in found if (s.pooling, s.epoch) == ("mean", run.config.train.epochs)]


def _differences(runs: Mapping[SpaceRatio, Sequence[Run]], preset: str) -> Table:
    """Each space against the first one, both at the ratio that the quick probe on validation images finds best."""
    chosen: dict[str, tuple[float, SpaceRatio]] = {}
    for cell, group in runs.items():
        value = trial_of({}, group).validation
        if value is not None and value > chosen.get(cell[0], (0.0, cell))[0]:
            chosen[cell[0]] = value, cell
    best = [cell for _, cell in chosen.values()]
    rows: list[list[Cell]] = []
    for cell in best[1:]:
        for protocol in PROTOCOLS:
            found = between(*(_scores(runs[each], protocol, preset) for each in (cell, best[0])))
            if found is not None:
                named = [f"{space} {ratio:g}" for space, ratio in (cell, best[0])]
                rows.append([*named, PROTOCOL_NAMES[protocol], *cells(found)])
    header = ("space", "against", "protocol", *COLUMNS)
    note = f"Each space at the ratio that the quick probe on validation images finds best, on test images. {NOTE}"
    return Table("spaces-differences", "Which spaces differ from the first by more than chance", header, rows, note)


def decimals(value: float | None, digits: int) -> str | None:
    """A number with so many decimals, for a table that shows one of others."""
    return None if value is None else minus(f"{value:.{digits}f}")


@styled
def scores_figure(rows: Sequence[Sequence[Cell]]) -> Drawing:
    """Accuracies of the rows of a table: a line a space, the best linear probe at the top, a dot a ratio."""
    found: dict[str, list[tuple[float, float]]] = {}
    for space, _, _, _, linear, knn, *_ in rows:
        if isinstance(linear, float) and isinstance(knn, float):
            found.setdefault(str(space), []).append((linear, knn))
    order = sorted(found, key=lambda space: max(found[space])[0])
    figure, axes = panels([0.6 + 0.24 * len(order)] * 2)
    for kind, (panel, title) in enumerate(zip(axes, ("Linear probe (%)", "k-NN (%)"), strict=True)):
        for height, space in enumerate(order):
            values = [pair[kind] for pair in found[space]]
            panel.plot([min(values), max(values)], [height, height], color=FAINT, linewidth=3, zorder=1)
            for number, value in enumerate(values):
                panel.scatter(value, height, 12 + 16 * number, color=color(int(is_mae(space))), zorder=2)
        panel.set_yticks(range(len(order)), [space_label(space).replace("\N{NO-BREAK SPACE}", " ") for space in order])
        panel.set(title=title)
    caption = "A dot a ratio, the larger the more is hidden; the space with the best linear probe at the top."
    return Drawing("spaces-scores", "Accuracy by masking space", caption, figure)
