"""Every protocol on one representation, as one `Evaluation`: features once, then probes, k-NN and fine-tuning."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pmae.config_file import to_dict
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits, fingerprint
from pmae.errors import UserError, require
from pmae.evaluate.duplicates import duplicates
from pmae.evaluate.features import (
    Extractor,
    LastBlocks,
    Representation,
    budgets,
    complete,
    effective_rank,
    hold_out,
    short_budgets,
)
from pmae.evaluate.finetune import finetune
from pmae.evaluate.metrics import SeedPredictions, effective_number, harder, score_of
from pmae.evaluate.probes import (
    ProbeTask,
    accuracy,
    choose,
    logistic_regression,
    nearest,
    statistics,
    train_probes,
    votes,
)
from pmae.evaluate.progress import Pace, Stages
from pmae.evaluate.protocols import FewLabelsProtocol, FinetuneProtocol, KnnProtocol, ProbeProtocol, Protocols
from pmae.models import Encoder
from pmae.results import BASELINES, PRIMARY, Duplicates, EvaluatedData, Evaluation, FeatureShape, KAccuracy, Score
from pmae.train.distributed import ONE_PROCESS, World

FIXED = "fixed by the preset"
SETTING = ("base_lr", "weight_decay")
WIDEST = 4096  # features wider than this have no effective rank: it takes the eigenvalues of their Gram matrix


def evaluate(
    represent: Representation,
    splits: Splits,
    standardize: Standardize,
    protocols: Protocols,
    method: str,
    epoch: int = 0,
    seeds: Sequence[int] = (0,),
    folder: Path | None = None,
    say: Callable[[str], None] = lambda message: None,
    world: World = ONE_PROCESS,
    shared: dict[str, Duplicates] | None = None,
) -> Evaluation:
    """Score what `method` made in `epoch` epochs by the protocols; `folder` makes fine-tuning resumable.

    Several processes that call this alike compute features together; heads are trained in each, alike. `shared` are the
    duplicates between the splits, where they were looked for before.
    """
    distinct = len(set(seeds)) == len(seeds) > 0 and min(seeds) >= 0
    require(distinct, "seeds", "one whole number from 0 on or more, no two alike", tuple(seeds))
    alone = world.size == 1 or not protocols.finetune
    require(alone, "protocols", f"linear, mlp or knn in several processes ({world.size})", "finetune")
    splits, label = complete(splits), f"{method} epoch {epoch}" if epoch else method
    if protocols.layers > 1 and isinstance(represent, Encoder):
        represent = LastBlocks(represent, protocols.layers)
    data = EvaluationData(represent, splits, standardize, protocols, world)
    stages = Stages(label, say if world.main else lambda message: None)
    with stages.next("features", sum(map(len, data.parts.values())), "images") as pace:
        data.features = {name: data.extractor(images, seen=pace.add) for name, images in data.parts.items()}
        shapes = {name: shape_of(value) for name, value in data.features["train"].items()}
    if folder and protocols.finetune:
        # One a preset and data set, two of which may share a name: each is a fine-tuning of its own to resume.
        told = f"{label} {protocols.name} {splits.name} {fingerprint(splits.train)[:8]}"
        folder = folder / re.sub(r"[^\w.]+", "-", told)
    scores = _scores(data, protocols, tuple(seeds), folder, stages)
    if method not in BASELINES:
        data.notes += [note for score in scores if score.pooling == PRIMARY for note in harder(score, label)]
    return Evaluation(
        method,
        protocols.name,
        data.description(splits, shared),
        tuple(scores),
        epoch,
        settings=to_dict(protocols),
        seeds=tuple(seeds),
        features=shapes,
        seconds=stages.seconds,
        notes=(*getattr(represent, "notes", ()), *data.notes),
    )


class EvaluationData:
    """What all protocols of an evaluation share: the images on the device, their labels and features."""

    def __init__(
        self, represent: Any, splits: Splits, standardize: Standardize, protocols: Protocols, world: World
    ) -> None:
        self.represent, self.standardize, self.protocols = represent, standardize, protocols
        self.device = standardize.mean.device
        self.extractor = Extractor(represent, standardize, self.device, world=world)
        self.sets = splits.parts
        self.held_out = [name for name in self.sets if name != "train"]
        self.labels = {name: _labels(part, name) for name, part in self.sets.items()}
        self.parts = {name: Batches(part.images, self.device) for name, part in self.sets.items()}
        self.features: dict[str, dict[str, Tensor]] = {}
        count = max(len(splits.train.classes), 1 + max(int(numbers.max()) for numbers in self.labels.values()))
        named = len(splits.train.classes) == count
        self.classes = splits.train.classes if named else tuple(map(str, range(count)))
        present = np.unique(self.labels["train"])
        self.notes = ["the training part has a single class: every answer is that class"] if len(present) == 1 else []
        for name in self.held_out:
            missing = [self.classes[c] for c in np.setdiff1d(self.labels[name], present)]
            self.notes += [f"class {c!r} is in {name} but not in train, and cannot be learned" for c in missing]
        if protocols.few:
            self.notes += short_budgets(self.labels["train"], self.classes, protocols.few)

    def target(self, part: str = "train") -> Tensor:
        return torch.from_numpy(self.labels[part]).to(self.device)

    def validation(self) -> tuple[Tensor, Tensor, str]:
        """Training positions to fit on, to choose settings on, and what is said of it; for all protocols alike.

        Split off train even where there is a val part: that is scored as test is (the paper tests the medical sets on
        it), and no image that is scored may choose.
        """
        share = self.protocols.validation_share
        halves = hold_out(self.labels["train"], share, groups=self.sets["train"].groups)
        kept, held = (torch.from_numpy(part).to(self.device) for part in halves)
        whole = "" if self.sets["train"].groups is None else ", whole groups"
        part = f"{len(held)} images ({share:.0%}, stratified{whole}) split off the training part"
        return kept, held, f"{part}; then refitted on all of it"

    def score(self, split: str, predictions: Sequence[tuple[int, Tensor, dict[str, Any]]], **named: Any) -> Score:
        """The score of class scores (N, C) by seed, with the settings that were chosen for it."""
        unseen = np.setdiff1d(np.arange(len(self.classes)), self.labels["train"])
        by_seed = [SeedPredictions(seed, scores.cpu().numpy(), chosen) for seed, scores, chosen in predictions]
        for one in by_seed:
            one.scores[:, unseen] = 0  # an untrained output is no answer
        truth = self.labels[split]
        resamples, groups = self.protocols.resamples, self.sets[split].groups
        score = score_of(by_seed, truth, self.classes, resamples, groups, split=split, **named)
        predicted = [np.where(np.isfinite(one.scores).all(), one.scores.argmax(1), -1) for one in by_seed]
        return replace(score, answers=np.stack([truth, *predicted]).astype(np.int16), groups=groups)

    def description(self, splits: Splits, shared: dict[str, Duplicates] | None) -> EvaluatedData:
        """What a reader must know of the data: sizes, classes, duplicates, and the score of the commonest class."""
        held_out = {name: self.sets[name] for name in self.held_out}
        commonest = np.bincount(self.labels["train"]).argmax()
        return EvaluatedData(
            splits.name,
            tuple(self.classes),
            **{name: len(part) for name, part in self.sets.items()},
            notes=tuple(splits.notes),
            duplicates=duplicates(splits.train, held_out, self.device) if shared is None else shared,
            majority={name: float((self.labels[name] == commonest).mean()) for name in self.held_out},
            fingerprint=fingerprint(splits),
        )


def _labels(part: ImageSet, name: str) -> np.ndarray:
    labels = part.labels
    if labels is None or not len(labels):
        raise UserError(f"the {name} split must have labelled images, got none")
    whole = bool(labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer) and labels.min() >= 0)
    require(whole, f"labels of {name}", "whole class numbers from 0 on, of shape (N,)", (labels.dtype, labels.shape))
    return labels.astype(np.int64)


def shape_of(features: Tensor) -> FeatureShape:
    count, width = features.shape
    bad = int((~features.isfinite()).any(1).sum())
    require(bad == 0, "features", f"finite for each of {count:,} training images", f"NaN or infinity for {bad:,}")
    return FeatureShape(width, effective_rank(features) if width <= WIDEST else None)


def _scores(
    data: EvaluationData, protocols: Protocols, seeds: tuple[int, ...], folder: Path | None, stages: Stages
) -> list[Score]:
    """Those of every protocol that is asked for, one after another."""
    scores: list[Score] = []
    if protocols.probe:
        with stages.next("probes"):
            scores += _probes(data, protocols.probe, seeds)
    if protocols.knn:
        with stages.next("knn"):
            scores += _knn(data, protocols.knn)
    if protocols.few:
        with stages.next("few labels"):
            scores += _few_labels(data, protocols.few, seeds[0])
    if protocols.finetune:
        with stages.next("finetune", protocols.finetune.epochs * len(seeds), "epochs") as pace:
            scores += _finetune(data, protocols.finetune, seeds, folder, pace)
    return scores


def _probes(data: EvaluationData, config: ProbeProtocol, seeds: tuple[int, ...]) -> list[Score]:
    """Linear and MLP heads for every seed, each with the settings that were best on the validation part."""
    offered = tuple(data.features["train"])
    # A baseline has none of the wanted poolings: what it has is probed.
    poolings = tuple(name for name in config.poolings if name in offered) or offered
    task = ProbeTask(data.target(), len(data.classes), poolings, data.represent.width, seeds)
    plain = {part: torch.stack([found[name] for name in poolings]) for part, found in data.features.items()}

    def source(epoch: int) -> Tensor:
        if config.augment is None:
            return plain["train"]
        found = data.extractor(data.parts["train"], config.augment, (seeds[0], epoch))
        return torch.stack([found[name] for name in poolings])

    grid, chosen_on = task.grid(config), FIXED
    if len(config.grid) > 1:
        fit, held, chosen_on = data.validation()
        grid = choose(source, plain["train"], task, (fit, held), config)
    probes = train_probes(source, task, config, grid)
    scores = []
    for split in data.held_out:
        found = probes.scores(plain[split])
        for kind, pooling in product(config.kinds, poolings):
            chosen = {seed: dict(zip(SETTING, grid[kind, seed, pooling][0], strict=True)) for seed in seeds}
            by_seed = [(seed, found[kind, seed, pooling][0], chosen[seed]) for seed in seeds]
            scores.append(data.score(split, by_seed, protocol=kind, pooling=pooling, chosen_on=chosen_on))
    return scores


def _knn(data: EvaluationData, config: KnnProtocol) -> list[Score]:
    labels, (fit, held, chosen_on) = data.target(), data.validation()
    groups = None if (own := data.sets["train"].groups) is None else own[held.cpu().numpy()]
    ks = tuple(k for k in config.ks if k <= len(fit))
    require(bool(ks), "knn.ks", f"at most the images left to search ({len(fit)})", config.ks)
    if len(ks) < len(config.ks):
        data.notes.append(f"k-NN: k above {len(fit)}, the number of training images to search, is left out")

    def search(bank: Tensor, bank_labels: Tensor, queries: Tensor) -> dict[int, Tensor]:
        return votes(bank_labels[nearest(bank, queries, max(ks))], len(data.classes), ks)

    scores = []
    for pooling, train in data.features["train"].items():
        shares = search(train[fit], labels[fit], train[held])
        right = {k: (shares[k].argmax(1) == labels[held]).cpu().numpy() for k in ks}
        validation = {k: float(right[k].mean()) for k in ks}
        number = {k: max(1, round(effective_number(right[k], groups))) for k in ks}
        best = max(ks, key=lambda k: (validation[k], -k))
        for split in data.held_out:
            shares, truth = search(train, labels, data.features[split][pooling]), data.target(split)
            by_k = tuple(KAccuracy(k, accuracy(shares[k], truth), validation[k], number[k]) for k in ks)
            named = {"protocol": "knn", "pooling": pooling, "chosen_on": chosen_on, "by_k": by_k}
            scores.append(data.score(split, [(0, shares[best], {"k": best})], **named))
    return scores


def _few_labels(data: EvaluationData, config: FewLabelsProtocol, seed: int) -> list[Score]:
    """Logistic regression for every budget and pooling; a score's seeds are the draws of the labelled images."""
    labels, classes, scores = data.target(), len(data.classes), list[Score]()
    for pooling, train in data.features["train"].items():
        # Standardized by all training images: statistics need no labels.
        mean, std = statistics(train)
        x = {split: (found[pooling] - mean) / std for split, found in data.features.items()}
        for name, draws in budgets(data.labels["train"], config, seed):
            places = [torch.from_numpy(own).to(labels.device) for own in draws]
            heads = [logistic_regression(x["train"][own], labels[own], classes, config.penalty) for own in places]
            chosen = {"labels": len(draws[0]), "penalty": config.penalty}
            named = {"protocol": name, "pooling": pooling, "chosen_on": f"{len(draws)} draws of the labelled images"}
            for split in data.held_out:
                logits = [x[split] @ weights[:-1] + weights[-1] for weights in heads]
                by_draw = [(number, found.softmax(1), chosen) for number, found in enumerate(logits)]
                scores.append(data.score(split, by_draw, **named))
    return scores


def _finetune(
    data: EvaluationData, config: FinetuneProtocol, seeds: Sequence[int], folder: Path | None, pace: Pace
) -> list[Score]:
    represent = data.represent
    if not isinstance(represent, nn.Module) or not any(p.requires_grad for p in represent.parameters()):
        data.notes.append("fine-tuning is left out: the representation has nothing to train")
        return []
    chosen = {name: getattr(config, name) for name in SETTING}
    found: dict[str, list[tuple[int, Tensor, dict[str, Any]]]] = {split: [] for split in data.held_out}
    named: dict[str, Any] = {"protocol": "finetune", "chosen_on": FIXED, "losses": ()}
    for seed in seeds:
        place = folder / f"seed-{seed}" if folder else None
        images, labels, classes = data.parts["train"], data.target(), len(data.classes)
        given = (represent, images, labels, classes, data.standardize, config, seed, place)
        made = finetune(*given, on_epoch=lambda epoch, loss: pace.add())
        # JSON has no number for the loss of training that diverged.
        named["losses"] += (tuple(loss if math.isfinite(loss) else None for loss in made.losses),)
        named["pooling"] = made.classifier.pooling
        for split, by_seed in found.items():
            by_seed.append((seed, made.scores(data.parts[split], data.standardize), chosen))
    return [data.score(split, by_seed, **named) for split, by_seed in found.items()]
