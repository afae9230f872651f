"""Before any run: what a table or figure costs in runs, images and hours, and our settings beside the paper's."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pmae.config import Config, SpaceConfig, replace
from pmae.config_file import with_settings
from pmae.derive import patch_for, resolve
from pmae.errors import require
from pmae.evaluate.protocols import Protocols, preset
from pmae.flops import flops_per_image
from pmae.paper.recipes import recipe
from pmae.paper.tables import ITEMS, PAIRS, Item, RunChoices, ratios_of, specs_of
from pmae.report.compare import published
from pmae.report.tables import Cell, Table
from pmae.sweep.find import Scoring, shortened

SPEEDS = {"H200": 85_500.0, "2 CPU cores": 56.0}
"""Measured images a second while pretraining at 17 tokens an image: 32x32 in patches of 8, and one [CLS]."""
SMALL = {"2 CPU cores": 1_830.0}
"""The same with the small networks that are derived where there is no GPU: 479 a second at 65 tokens."""
TOKENS = 17
CHECKPOINTS = 10
DATA = {
    "cifar10": (50_000, 32),
    "tinyimagenet": (100_000, 64),
    "dermamnist": (7_007, 64),
    "bloodmnist": (11_959, 64),
    "pathmnist": (89_996, 64),
}
"""Training images and their side in pixels."""
PAPER = Scoring()


@dataclass(frozen=True)
class Cost:
    """Runs, images they and their evaluation see, and the same in images of 17 tokens, which hours follow from."""

    runs: int
    images: float
    work: float

    def hours(self, speed: float) -> float:
        """Hours at so many images of 17 tokens a second; evaluation is counted at the speed of pretraining."""
        return self.work / speed / 3600


def cost_of(item: Item, chosen: RunChoices, scoring: Scoring = PAPER, gpu: bool = True) -> Cost:
    """The cost of an item from nothing, with what is derived on a GPU or without; shared runs are counted in each."""
    passes = sum(map(_passes, scoring.chosen(item.kept(scoring.protocols), item.with_plain)))
    passes *= CHECKPOINTS if item.every_epoch else 1
    configs, cells = [spec.config for spec in specs_of(item, chosen)], item.cells(chosen)
    runs, images, work = 0, 0.0, 0.0
    for data in dict.fromkeys(data for _, data in cells):
        made = [config for config in configs if config.data.source == data]
        rows = [row for row, other in cells if other == data]
        again = sum(row.ratio == "oracle" for row in rows) * (len(chosen.seeds) - 1)
        scored = sum(1 if row.ratio == "oracle" else len(ratios_of(row, chosen)) for row in rows) * len(chosen.seeds)
        seen = DATA[data][0] * ((len(made) + again) * _views(made[0], gpu) + scored * passes)
        runs, images = runs + len(made) + again, images + seen
        work += seen * _tokens(made[0]) / TOKENS * statistics.fmean(_networks(config, chosen) for config in made)
    return Cost(runs, images, work)


def cost_lines(chosen: RunChoices, scoring: Scoring, speed: float | None, items: Sequence[Item] = ()) -> list[str]:
    """A line an item, all if none is named: paper's label, runs, images and hours; then what the hours rest on."""
    require(speed is None or speed > 0, "--images-per-second", "above 0", speed)
    derived = "encoder.width" in _resolved(_recipe(chosen), "cifar10", gpu=False)[1]
    speeds = {"this machine": speed} if speed else SPEEDS | (SMALL if derived else {})
    columns = "".join(f"{f'hours, {machine}':>20}" for machine in speeds)
    lines = [f"{'name':<16}{'runs':>6}{'images seen':>16}{columns}  title"]
    for item in items or [item for item in ITEMS.values() if _concerned(item, chosen, scoring)]:
        cost = cost_of(item, chosen, scoring)
        machines = [(name, cost_of(item, chosen, scoring, gpu=name not in SMALL)) for name in speeds]
        hours = "".join(f"{_hours(each.hours(speeds[name])):>20}" for name, each in machines)
        images = f"{cost.images / 1e6:,.1f} million" if cost.images else "none"
        lines.append(f"{item.name:<16}{cost.runs:>6}{images:>16}{hours}  {item.title}")
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


def _recipe(chosen: RunChoices) -> Config:
    return with_settings(recipe(PAIRS[chosen.recipe][0]), dict(chosen.settings))


def _resolved(config: Config, data: str, gpu: bool = True) -> tuple[Config, dict[str, Any]]:
    """The settings on a data set of the paper, and what was derived."""
    images, side = DATA[data]
    return resolve(config, images, (3, side, side), gpu=gpu)


def _passes(protocols: Protocols) -> int:
    """How often evaluation takes every training image through the encoder."""
    probe, tune = protocols.probe, protocols.finetune
    heads = (probe.epochs if probe.augment else 1) if probe else 0
    return heads + (1 if protocols.knn else 0) + (tune.epochs if tune else 0)


def _views(config: Config, gpu: bool) -> int:
    """How often pretraining takes every image through the networks: epochs, twice where a second view is taken."""
    config, _ = _resolved(config, config.data.source, gpu)
    return (config.train.epochs or 0) * (2 if config.objective.contrastive_weight else 1)


def _tokens(config: Config) -> int:
    side = DATA[config.data.source][1]
    return (side // (config.encoder.patch_size or patch_for(side, side))) ** 2 + 1


def _networks(config: Config, chosen: RunChoices) -> float:
    """Operations of a run's networks relative to its recipe's own; other models of timm are taken as equal."""
    if config.encoder.name != "vit_tiny":
        return 1.0
    side, usual = DATA[config.data.source][1], recipe(PAIRS[chosen.recipe][0])
    config = replace(config, encoder__patch_size=config.encoder.patch_size or patch_for(side, side))
    if config.space.name != "pixels":
        config = dataclasses.replace(config, space=SpaceConfig("pca"))
    encoder = dataclasses.replace(usual.encoder, patch_size=config.encoder.patch_size)
    same = dataclasses.replace(config, encoder=encoder, decoder=usual.decoder)
    return flops_per_image(config, (3, side, side)) / flops_per_image(same, (3, side, side))


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.05 else f"{value:.2f}"


def settings_table(chosen: RunChoices, scoring: Scoring) -> Table:
    """The paper's tables of settings: a row a setting, the published value and ours on CIFAR-10."""
    config, mae = _recipe(chosen), recipe(PAIRS[chosen.recipe][1])
    config, _ = _resolved(replace(config, train__epochs=chosen.epochs or config.train.epochs), "cifar10")
    protocols = shortened(preset(scoring.presets[0]), scoring.head_epochs)
    ours = _settings(config, protocols)
    rows: list[list[Cell]] = []
    for part, settings in published()["settings"].items():
        for name, value in settings.items():
            there, here = _text(value), _text(ours[part].get(name))
            rows.append([part, name, there, here, "yes" if there == here else "no"])
    normalized = mae.objective.normalize_patches
    note = (
        f"Ours: recipe {chosen.recipe}, preset {protocols.name}. "
        "The paper counts warm-up in steps; its evaluation's are epochs in the code it adapts. "
        f"Normalized targets: there for MAE, not for PMAE; here {'the same' if normalized else 'for neither'}."
    )
    header = ["part", "setting", "published", "ours", "same"]
    return Table("settings-comparison", "Settings: published and ours", header, rows, note)


def _settings(config: Config, protocols: Protocols) -> dict[str, dict[str, object]]:
    """Our settings by the names that the paper's tables have for them."""
    optim, train, probe, tune = config.optim, config.train, protocols.probe, protocols.finetune
    width, heads = config.encoder.width or 192, config.encoder.heads or 12
    shape: dict[str, object] = {"hidden size": width, "attention heads": heads, "intermediate size": 4 * width}
    pretraining = _training(train.epochs, train.batch_size or 1, [optim.base_lr or 0.0], [optim.weight_decay])
    steps = f"{optim.warmup_epochs:g} epochs" if optim.warmup_steps is None else f"{optim.warmup_steps} steps"
    pretraining |= {"optimizer": "AdamW", "betas": ", ".join(map(str, optim.betas)), "warm-up": steps}
    probes, tuning = dict[str, object](), dict[str, object]()
    if probe:
        probes = _training(probe.epochs, probe.batch_size, probe.base_lrs, probe.weight_decays)
        probes |= {"optimizer": "SGD", "momentum": probe.momentum, "warm-up": f"{probe.warmup_epochs:g} epochs"}
    if tune:
        tuning = _training(tune.epochs, tune.batch_size, [tune.base_lr], [tune.weight_decay])
        betas = ", ".join(map(str, tune.betas))
        tuning |= {"optimizer": "AdamW", "betas": betas, "warm-up": f"{tune.warmup_epochs:g} epochs"}
    encoder = shape | {"patch size": config.encoder.patch_size}
    return {"encoder": encoder, "pretraining": pretraining, "probes": probes, "fine-tuning": tuning}


def _training(epochs: int | None, batch: int, base_lrs: Sequence[float], decays: Sequence[float]) -> dict[str, object]:
    """What all kinds of training have: the peak rate is in proportion to the batch."""

    def one_of(values: Sequence[float]) -> object:
        return values[0] if len(values) == 1 else "one of " + ", ".join(f"{value:g}" for value in values)

    rates = {"base rate": one_of(base_lrs), "rate": one_of([base_lr * batch / 256 for base_lr in base_lrs])}
    return {"epochs": epochs, "batch size": batch, **rates, "weight decay": one_of(decays)}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "" if value is None else str(value)
