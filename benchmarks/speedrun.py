"""A speedrun: CIFAR-10 from random weights to a linear probe of 90%, without labels in pretraining.

    python -m benchmarks.speedrun --root data --out runs/speedrun

Every look scores mean-pooled features by a linear probe and k-NN on a fifth of the training images, held out from the
probe's fit. The run ends at the first look that reaches the target, or with its schedule; then the test images are
scored once, by preset `strong`. Minutes are of everything before and between the looks: fit, compilation and training.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pmae import api
from pmae.config import Config, replace
from pmae.config_file import describe
from pmae.data.augment import Standardize
from pmae.data.images import Splits
from pmae.data.sets import load
from pmae.demo import demo_protocols
from pmae.derive import resolve
from pmae.errors import UserError, require
from pmae.evaluate.probes import online_probe
from pmae.evaluate.protocols import Protocols, only, preset
from pmae.files import write_json, write_text
from pmae.models import Encoder
from pmae.results import primary_pooling, scores_of
from pmae.runs import Run
from pmae.train.environment import pick_device
from pmae.train.loop import pretrain

FRONTIER: dict[str, Any] = {
    "data__source": "cifar10",
    "augment__extra": ("color_jitter", "grayscale"),
    "encoder__patch_size": 4,
    "objective__contrastive_weight": 1.0,
    "objective__local_views": 2,
    "train__epochs": 200,
    "probe__every": 5,
    "train__checkpoint_every": 5,
}
"""What differs from recipe `ours`: colors and local views are worth 2 to 6 points here after thirty epochs
(results/frontier.md)."""
TINY: dict[str, Any] = {
    "data__source": "photos",
    "space__name": "cosine",
    "encoder__patch_size": 8,
    "train__epochs": 2,
    "train__batch_size": 64,
    "probe__every": 1,
    "train__checkpoint_every": 1,
}
SIZES = {"width": 24, "depth": 2, "heads": 2}
TINY |= {f"{part}__{key}": size for part in ("encoder", "decoder") for key, size in SIZES.items()}
"""The same in seconds on a CPU, to see that it works."""
TINY_IMAGES = 192


class Reached(Exception):
    """A look found the target."""


@dataclass(frozen=True)
class Look:
    """What was found, after how much."""

    minutes: float
    epoch: int
    images: int
    linear: float
    knn: float
    effective_rank: float

    def __str__(self) -> str:
        scores = f"linear {self.linear:.1%}, k-NN {self.knn:.1%}, effective rank {self.effective_rank:.1f}"
        return f"{self.minutes:7.2f} min, epoch {self.epoch:4d}, {self.images:,} images: {scores}"


@dataclass
class Watch:
    """The online probe of a run, with a clock that stands still while it looks."""

    probe: Callable[[Encoder, Standardize, torch.device], dict[str, float]]
    target: float
    every: int
    last: int
    """Epochs between two looks, and of the whole schedule."""
    images: int
    """Images of an epoch."""
    looks: list[Look] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __call__(self, encoder: Encoder, standardize: Standardize, device: torch.device) -> dict[str, float]:
        """Score, log, and end the run where it is good enough."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now, epoch = time.monotonic(), min(self.every * (len(self.looks) + 1), self.last)
        found = self.probe(encoder, standardize, device)
        scores = {name: found[name] for name in ("linear", "knn", "effective_rank")}
        self.looks.append(Look((now - self.began) / 60, epoch, epoch * self.images, **scores))
        print(self.looks[-1])
        if found["linear"] >= self.target:
            raise Reached
        self.began += time.monotonic() - now
        return found


def speedrun(config: Config, splits: Splits, protocols: Protocols, target: float, out: Path) -> Path:
    """Pretrain to the target or the end, score the test images once, and write speedrun.json and speedrun.md."""
    began, gpu = time.monotonic(), pick_device(config.train.device).type == "cuda"
    config, reasons = resolve(config, len(splits.train), splits.train.shape, gpu=gpu)
    print(describe(config, reasons))
    epochs, batch = (config.probe.every or 1, config.train.epochs or 1), config.train.batch_size or 1
    watch = Watch(online_probe(splits), target, *epochs, len(splits.train) // batch * batch, began=began)
    with suppress(Reached):
        pretrain(config, splits, out, quiet=True, online_probe=watch)
    run = api.evaluate(out, protocols, splits, baselines=False, figures=False)
    scores = scores_of(run.evaluations)
    test = {
        score.protocol: score.metrics["accuracy"].value
        for score in scores
        if score.split == "test" and score.pooling == primary_pooling(scores)
    }
    print("test images, once: " + ", ".join(f"{name} {value:.1%}" for name, value in test.items()))
    return write(run, config, reasons, target, watch.looks, test)


def write(
    run: Run, config: Config, reasons: dict[str, str], target: float, looks: list[Look], test: dict[str, float]
) -> Path:
    """One JSON and one page of what happened."""
    reached = next((look for look in looks if look.linear >= target), None)
    device = run.environment["device"]
    record = {"target": target, "reached": reached and asdict(reached), "test": test, "device": device}
    write_json(run.path / "speedrun.json", {**record, "looks": [asdict(look) for look in looks]})
    end = f"{target:.0%} after {reached.minutes:.1f} minutes" if reached else f"{target:.0%} not reached"
    rows = [
        f"| {a.minutes:.2f} | {a.epoch} | {a.images:,} | {a.linear:.1%} | {a.knn:.1%} | {a.effective_rank:.1f} |"
        for a in looks
    ]
    head = "| minutes | epoch | images | linear | k-NN | effective rank |"
    scored = ", ".join(f"{name} {value:.1%}" for name, value in test.items())
    page = [f"# Speedrun: {end}", "", f"{device}. Looks are at held-out training images; the test images, scored once:"]
    page += [f"{scored}.", "", head, "|" + "---|" * 6, *rows, "", "```text", describe(config, reasons), "```", ""]
    write_text(run.path / "speedrun.md", "\n".join(page))
    return run.path / "speedrun.json"


def main(arguments: list[str] | None = None) -> int:
    """Run it; a user's mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="speedrun", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun"), help="a new run folder")
    parser.add_argument("--root", default="data", help="the folder with CIFAR-10's files")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy of the linear probe at which to stop")
    parser.add_argument("--epochs", type=int, help=f"length of the schedule, {FRONTIER['train__epochs']} if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny network and embedded images: seconds on a CPU")
    options = parser.parse_args(arguments)
    try:
        require(0 < options.target <= 1, "target", "an accuracy in (0, 1]", options.target)
        changes = FRONTIER | (TINY if options.tiny else {})
        changes |= {"train__epochs": options.epochs} if options.epochs else {}
        config = replace(Config(), **changes, data__root=options.root, train__seed=options.seed)
        splits, protocols = load(config.data), only(preset("strong"), ["linear", "knn"])
        if options.tiny:
            splits, protocols = _few(splits), demo_protocols()
        print(f"written to {speedrun(config, splits, protocols, options.target, options.out)}")
    except UserError as error:
        print(f"speedrun: error: {error}", file=sys.stderr)
        return 2
    return 0


def _few(splits: Splits) -> Splits:
    parts = (splits.train, splits.test)
    train, test = (part and part.take(torch.linspace(0, len(part) - 1, TINY_IMAGES).long().numpy()) for part in parts)
    assert train is not None
    return Splits(splits.name, train, None, test)


if __name__ == "__main__":
    raise SystemExit(main())
