"""The paper's tables of settings, each value beside that of a recipe and a preset."""

from pmae.config import Config
from pmae.derive import resolve
from pmae.evaluate.protocols import Protocols
from pmae.paper.cost import DATA
from pmae.report import published
from pmae.report.tables import Cell, Table

Values = dict[str, object]


def settings_table(config: Config, protocols: Protocols, names: str, normalized: bool) -> Table:
    """A row a setting: the published value and ours on CIFAR-10; `normalized`: whether our MAE's targets are."""
    side = DATA["cifar10"].side
    config, _ = resolve(config, DATA["cifar10"].images, (3, side, side))
    ours = {"encoder": _encoder(config), "pretraining": _pretraining(config)}
    ours |= {"probes": _probes(protocols), "fine-tuning": _finetuning(protocols)}
    rows: list[list[Cell]] = []
    for part, settings in published.paper()["settings"].items():
        for name, value in settings.items():
            here = ours[part].get(name)
            rows.append([part, name, _text(value), _text(here), "yes" if _text(value) == _text(here) else "no"])
    note = (
        f"Ours: {names}. The paper counts warm-up in steps; its evaluation's are epochs in the code it adapts. "
        f"Normalized targets: there for MAE, not for PMAE; here {'the same' if normalized else 'for neither'}."
    )
    return Table(
        "settings-comparison",
        "Settings: published and ours",
        ["part", "setting", "published", "ours", "same"],
        rows,
        note,
    )


def _encoder(config: Config) -> Values:
    width = config.encoder.width or 192
    named: Values = {
        "hidden size": width,
        "attention heads": config.encoder.heads or 12,
        "intermediate size": 4 * width,
    }
    return named | {"patch size": config.encoder.patch_size}


def _pretraining(config: Config) -> Values:
    optim, batch = config.optim, config.train.batch_size or 1
    steps = optim.warmup_steps
    return {
        "epochs": config.train.epochs,
        "batch size": batch,
        "base rate": optim.base_lr,
        "rate": (optim.base_lr or 0.0) * batch / 256,
        "optimizer": "AdamW",
        "betas": ", ".join(map(str, optim.betas)),
        "warm-up": f"{optim.warmup_epochs:g} epochs" if steps is None else f"{steps} steps",
        "weight decay": optim.weight_decay,
    }


def _probes(protocols: Protocols) -> Values:
    probe = protocols.probe
    if probe is None:
        return {}
    return {
        "epochs": probe.epochs,
        "batch size": probe.batch_size,
        "base rate": _list(probe.base_lrs),
        "rate": _list([lr * probe.batch_size / 256 for lr in probe.base_lrs]),
        "optimizer": "SGD",
        "momentum": probe.momentum,
        "warm-up": f"{probe.warmup_epochs:g} epochs",
        "weight decay": _list(probe.weight_decays),
    }


def _finetuning(protocols: Protocols) -> Values:
    tune = protocols.finetune
    if tune is None:
        return {}
    return {
        "epochs": tune.epochs,
        "batch size": tune.batch_size,
        "base rate": tune.base_lr,
        "rate": tune.base_lr * tune.batch_size / 256,
        "optimizer": "AdamW",
        "betas": ", ".join(map(str, tune.betas)),
        "warm-up": f"{tune.warmup_epochs:g} epochs",
        "weight decay": tune.weight_decay,
    }


def _list(values: tuple[float, ...] | list[float]) -> object:
    return values[0] if len(values) == 1 else "one of " + ", ".join(f"{value:g}" for value in values)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "" if value is None else str(value)
