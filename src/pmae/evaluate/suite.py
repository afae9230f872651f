"""Every protocol on one representation: probes, k-NN and fine-tuning, as one `Evaluation`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from pmae.config_file import to_dict
from pmae.data.augment import Standardize
from pmae.data.images import Splits
from pmae.errors import require
from pmae.evaluate.features import Bench, Processes, Representation, describe, set_up, shape_of, stacked
from pmae.evaluate.finetune import finetune
from pmae.evaluate.knn import nearest, votes
from pmae.evaluate.probes import Task, choose, train_together
from pmae.evaluate.protocols import FinetuneConfig, KnnConfig, ProbeConfig, Protocols
from pmae.evaluate.results import Predictions, SeedPredictions, score_of
from pmae.evaluate.splits import complete
from pmae.results import Evaluation, KAccuracy

FIXED = "fixed by the preset"


def evaluate(
    represent: Representation,
    splits: Splits,
    standardize: Standardize,
    protocols: Protocols,
    *,
    method: str,
    epoch: int = 0,
    device: torch.device,
    seeds: Sequence[int] = (0,),
    folder: Path | None = None,
    compile: bool | None = None,
    keep_on: Literal["auto", "device", "host"] = "auto",
    say: Callable[[str], None] = lambda message: None,
    processes: Processes | None = None,
) -> Evaluation:
    """Score what `method` made in `epoch` epochs by the protocols; `folder` makes fine-tuning resumable.

    `represent` and `standardize` are on `device`; `say` hears what is being done. Several processes that call this
    alike compute features together (`processes`); heads are trained in each, alike.
    """
    require(len(set(seeds)) == len(seeds) > 0, "seeds", "at least one number, no two alike", tuple(seeds))
    splits = complete(splits)
    bench = set_up(represent, splits, standardize, protocols.validation_share, device, compile, keep_on, processes)
    say("features")
    with bench.timed("features"):
        bench.features = {name: bench.extractor(images) for name, images in bench.parts.items()}
    shapes = {name: shape_of(value) for name, value in bench.features["train"].items()}
    made: list[Predictions] = []
    if protocols.probe:
        say("probes")
        made += _probes(bench, protocols.probe, seeds)
    if protocols.knn:
        say("neighbours")
        made += _knn(bench, protocols.knn)
    if protocols.finetune:
        say("fine-tuning")
        made += _finetune(bench, protocols.finetune, seeds, folder, compile)
    say("metrics")
    with bench.timed("metrics"):
        scores = [score_of(one, bench.labels[one.split], bench.classes, protocols.resamples) for one in made]
    return Evaluation(
        method,
        protocols.name,
        describe(splits, bench),
        tuple(scores),
        epoch,
        settings=to_dict(protocols),
        seeds=tuple(seeds),
        features=shapes,
        seconds={what: round(spent, 3) for what, spent in bench.seconds.items()},
        notes=(*getattr(represent, "notes", ()), *bench.notes),
    )


def _probes(bench: Bench, config: ProbeConfig, seeds: Sequence[int]) -> list[Predictions]:
    """Linear and MLP heads for every seed, each with the settings that were best on the validation part."""
    with bench.timed("probes"):
        poolings = _poolings(bench, config.poolings)
        task = Task(bench.target(), len(bench.classes), poolings, bench.represent.width)
        plain = {name: stacked(found, poolings) for name, found in bench.features.items()}
        found: dict[tuple[str, str, str], list[SeedPredictions]] = {}

        def source(epoch: int) -> Tensor:
            if config.augment is None:
                return plain["train"]
            return stacked(bench.extractor(bench.parts["train"], config.augment, (seeds[0], epoch)), poolings)

        parts = bench.validation() if len(config.grid) > 1 else (task.labels, task.labels)
        grids = {seed: choose(source, plain["train"], task, parts, config, seed) for seed in seeds}
        for seed, probes in train_together(source, task, config, grids).items():
            for split in bench.held_out:
                for (kind, pooling), scores in probes.scores(plain[split]).items():
                    lr, decay = grids[seed][kind, pooling][0]
                    one = SeedPredictions(seed, bench.seen(scores[0]), {"base_lr": lr, "weight_decay": decay})
                    found.setdefault((kind, pooling, split), []).append(one)
    chosen_on = _chosen_on(bench) if len(config.grid) > 1 else FIXED
    return [Predictions(*key, chosen_on, by_seed) for key, by_seed in found.items()]


def _knn(bench: Bench, config: KnnConfig) -> list[Predictions]:
    """Majority vote with the k that was best on the validation part, and the accuracy of every k."""
    found = []
    with bench.timed("knn"):
        labels, (fit, held) = bench.target(), bench.validation()
        ks = tuple(k for k in config.ks if k <= len(fit))
        require(bool(ks), "knn.ks", f"at most the images left to search ({len(fit)})", config.ks)
        if len(ks) < len(config.ks):
            bench.notes.append(f"k-NN: k above {len(fit)}, the number of training images to search, is left out")
        for pooling, train in bench.features["train"].items():
            search = nearest(train[fit], train[held], max(ks), config.metric)
            validation = _accuracies(votes(labels[fit][search], len(bench.classes), ks), labels[held])
            best = max(ks, key=lambda k: (validation[k], -k))
            for split in bench.held_out:
                search = nearest(train, bench.features[split][pooling], max(ks), config.metric)
                shares = votes(labels[search], len(bench.classes), ks)
                accuracy = _accuracies(shares, bench.target(split))
                by_k = tuple(KAccuracy(k, accuracy[k], validation[k]) for k in ks)
                one = SeedPredictions(0, bench.seen(shares[best]), {"k": best, "metric": config.metric})
                found.append(Predictions("knn", pooling, split, _chosen_on(bench), [one], {"by_k": by_k}))
    return found


def _finetune(
    bench: Bench, config: FinetuneConfig, seeds: Sequence[int], folder: Path | None, compile: bool | None
) -> list[Predictions]:
    """The encoder trained on with a linear head, for every seed."""
    represent = bench.represent
    if not isinstance(represent, nn.Module) or not any(p.requires_grad for p in represent.parameters()):
        bench.notes.append("fine-tuning is left out: the representation has nothing to train")
        return []
    found: dict[str, list[SeedPredictions]] = {split: [] for split in bench.held_out}
    losses, pooling = [], config.pooling
    with bench.timed("finetune"):
        for seed in seeds:
            place = folder / f"seed-{seed}" if folder else None
            made = finetune(
                represent,
                bench.parts["train"],
                bench.target(),
                len(bench.classes),
                bench.standardize,
                config,
                seed,
                place,
                compile,
            )
            # JSON has no number for the loss of training that diverged.
            losses.append(tuple(loss if math.isfinite(loss) else None for loss in made.losses))
            pooling = made.classifier.pooling
            for split in bench.held_out:
                scores = bench.seen(made.scores(bench.parts[split], bench.standardize))
                chosen = {"base_lr": config.base_lr, "weight_decay": config.weight_decay}
                found[split].append(SeedPredictions(seed, scores, chosen))
    more = {"losses": tuple(losses)}
    return [Predictions("finetune", pooling, split, FIXED, by_seed, more) for split, by_seed in found.items()]


def _poolings(bench: Bench, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The wanted representations that there are; all that there are where none of the wanted is (a baseline)."""
    offered = tuple(bench.features["train"])
    return tuple(name for name in wanted if name in offered) or offered


def _accuracies(shares: dict[int, Tensor], labels: Tensor) -> dict[int, float]:
    return {k: float((share.argmax(1) == labels).float().mean()) for k, share in shares.items()}


def _chosen_on(bench: Bench) -> str:
    _, held = bench.validation()
    return f"{len(held)} images ({bench.share:.0%}, stratified) split off the training part; then refitted on all of it"
