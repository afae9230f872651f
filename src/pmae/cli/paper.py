"""Reproduce a table or figure of the paper: run what is missing, and set it beside the published numbers."""

import argparse

from pmae.cli.sweep import add_worker_options, workers_of

EXAMPLES = """examples:
  pmae paper --list                                                     every table and figure, with its cost
  pmae paper main --datasets cifar10 bloodmnist --epochs 100 --seeds 0 1 2 --out runs/paper
  pmae paper ratio --recipe masking --ratios 0.1 0.2 0.4 --epochs 50 --set encoder.patch_size=8
  pmae paper knn --datasets cifar10 --runs results/runs --only-found    from stored results, running nothing
  pmae paper status --runs results/runs                                 how much of the main table has been run
The same command again continues where it was stopped. An oracle's ratio is chosen on validation images (the val split,
or a fifth of the training images where there is none), never on those of the final number.
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from contextlib import nullcontext
    from pathlib import Path

    from pmae.config_file import settings_given
    from pmae.paper.tables import RATIOS, RunChoices, items
    from pmae.sweep.scored import Scoring

    chosen = RunChoices(
        options.recipe,
        tuple(options.datasets),
        options.epochs,
        tuple(options.seeds),
        tuple(options.ratios or RATIOS),
        settings_given(options.set),
        options.root,
        options.device,
        tuple(options.methods),
    )
    scoring = Scoring(
        Path(options.out),
        tuple(map(Path, options.runs)),
        tuple(options.preset or ["released" if options.recipe == "released" else "paper"]),
        tuple(options.protocols),
        options.head_epochs,
        options.only_found,
        options.pooling,
    )
    if options.names == ["status"]:
        from pmae.paper.runner import status
        from pmae.report.tables import to_markdown

        print(to_markdown(status(chosen, scoring)))
        return
    wanted = [] if options.list and not options.names else items(options.names)
    if options.list:
        from pmae.paper.cost import cost_lines

        print("\n".join(cost_lines(chosen, scoring, options.images_per_second, wanted)))
        return
    from pmae.paper.runner import check, reproduce
    from pmae.report.tables import to_markdown

    with workers_of(options) or nullcontext() as workers:
        for item in wanted:  # all of them before the first one, which may take days
            check(item, chosen, scoring)
        for item in wanted:
            page, paths = reproduce(item, chosen, scoring, workers)
            notes = [f"- {note}" for note in page.notes]
            print("\n".join([*(to_markdown(table) for table in page.tables[:1]), *notes, *map(str, paths)]))


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        "pmae paper",
        description=__doc__,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", help="tables and figures by the names that --list gives, or status")
    add("--list", action="store_true", help="tables and figures, all or those named, with runs, images seen and hours")
    add("--datasets", nargs="+", default=[], help="cifar10 tinyimagenet dermamnist bloodmnist pathmnist")
    add("--methods", nargs="+", default=[], metavar="METHOD", help="only these rows: mae_std mae_oracle mae_random ...")
    add("--recipe", default="paper", help="how to train: paper (the default), released, masking or ours")
    add("--epochs", type=int, help="epochs of pretraining, if not the recipe's")
    add("--seeds", nargs="+", type=int, default=[0], help="repetitions of pretraining and evaluation")
    add("--ratios", nargs="+", type=float, help="masking ratios to search; 0.1 to 0.9 if not given")
    add("--protocols", nargs="+", default=[], help="only these of linear mlp knn finetune")
    add("--preset", nargs="+", help="how to evaluate: paper, released, plain, strong; the recipe's own if not given")
    add("--pooling", default="cls", help="which representation's accuracies to show: cls, as the paper does, or mean")
    add("--head-epochs", type=int, help="epochs of probes and fine-tuning, if not the preset's")
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="further settings of all runs")
    add("--out", default="runs/paper", help="folder for tables, figures and, in runs/, the runs")
    add("--runs", nargs="+", default=[], help="more folders of runs to look in")
    add("--only-found", action="store_true", help="use runs and results that are there; run nothing")
    add("--root", default="data", help="folder of named data sets")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--images-per-second", type=float, help="for --list: this machine's speed, at 32x32 in patches of 8")
    add_worker_options(parser)
    return parser
