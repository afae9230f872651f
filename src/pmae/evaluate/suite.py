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
from pmae.evaluate.features import EvaluationData, Processes, Representation, describe, set_up, shape_of, stacked
from pmae.evaluate.finetune import finetune
from pmae.evaluate.metrics import Predictions, SeedPredictions, score_of
from pmae.evaluate.online import nearest, votes
from pmae.evaluate.probes import ProbeTask, choose, train_together
from pmae.evaluate.protocols import FinetuneProtocol, KnnProtocol, ProbeProtocol, Protocols
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
    data = set_up(represent, splits, standardize, protocols.validation_share, device, compile, keep_on, processes)
    say("features")
    with data.timed("features"):
        data.features = {name: data.extractor(images) for name, images in data.parts.items()}
    shapes = {name: shape_of(value) for name, value in data.features["train"].items()}
    made: list[Predictions] = []
    if protocols.probe:
        say("probes")
        made += _probes(data, protocols.probe, seeds)
    if protocols.knn:
        say("neighbours")
        made += _knn(data, protocols.knn)
    if protocols.finetune:
        say("fine-tuning")
        made += _finetune(data, protocols.finetune, seeds, folder, compile)
    say("metrics")
    with data.timed("metrics"):
        scores = [score_of(one, data.labels[one.split], data.classes, protocols.resamples) for one in made]
    return Evaluation(
        method,
        protocols.name,
        describe(splits, data),
        tuple(scores),
        epoch,
        settings=to_dict(protocols),
        seeds=tuple(seeds),
        features=shapes,
        seconds={what: round(spent, 3) for what, spent in data.seconds.items()},
        notes=(*getattr(represent, "notes", ()), *data.notes),
    )


def _probes(data: EvaluationData, config: ProbeProtocol, seeds: Sequence[int]) -> list[Predictions]:
    """Linear and MLP heads for every seed, each with the settings that were best on the validation part."""
    with data.timed("probes"):
        poolings = _poolings(data, config.poolings)
        task = ProbeTask(data.target(), len(data.classes), poolings, data.represent.width)
        plain = {name: stacked(found, poolings) for name, found in data.features.items()}
        found: dict[tuple[str, str, str], list[SeedPredictions]] = {}

        def source(epoch: int) -> Tensor:
            if config.augment is None:
                return plain["train"]
            return stacked(data.extractor(data.parts["train"], config.augment, (seeds[0], epoch)), poolings)

        parts = data.validation() if len(config.grid) > 1 else (task.labels, task.labels)
        grids = {seed: choose(source, plain["train"], task, parts, config, seed) for seed in seeds}
        for seed, probes in train_together(source, task, config, grids).items():
            for split in data.held_out:
                for (kind, pooling), scores in probes.scores(plain[split]).items():
                    lr, decay = grids[seed][kind, pooling][0]
                    one = SeedPredictions(seed, data.seen(scores[0]), {"base_lr": lr, "weight_decay": decay})
                    found.setdefault((kind, pooling, split), []).append(one)
    chosen_on = _chosen_on(data) if len(config.grid) > 1 else FIXED
    return [Predictions(*key, chosen_on, by_seed) for key, by_seed in found.items()]


def _knn(data: EvaluationData, config: KnnProtocol) -> list[Predictions]:
    """Majority vote with the k that was best on the validation part, and the accuracy of every k."""
    found = []
    with data.timed("knn"):
        labels, (fit, held) = data.target(), data.validation()
        ks = tuple(k for k in config.ks if k <= len(fit))
        require(bool(ks), "knn.ks", f"at most the images left to search ({len(fit)})", config.ks)
        if len(ks) < len(config.ks):
            data.notes.append(f"k-NN: k above {len(fit)}, the number of training images to search, is left out")
        for pooling, train in data.features["train"].items():
            search = nearest(train[fit], train[held], max(ks), config.metric)
            validation = _accuracies(votes(labels[fit][search], len(data.classes), ks), labels[held])
            best = max(ks, key=lambda k: (validation[k], -k))
            for split in data.held_out:
                search = nearest(train, data.features[split][pooling], max(ks), config.metric)
                shares = votes(labels[search], len(data.classes), ks)
                accuracy = _accuracies(shares, data.target(split))
                by_k = tuple(KAccuracy(k, accuracy[k], validation[k]) for k in ks)
                one = SeedPredictions(0, data.seen(shares[best]), {"k": best, "metric": config.metric})
                found.append(Predictions("knn", pooling, split, _chosen_on(data), [one], {"by_k": by_k}))
    return found


def _finetune(
    data: EvaluationData, config: FinetuneProtocol, seeds: Sequence[int], folder: Path | None, compile: bool | None
) -> list[Predictions]:
    """The encoder trained on with a linear head, for every seed."""
    represent = data.represent
    if not isinstance(represent, nn.Module) or not any(p.requires_grad for p in represent.parameters()):
        data.notes.append("fine-tuning is left out: the representation has nothing to train")
        return []
    found: dict[str, list[SeedPredictions]] = {split: [] for split in data.held_out}
    losses, pooling = [], config.pooling
    with data.timed("finetune"):
        for seed in seeds:
            place = folder / f"seed-{seed}" if folder else None
            made = finetune(
                represent,
                data.parts["train"],
                data.target(),
                len(data.classes),
                data.standardize,
                config,
                seed,
                place,
                compile,
            )
            # JSON has no number for the loss of training that diverged.
            losses.append(tuple(loss if math.isfinite(loss) else None for loss in made.losses))
            pooling = made.classifier.pooling
            for split in data.held_out:
                scores = data.seen(made.scores(data.parts[split], data.standardize))
                chosen = {"base_lr": config.base_lr, "weight_decay": config.weight_decay}
                found[split].append(SeedPredictions(seed, scores, chosen))
    more = {"losses": tuple(losses)}
    return [Predictions("finetune", pooling, split, FIXED, by_seed, more) for split, by_seed in found.items()]


def _poolings(data: EvaluationData, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The wanted representations that there are; all that there are where none of the wanted is (a baseline)."""
    offered = tuple(data.features["train"])
    return tuple(name for name in wanted if name in offered) or offered


def _accuracies(shares: dict[int, Tensor], labels: Tensor) -> dict[int, float]:
    return {k: float((share.argmax(1) == labels).float().mean()) for k, share in shares.items()}


def _chosen_on(data: EvaluationData) -> str:
    _, held = data.validation()
    return f"{len(held)} images ({data.share:.0%}, stratified) split off the training part; then refitted on all of it"
