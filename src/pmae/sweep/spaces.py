"""Masking spaces at the same budget: the grid of spaces and ratios, its runs, and the table they make."""

import dataclasses
from dataclasses import dataclass
from itertools import islice

import torch

from pmae.config import Config, DataConfig, replace
from pmae.config_file import with_settings
from pmae.derive import patch_for
from pmae.errors import require, unknown_name
from pmae.paper.fill import Need, only_found, run_missing
from pmae.paper.pages import Page
from pmae.paper.presets import chosen
from pmae.paper.recipes import recipe
from pmae.paper.runner import Way
from pmae.paper.tables import Item
from pmae.report.spaces import run_row, run_table, scores_figure
from pmae.report.tables import Table
from pmae.runs import Run
from pmae.spaces import SPACES, build_space
from pmae.sweep.jobs import Job, Library, Workers, splits

CHOSEN = (
    "pca", "pca:components=256", "patch_pca", "cosine", "cosine:grouped=true", "fourier:grouped=true", "wavelet",
    "wavelet:grouped=true", "kernel_pca", "diffusion", "ica", "learned", "pixels",
)  # fmt: skip
"""The spaces that are compared if the caller does not say."""
RATIOS, MAE_RATIOS = (0.1, 0.2, 0.4), (0.5, 0.75, 0.9)
EPOCHS, PATCH = 50, 8
KINDS = ("linear", "knn")
Place = tuple[str, float]
"""A space and a ratio."""
ITEM = Item("spaces", "Masking spaces at the same budget", "not in the paper", "spaces", protocols=KINDS)


@dataclass(frozen=True)
class Grid:
    """Which spaces at which ratios, on which images; everything else is the same for all."""

    data: DataConfig
    spaces: tuple[str, ...] = CHOSEN
    """`name` or `name:setting=value,setting=value`, such as `kernel_pca:landmarks=1024`."""
    ratios: tuple[float, ...] = RATIOS
    mae_ratios: tuple[float, ...] = MAE_RATIOS
    """The ratios of pixel space, where patches are hidden."""
    epochs: int = EPOCHS
    seeds: tuple[int, ...] = (0,)
    settings: tuple[tuple[str, str], ...] = ()
    """Further settings of all runs by dotted name, as text."""
    device: str = "auto"

    def __post_init__(self) -> None:
        require(len(set(self.spaces)) == len(self.spaces) > 0, "spaces", "at least one, no two alike", self.spaces)
        require(len(set(self.seeds)) == len(self.seeds) > 0, "seeds", "at least one number, no two alike", self.seeds)
        for name in ("ratios", "mae_ratios"):
            given = getattr(self, name)
            distinct = len(set(given)) == len(given) > 0
            require(distinct and all(0 < r < 1 for r in given), name, "different shares in (0, 1)", given)

    def shares(self, space: str) -> tuple[float, ...]:
        """The ratios of a space."""
        return self.mae_ratios if is_mae(space) else self.ratios

    def config(self, space: str) -> Config:
        """The settings of a space's runs but for ratio and seed; refused if the images cannot have such a space."""
        height, width = self.shape[1:]
        patch = PATCH if height % PATCH == width % PATCH == 0 else patch_for(height, width)
        base = replace(
            recipe("mae_masking" if is_mae(space) else "masking"),
            encoder__patch_size=patch,
            decoder__name="small",
            train__epochs=self.epochs,
            train__device=self.device,
        )
        base = dataclasses.replace(base, data=self.data)
        config = with_settings(with_settings(base, space_settings(space)), dict(self.settings))
        with torch.device("meta"):
            build_space(config.space, self.shape)
        return config

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images."""
        return splits(self.data).train.shape


def space_settings(text: str) -> dict[str, str]:
    """`pca:components=256` as settings by dotted name."""
    name, _, rest = text.partition(":")
    if name not in SPACES:
        raise unknown_name("spaces", name, SPACES)
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
    """Whether patches are hidden."""
    return space_settings(space)["space.name"] == "pixels"


def grid_jobs(grid: Grid) -> dict[Place, list[Job]]:
    """For each space and ratio a job a seed; all are checked before any is run."""
    cells: dict[Place, list[Job]] = {}
    for space in grid.spaces:
        config, share = grid.config(space), "masked_patches" if is_mae(space) else "masked_variance"
        for ratio in grid.shares(space):
            named = f"{space.replace(':', '-')}-{ratio:g}"
            chosen = [replace(config, **{f"masking__{share}": ratio, "train__seed": seed}) for seed in grid.seeds]
            cells[space, ratio] = [Job(f"{named}-seed{one.train.seed}", one) for one in chosen]
    return cells


def table_page(grid: Grid, way: Way, workers: Workers | None = None) -> Page:
    """Run what is missing, here or by `workers`, evaluate what is not evaluated, and compare."""
    cells, folder = grid_jobs(grid), way.out / "runs"
    need = Need(chosen(way.presets, KINDS, False, way.head_epochs), device=grid.device, root=grid.data.root)
    library = Library([folder, *way.places])
    get = only_found(ITEM, library) if way.only_found else run_missing(ITEM, folder, library, workers)
    labelled = splits(grid.data).train.labels is not None
    found = iter(get([job for jobs in cells.values() for job in jobs], need if labelled else None))
    runs = {place: [run for run in islice(found, len(jobs)) if run is not None] for place, jobs in cells.items()}
    table = _table(grid, runs, need)
    scored = [row for row in table.rows if row[4] is not None]
    labels = {space: space_label(space) for space in grid.spaces}
    return Page([table], [scores_figure(table.rows, labels)] if scored else [])


def _table(grid: Grid, runs: dict[Place, list[Run]], need: Need) -> Table:
    preset = need.protocols[0].name
    rows = [run_row(space, ratio, group, preset) for (space, ratio), group in runs.items()]
    devices = sorted({str(run.environment["device"]) for group in runs.values() for run in group})
    missing = sum(len(grid.seeds) - len(group) for group in runs.values())
    note = [
        f"Epochs: {grid.epochs}, seeds: {len(grid.seeds)}, data: {splits(grid.data).name}, on "
        f"{' and '.join(devices) or 'no machine yet'}. R2 is of held-out images and compares within a space and ratio "
        f"alone; accuracies are of mean-pooled tokens, preset {preset}. The ratio is a share of the variance, "
        "for MAE of the patches; hidden is what masks came to, which differs where one component holds much. The "
        "pre-image error is what a way back that is no inverse misses of new images.",
        f"{missing} of {len(runs) * len(grid.seeds)} runs are not there yet." if missing else "",
    ]
    return run_table(rows, ITEM.title, " ".join(filter(None, note)))
