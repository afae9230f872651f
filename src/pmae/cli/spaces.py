"""Compare masking spaces: pretrain in each at the same budget and set them in one table; draw what each hides."""

import argparse
from typing import TYPE_CHECKING

from pmae.cli.sweep import add_worker_options, workers_of

if TYPE_CHECKING:
    from pmae.sweep.spaces import SpaceGrid

PARTS = ("figures", "table")
EXAMPLES = """examples:
  pmae spaces --data cifar10                                  figures, and a table of 13 spaces at three ratios each
  pmae spaces figures --data scans/ --images 5000             basis images, masks and spectra: fits, trains nothing
  pmae spaces table --data cifar10 --spaces pca cosine:grouped=true pixels --ratios 0.1 0.2 --epochs 100
  pmae spaces table --only-found --runs results/runs          from stored results, running nothing
A space is a name, or a name with settings of its own: kernel_pca:landmarks=1024,gamma=0.0003. The same command again
continues where it was stopped. Encoder ViT-T, patches of 8 where they divide the images, a small decoder, one mask an
image; --set changes that for all.
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from contextlib import nullcontext
    from pathlib import Path

    from pmae.errors import unknown_name
    from pmae.report.sweeps import write_page
    from pmae.report.tables import to_markdown
    from pmae.sweep.scored import Scoring
    from pmae.sweep.space_figures import figures_page
    from pmae.sweep.spaces import TITLE, table_page

    for part in options.parts:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
    grid, folders = grid_of(options), tuple(map(Path, options.runs))
    scoring = Scoring(Path(options.out), folders, (options.preset,), (), options.head_epochs, options.only_found)
    with workers_of(options) or nullcontext() as workers:
        for part in options.parts or PARTS:
            drawn = part == "figures"
            page = figures_page(grid, options.images, options.picture) if drawn else table_page(grid, scoring, workers)
            paths = write_page(f"spaces-{part}", f"{TITLE}: not in the paper", page, scoring.out)
            print("\n".join([*map(to_markdown, page.tables), *map(str, paths)]))


def grid_of(options: argparse.Namespace) -> "SpaceGrid":
    """Spaces, ratios, data and settings as they were given."""
    from pmae.config import Config, DataConfig
    from pmae.config_file import settings_given, with_settings
    from pmae.sweep.spaces import SpaceGrid

    given = dict(settings_given(options.set))
    of_data = {name: value for name, value in given.items() if name.startswith("data.")}
    data = with_settings(Config(data=DataConfig(source=options.data, root=options.root)), of_data).data
    others = tuple((name, value) for name, value in given.items() if name not in of_data)
    named = {name: tuple(value) for name in ("spaces", "ratios", "mae_ratios") if (value := getattr(options, name))}
    return SpaceGrid(
        data, epochs=options.epochs, seeds=tuple(options.seeds), settings=others, device=options.device, **named
    )


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        "pmae spaces",
        description=__doc__,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("parts", nargs="*", help="figures, table or, if not given, both")
    add("--data", default="photos", help="a named set, a folder, a .npy or a .npz file")
    add("--root", default="data", help="folder of named data sets")
    add("--spaces", nargs="+", help="spaces to compare; thirteen if not given")
    add("--ratios", nargs="+", type=float, help="masked shares of the variance; 0.1 0.2 0.4 if not given")
    add("--mae-ratios", nargs="+", type=float, help="masked shares of the patches; 0.5 0.75 0.9 if not given")
    add("--epochs", type=int, default=50, help="epochs of pretraining; 50 if not given")
    add("--seeds", nargs="+", type=int, default=[0], help="repetitions of pretraining and evaluation")
    add("--preset", default="strong", help="how to evaluate: strong (the default), paper, released or plain")
    add("--head-epochs", type=int, help="epochs of probes, if not the preset's")
    add("--images", type=int, help="figures: how many training images to fit on; all if not given")
    add("--picture", type=int, default=0, help="figures: which held-out image to hide parts of")
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="further settings of all runs")
    add("--out", default="runs/spaces", help="folder for table, figures and, in runs/, the runs")
    add("--runs", nargs="+", default=[], help="more folders of runs to look in")
    add("--only-found", action="store_true", help="table: use runs and results that are there; run nothing")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_worker_options(parser)
    return parser
