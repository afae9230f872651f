"""The whole protocol of one method on the clock: load, pretrain, then linear and MLP probes and k-NN; seconds a stage.

    python benchmarks/protocol.py --data cifar10 --root data [--recipe paper] [--epochs 800] [--out runs/protocol]
    python benchmarks/protocol.py --data cifar10 --root data --epochs 2 --images 1000
    python benchmarks/protocol.py --recipe masking --set encoder.patch_size=8

What is timed is what `pmae pretrain` and `pmae evaluate --preset paper --no-baselines` do, one seed, everything that
they write included: the fit of the space, compilation, the probes while training, checkpoints and figures. Lines that
are set in are parts of the line above them. The last line is the same as JSON.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.machine import name_of
from pmae import api
from pmae.config import Config, replace
from pmae.config_file import settings_given, with_settings
from pmae.data.images import ImageSet, Splits
from pmae.data.sets import load
from pmae.evaluate.protocols import only, preset
from pmae.paper.recipes import recipe
from pmae.runs import Run
from pmae.train.environment import pick_device

T = TypeVar("T")
PROTOCOLS = ("linear", "mlp", "knn")


def parse() -> argparse.Namespace:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="a labelled set: a name or a path")
    parser.add_argument("--root", default="data", help="folder of named sets")
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--decoder", default="released", help="the released code's, or text")
    parser.add_argument("--preset", default="paper", help="of the evaluation")
    parser.add_argument("--epochs", type=int, default=800)
    parser.add_argument("--images", type=int, help="train on so many and test on a fifth of that; all if not given")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the recipe")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="run folder to keep")
    return parser.parse_args()


def configure(options: argparse.Namespace) -> Config:
    """The recipe with what the command line says."""
    config = with_settings(recipe(options.recipe), dict(settings_given(options.set)))
    return replace(
        config,
        data__source=options.data,
        data__root=options.root,
        decoder__name=options.decoder,
        train__epochs=options.epochs,
        train__device=options.device,
    )


def some(splits: Splits, count: int | None) -> Splits:
    """The first images of each part."""
    if count is None:
        return splits
    parts = {"train": count, "val": count // 5, "test": count // 5}
    cut = {name: first(getattr(splits, name), most) for name, most in parts.items()}
    return dataclasses.replace(splits, **cut)


def first(part: ImageSet | None, count: int) -> ImageSet | None:
    """So many images of one part, if it exists."""
    return None if part is None else part.take(np.arange(min(count, len(part))))


def timed(stages: dict[str, float], name: str, work: Callable[[], T]) -> T:
    """What some work gives, its seconds noted."""
    began = time.perf_counter()
    found = work()
    stages[name] = time.perf_counter() - began
    return found


def measure(config: Config, options: argparse.Namespace, out: Path) -> tuple[dict[str, float], Run]:
    """The stages in turn; each ends by writing numbers that came from the device, so nothing is still under way."""
    stages: dict[str, float] = {}
    splits = timed(stages, "load", lambda: some(load(config.data), options.images))
    run = timed(stages, "pretrain", lambda: api.pretrain(config, splits, out, quiet=True))
    stages |= of_pretraining(run, options.epochs * len(splits.train))
    protocols = only(preset(options.preset), PROTOCOLS)
    evaluate = partial(api.evaluate, out, protocols, splits, baselines=False, device=options.device)
    run = timed(stages, "evaluate", evaluate)
    return stages | of_evaluation(run), run


def of_pretraining(run: Run, images: int) -> dict[str, float]:
    """The fit, the steps at their median speed, and all else: compilation, probes, checkpoints, figures."""
    speeds = [line["images_per_second"] for line in run.metrics() if "images_per_second" in line]
    return {"  fit of the space": run.environment["fit_seconds"], "  steps": images / statistics.median(speeds)}


def of_evaluation(run: Run) -> dict[str, float]:
    """What the evaluation itself noted."""
    (found,) = run.evaluations
    return {f"  {name}": seconds for name, seconds in found.seconds.items()}


def show(stages: dict[str, float]) -> None:
    """A line a stage, and the whole."""
    for name, seconds in [*stages.items(), ("all", whole(stages))]:
        print(f"{name:<20} {seconds:>9.1f} s")


def whole(stages: dict[str, float]) -> float:
    """Seconds of everything."""
    return sum(stages[name] for name in ("load", "pretrain", "evaluate"))


def accuracies(run: Run) -> dict[str, float | None]:
    """What came out, so that speed is not of something else."""
    (found,) = run.evaluations
    return {f"{s.protocol}, {s.pooling}, {s.split}": s.metrics["accuracy"].value for s in found.scores}


def main() -> None:
    """Print one table."""
    options = parse()
    config, device = configure(options), name_of(pick_device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        stages, run = measure(config, options, options.out or Path(folder) / "run")
        about = {"device": device, "data": options.data, "recipe": options.recipe, "epochs": options.epochs}
        about |= {"settings": options.set, "decoder": options.decoder}
        print(", ".join(map(str, about.values())))
        show(stages)
        seconds = {name.strip(): round(value, 2) for name, value in [*stages.items(), ("all", whole(stages))]}
        print(json.dumps({**about, "seconds": seconds, "accuracy": accuracies(run)}))


if __name__ == "__main__":
    main()
