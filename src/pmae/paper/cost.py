"""What a table or figure costs: runs, images seen, and hours at a stated speed."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pmae.config import Config, SpaceConfig, replace
from pmae.config_file import with_settings
from pmae.derive import patch_for, resolve
from pmae.errors import require
from pmae.evaluate.protocols import Protocols
from pmae.flops import flops_per_image
from pmae.paper.recipes import recipe
from pmae.paper.tables import ITEMS, PAIRS, Item, RunChoices, ratios_of, specs_of
from pmae.sweep.scored import Scoring

SPEEDS = {"H200": 85_500.0, "2 CPU cores": 56.0}
"""Measured images a second while pretraining at 17 tokens an image: 32x32 in patches of 8, and one [CLS]."""
SMALL = {"2 CPU cores": 1_830.0}
"""The same with the small networks that are derived where there is no GPU: 479 a second at 65 tokens."""
TOKENS = 17
CHECKPOINTS = 10


@dataclass(frozen=True)
class DataSet:
    """What the cost of a run follows from: training images and their side in pixels."""

    images: int
    side: int


DATA = {
    "cifar10": DataSet(50_000, 32),
    "tinyimagenet": DataSet(100_000, 64),
    "dermamnist": DataSet(7_007, 64),
    "bloodmnist": DataSet(11_959, 64),
    "pathmnist": DataSet(89_996, 64),
}


@dataclass(frozen=True)
class Cost:
    """Runs, images they and their evaluation see, and the same in images of 17 tokens, which hours follow from."""

    runs: int
    images: float
    work: float

    def hours(self, speed: float) -> float:
        """Hours at so many images of 17 tokens a second; evaluation is counted at the speed of pretraining."""
        return self.work / speed / 3600

    def plus(self, other: "Cost") -> "Cost":
        """Both together."""
        return Cost(self.runs + other.runs, self.images + other.images, self.work + other.work)


PAPER = Scoring()


def cost_of(item: Item, chosen: RunChoices, scoring: Scoring = PAPER, gpu: bool = True) -> Cost:
    """The cost of an item from nothing, with what is derived on a GPU or without; shared runs are counted in each."""
    passes = sum(map(_passes, scoring.chosen(item.kept(scoring.protocols), item.with_plain)))
    passes *= CHECKPOINTS if item.every_epoch else 1
    specs, cells, total = specs_of(item, chosen), item.cells(chosen), Cost(0, 0.0, 0.0)
    for data in dict.fromkeys(data for _, data in cells):
        made = [spec.config for spec in specs if spec.config.data.source == data]
        rows = [row for row, other in cells if other == data]
        again = sum(row.ratio == "oracle" for row in rows) * (len(chosen.seeds) - 1)
        scored = sum(1 if row.ratio == "oracle" else len(ratios_of(row, chosen)) for row in rows) * len(chosen.seeds)
        images = DATA[data].images * ((len(made) + again) * _views(made[0], gpu) + scored * passes)
        networks = statistics.fmean(_networks(config, chosen) for config in made)
        work = images * _tokens(made[0]) / TOKENS * networks
        total = total.plus(Cost(len(made) + again, images, work))
    return total


def cost_lines(chosen: RunChoices, scoring: Scoring, speed: float | None, items: Sequence[Item] = ()) -> list[str]:
    """A line an item, all if none is named: paper's label, runs, images and hours; then what the hours rest on."""
    require(speed is None or speed > 0, "--images-per-second", "above 0", speed)
    speeds = {"this machine": speed} if speed else SPEEDS | (SMALL if _derives_networks(chosen) else {})
    columns = "".join(f"{f'hours, {machine}':>20}" for machine in speeds)
    lines = [f"{'name':<16}{'runs':>6}{'images seen':>16}{columns}  title"]
    for item in items or [item for item in ITEMS.values() if _concerned(item, chosen, scoring)]:
        cost = cost_of(item, chosen, scoring)
        machines = [(name, cost_of(item, chosen, scoring, gpu=name not in SMALL)) for name in speeds]
        hours = "".join(f"{_hours(each.hours(speeds[name])):>20}" for name, each in machines)
        lines.append(f"{item.name:<16}{cost.runs:>6}{_count(cost.images):>16}{hours}  {item.title}")
        lines.append(f"{'':<16}{item.labels}")
    stated = ", ".join(f"{value:,.0f} images/s ({machine})" for machine, value in speeds.items())
    lines.append(
        f"\nrecipe {chosen.recipe}, {len(chosen.seeds)} seed{'s' * (len(chosen.seeds) > 1)}; hours at {stated} for "
        f"images of {TOKENS} tokens (32x32 in patches of 8), in proportion to the tokens of larger ones and to the "
        "operations of networks of another size than the recipe's, evaluation included.\n"
        "Each item is counted from nothing, but runs are shared: main, knn, ratio, spread and epochs use the same ones."
    )
    return lines


def _concerned(item: Item, chosen: RunChoices, scoring: Scoring) -> bool:
    """Whether an item has a row and a protocol of those that were asked for."""
    rows = not chosen.methods or any(row.key in chosen.methods for row in item.rows)
    return rows and (not scoring.protocols or any(name in scoring.protocols for name in item.protocols))


def _passes(protocols: Protocols) -> int:
    """How often evaluation takes every training image through the encoder."""
    probe, tune = protocols.probe, protocols.finetune
    heads = (probe.epochs if probe.augment else 1) if probe else 0
    return heads + (1 if protocols.knn else 0) + (tune.epochs if tune else 0)


def _derives_networks(chosen: RunChoices) -> bool:
    """Whether recipe and settings leave the networks open, so that they are small where there is no GPU."""
    config = with_settings(recipe(PAIRS[chosen.recipe][0]), dict(chosen.settings))
    shape = (3, DATA["cifar10"].side, DATA["cifar10"].side)
    return "encoder.width" in resolve(config, DATA["cifar10"].images, shape, gpu=False)[1]


def _views(config: Config, gpu: bool) -> int:
    """How often pretraining takes every image through the networks: epochs, twice where a second view is taken."""
    data = DATA[config.data.source]
    config, _ = resolve(config, data.images, (3, data.side, data.side), gpu=gpu)
    return (config.train.epochs or 0) * (2 if config.objective.contrastive_weight else 1)


def _tokens(config: Config) -> int:
    side = DATA[config.data.source].side
    return (side // (config.encoder.patch_size or patch_for(side, side))) ** 2 + 1


def _networks(config: Config, chosen: RunChoices) -> float:
    """Operations of a run's networks relative to its recipe's own; other models of timm are taken as equal."""
    if config.encoder.name != "vit_tiny":
        return 1.0
    side, usual = DATA[config.data.source].side, recipe(PAIRS[chosen.recipe][0])
    config = replace(config, encoder__patch_size=config.encoder.patch_size or patch_for(side, side))
    if config.space.name != "pixels":
        config = dataclasses.replace(config, space=SpaceConfig("pca"))
    encoder = dataclasses.replace(usual.encoder, patch_size=config.encoder.patch_size)
    same = dataclasses.replace(config, encoder=encoder, decoder=usual.decoder)
    return flops_per_image(config, (3, side, side)) / flops_per_image(same, (3, side, side))


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.05 else f"{value:.2f}"


def _count(images: float) -> str:
    return f"{images / 1e6:,.1f} million" if images else "none"
