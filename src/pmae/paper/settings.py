"""The paper's tables of settings, each value beside that of a recipe and a preset."""

from collections.abc import Sequence
from typing import Any

from pmae.config import Config, replace
from pmae.config_file import with_settings
from pmae.derive import resolve
from pmae.evaluate.protocols import FinetuneProtocol, ProbeProtocol, preset
from pmae.paper.cost import DATA
from pmae.paper.recipes import recipe
from pmae.paper.tables import PAIRS, RunChoices
from pmae.report import published
from pmae.report.tables import Cell, Table
from pmae.sweep.scored import Scoring, shortened

Values = dict[str, object]


def settings_table(chosen: RunChoices, scoring: Scoring) -> Table:
    """A row a setting: the published value and ours on CIFAR-10."""
    pmae, mae = map(recipe, PAIRS[chosen.recipe])
    config = with_settings(replace(pmae, train__epochs=chosen.epochs or pmae.train.epochs), dict(chosen.settings))
    side = DATA["cifar10"].side
    config, _ = resolve(config, DATA["cifar10"].images, (3, side, side))
    protocols = shortened(preset(scoring.presets[0]), scoring.head_epochs)
    ours = {"encoder": _encoder(config), "pretraining": _pretraining(config)}
    ours |= {"probes": _probes(protocols.probe), "fine-tuning": _finetuning(protocols.finetune)}
    rows: list[list[Cell]] = []
    for part, settings in published.paper()["settings"].items():
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


def _encoder(config: Config) -> Values:
    width, heads = config.encoder.width or 192, config.encoder.heads or 12
    shape = {"hidden size": width, "attention heads": heads, "intermediate size": 4 * width}
    return shape | {"patch size": config.encoder.patch_size}


def _pretraining(config: Config) -> Values:
    optim, steps = config.optim, config.optim.warmup_steps
    warmup = f"{optim.warmup_epochs:g} epochs" if steps is None else f"{steps} steps"
    common = _common(config.train.epochs, config.train.batch_size or 1, [optim.base_lr or 0.0], [optim.weight_decay])
    return common | {"optimizer": "AdamW", "betas": ", ".join(map(str, optim.betas)), "warm-up": warmup}


def _probes(probe: ProbeProtocol | None) -> Values:
    if probe is None:
        return {}
    common = _common(probe.epochs, probe.batch_size, probe.base_lrs, probe.weight_decays)
    return common | {"optimizer": "SGD", "momentum": probe.momentum, "warm-up": f"{probe.warmup_epochs:g} epochs"}


def _finetuning(tune: FinetuneProtocol | None) -> Values:
    if tune is None:
        return {}
    common = _common(tune.epochs, tune.batch_size, [tune.base_lr], [tune.weight_decay])
    betas = ", ".join(map(str, tune.betas))
    return common | {"optimizer": "AdamW", "betas": betas, "warm-up": f"{tune.warmup_epochs:g} epochs"}


def _common(epochs: int | None, batch: int, base_lrs: Sequence[float], decays: Sequence[float]) -> Values:
    """What all kinds of training have: the peak rate is in proportion to the batch."""
    rates = [base_lr * batch / 256 for base_lr in base_lrs]
    values: Values = {"epochs": epochs, "batch size": batch, "base rate": _one_of(base_lrs)}
    return values | {"rate": _one_of(rates), "weight decay": _one_of(decays)}


def _one_of(values: Sequence[float]) -> object:
    return values[0] if len(values) == 1 else "one of " + ", ".join(f"{value:g}" for value in values)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "" if value is None else str(value)
