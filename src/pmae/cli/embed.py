"""Write the features of any number of images, in bounded memory, to a .npz, .csv or .parquet file."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pmae.config import DataConfig
    from pmae.runs import Run

EXAMPLES = """examples:
  pmae embed runs/a --data scans/ -o scans.npz                          numpy.load: features, name
  pmae embed runs/a --data scans/ --labels folders -o scans.parquet     one column a feature, name, label, class
  pmae embed runs/a --data images.npy --pooling patches -o tokens.npz   features (images, tokens, width)
"""


def run(arguments: list[str]) -> None:
    """Parse, call, print."""
    options = parser().parse_args(arguments)
    from pmae.embed import embed
    from pmae.runs import Run
    from pmae.train.distributed import is_main

    run = Run(options.run)
    data = _data(options, run)
    count = embed(
        run,
        data,
        options.out,
        options.pooling,
        options.split,
        options.epoch,
        options.device,
        options.batch_size,
        say=lambda message: print(message, flush=True) if is_main() else None,
    )
    if is_main():
        print(f"{options.out}: {options.pooling} features of {count:,} images")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "pmae embed", description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--data", required=True, help="a named set, or the path of a folder, .npy or .npz file")
    parser.add_argument("-o", "--out", required=True, help="the file to write: .npz, .csv or .parquet")
    parser.add_argument("--pooling", default="mean", help="mean (the default), cls, both, or patches: every token")
    parser.add_argument("--split", default="all", help="all (the default), train, val or test")
    parser.add_argument("--epoch", type=int, help="checkpoint to use; the last if not given")
    parser.add_argument("--labels", choices=["none", "folders"], default="none", help="whether subfolders are classes")
    parser.add_argument("--resize", type=int, help="resize image files to this side; the run's setting if not given")
    parser.add_argument("--channels", type=int, choices=[1, 3], help="convert image files; the run's if not given")
    parser.add_argument("--root", help="folder of named sets, if not the run's")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--batch-size", type=int, help="images in a batch; 256, fewer if they are large, if not given")
    return parser


def _data(options: argparse.Namespace, run: "Run") -> "DataConfig":
    """The source with the run's own way of reading, as far as it applies: only image files can be converted."""
    import dataclasses

    from pmae.data.sets import converts

    of_run = run.config.data
    given = {"source": options.data, "root": options.root or of_run.root, "labels": options.labels}
    data = dataclasses.replace(of_run, resize=options.resize, channels=options.channels, **given)
    if not converts(data):
        return data
    ours = {key: getattr(of_run, key) for key in ("resize", "channels") if getattr(options, key) is None}
    return dataclasses.replace(data, **ours)
