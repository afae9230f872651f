"""A speedrun: CIFAR-10 from random weights to a linear probe of 90%, without labels in pretraining.

    python -m benchmarks.speedrun --root data --out runs/speedrun

It is a pretraining with large patches, whose encoder goes on with small ones: a token more costs as much as an image
more, and most of what is learned does not need it. Every look scores mean-pooled features by a linear probe and k-NN on
a fifth of the training images, held out from the probe's fit; at the end the test images are scored once, by preset
`strong`. Minutes are of everything before and between the looks: fits, compilation and training.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pmae import api
from pmae.config import Config, replace
from pmae.config_file import describe, with_settings
from pmae.data.augment import Standardize
from pmae.data.images import Splits
from pmae.data.sets import load
from pmae.demo import demo_protocols
from pmae.derive import resolve
from pmae.errors import UserError, require
from pmae.evaluate.probes import online_probe
from pmae.evaluate.protocols import Protocols, only, preset
from pmae.files import require_empty, write_json, write_text
from pmae.models import Encoder
from pmae.paper.recipes import RECIPES
from pmae.standing import primary_pooling, scores_of
from pmae.train.environment import pick_device
from pmae.train.loop import pretrain

FRONTIER: dict[str, Any] = {
    "encoder__first_patch_size": 0,
    "data__source": "cifar10",
    "augment__extra": ("color_jitter", "grayscale"),
    "objective__contrastive_weight": 1.0,
    "objective__local_views": 2,
    "optim__name": "muon",
    "optim__base_lr": 2.4e-3,
}
"""What differs from recipe `ours`: twice the rate. The rest is derived from photographs, and named here so that the run
stays what it is (results/frontier.md)."""
PATCHES, EPOCHS = (8, 4, 2), (260, 130, 24)
SCHEDULES, RATES = ("constant", "cosine", "cosine"), (1.0, 1.0, 0.3)
"""Of each stage. The first two have one schedule: the rate is kept, then goes to 0."""
WARMUP = 0.05
"""Share of the epochs of a stage."""
TINY: dict[str, Any] = {"data__source": "photos", "space__name": "cosine", "train__batch_size": 64}
SIZES = {"width": 24, "depth": 2, "heads": 2}
TINY |= {f"{part}__{key}": size for part in ("encoder", "decoder") for key, size in SIZES.items()}
"""The same in seconds on a CPU, to see that it works."""
TINY_IMAGES = 192


@dataclass(frozen=True)
class Look:
    """What was found, after how much."""

    minutes: float
    patch_size: int
    epoch: int
    """Of its stage."""
    images: int
    """Seen in all stages."""
    linear: float
    knn: float
    effective_rank: float

    def __str__(self) -> str:
        scores = f"linear {self.linear:.1%}, k-NN {self.knn:.1%}, effective rank {self.effective_rank:.1f}"
        where = f"patches of {self.patch_size}, epoch {self.epoch:4d}, {self.images:,} images"
        return f"{self.minutes:7.2f} min, {where}: {scores}"


@dataclass
class Watch:
    """The online probe of all stages, with a clock that stands still while it looks."""

    probe: Callable[[Encoder, Standardize, torch.device], dict[str, float]]
    began: float
    looks: list[Look] = field(default_factory=list)

    def stage(self, config: Config, count: int) -> Callable[[Encoder, Standardize, torch.device], dict[str, float]]:
        """The probe of a run with these settings on so many images, which looks at its start if it goes on."""
        every, last, batch = config.probe.every or 1, config.train.epochs or 1, config.train.batch_size or 1
        first = 0 if config.encoder.weights else every
        epochs = iter(sorted({*range(first, last + 1, every), last}))
        seen, patch = self.looks[-1].images if self.looks else 0, config.encoder.patch_size or 1

        def look(encoder: Encoder, standardize: Standardize, device: torch.device) -> dict[str, float]:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now, epoch = time.monotonic(), next(epochs)
            found = self.probe(encoder, standardize, device)
            scores = {name: found[name] for name in ("linear", "knn", "effective_rank")}
            images = seen + epoch * (count // batch) * batch
            self.looks.append(Look((now - self.began) / 60, patch, epoch, images, **scores))
            print(self.looks[-1], flush=True)
            self.began += time.monotonic() - now
            return found

        return look


def speedrun(stages: list[Config], splits: Splits, protocols: Protocols, target: float, out: Path) -> Path:
    """Pretrain stage by stage, score the test images once, and write speedrun.json and speedrun.md."""
    watch = Watch(online_probe(splits), time.monotonic())
    gpu, settings, path = pick_device(stages[0].train.device).type == "cuda", list[str](), None
    for config in stages:
        if path is not None:
            config = replace(config, encoder__weights=str(path))
        goes_on = path is not None
        config, reasons = resolve(config, len(splits.train), splits.train.shape, gpu=gpu, goes_on=goes_on)
        settings.append(describe(config, reasons))
        print(settings[-1], flush=True)
        path = out / f"patch_{config.encoder.patch_size}"
        pretrain(config, splits, path, quiet=True, online_probe=watch.stage(config, len(splits.train)))
    assert path is not None
    run = api.evaluate(path, protocols, splits, baselines=False, figures=False)
    scores = scores_of(run.evaluations)
    test = {
        score.protocol: float(score.metrics["accuracy"].value or 0.0)
        for score in scores
        if score.split == "test" and score.pooling == primary_pooling(scores)
    }
    print("test images, once: " + ", ".join(f"{name} {value:.1%}" for name, value in test.items()))
    return write(out, str(run.environment["device"]), settings, target, watch.looks, test)


def write(
    out: Path, device: str, settings: list[str], target: float, looks: list[Look], test: dict[str, float]
) -> Path:
    """One JSON and one page of what happened."""
    reached = next((look for look in looks if look.linear >= target), None)
    record = {"target": target, "reached": reached and asdict(reached), "test": test, "device": device}
    write_json(out / "speedrun.json", {**record, "looks": [asdict(look) for look in looks]})
    end = f"{target:.0%} after {reached.minutes:.1f} minutes" if reached else f"{target:.0%} not reached"
    rows = [
        f"| {a.minutes:.2f} | {a.patch_size} | {a.epoch} | {a.images:,} | {a.linear:.1%} | {a.knn:.1%} "
        f"| {a.effective_rank:.1f} |"
        for a in looks
    ]
    head = "| minutes | patches | epoch | images | linear | k-NN | effective rank |"
    scored = ", ".join(f"{name} {value:.1%}" for name, value in test.items())
    page = [f"# Speedrun: {end}", "", f"{device}. Looks are at held-out training images; the test images, scored once:"]
    page += [f"{scored}.", "", head, "|" + "---|" * 7, *rows, ""]
    page += [line for stage in settings for line in ("```text", stage, "```", "")]
    write_text(out / "speedrun.md", "\n".join(page))
    return out / "speedrun.json"


def main(arguments: list[str] | None = None) -> int:
    """Run it; a user's mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="speedrun", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun"), help="a new folder")
    parser.add_argument("--root", default="data", help="the folder with CIFAR-10's files")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy of the linear probe whose minutes are told")
    parser.add_argument("--patches", type=int, nargs="+", default=PATCHES, help="patch size of each stage")
    parser.add_argument("--epochs", type=int, nargs="+", default=EPOCHS, help="length of each stage")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="schedule of the rate in each stage")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="share of the rate in each stage")
    parser.add_argument("--looks", type=int, default=12, help="at held-out images, in a stage")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="ours", help="what hides and what is predicted")
    parser.add_argument("--set", action="append", nargs=2, default=[], metavar=("SETTING", "VALUE"), dest="changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny network and embedded images: seconds on a CPU")
    options = parser.parse_args(arguments)
    try:
        require(0 < options.target <= 1, "target", "an accuracy in (0, 1]", options.target)
        stages, protocols = stages_of(options), only(preset("strong"), ["linear", "knn"])
        require_empty(options.out)
        splits = load(stages[0].data)
        if options.tiny:
            splits, protocols = _few(splits), demo_protocols()
        print(f"written to {speedrun(stages, splits, protocols, options.target, options.out)}")
    except UserError as error:
        print(f"speedrun: error: {error}", file=sys.stderr)
        return 2
    return 0


def stages_of(options: argparse.Namespace) -> list[Config]:
    """The settings of each stage, but for the encoder that it starts from."""
    patches, count = options.patches, len(options.patches)
    given = {"epochs": options.epochs, "schedules": options.schedules, "rates": options.rates}
    for name, values in given.items():
        require(len(values) == count, name, f"one for each of the patches ({count})", values)
    require(len(set(patches)) == count, "patches", "no two alike", patches)
    require(options.looks >= 1, "looks", "at least 1", options.looks)
    recipe, changes = RECIPES[options.recipe](), FRONTIER | (TINY if options.tiny else {})
    if recipe.objective.target == "patches":
        changes = {key: value for key, value in changes.items() if key != "space__name"}
    shared = replace(recipe, **changes, data__root=options.root, train__seed=options.seed)
    shared = with_settings(shared, dict(options.changed))
    return [
        replace(
            shared,
            encoder__patch_size=patch,
            optim__schedule=schedule,
            optim__base_lr=rate * (shared.optim.base_lr or 0.0),
            optim__warmup_epochs=WARMUP * epochs,
            train__epochs=epochs,
            probe__every=max(1, epochs // options.looks),
        )
        for patch, epochs, schedule, rate in zip(patches, *given.values(), strict=True)
    ]


def _few(splits: Splits) -> Splits:
    parts = (splits.train, splits.test)
    train, test = (part and part.take(torch.linspace(0, len(part) - 1, TINY_IMAGES).long().numpy()) for part in parts)
    assert train is not None
    return Splits(splits.name, train, None, test)


if __name__ == "__main__":
    raise SystemExit(main())
