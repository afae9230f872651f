"""The runs in results/runs by what they are (data, method, ratio, length, recipe), and their scores."""

import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmae.config import Config, replace
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.paper.recipes import recipe
from pmae.report.difference import Difference
from pmae.results import Score
from pmae.runs import Run
from pmae.standing import scores_of
from pmae.sweep.find import MACHINE, flat
from pmae.train import stages

ROOT = Path(__file__).parent.parent
RUNS, FIGURES = ROOT / "results" / "runs", ROOT / "results" / "figures"
RECIPES = {
    True: ("mae", "mae_released", "mae_masking", "mae_ours"),
    False: ("paper", "released", "masking", "ours", "kmae", "simclr"),
}
"""The recipes that hide patches, and those that hide components; of equally near ones the first counts."""
VARIED = MACHINE | {
    "train.epochs", "train.seed", "masking.masked_patches", "masking.masked_variance", "masking.ratio_schedule",
    "objective.target",
}  # fmt: skip
"""Settings that are told apart from the recipe, or not at all."""


@dataclass(frozen=True)
class Kind:
    """What runs that differ in their seed alone have in common."""

    data: str
    method: str
    """simclr, mae, pmae, pmae-pixels, or another space with its settings."""
    ratio: float | None
    """The hidden share; None if it is random."""
    epochs: int
    recipe: str
    differs: tuple[str, ...]
    """`name=value` of the settings that are not the recipe's."""
    local_views: int
    """How many each crop has."""

    @property
    def title(self) -> str:
        """`MAE 0.75`, `PMAE random`."""
        if self.method == "simclr":
            return "SimCLR"
        name = {"mae": "MAE", "pmae": "PMAE", "pmae-pixels": "PMAE (pixel objective)"}.get(self.method, self.method)
        return f"{name} {'random' if self.ratio is None else f'{self.ratio:g}'}"

    @property
    def decoder(self) -> str:
        """The decoder, if it is not the recipe's."""
        return next((text.partition("=")[2] for text in self.differs if text.startswith("decoder.name=")), "")

    @property
    def settings(self) -> str:
        """The recipe, and what is not as it says."""
        return f"`{self.recipe}`" + (f" with {', '.join(self.differs)}" if self.differs else "")


@functools.cache
def published_runs(folder: Path = RUNS) -> dict[Kind, list[Run]]:
    """The runs of each kind in a folder, seeds in order."""
    runs = [Run(path.parent) for path in sorted(folder.glob("*/config.json"))]
    found: dict[Kind, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.config.train.seed):
        found.setdefault(kind_of(run), []).append(run)
    return found


def kind_of(run: Run) -> Kind:
    """What a run is."""
    config, data = run.config, run.environment["data"]
    names = RECIPES[config.space.name == "pixels"]
    differences = {name: found for name in names if (found := _differing(config, data, name)) is not None}
    nearest = min(differences, key=lambda name: len(differences[name]))
    method = _method(config, differences[nearest])
    masking = config.masking
    ratio = None if masking.ratio_schedule == "uniform" else masking.masked_patches or masking.masked_variance
    length, local = config.train.epochs or 0, config.objective.local_views or 0
    return Kind(str(data["name"]), method, ratio, length, nearest, tuple(differences[nearest]), local)


def _method(config: Config, differs: Sequence[str]) -> str:
    """simclr, mae, pmae, pmae-pixels, or a space with its settings: `cosine-grouped=True`."""
    if not config.masking.enabled and not config.objective.reconstruction_weight:
        return "simclr"
    settings = [text.removeprefix("space.") for text in differs if text.startswith("space.")]
    settings = [text for text in settings if not text.startswith("name=")]
    if config.space.name not in ("pixels", "pca") or settings:
        return "-".join([config.space.name, *settings])
    return "mae" if config.space.name == "pixels" else f"pmae{'-pixels' * (config.objective.target == 'pixels')}"


def _differing(config: Config, data: dict[str, Any], name: str) -> list[str] | None:
    """The settings of a run that this recipe would not have given it; None if its data or length allows no such run."""
    given = (name, config.data.source, config.train.epochs, data["counts"]["train"], tuple(data["shape"]))
    usual, wanted = _resolved(*given), _resolved(*given, optimizer=config.optim.name)
    if usual is None or wanted is None:
        return None
    # The rate that follows from another optimizer need not be told beside it.
    mine, other = flat(config), flat(wanted) | {"optim.name": usual.optim.name}
    return [f"{key}={mine[key]}" for key in mine if key not in VARIED and mine[key] != other[key]]


@functools.cache  # most runs have one of a few lengths and sets
def _resolved(
    name: str, source: str, epochs: int | None, count: int, shape: tuple[int, int, int], optimizer: str | None = None
) -> Config | None:
    """A recipe on this data for so long, with its own optimizer or another; None where it allows no such run."""
    wanted = replace(recipe(name), data__source=source, train__epochs=epochs)
    try:
        return resolve(replace(wanted, optim__name=optimizer) if optimizer else wanted, count, shape)[0]
    except UserError:
        return None


@functools.cache  # a table asks for every row of a run
def operations(*runs: Run) -> str:
    """Operations of a whole pretraining (per image, times images, times epochs) as `1.6e16`; a dash if not counted.

    Of several runs, each of which goes on with the encoder of the one before, it is the sum.
    """
    whole = 0.0
    for run in runs:
        own = stages.operations(run.config, run.environment["data"], _trained(run))
        if own is None:
            return "–"
        whole += own
    return f"{whole:.1e}".replace("e+", "e")


def _trained(run: Run) -> float:
    """Epochs of a run, fewer than it was to have where it was stopped."""
    whole = float(run.config.train.epochs or 0)
    return min(whole, max((float(line["epoch"]) for line in run.metrics()), default=whole))


@functools.cache  # every table asks again
def all_scores(run: Run) -> list[Score]:
    """Every score of a run and its baselines."""
    return scores_of(run.evaluations)


def of_encoder(run: Run) -> list[Score]:
    """Every score of a run's own encoder at its last epoch."""
    last = run.config.train.epochs
    return [score for score in all_scores(run) if not score.is_baseline and score.epoch == last]


def cell(scores: Sequence[Score]) -> str:
    """Mean and standard deviation in percent: over runs, or over the probe heads of the only one; empty without any."""
    values = [score.accuracy.value for score in scores if score.accuracy.value is not None]
    if not values:
        return ""
    heads = scores[0].accuracy.std if scores[0].protocol != "knn" and len(scores[0].by_seed) > 1 else None
    spread = statistics.stdev(values) if len(values) > 1 else heads
    return f"{statistics.fmean(values):.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def interval(score: Score | None) -> str:
    """Accuracy with its 95% interval; empty without a score."""
    if score is None or score.accuracy.value is None:
        return ""
    return f"{score.accuracy.value:.1f} ({score.accuracy.low:.1f} to {score.accuracy.high:.1f})"


def gain(found: Difference | None) -> str:
    """A difference with its interval, bold where it is more than chance; empty without one."""
    if found is None:
        return ""
    shown = f"{found.points:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
    return f"**{shown}**" if found.clear else shown


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"
