"""Pretrain over a grid of settings and find the best by validation; finished runs are reused, stopped ones go on."""

import argparse
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pmae.sweep.workers import Workers

EXAMPLES = """examples:
  pmae sweep ratio --data cifar10 --ratios 0.1 0.2 0.4 --epochs 50 --out runs/ratios
  pmae sweep ratio --data cifar10 --ratios 0.1 0.2 0.4 --epochs 50 --at-once 3
  pmae sweep encoder.patch_size 2 4 8 --data scans/ --set data.labels=folders data.resize=32
  pmae sweep ratio 0.1 0.2 optim.base_lr 1.5e-4 5e-4 --recipe mae --data bloodmnist --seeds 0 1
  pmae sweep ratio --data cifar10 --ratios 0.1 0.2 0.3 0.4 --epochs 90 --search asha --ray local --gpus-each 0.25
`ratio` is masking.masked_variance, or masking.masked_patches in pixel space; several settings make a grid.
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pathlib import Path

    from pmae.config import replace
    from pmae.config_file import settings_given, with_settings
    from pmae.paper.recipes import recipe
    from pmae.report.sweeps import write_page
    from pmae.report.tables import to_markdown
    from pmae.sweep.grid import RATIO, parse_grid, sweep

    base = replace(recipe(options.recipe), train__device=options.device, data__root=options.root)
    base = replace(base, **({"data__source": options.data} if options.data else {}))
    base = replace(base, **({} if options.epochs is None else {"train__epochs": options.epochs}))
    base = with_settings(base, dict(settings_given(options.set)))
    words = list(options.settings)
    if options.ratios:
        words = [word for word in words if word != RATIO] + [RATIO, *options.ratios]
    workers, folders = workers_of(options), [Path(folder) for folder in options.runs]
    grid, out = parse_grid(words, base), Path(options.out)
    page = sweep(base, grid, options.seeds, out, options.search, workers, folders)
    files = write_page("sweep", "Sweep", page, out)
    print("\n".join([to_markdown(page.tables[0]), *page.notes, *map(str, files)]))


def workers_of(options: argparse.Namespace) -> "AbstractContextManager[Workers] | None":
    """Workers in processes of this machine or on Ray, if they are asked for."""
    from pmae.errors import require

    if options.at_once is not None:
        from contextlib import closing

        from pmae.sweep.workers import LocalWorkers

        require(options.ray is None, "--at-once", "given without --ray, which counts for itself", options.at_once)
        return closing(LocalWorkers(options.at_once))
    if options.ray is None:
        given = {"--gpus-each": options.gpus_each, "--cpus-each": options.cpus_each}
        for flag, value in given.items():
            require(value is None, flag, "given with --ray, which hands them out", value)
        return None
    from pmae.sweep.workers import ray_workers

    gpus = 0 if options.gpus_each is None and options.device == "cpu" else options.gpus_each
    return ray_workers(options.ray, gpus, 1 if options.cpus_each is None else options.cpus_each)


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """The flags of commands that can train several runs at a time."""
    add = parser.add_argument
    add("--at-once", type=int, help="runs at a time on this machine, on one GPU or the CPU; 1 if not given")
    add("--ray", metavar="local|HOST:PORT", help="run several at a time by Ray, on this machine or on a cluster")
    add("--gpus-each", type=float, help="with --ray: share of a GPU for a run; 1, or 0 where there are none")
    add("--cpus-each", type=float, help="with --ray: CPU cores for a run; 1 if not given")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        "pmae sweep",
        description=__doc__,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("settings", nargs="+", metavar="SETTING VALUE...", help="`ratio` or a dotted setting, followed by its values")
    add("--ratios", nargs="+", help="values of the masking ratio")
    add("--data", help="a named set, a folder, a .npy or a .npz file")
    add("--root", default="data", help="folder of named data sets")
    add("--recipe", default="ours", help="where the other settings come from: ours, paper, released, mae, ...")
    add("--epochs", type=int, help="epochs of pretraining, if not the recipe's")
    add("--seeds", nargs="+", type=int, default=[0], help="repetitions; their validation accuracies are averaged")
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="further settings of all runs")
    add("--out", default="runs/sweep", help="folder for table, plot and, in runs/, the runs")
    add("--runs", nargs="+", default=[], help="more folders of runs to look in")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--search", default="grid", help="grid: all runs to their end; asha: only the best third of each rung goes on")
    add_worker_options(parser)
    return parser
