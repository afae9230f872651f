"""How many labels a representation saves: test accuracy against the number of labelled images, by random draws.

    python -m benchmarks.labels measure SET START [--run FOLDER] --out labels.jsonl
    python -m benchmarks.labels tables labels.jsonl

START names a row: `raw pixels`, `PCA features`, `from scratch` (random weights), or any name for the encoder of a run.
Each is measured by a linear head on frozen features (logistic regression, one fixed penalty) and, where there are
weights to train, by fine-tuning all of them as `pmae finetune` does, but for a fixed number of steps: with one label a
class there is nothing to stop on. Nothing is chosen by a label outside the draw; test images are scored once.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmae.classify import FinetuneConfig
from pmae.classify.fit import protocol_of
from pmae.config import DataConfig, EncoderConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, fit_standardize
from pmae.data.images import Splits
from pmae.data.sets import load
from pmae.evaluate.baselines import RawPixels, fit_pca, random_weights
from pmae.evaluate.features import batch_of, budgets, extract
from pmae.evaluate.finetune import finetune
from pmae.evaluate.probes import accuracy, logistic_regression, nearest, statistics, votes
from pmae.evaluate.protocols import FewLabelsProtocol
from pmae.models import build_encoder
from pmae.results import PRIMARY
from pmae.train.checkpoint import load_encoder
from pmae.train.environment import describe_environment, pick_device

BUDGETS = FewLabelsProtocol(shots=(1, 5, 20), fractions=(0.01, 0.1), draws=3)
ALL = "100% labels"
STEPS = {"few": 500, "all": 3000}
"""Of fine-tuning, with a part of the labels and with all of them."""
NEIGHBOURS, PENALTY, SEED = 20, 1.0, 0
PIXELS, COMPONENTS, SCRATCH = "raw pixels", "PCA features", "from scratch"
Key = tuple[str, str, int]  # head, budget and draw


@dataclass(frozen=True)
class Start:
    """A representation of the images of a set: features to be frozen, and weights to be trained, if it has any."""

    represent: Any
    standardize: Standardize
    pooling: str

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.represent.parameters())


def load_start(name: str, run: Path | None, splits: Splits, device: torch.device) -> Start:
    """The representation of this name; that of a run has the run's own statistics of pixels."""
    if run is not None:
        _, encoder, standardize = load_encoder(run)
        return Start(encoder.to(device), standardize.to(device), PRIMARY)
    images, shape = Batches(splits.train.images, device), splits.train.shape
    standardize = fit_standardize(images, "channel").to(device)
    encoder = random_weights(lambda: build_encoder(EncoderConfig(patch_size=shape[1] // 8), shape), SEED).to(device)
    if name == SCRATCH:
        return Start(encoder, standardize, PRIMARY)
    if name == PIXELS:
        return Start(RawPixels(shape, encoder.width), standardize, "pixels")
    return Start(fit_pca(images, standardize, shape, encoder.width).to(device), standardize, "pca")


def measure(splits: Splits, start: Start, steps: dict[str, int], done: set[Key]) -> Iterator[dict[str, Any]]:
    """One row for every head, budget and draw that is not done yet; fine-tuned where there are steps."""
    device, classes = start.standardize.mean.device, len(splits.train.classes)
    test = splits.test
    assert test is not None
    assert test.labels is not None
    assert splits.train.labels is not None
    labels, truth = (torch.from_numpy(part).to(device) for part in (splits.train.labels, test.labels))
    images, held = (Batches(part.images, device) for part in (splits.train, test))
    found = (extract(start.represent, part, start.standardize)[start.pooling] for part in (images, held))
    seen, unseen = found
    # Standardized by all training images: statistics need no labels.
    mean, std = statistics(seen)
    x, y = (seen - mean) / std, (unseen - mean) / std
    near = votes(labels[nearest(seen, unseen, NEIGHBOURS)], classes, (NEIGHBOURS,))[NEIGHBOURS]
    yield {"how": "k-NN", "budget": ALL, "draw": 0, "labels": len(labels), **scores(near, truth)}
    draws = [*budgets(splits.train.labels, BUDGETS, SEED), (ALL, [np.arange(len(labels))])]
    for budget, drawn in draws:
        for draw, places in enumerate(drawn):
            index = torch.from_numpy(places).to(device)
            weights = logistic_regression(x[index], labels[index], classes, PENALTY)
            row = {"budget": budget, "draw": draw, "labels": len(places)}
            yield {"how": "linear", **row, **scores(y @ weights[:-1] + weights[-1], truth)}
            if steps and start.trainable and ("fine-tuned", budget, draw) not in done:
                head = _on_raw(weights, mean, std)
                count = steps["all" if budget == ALL else "few"]
                logits = tuned(start, splits, places, head, classes, count, draw, held)
                yield {"how": "fine-tuned", **row, **scores(logits, truth)}


def _on_raw(weights: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (C, W) and biases of a head on standardized features, for features as they come."""
    weight = (weights[:-1] / std.T).T.contiguous()
    return weight, weights[-1] - weight @ mean[0]


def tuned(
    start: Start,
    splits: Splits,
    places: np.ndarray,
    head: tuple[Tensor, Tensor],
    classes: int,
    steps: int,
    seed: int,
    held: Batches,
) -> Tensor:
    """Probabilities of the held-out images after so many steps from the linear head, as `pmae finetune` takes them."""
    part = splits.train.take(places)
    assert part.labels is not None
    config = FinetuneConfig(augment="crops")
    epochs = max(1, round(steps / (len(part) // batch_of(len(part), config.batch_size))))
    protocol = protocol_of(replace(config, epochs=epochs), part)
    # With one label an image and so few steps, an average over a thousand of them would still be the start.
    protocol = replace(protocol, ema_decay=0.0)
    device = held.device
    labels = torch.from_numpy(part.labels).to(device)
    images = Batches(part.images, device)
    made = finetune(start.represent, images, labels, classes, start.standardize, protocol, seed, head=head)
    return made.scores(held, start.standardize)


def scores(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Accuracy, and the mean of the classes' recalls, in percent."""
    right = found.argmax(1) == truth
    recalls = [right[truth == label].float().mean() for label in truth.unique()]
    return {"accuracy": 100 * accuracy(found, truth), "balanced": 100 * float(torch.stack(recalls).mean())}


def run(options: argparse.Namespace) -> None:
    """Measure one start on one set and append each row as it comes; those that are there already are left."""
    out, device = Path(options.out), pick_device(options.device)
    name = options.name or Path(options.set).stem
    splits = load(DataConfig(options.set))
    splits = replace(splits, train=with_classes(splits)) if not splits.train.classes else splits
    start = load_start(options.start, Path(options.run) if options.run else None, splits, device)
    common = {"set": name, "start": options.start, "commit": describe_environment(splits, device)["commit"]}
    done = {_key(row) for row in read(out) if (row["set"], row["start"]) == (name, options.start)}
    steps = {} if options.frozen else {"few": options.steps, "all": options.steps_all}
    with out.open("a") as file:
        for row in measure(splits, start, steps, done):
            if _key(row) not in done:
                file.write(json.dumps({**common, **row}) + "\n")
                file.flush()


def _key(row: dict[str, Any]) -> Key:
    return row["how"], row["budget"], row["draw"]


def with_classes(splits: Splits) -> Any:
    assert splits.train.labels is not None
    return replace(splits.train, classes=tuple(map(str, range(int(splits.train.labels.max()) + 1))))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(rows: list[dict[str, Any]], metric: str) -> str:
    """For each set a table of starts by budgets: the mean over the draws, and the lowest and highest of them."""
    parts = []
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        columns = list(dict.fromkeys(row["budget"] for row in own if row["how"] == "linear"))
        counts = {c: next(row["labels"] for row in own if row["budget"] == c) for c in columns}
        lines = [f"| {name} | head | {' | '.join(f'{c} ({counts[c]:,})' for c in columns)} | k-NN, all |"]
        lines.append("|---|---|" + "---|" * (len(columns) + 1))
        for start, how in dict.fromkeys((row["start"], row["how"]) for row in own if row["how"] != "k-NN"):
            cells = [
                _cell([r[metric] for r in own if (r["start"], r["how"], r["budget"]) == (start, how, c)])
                for c in columns
            ]
            near = [r[metric] for r in own if (r["start"], r["how"]) == (start, "k-NN")] if how == "linear" else []
            lines.append(f"| {start} | {how} | {' | '.join(cells)} | {_cell(near)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.1f}{spread}"


def main() -> None:
    """Measure, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("set", help="an .npz file or a named set with labels and a test split")
    one.add_argument("start")
    one.add_argument("--run", help="run folder whose encoder it is")
    one.add_argument("--name", help="of the set; its file's if not given")
    one.add_argument("--out", default="labels.jsonl")
    one.add_argument("--steps", type=int, default=STEPS["few"])
    one.add_argument("--steps-all", type=int, default=STEPS["all"])
    one.add_argument("--frozen", action="store_true", help="linear heads and k-NN alone, without fine-tuning")
    one.add_argument("--device", default="auto")
    table = commands.add_parser("tables")
    table.add_argument("file")
    table.add_argument("--metric", choices=("accuracy", "balanced"), default="accuracy")
    options = parser.parse_args()
    if options.command == "measure":
        run(options)
    else:
        print(tables(read(Path(options.file)), options.metric))


if __name__ == "__main__":
    main()
