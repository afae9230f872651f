"""Every protocol on one representation: `evaluate` returns plain JSON values, which the report reads.

format        1
data          name, classes (names), train / val / test (numbers of images, null if absent), notes (list of str),
              duplicates {split: {count, pairs: [{train, held_out}]}}: held-out images whose bytes train holds too,
              majority {split: accuracy of always answering the commonest training class}
preset        name of the preset; settings: all of its fields
seeds         list of int
features      {pooling: {width, effective_rank (null if wider than 4096)}} of the training images
results       list of entries, one per protocol, pooling and split:
    protocol  linear | mlp | knn | finetune
    pooling   cls | mean | pixels | pca
    split     val | test
    images    how many were scored
    metrics   {accuracy, balanced_accuracy, macro_auc, macro_f1}: each {value, low, high, std}; value and 95%
              bootstrap interval averaged over the seeds, std between seeds (null for one); null where undefined
    chosen_on how the settings were chosen
    runs      one per seed: {seed, chosen {base_lr, weight_decay} or {k}, metrics {name: {value, low, high}} or null}
    per_class [{class, precision, recall, support}] and confusion (rows true, columns predicted): the first seed
    notes     list of str
    by_k      knn only: [{k, accuracy, validation}] with accuracy on this split and on the validation part
    losses    finetune only: mean training loss of each epoch, for each seed
seconds       {features, probes, knn, finetune, metrics}
notes         list of str
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pmae.config_file import to_dict
from pmae.data.augment import Standardize
from pmae.data.images import Splits
from pmae.errors import require
from pmae.evaluate.features import ALL, Bench, Part, Representation, describe, set_up, shape_of, stacked
from pmae.evaluate.finetune import finetune
from pmae.evaluate.knn import nearest, votes
from pmae.evaluate.probes import Task, choose, train_together
from pmae.evaluate.protocols import FinetuneConfig, KnnConfig, ProbeConfig, Protocols
from pmae.evaluate.results import Measured, Run, entry
from pmae.evaluate.splits import complete

FIXED = "fixed by the preset"


def evaluate(
    represent: Representation,
    splits: Splits,
    standardize: Standardize,
    protocols: Protocols,
    *,
    device: torch.device,
    seeds: Sequence[int] = (0,),
    folder: Path | None = None,
    compile: bool | None = None,
    keep_on: Literal["auto", "device", "host"] = "auto",
    say: Callable[[str], None] = lambda message: None,
    part: Part = ALL,
) -> dict[str, Any]:
    """Run the protocols and return the results described above; `folder` makes fine-tuning resumable.

    `represent` and `standardize` are on `device`; `say` hears what is being done. Several processes that call this
    alike compute features together (`part`); heads are trained in each, alike.
    """
    require(len(set(seeds)) == len(seeds) > 0, "seeds", "at least one number, no two alike", tuple(seeds))
    splits = complete(splits)
    bench = set_up(represent, splits, standardize, protocols.validation_share, device, compile, keep_on, part)
    say("features")
    with bench.timed("features"):
        bench.features = {name: bench.extractor(images) for name, images in bench.parts.items()}
    shapes = {name: shape_of(value) for name, value in bench.features["train"].items()}
    measured: list[Measured] = []
    if protocols.probe:
        say("probes")
        measured += _probes(bench, protocols.probe, seeds)
    if protocols.knn:
        say("neighbours")
        measured += _knn(bench, protocols.knn)
    if protocols.finetune:
        say("fine-tuning")
        measured += _finetune(bench, protocols.finetune, seeds, folder, compile)
    say("metrics")
    with bench.timed("metrics"):
        entries = [entry(m, bench.labels[m.split], bench.classes, protocols.resamples) for m in measured]
    return {
        "format": 1,
        "data": describe(splits, bench),
        "preset": protocols.name,
        "settings": to_dict(protocols),
        "seeds": list(seeds),
        "features": shapes,
        "results": entries,
        "seconds": {what: round(spent, 3) for what, spent in bench.seconds.items()},
        "notes": [*getattr(represent, "notes", ()), *bench.notes],
    }


def _probes(bench: Bench, config: ProbeConfig, seeds: Sequence[int]) -> list[Measured]:
    """Linear and MLP heads for every seed, each with the settings that were best on the validation part."""
    with bench.timed("probes"):
        poolings = _poolings(bench, config.poolings)
        task = Task(bench.target(), len(bench.classes), poolings, bench.represent.width)
        plain = {name: stacked(found, poolings) for name, found in bench.features.items()}
        runs: dict[tuple[str, str, str], list[Run]] = {}

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
                    run = Run(seed, bench.seen(scores[0]), {"base_lr": lr, "weight_decay": decay})
                    runs.setdefault((kind, pooling, split), []).append(run)
    chosen_on = _chosen_on(bench) if len(config.grid) > 1 else FIXED
    return [Measured(*key, chosen_on, found) for key, found in runs.items()]


def _knn(bench: Bench, config: KnnConfig) -> list[Measured]:
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
                by_k = [{"k": k, "accuracy": accuracy[k], "validation": validation[k]} for k in ks]
                run = Run(0, bench.seen(shares[best]), {"k": best, "metric": config.metric})
                found.append(Measured("knn", pooling, split, _chosen_on(bench), [run], {"by_k": by_k}))
    return found


def _finetune(
    bench: Bench, config: FinetuneConfig, seeds: Sequence[int], folder: Path | None, compile: bool | None
) -> list[Measured]:
    """The encoder trained on with a linear head, for every seed."""
    represent = bench.represent
    if not isinstance(represent, nn.Module) or not any(p.requires_grad for p in represent.parameters()):
        bench.notes.append("fine-tuning is left out: the representation has nothing to train")
        return []
    runs: dict[str, list[Run]] = {split: [] for split in bench.held_out}
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
            losses.append(list(made.losses))
            pooling = made.classifier.pooling
            for split in bench.held_out:
                scores = bench.seen(made.scores(bench.parts[split], bench.standardize))
                runs[split].append(Run(seed, scores, {"base_lr": config.base_lr, "weight_decay": config.weight_decay}))
    return [Measured("finetune", pooling, split, FIXED, found, {"losses": losses}) for split, found in runs.items()]


def _poolings(bench: Bench, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The wanted representations that there are; all that there are where none of the wanted is (a baseline)."""
    offered = tuple(bench.features["train"])
    return tuple(name for name in wanted if name in offered) or offered


def _accuracies(shares: dict[int, Tensor], labels: Tensor) -> dict[int, float]:
    return {k: float((share.argmax(1) == labels).float().mean()) for k, share in shares.items()}


def _chosen_on(bench: Bench) -> str:
    _, held = bench.validation()
    return f"{len(held)} images ({bench.share:.0%}, stratified) split off the training part; then refitted on all of it"
