"""Compare masking spaces at the same budget: the grid of spaces and ratios, its runs, their table and its figure."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from pmae.config import Config, DataConfig, replace
from pmae.config_file import with_settings
from pmae.derive import patch_for
from pmae.errors import require, unknown_name
from pmae.paper.recipes import recipe
from pmae.report.style import FAINT, Drawing, color, panels, styled
from pmae.report.sweeps import Page
from pmae.report.tables import Cell, Table
from pmae.runs import Run
from pmae.spaces import SPACES, build_space
from pmae.sweep.find import RunSpec
from pmae.sweep.scored import Requirements, Scoring, get_runs, own_scores
from pmae.sweep.workers import Workers, splits

CHOSEN = (
    "pca", "pca:components=256", "patch_pca", "cosine", "cosine:grouped=true", "fourier:grouped=true", "wavelet",
    "wavelet:grouped=true", "kernel_pca", "diffusion", "ica", "learned", "pixels",
)  # fmt: skip
"""The spaces that are compared if the caller does not say."""
RATIOS, MAE_RATIOS = (0.1, 0.2, 0.4), (0.5, 0.75, 0.9)
EPOCHS, PATCH = 50, 8
PROTOCOLS = ("linear", "knn")
SpaceRatio = tuple[str, float]
TITLE = "Masking spaces at the same budget"


@dataclass(frozen=True)
class SpaceGrid:
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


def space_specs(grid: SpaceGrid) -> dict[SpaceRatio, list[RunSpec]]:
    """For each space and ratio a run a seed; all are checked before any is trained."""
    cells: dict[SpaceRatio, list[RunSpec]] = {}
    for space in grid.spaces:
        config, share = grid.config(space), "masked_patches" if is_mae(space) else "masked_variance"
        for ratio in grid.shares(space):
            named = f"{space.replace(':', '-')}-{ratio:g}"
            chosen = [replace(config, **{f"masking__{share}": ratio, "train__seed": seed}) for seed in grid.seeds]
            cells[space, ratio] = [RunSpec(f"{named}-seed{one.train.seed}", one) for one in chosen]
    return cells


def table_page(grid: SpaceGrid, scoring: Scoring, workers: Workers | None = None) -> Page:
    """Run what is missing, here or by `workers`, evaluate what is not evaluated, and compare."""
    cells, data = space_specs(grid), splits(grid.data)
    needed = Requirements(scoring.chosen(PROTOCOLS), device=grid.device, root=grid.data.root)
    get, specs = get_runs(scoring, workers=workers), [spec for some in cells.values() for spec in some]
    found = iter(get(specs, None if data.train.labels is None else needed))
    runs = {cell: [run for run in islice(found, len(some)) if run is not None] for cell, some in cells.items()}
    table = run_table(grid, runs, needed.protocols[0].name)
    scored = any(row[4] is not None for row in table.rows)
    labels = {space: space_label(space) for space in grid.spaces}
    return Page([table], [scores_figure(table.rows, labels)] if scored else [])


def run_table(grid: SpaceGrid, runs: Mapping[SpaceRatio, Sequence[Run]], preset: str) -> Table:
    """A row a space and ratio."""
    header = ["space", "ratio", "hidden", "R2", "linear %", "k-NN %", "images/s", "fit, s", "pre-image error"]
    rows = [_row(space, ratio, group, preset) for (space, ratio), group in runs.items()]
    devices = sorted({str(run.environment["device"]) for group in runs.values() for run in group})
    missing = sum(len(grid.seeds) - len(group) for group in runs.values())
    note = (
        f"Epochs: {grid.epochs}, seeds: {len(grid.seeds)}, data: {splits(grid.data).name}, on "
        f"{' and '.join(devices) or 'no machine yet'}. R2 is of held-out images and compares within a space and ratio "
        f"alone; accuracies are of mean-pooled tokens, preset {preset}. The ratio is a share of the variance, "
        "for MAE of the patches; hidden is what masks came to, which differs where one component holds much. The "
        "pre-image error is what a way back that is no inverse misses of new images."
    )
    note += f" {missing} of {len(runs) * len(grid.seeds)} runs are not there yet." if missing else ""
    return Table("spaces", TITLE, header, rows, note)


def _row(space: str, ratio: float, runs: Sequence[Run], preset: str) -> list[Cell]:
    """Space, ratio, share really hidden, R2, accuracies, speed and fit time of the runs that repeat a cell."""
    ends = [run.results.get("pretrain", {}) for run in runs]
    r2 = _mean([end.get("held_out_r2", end.get("train_r2")) for end in ends])
    lines = [line for run in runs for line in run.metrics() if "images_per_second" in line]
    speed = round(statistics.median(line["images_per_second"] for line in lines)) if lines else None
    share = decimals(_mean([line.get("masked_share") for line in lines]), 3)
    seconds = decimals(_mean([run.environment.get("fit_seconds") for run in runs]), 2)
    missed = decimals(_mean([end.get("preimage_error_unseen") for end in ends]), 3)
    accuracies = [_mean([_accuracy(run, protocol, preset) for run in runs]) for protocol in PROTOCOLS]
    return [space, f"{ratio:g}", share, decimals(r2, 3), *accuracies, speed, seconds, missed]


def _accuracy(run: Run, protocol: str, preset: str) -> float | None:
    """Test accuracy of the mean of the patch tokens at the last epoch."""
    scores = own_scores(run, protocol, preset, pooling="mean")
    found = [score for score in scores if (score.pooling, score.epoch) == ("mean", run.config.train.epochs)]
    return found[0].accuracy.value if found else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def decimals(value: float | None, digits: int) -> str | None:
    """A number with so many decimals, for a table that shows one of others."""
    return None if value is None else f"{value:.{digits}f}".replace("-", "−")


@styled
def scores_figure(rows: Sequence[Sequence[Cell]], labels: Mapping[str, str]) -> Drawing:
    """Accuracies of the rows of `run_table`: a line a space, the best linear probe at the top, a dot a ratio."""
    known = [
        (str(space), linear, knn)
        for space, _, _, _, linear, knn, *_ in rows
        if isinstance(linear, float) and isinstance(knn, float)
    ]
    best = {space: max(linear for one, linear, _ in known if one == space) for space, _, _ in known}
    order = sorted(best, key=lambda space: best[space])
    figure, axes = panels([0.6 + 0.24 * len(order)] * 2)
    for panel, (title, score) in zip(axes, (("Linear probe (%)", 1), ("k-NN (%)", 2)), strict=True):
        for height, space in enumerate(order):
            values, mae = [float(row[score]) for row in known if row[0] == space], space == "pixels"
            panel.plot([min(values), max(values)], [height, height], color=FAINT, linewidth=3, zorder=1)
            for number, value in enumerate(values):
                panel.scatter(value, height, 12 + 16 * number, color=color(1 if mae else 0), zorder=2)
        panel.set_yticks(range(len(order)), [labels[space].replace("\N{NO-BREAK SPACE}", " ") for space in order])
        panel.set(title=title)
    caption = "A dot a ratio, the larger the more is hidden; the space with the best linear probe at the top."
    return Drawing("spaces-scores", "Accuracy by masking space", caption, figure)
