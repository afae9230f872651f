"""The command line: parse, call, print. Every command imports what it needs, so that --help answers at once."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pmae.errors import Interrupted, UserError, unknown_name

if TYPE_CHECKING:
    from pmae.config import Config, DataConfig

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


def pretrain(arguments: list[str]) -> None:
    """Pretrain an encoder without labels on a named set, a folder or an array file."""
    from pmae import api

    config, first = _configure(arguments)
    out = first.out or f"runs/{os.path.basename(config.data.source.rstrip('/'))}-{config.space.name}"
    run = api.pretrain(config, out=out, resume=first.resume)
    scores = {k: v for k, v in run.results["pretrain"].items() if isinstance(v, float)}
    print("\n".join(f"  {name:<18} {value:.4f}" for name, value in scores.items()))
    print(f"run folder: {run.path}   (config.json, metrics.jsonl, checkpoints/, figures/)")


def demo(arguments: list[str]) -> None:
    """Pretrain a small PMAE on photographs that ship with scikit-image and show what it learned."""
    from pmae.demo import demo as run_demo

    parser = argparse.ArgumentParser("pmae demo", description=demo.__doc__, allow_abbrev=False)
    parser.add_argument("--out", default="runs/demo", help="run folder; an old demo there is replaced")
    parser.add_argument("--epochs", type=int, default=None, help="passes over the crops")
    options = parser.parse_args(arguments)
    run_demo(options.out, options.epochs)


def data(arguments: list[str]) -> None:
    """Fetch and verify a named data set; the only command that uses the network."""
    from pathlib import Path

    from pmae.data.fetch import FETCHABLE, fetch

    parser = argparse.ArgumentParser("pmae data", description=data.__doc__, allow_abbrev=False)
    parser.add_argument("name", help=f"one of {', '.join(FETCHABLE)}")
    parser.add_argument("--root", default="data", help="folder that holds named sets")
    options = parser.parse_args(arguments)
    print("\n".join(fetch(options.name, Path(options.root))))


def evaluate(arguments: list[str]) -> None:
    """Score a run's encoder with probes, k-NN and fine-tuning, beside what needs no pretraining."""
    parser = argparse.ArgumentParser("pmae evaluate", description=evaluate.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--preset", default="strong", help="paper, released or strong (the default)")
    parser.add_argument("--protocols", nargs="+", default=["linear", "mlp", "knn"], help="linear mlp knn finetune")
    parser.add_argument("--epochs", nargs="+", type=int, default=[], help="checkpoints to score; the last if not given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the heads")
    parser.add_argument("--no-baselines", action="store_true", help="score the run alone")
    parser.add_argument("--with", dest="twin", choices=["mae"], help="pretrain the MAE twin too, and score it")
    parser.add_argument("--data", help="another labelled set: a name or a path")
    parser.add_argument("--root", help="folder of named sets, if not the run's")
    parser.add_argument("--labels", choices=["none", "folders"], help="whether subfolders of --data are classes")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options = parser.parse_args(arguments)
    from pmae import api
    from pmae.data.datasets import load
    from pmae.evaluate.protocols import only, preset

    protocols = only(preset(options.preset), options.protocols)
    splits = load(_labelled(options)) if options.data or options.root or options.labels else None
    runs = [options.run]
    if options.twin:
        runs.append(api.pretrain_twin(options.run, splits).path)
    for path in runs:
        run = api.evaluate(
            path,
            protocols,
            splits,
            options.epochs or [None],
            not options.no_baselines,
            options.seeds,
            options.device,
            say=print,
        )
        print(f"{run.path}\n{api.score_table(run)}")


def report(arguments: list[str]) -> None:
    """Write one self-contained HTML page about one or several runs."""
    from pmae.report.page import write_report

    parser = argparse.ArgumentParser("pmae report", description=report.__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument(
        "-o", "--out", default="report.html", help="the page to write; its tables and figures go beside"
    )
    options = parser.parse_args(arguments)
    write_report(options.runs, options.out)
    print(f"report: {options.out}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "pretrain": pretrain,
    "evaluate": evaluate,
    "report": report,
    "data": data,
    "demo": demo,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line and exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if given[0] == "--version":
        from importlib.metadata import version

        print(f"pmae {version('pmae')}")
        return 0
    try:
        if given[0] not in COMMANDS:
            raise unknown_name("command", given[0], COMMANDS)
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
            COMMANDS[given[0]](given[1:])
    except UserError as error:
        print(f"pmae: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pmae: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Interrupted as stop:
        print(f"pmae: {stop}", file=sys.stderr)
        return stop.code
    return 0


def _labelled(options: argparse.Namespace) -> "DataConfig":
    """The run's own data settings, with what the command line says otherwise."""
    import dataclasses

    from pmae.runs import Run

    given = {"source": options.data, "root": options.root, "labels": options.labels}
    return dataclasses.replace(Run(options.run).config.data, **{k: v for k, v in given.items() if v is not None})


def _warn(message: Warning | str, category: type[Warning], *where: object) -> None:
    """Our own warnings as one plain line; other people's are for developers."""
    if category is UserWarning:
        print(f"pmae: warning: {message}", file=sys.stderr)


def _overview() -> str:
    lines = [f"  {name:<10} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    title = "pmae: learn image representations without labels by masking components instead of pixels"
    return "\n".join([title, "", "commands:", *lines, "", "pmae COMMAND --help tells the rest; pmae --version"])


def _configure(arguments: list[str]) -> tuple["Config", argparse.Namespace]:
    """The settings a command line describes: a recipe, a file or a run to resume, changed by the other flags."""
    from pathlib import Path

    import tyro

    from pmae.config import Config
    from pmae.config_file import from_dict
    from pmae.experiments.recipes import recipe
    from pmae.runs import Run, read_json

    first = _first_pass(arguments)
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
        """Start from a named recipe: paper, released, mae, mae_released or ours."""
        config: str | None = None
        """Start from a config.json; with a run's own file this repeats the run."""
        resume: tyro.conf.FlagCreatePairsOff[bool] = False
        """Continue the run in --out from its last checkpoint."""
        settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=lambda: base)

    parsed = tyro.cli(Pretrain, args=arguments_long(arguments), prog="pmae pretrain", description=_pretrain_help())
    return parsed.settings, first


def _first_pass(arguments: list[str]) -> argparse.Namespace:
    """The flags that choose where the settings start from."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--out", "--recipe", "--config"):
        parser.add_argument(flag)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_known_args(arguments)[0]


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
