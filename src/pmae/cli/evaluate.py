"""Score a run's encoder with probes, k-NN and fine-tuning, beside what needs no pretraining."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pmae.config import DataConfig

EXAMPLES = """examples:
  pmae evaluate runs/a
  pmae evaluate runs/a --data labelled/ --labels folders --protocols linear knn
  pmae evaluate runs/a --preset paper --protocols linear mlp knn finetune --with mae
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae import api
    from pmae.data.sets import load
    from pmae.evaluate.protocols import only, preset
    from pmae.evaluate.run import score_table
    from pmae.train.distributed import is_main

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
        if is_main():
            print(f"{run.path}\n{score_table(run)}")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pmae evaluate", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--preset", default="strong", help="paper, released, plain or strong (the default)")
    parser.add_argument("--protocols", nargs="+", default=["linear", "mlp", "knn"], help="linear mlp knn finetune")
    parser.add_argument("--epochs", nargs="+", type=int, default=[], help="checkpoints to score; the last if not given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the heads")
    parser.add_argument("--no-baselines", action="store_true", help="score the run alone")
    parser.add_argument("--with", dest="twin", choices=["mae"], help="pretrain the MAE twin too, and score it")
    parser.add_argument("--data", help="another labelled set: a name or a path")
    parser.add_argument("--root", help="folder of named sets, if not the run's")
    parser.add_argument("--labels", choices=["none", "folders"], help="whether subfolders of --data are classes")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def _labelled(options: argparse.Namespace) -> "DataConfig":
    """The run's own data settings, with what the command line says otherwise."""
    import dataclasses

    from pmae.runs import Run

    given = {"source": options.data, "root": options.root, "labels": options.labels}
    return dataclasses.replace(Run(options.run).config.data, **{k: v for k, v in given.items() if v is not None})
