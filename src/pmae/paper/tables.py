"""The paper's tables and figures as data: the cells of each, the configuration behind a cell, and what they cost.

Numbers of tables and figures are counted from the LaTeX source, whose labels stand beside them.
"""

import dataclasses
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pmae.config import Config, SpaceConfig, replace
from pmae.config_file import with_settings
from pmae.derive import patch_for, resolve
from pmae.errors import UserError, require, require_known
from pmae.flops import flops_per_image
from pmae.paper.recipes import recipe
from pmae.sweep.find import RunSpec
from pmae.sweep.scoring import Scoring
from pmae.train.stages import first_stage

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PAIRS = {"paper": ("paper", "mae")} | {name: (name, f"mae_{name}") for name in ("released", "masking", "ours")}
"""For each way to train, the recipes of PMAE and of MAE."""
PICTURES = ("masks", "spectrum", "examples", "reconstructions")  # kinds of items that are made of images
TRAINING = {
    "cifar10": (50_000, 32),
    "tinyimagenet": (100_000, 64),
    "dermamnist": (7_007, 64),
    "bloodmnist": (11_959, 64),
    "pathmnist": (89_996, 64),
}
"""Training images and their side in pixels."""
DATASETS, MEDICAL = tuple(TRAINING), ("dermamnist", "pathmnist", "bloodmnist")
TOKENS, CHECKPOINTS = 17, 10
SPEEDS = {"H200": 85_500.0, "2 CPU cores": 56.0}
"""Measured images a second while pretraining at 17 tokens an image: 32x32 in patches of 8, and one [CLS]."""
SMALL = {"2 CPU cores": 1_830.0}
"""The same with the small networks that are derived where there is no GPU: 479 a second at 65 tokens."""
Ratio = float | Literal["oracle", "random", "every"]
"""A share, the best of several on validation images, a new one for each batch, or each of several in turn."""


@dataclass(frozen=True)
class Row:
    """A method as the paper's tables name it: what is hidden, how much of it, and what is compared."""

    method: Literal["mae", "pmae", "kmae"]
    ratio: Ratio
    target: Literal["components", "pixels"] = "components"

    @property
    def key(self) -> str:
        """Its name among the published numbers; a ratio of one's own stands beside the oracle's."""
        standard = self.method == "mae" and self.ratio == 0.75
        kind = "std" if standard else "random" if self.ratio == "random" else "oracle"
        return f"{self.method}_{kind}" + (f"_{self.target}" if self.method == "pmae" else "")


@dataclass(frozen=True)
class RunChoices:
    """How the runs of all cells are pretrained, as the caller chose."""

    recipe: str = "paper"
    datasets: tuple[str, ...] = ()  # the data sets; the item's own if empty
    epochs: int | None = None  # length of pretraining; the item's or the recipe's own if not given
    seeds: tuple[int, ...] = (0,)  # a whole repetition each: pretraining and heads
    ratios: tuple[float, ...] = RATIOS  # where the oracle searches, and what `every` runs through
    settings: tuple[tuple[str, str], ...] = ()  # further settings by dotted name, as text
    root: str = "data"
    device: str = "auto"
    methods: tuple[str, ...] = ()  # rows to keep, by their names among the published numbers; all if empty

    def __post_init__(self) -> None:
        require_known("methods", self.methods, ROWS)
        require_known("recipe", [self.recipe], PAIRS)
        require_known("datasets", self.datasets, DATASETS)
        require(len(set(self.datasets)) == len(self.datasets), "datasets", "all different", self.datasets)
        require(self.epochs is None or self.epochs > 0, "epochs", "at least 1", self.epochs)
        require(len(set(self.seeds)) == len(self.seeds) > 0, "seeds", "at least one number, no two alike", self.seeds)
        require(bool(self.ratios) and all(0 < r < 1 for r in self.ratios), "ratios", "shares in (0, 1)", self.ratios)
        require(len(set(self.ratios)) == len(self.ratios), "ratios", "all different", self.ratios)


@dataclass(frozen=True)
class Item:
    """One table or figure, or several that the same cells fill."""

    name: str
    title: str
    labels: str  # number and label in the paper
    kind: str  # how it is shown: see `runner.reproduce` and `page_of`
    rows: tuple[Row, ...] = ()
    datasets: tuple[str, ...] = DATASETS
    protocols: tuple[str, ...] = ()
    with_plain: bool = False  # whether probes are also trained without augmentation
    every_epoch: bool = False  # whether every checkpoint is evaluated, not the last alone
    epochs: int | None = None  # length of pretraining, where it is not the recipe's
    any_length: bool = False  # whether runs of any length and seed will do: what is shown does not depend on training

    @property
    def heading(self) -> str:
        return f"{self.title}: {self.labels}"

    def kept(self, protocols: Sequence[str]) -> list[str]:
        """Its protocols, or those of them that were asked for."""
        found = [name for name in self.protocols if not protocols or name in protocols]
        if self.protocols and not found:
            known = ", ".join(self.protocols)
            raise UserError(f"protocols of {self.name!r} must be among {known}, got {', '.join(protocols)}")
        return found

    def cells(self, chosen: RunChoices) -> list[tuple[Row, str]]:
        """Its rows on each of the chosen data sets, one data set after the other."""
        rows = [row for row in self.rows if not chosen.methods or row.key in chosen.methods]
        if self.rows and not rows:
            known = ", ".join(dict.fromkeys(row.key for row in self.rows))
            raise UserError(f"methods of {self.name!r} must be among {known}, got {', '.join(chosen.methods)}")
        return [(row, data) for data in chosen.datasets or self.datasets for row in rows]


def ratios_of(row: Row, chosen: RunChoices) -> tuple[float | None, ...]:
    """The shares a row needs runs of; None is a random one."""
    if isinstance(row.ratio, str):
        return (None,) if row.ratio == "random" else chosen.ratios
    return (row.ratio,)


def spec_of(item: Item, row: Row, data: str, ratio: float | None, seed: int, chosen: RunChoices) -> RunSpec:
    """The pretraining run behind a row on a data set at one ratio (None: random) and seed."""
    epochs = chosen.epochs or item.epochs
    changes: dict[str, Any] = {"data__source": data, "data__root": chosen.root, "train__device": chosen.device}
    changes |= {"masking__masked_patches" if row.method == "mae" else "masking__masked_variance": ratio}
    changes |= {"masking__ratio_schedule": "uniform" if ratio is None else "fixed", "train__seed": seed}
    changes |= {"train__epochs": epochs} if epochs else {}
    changes |= {"objective__target": "pixels"} if row.target == "pixels" else {}
    config: Config = replace(recipe(PAIRS[chosen.recipe][row.method == "mae"]), **changes)
    if row.method == "kmae":
        config = dataclasses.replace(config, space=recipe("kmae").space)
    share = "random" if ratio is None else f"{ratio:g}"
    target = "-pixels" if row.target == "pixels" else ""
    return RunSpec(f"{data}-{row.method}{target}-{share}-seed{seed}", with_settings(config, dict(chosen.settings)))


def specs_of(item: Item, chosen: RunChoices) -> list[RunSpec]:
    """Every pretraining run that an item needs before an oracle's ratio is known: its search takes one seed."""
    specs = [
        spec_of(item, row, data, ratio, seed, chosen)
        for row, data in item.cells(chosen)
        for ratio in ratios_of(row, chosen)
        for seed in (chosen.seeds[:1] if row.ratio == "oracle" else chosen.seeds)
    ]
    return list({spec.config: spec for spec in specs}.values())


def items(names: Sequence[str]) -> list[Item]:
    require_known("table or figure", names, ITEMS)
    if not names:
        raise UserError(f"name at least one table or figure; choices: {', '.join(ITEMS)}")
    return [ITEMS[name] for name in names]


class Cost(NamedTuple):
    """Runs, images they and their evaluation see, and the same in images of 17 tokens, which hours follow from."""

    runs: int = 0
    images: float = 0
    work: float = 0

    def hours(self, speed: float) -> float:
        """Hours at so many images of 17 tokens a second; evaluation is counted at the speed of pretraining."""
        return self.work / speed / 3600


def cost_of(item: Item, chosen: RunChoices, scoring: Scoring | None = None, gpu: bool = True) -> Cost:
    """The cost of an item from nothing, with what is derived on a GPU or without; shared runs are counted in each."""
    passes, scoring = 0, scoring or Scoring()
    for protocols in scoring.chosen(item.kept(scoring.protocols), item.with_plain):
        probe, tune = protocols.probe, protocols.finetune
        passes += (probe.epochs if probe.augment else 1) if probe else 0
        passes += bool(protocols.knn) + (tune.epochs if tune else 0)
    passes *= CHECKPOINTS if item.every_epoch else 1
    configs, cells, total = [spec.config for spec in specs_of(item, chosen)], item.cells(chosen), Cost()
    for data in dict.fromkeys(data for _, data in cells):
        made = [config for config in configs if config.data.source == data]
        rows = [row for row, other in cells if other == data]
        again = sum(row.ratio == "oracle" for row in rows) * (len(chosen.seeds) - 1)
        scored = sum(1 if row.ratio == "oracle" else len(ratios_of(row, chosen)) for row in rows) * len(chosen.seeds)
        config, _ = resolved(made[0], data, gpu)
        images, side = TRAINING[data]
        views = images * (len(made) + again) * (2 if config.objective.contrastive_weight else 1)
        stages = [first_stage(config), config] if config.encoder.first_patch_size else [config]
        seen = [views * (stage.train.epochs or 0) for stage in stages]
        seen[-1] += images * scored * passes
        tokens = [(side // (stage.encoder.patch_size or 1)) ** 2 + 1 for stage in stages]
        size = statistics.fmean(_size(config, chosen, side) for config in made)
        work = sum(map(operator.mul, seen, tokens)) / TOKENS * size
        total = Cost(total.runs + len(made) + again, total.images + sum(seen), total.work + work)
    return total


def _size(config: Config, chosen: RunChoices, side: int) -> float:
    """Operations of a run's networks relative to those of its recipe; other models of timm are taken as equal."""
    if config.encoder.name != "vit_tiny":
        return 1.0
    usual, patch = recipe(PAIRS[chosen.recipe][0]), config.encoder.patch_size or patch_for(side, side)
    space = SpaceConfig("pixels" if config.method == "mae" else "pca")
    own = replace(dataclasses.replace(config, space=space), encoder__patch_size=patch)
    same = replace(dataclasses.replace(own, encoder=usual.encoder, decoder=usual.decoder), encoder__patch_size=patch)
    return flops_per_image(own, (3, side, side)) / flops_per_image(same, (3, side, side))


def resolved(config: Config, data: str, gpu: bool = True) -> tuple[Config, dict[str, Any]]:
    """The settings on a data set of the paper, and what was derived."""
    images, side = TRAINING[data]
    return resolve(config, images, (3, side, side), gpu=gpu)


def cost_lines(chosen: RunChoices, scoring: Scoring, speed: float | None, wanted: Sequence[Item] = ()) -> list[str]:
    """A line an item, all if none is named: paper's label, runs, images and hours; then what the hours rest on."""
    require(speed is None or speed > 0, "--images-per-second", "above 0", speed)
    base = with_settings(recipe(chosen.recipe), dict(chosen.settings))
    derived = "encoder.width" in resolved(base, "cifar10", gpu=False)[1]
    speeds = {"this machine": speed} if speed else SPEEDS | (SMALL if derived else {})
    columns = "".join(f"{f'hours, {machine}':>20}" for machine in speeds)
    lines = [f"{'name':<16}{'runs':>6}{'images seen':>16}{columns}  title"]
    for item in wanted or ITEMS.values():
        rows = not chosen.methods or any(row.key in chosen.methods for row in item.rows)
        scored = not scoring.protocols or any(name in scoring.protocols for name in item.protocols)
        if wanted or (rows and scored):
            lines += _cost_of_item(item, chosen, scoring, speeds)
    stated = ", ".join(f"{value:,.0f} images/s ({machine})" for machine, value in speeds.items())
    lines.append(
        f"\nrecipe {chosen.recipe}, {len(chosen.seeds)} seed{'s' * (len(chosen.seeds) > 1)}; hours at {stated} for "
        f"images of {TOKENS} tokens (32x32 in patches of 8), in proportion to the tokens of larger ones and to the "
        "operations of networks of another size than the recipe's, evaluation included.\n"
        "Each item is counted from nothing, but runs are shared: main, knn, ratio, spread and epochs use the same ones."
    )
    return lines


def _cost_of_item(item: Item, chosen: RunChoices, scoring: Scoring, speeds: dict[str, float]) -> list[str]:
    """Its name, runs, images, hours at each speed and title; below, its labels in the paper."""
    costs = {gpu: cost_of(item, chosen, scoring, gpu) for gpu in {True, *(name not in SMALL for name in speeds)}}
    cost, hours = costs[True], [costs[name not in SMALL].hours(speed) for name, speed in speeds.items()]
    shown = [f"{h:,.0f}" if h >= 10 else f"{h:.1f}" if h >= 0.05 else f"{h:.2f}" for h in hours]
    images = f"{cost.images / 1e6:,.1f} million" if cost.images else "none"
    columns = "".join(f"{text:>20}" for text in shown)
    return [f"{item.name:<16}{cost.runs:>6}{images:>16}{columns}  {item.title}", f"{'':<16}{item.labels}"]


MAIN = (Row("mae", 0.75), Row("mae", "oracle"), Row("pmae", "oracle"), Row("mae", "random"), Row("pmae", "random"))
PIXELS = (Row("pmae", "oracle", "pixels"), Row("pmae", "random", "pixels"))
EVERY = (Row("mae", "every"), Row("pmae", "every"))

_LISTED = (
    Item("main", "Linear, MLP and fine-tuned accuracy", "Table 1 (tab:results)", "table", MAIN,
         protocols=("linear", "mlp", "finetune")),
    Item("settings", "Settings of model, training and evaluation", "Tables 2, 3, 4 and Figure 10 (app_tab:training, "
         "app_tab:evaluation_lin, app_tab:evaluation_fine, app_tab:model)", "settings", datasets=("cifar10",)),
    Item("knn", "k-NN accuracy", "Table 5 (app_tab:results)", "table", (*MAIN, *PIXELS), protocols=("knn",)),
    Item("kernel", "Masking in kernel PCA space", "Table 6 (tab:results_kernel)", "table",
         (*MAIN[:3], Row("kmae", "oracle")), ("cifar10",), ("linear", "mlp")),
    Item("pixel-objective", "The objective in pixel space", "Table 7 (tab:results_A)", "table",
         (*MAIN[:2], PIXELS[0], MAIN[3], PIXELS[1]), protocols=("linear", "mlp")),
    Item("overview", "Drawings of the method", "Figures 2 and 18 (fig:overview, fig:overview_A)", "scheme"),
    Item("masks", "Mask designs", "Figures 1, 3, 4 and 9 (fig:pitch, fig:pixel_mask, fig:masking3, fig:masking)",
         "masks", (Row("mae", 0.75), Row("mae", "random"), Row("pmae", 0.2), Row("pmae", "random")), ("cifar10",),
         epochs=1, any_length=True),
    Item("ratio", "Accuracy against the masking ratio", "Figure 5 left and Figure 19 (fig:mae_hyperparameters, "
         "fig:pmae_masking_ratio_combined)", "ratio", (*EVERY, Row("pmae", "every", "pixels"), *MAIN[3:]),
         protocols=("linear", "knn"), with_plain=True),
    Item("epochs", "Accuracy against the epochs of pretraining", "Figure 5 right and Figures 13 to 17 "
         "(fig:mae_hyperparameters, app_fig:performance_curve)", "epochs", MAIN[:3], protocols=("linear",),
         every_epoch=True),
    Item("spread", "Mean and standard error over masking ratios", "Figure 6 (fig:stability)", "spread", EVERY,
         protocols=("linear",)),
    Item("spectrum", "What parts of the spectrum show", "Figure 7 (fig:masking_pc)", "spectrum", (Row("pmae", 0.2),),
         ("cifar10",), epochs=1, any_length=True),
    Item("examples", "Images of the medical data sets", "Figure 8 (fig:medmnist)", "examples", (Row("pmae", 0.2),),
         MEDICAL, epochs=1, any_length=True),
    Item("time", "Training time for 800 epochs", "Figure 11 (app_fig:ressources)", "time",
         (Row("mae", "every"), Row("pmae", 0.2)), ("cifar10", "tinyimagenet"), epochs=1, any_length=True),
    Item("reconstructions", "Predictions of the hidden part", "Figure 12 (fig:reconstructions)", "reconstructions",
         (Row("mae", 0.75), Row("pmae", 0.1)), ("cifar10",), epochs=1000),
)  # fmt: skip
ITEMS = {item.name: item for item in _LISTED}
ROWS = tuple(dict.fromkeys(row.key for item in _LISTED for row in item.rows))
"""The rows of all items by their names among the published numbers; a ratio of one's own stands with the oracle's."""
