"""What a table or figure costs: runs, images seen, and hours at a stated speed."""

from collections.abc import Sequence
from dataclasses import dataclass

from pmae.config import Config
from pmae.config_file import with_settings
from pmae.derive import patch_for, resolve
from pmae.errors import require
from pmae.evaluate.protocols import Protocols
from pmae.paper.presets import chosen, kept
from pmae.paper.recipes import recipe
from pmae.paper.tables import ITEMS, PAIRS, Item, Plan, jobs_of, ratios_of

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


@dataclass(frozen=True)
class Heads:
    """What is evaluated: presets, the protocols to keep of an item's own, and epochs that are not the preset's."""

    presets: tuple[str, ...] = ("paper",)
    kinds: tuple[str, ...] = ()
    epochs: int | None = None


PAPER = Heads()


def cost_of(item: Item, plan: Plan, heads: Heads = PAPER, gpu: bool = True) -> Cost:
    """The cost of an item from nothing, with what is derived on a GPU or without; shared runs are counted in each."""
    protocols = chosen(heads.presets, kept(item, heads.kinds), item.with_plain, heads.epochs)
    passes = sum(map(_passes, protocols))
    passes *= CHECKPOINTS if item.every_epoch else 1
    jobs, cells, total = jobs_of(item, plan), item.cells(plan), Cost(0, 0.0, 0.0)
    for data in dict.fromkeys(cell.data for cell in cells):
        made = [job.config for job in jobs if job.config.data.source == data]
        rows = [cell.row for cell in cells if cell.data == data]
        again = sum(row.ratio == "oracle" for row in rows) * (len(plan.seeds) - 1)
        scored = sum(1 if row.ratio == "oracle" else len(ratios_of(row, plan)) for row in rows) * len(plan.seeds)
        images = DATA[data].images * ((len(made) + again) * _views(made[0], gpu) + scored * passes)
        total = total.plus(Cost(len(made) + again, images, images * _tokens(made[0]) / TOKENS))
    return total


def cost_lines(plan: Plan, heads: Heads, speed: float | None, items: Sequence[Item] = ()) -> list[str]:
    """A line an item, all if none is named: paper's label, runs, images and hours; then what the hours rest on."""
    require(speed is None or speed > 0, "--images-per-second", "above 0", speed)
    speeds = {"this machine": speed} if speed else SPEEDS | (SMALL if _derives_networks(plan) else {})
    columns = "".join(f"{f'hours, {machine}':>20}" for machine in speeds)
    lines = [f"{'name':<16}{'runs':>6}{'images seen':>16}{columns}  title"]
    for item in items or [item for item in ITEMS.values() if _concerned(item, plan, heads)]:
        cost = cost_of(item, plan, heads)
        machines = [(name, cost_of(item, plan, heads, gpu=name not in SMALL)) for name in speeds]
        hours = "".join(f"{_hours(each.hours(speeds[name])):>20}" for name, each in machines)
        lines.append(f"{item.name:<16}{cost.runs:>6}{_count(cost.images):>16}{hours}  {item.title}")
        lines.append(f"{'':<16}{item.labels}")
    stated = ", ".join(f"{value:,.0f} images/s ({machine})" for machine, value in speeds.items())
    lines.append(
        f"\nrecipe {plan.recipe}, {len(plan.seeds)} seed{'s' * (len(plan.seeds) > 1)}; hours at {stated} for images of "
        f"{TOKENS} tokens (32x32 in patches of 8), in proportion to the tokens of larger ones, evaluation included.\n"
        "Each item is counted from nothing, but runs are shared: main, knn, ratio, spread and epochs use the same ones."
    )
    return lines


def _concerned(item: Item, plan: Plan, heads: Heads) -> bool:
    """Whether an item has a row and a protocol of those that were asked for."""
    rows = not plan.methods or any(row.key in plan.methods for row in item.rows)
    return rows and (not heads.kinds or any(kind in heads.kinds for kind in item.protocols))


def _passes(protocols: Protocols) -> int:
    """How often evaluation takes every training image through the encoder."""
    probe, tune = protocols.probe, protocols.finetune
    heads = (probe.epochs if probe.augment else 1) if probe else 0
    return heads + (1 if protocols.knn else 0) + (tune.epochs if tune else 0)


def _derives_networks(plan: Plan) -> bool:
    """Whether recipe and settings leave the networks open, so that they are small where there is no GPU."""
    config = with_settings(recipe(PAIRS[plan.recipe][0]), dict(plan.settings))
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


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.05 else f"{value:.2f}"


def _count(images: float) -> str:
    return f"{images / 1e6:,.1f} million" if images else "none"
