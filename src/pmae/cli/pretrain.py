"""Pretrain an encoder without labels on a named set, a folder or an array file."""

import argparse
import difflib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
    default = f"runs/{os.path.basename(config.data.source.rstrip('/'))}-{config.space.name}"
    run = api.pretrain(config, out=default if first.out is None else first.out, resume=first.resume)
    if not is_main():
        return
    scores = {k: v for k, v in run.results["pretrain"].items() if isinstance(v, float)}
    print("\n".join(f"  {name:<18} {value:.4f}" for name, value in scores.items()))
    print(f"run folder: {run.path}   (config.json, metrics.jsonl, checkpoints/, figures/)")


class OneLine(argparse.ArgumentParser):
    """Mistakes are errors like all others, told in one line without the usage, which is pages long here."""

    def error(self, message: str) -> NoReturn:
        """Raise what the command line prints."""
        raise UserError(message.removeprefix("argument "))


def _configure(arguments: list[str]) -> tuple["Config", argparse.Namespace]:
    """The settings a command line describes: a recipe, a file or a run to resume, changed by the other flags."""
    from pmae.config_file import with_settings

    taken = _with_settings(parser())
    first, rest = taken.parse_known_args(arguments_long(arguments))
    base = _base(first)
    if first.help:
        _print_help(base)
    if rest:
        raise _unknown(rest[0], [*SHORT, *taken._option_string_actions])
    given = {name: text for name, text in vars(first).items() if "." in name and text is not None}
    return with_settings(base, given), first


def _unknown(argument: str, flags: list[str]) -> UserError:
    """There are a hundred flags: only the nearest are named."""
    from pmae.validation import check_not_renamed

    if not argument.startswith("-"):
        return UserError(f"arguments must be options and their values, got {argument!r}")
    check_not_renamed(argument.partition("=")[0].removeprefix("--").replace("-", "_"))
    near = difflib.get_close_matches(argument, flags, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; see pmae pretrain --help"
    return UserError(f"options must be among those of pmae pretrain, got {argument!r}{hint}")


def _base(first: argparse.Namespace) -> "Config":
    """Where the settings start from."""
    from pmae.paper.recipes import recipe
    from pmae.runs import Run, folder_path, read_config

    if sum((first.recipe is not None, first.config is not None, first.resume)) > 1:
        raise UserError("--recipe, --config and --resume must not be combined: each names a whole set of settings")
    if first.out is not None:
        first.out = folder_path(first.out)
    if first.resume:
        if first.out is None:
            raise UserError("--resume must come with --out, the run folder to continue")
        return Run(first.out).config
    if first.config is not None:
        return read_config(folder_path(first.config, "config"))
    return recipe("ours" if first.recipe is None else first.recipe)


def parser() -> argparse.ArgumentParser:
    """The flags that choose where the settings start from."""
    parser = OneLine(add_help=False, allow_abbrev=False)
    for flag in ("--out", "--recipe", "--config"):
        parser.add_argument(flag)
    parser.add_argument("--resume", action="store_true")
    return parser


def _with_settings(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """And those of the settings, from their types: values stay text, for the settings themselves say what is wrong."""
    from typing import get_args, get_origin, get_type_hints

    from pmae.config import Config

    parser.add_argument("-h", "--help", action="store_true")
    for section, kind in get_type_hints(Config).items():
        for name, hint in get_type_hints(kind).items():
            key, flag = f"{section}.{name}", f"--{section}.{name.replace('_', '-')}"
            if hint is bool:
                parser.add_argument(flag, dest=key, action="store_const", const="true")
                off = f"--{section}.no-{name.replace('_', '-')}"
                parser.add_argument(off, dest=key, action="store_const", const="false")
            elif get_origin(hint) is tuple:
                parser.add_argument(flag, dest=key, nargs=len(get_args(hint)), action=AsList)
            else:
                parser.add_argument(flag, dest=key)
    return parser


class AsList(argparse.Action):
    """Several values as the text of one list."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        """Keep them."""
        setattr(namespace, self.dest, f"[{', '.join(values)}]")


def arguments_long(arguments: list[str]) -> list[str]:
    """Flags by their dotted names with hyphens: `--epochs 3` is `--train.epochs 3`."""
    split = [argument.partition("=") for argument in arguments]
    hyphens = [(flag.replace("_", "-") if flag.startswith("--") else flag, *value) for flag, *value in split]
    return [SHORT.get(flag, flag) + equals + value for flag, equals, value in hyphens]


def _print_help(base: "Config") -> NoReturn:
    """Every setting with its type, default and sentence, as tyro lays them out; then leave."""
    import tyro

    from pmae.config import Config

    @dataclass
    class Pretrain:
        out: str | None = None
        """Run folder to write; runs/DATA-SPACE if not given."""
        recipe: str | None = None
        """Start from a named recipe: paper, released, mae, mae_released, kmae, masking, mae_masking, ours
        or mae_ours."""
        config: str | None = None
        """Start from a config.json; with a run's own file this repeats the run."""
        resume: tyro.conf.FlagCreatePairsOff[bool] = False
        """Continue the run in --out from its last checkpoint."""
        settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=lambda: base)

    tyro.cli(Pretrain, args=["--help"], prog="pmae pretrain", description=_pretrain_help())
    raise SystemExit(0)


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
