"""Pretrain an encoder without labels on a named set, a folder or an array file."""

import argparse
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pmae.errors import UserError

if TYPE_CHECKING:
    from pmae.config import Config

SHORT = {
    "--data": "--data.source",
    "--root": "--data.root",
    "--epochs": "--train.epochs",
    "--batch-size": "--train.batch-size",
    "--seed": "--train.seed",
    "--device": "--train.device",
    "--space": "--space.name",
    "--masked-variance": "--masking.masked-variance",
    "--masked-patches": "--masking.masked-patches",
    "--encoder": "--encoder.name",
    "--patch-size": "--encoder.patch-size",
    "--decoder": "--decoder.name",
    "--probe-data": "--probe.data",
}


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    from pmae import api
    from pmae.train.distributed import is_main

    config, first = _configure(arguments)
    out = first.out or f"runs/{os.path.basename(config.data.source.rstrip('/'))}-{config.space.name}"
    run = api.pretrain(config, out=out, resume=first.resume)
    if not is_main():
        return
    scores = {k: v for k, v in run.results["pretrain"].items() if isinstance(v, float)}
    print("\n".join(f"  {name:<18} {value:.4f}" for name, value in scores.items()))
    print(f"run folder: {run.path}   (config.json, metrics.jsonl, checkpoints/, figures/)")


def _configure(arguments: list[str]) -> tuple["Config", argparse.Namespace]:
    """The settings a command line describes: a recipe, a file or a run to resume, changed by the other flags."""
    from pathlib import Path

    import tyro

    from pmae.config import Config
    from pmae.config_file import from_dict
    from pmae.experiments.recipes import recipe
    from pmae.runs import Run, read_json

    first = parser().parse_known_args(arguments)[0]
    if sum(map(bool, (first.recipe, first.config, first.resume))) > 1:
        raise UserError("--recipe, --config and --resume must not be combined: each names a whole set of settings")
    if first.resume and not first.out:
        raise UserError("--resume must come with --out, the run folder to continue")
    base: Config = recipe(first.recipe or "ours")
    if first.config:
        base = from_dict(read_json(Path(first.config)))
    if first.resume:
        base = Run(first.out).config

    @dataclass
    class Pretrain:
        out: str | None = None
        """Run folder to write; runs/DATA-SPACE if not given."""
        recipe: str | None = None
        """Start from a named recipe: paper, released, mae, mae_released, kmae, ours or mae_ours."""
        config: str | None = None
        """Start from a config.json; with a run's own file this repeats the run."""
        resume: tyro.conf.FlagCreatePairsOff[bool] = False
        """Continue the run in --out from its last checkpoint."""
        settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=lambda: base)

    parsed = tyro.cli(Pretrain, args=arguments_long(arguments), prog="pmae pretrain", description=_pretrain_help())
    return parsed.settings, first


def parser() -> argparse.ArgumentParser:
    """The flags that choose where the settings start from; those of the settings are tyro's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--out", "--recipe", "--config"):
        parser.add_argument(flag)
    parser.add_argument("--resume", action="store_true")
    return parser


def arguments_long(arguments: list[str]) -> list[str]:
    """Short flags by their dotted names: `--epochs 3` is `--train.epochs 3`."""
    split = [argument.partition("=") for argument in arguments]
    return [SHORT.get(flag.replace("_", "-"), flag) + equals + value for flag, equals, value in split]


def _pretrain_help() -> str:
    short = ", ".join(f"{a} ({b[2:]})" for a, b in SHORT.items())
    return (
        "Pretrain an encoder without labels.\n\n"
        "  pmae pretrain --data photos --out runs/a --epochs 20\n"
        "  pmae pretrain --data scans/ --data.resize 64 --out runs/b\n"
        "  pmae pretrain --recipe paper --data cifar10 --out runs/c\n"
        "  pmae pretrain --config runs/c/config.json --out runs/d\n"
        "  pmae pretrain --out runs/c --resume\n\n"
        f"Short flags: {short}."
    )
