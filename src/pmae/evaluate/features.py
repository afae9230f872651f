"""Features of all images in one pass (no gradient, no masking, bfloat16 on CUDA); which images, in what order."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pmae.config import AugmentConfig
from pmae.data.augment import Standardize, crop, draw_boxes
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.data.streamed import shown
from pmae.errors import UserError, require
from pmae.evaluate.protocols import FewLabelsProtocol
from pmae.fast import accelerate
from pmae.models import Encoder
from pmae.results import LAST
from pmae.train.distributed import ONE_PROCESS, World

CHUNK = {"cuda": 4096, "cpu": 256}  # images that are encoded at once, at most
VALUES = 2**26  # pixels that are encoded at once, at most
HELD_OUT = 0.2  # share of the training images that are the test part of a set without one
ORDER, BOXES, HEADS, NOISE, MAGNITUDES, ERASING, MIXES = range(7)
"""Purposes of random numbers. Seeding: a generator is a function of a key such as (seed, purpose, epoch, step)."""


class Representation(Protocol):
    """What can be evaluated: an encoder, or a baseline that looks like one (in practice an `nn.Module`)."""

    training: bool

    @property
    def width(self) -> int:
        """Width of the hidden layers of an MLP head on it."""

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """One vector per standardized image, for each way of pooling."""

    def train(self, mode: bool = True) -> Any:
        """Switch between training and evaluation."""


class LastBlocks(nn.Module):
    """A ViT read after each of its last blocks: the mean patch tokens, side by side."""

    def __init__(self, encoder: Encoder, count: int) -> None:
        super().__init__()
        rule = f"at most the blocks of the encoder ({encoder.depth})"
        require(count <= encoder.depth, "layers", rule if encoder.is_vit else "1 for what is no ViT", count)
        self.encoder, self.count, self.width = encoder, count, count * encoder.width

    def features(self, x: Tensor) -> dict[str, Tensor]:
        layers = self.encoder.layers(x, self.count)[1]
        return {f"{LAST}{self.count}": torch.cat([tokens.mean(1) for tokens in layers], 1)}


@contextmanager
def evaluating(represent: Representation) -> Iterator[None]:
    """Evaluation mode and no gradients inside; the module's mode is put back after."""
    before = represent.training
    represent.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        represent.train(before)


class Extractor:
    """Features pass after pass; several processes divide the chunks among them."""

    def __init__(
        self, represent: Representation, standardize: Standardize, device: torch.device, world: World = ONE_PROCESS
    ) -> None:
        if isinstance(represent, nn.Module):
            accelerate(represent)
        self.represent, self.standardize, self.device, self.world = represent, standardize, device, world

    def __call__(
        self,
        batches: Batches,
        augment: AugmentConfig | None = None,
        key: tuple[int, ...] = (),
        seen: Callable[[int], None] = lambda count: None,
    ) -> dict[str, Tensor]:
        """Features (N, width) in float32 for each pooling; crops and flips are a function of `key`.

        `seen` is told of every so many images that all processes have done.
        """
        found: dict[str, Tensor] = {}
        with evaluating(self.represent):
            most = CHUNK.get(batches.device.type, CHUNK["cpu"])
            size = min(most, max(1, VALUES // math.prod(batches.shape)))
            starts = range(0, len(batches), size)
            mine = starts[self.world.rank :: self.world.size]
            # A process without a chunk computes the first one, to know what all of them add up.
            for start in mine or starts[:1]:
                stop = min(start + size, len(batches))
                images = batches.take(torch.arange(start, stop, device=batches.device))
                if augment is not None:
                    (count, _, height, width), draw = images.shape, generator(self.device, *key, start, BOXES)
                    boxes = draw_boxes(count, height, width, augment, draw, self.device)
                    images = crop(images, boxes, augment.interpolation)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    encoded = self.represent.features(self.standardize(images))
                for name, value in encoded.items():
                    if name not in found:
                        found[name] = torch.zeros(len(batches), value.shape[1], device=self.device)
                    if mine:
                        found[name][start:stop] = value[: stop - start]
                seen(self.world.size * (stop - start))
        # A sum with zeros is exact: all processes have the numbers that one would have.
        return {name: self.world.all_reduce(value) for name, value in found.items()}


def extract(represent: Representation, batches: Batches, standardize: Standardize) -> dict[str, Tensor]:
    """Features (N, width) of all images in order, for each pooling the representation has."""
    return Extractor(represent, standardize, batches.device)(batches)


def effective_rank(features: Tensor) -> float:
    """exp(entropy of the singular values' shares): how many dimensions the features really use (RankMe)."""
    z = features.double()
    gram = z.T @ z if len(z) > z.shape[1] else z @ z.T
    # On the host: the CUDA solver gives up on the nearly singular Gram matrices of untrained features.
    values = torch.linalg.eigvalsh(gram.cpu()).clamp(min=0).sqrt()
    total = float(values.sum())
    return float(torch.special.entr(values / total).sum().exp()) if total else 0.0


def mixed(*key: int) -> int:
    """One 63-bit seed out of several non-negative numbers, so that neighbouring keys share nothing."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator for this key; seeding one waits for nothing on the device."""
    return torch.Generator(device).manual_seed(mixed(*key))


def batch_of(count: int, batch_size: int) -> int:
    """The batch really used: a small set still gets about ten steps an epoch, of at least 16 images if it has them."""
    return min(batch_size, count, max(16, count // 10))


def order(count: int, batch: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    """(steps, batch) positions of the images of one epoch, shuffled; what does not fill a batch is left out."""
    steps = count // batch
    shuffled = torch.randperm(count, generator=generator(device, seed, ORDER, epoch), device=device)
    return shuffled[: steps * batch].view(steps, batch)


def hold_out(
    labels: np.ndarray, share: float, seed: int = 0, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted positions kept and held out: the same share of every class that has at least two images.

    Images of one group are held out together, so that the shares are then met only nearly.
    """
    require(0 < share < 1, "share", "between 0 and 1, both excluded", share)
    if groups is not None:
        return _hold_out_groups(labels, share, seed, groups)
    rng, held = np.random.default_rng(seed), [np.empty(0, np.int64)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        held.append(members[: min(max(round(share * len(members)), 1), len(members) - 1)])
    out = np.sort(np.concatenate(held))
    if not len(out):
        raise UserError(f"labels must have a class of at least two images to hold some out, got {len(labels)} images")
    return np.setdiff1d(np.arange(len(labels)), out), out


def _hold_out_groups(labels: np.ndarray, share: float, seed: int, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole groups in random order, each if a class in it lacks held-out images and all in it keep some.

    One of more images than are wanted altogether comes after all others: it would be most of what there is to train on.
    """
    numbers, members = (np.unique(of, return_inverse=True)[1].reshape(-1) for of in (labels, groups))
    counts = np.zeros((members.max() + 1, numbers.max() + 1), np.int64)
    np.add.at(counts, (members, numbers), 1)
    total, out, chosen = counts.sum(0), np.zeros(counts.shape[1], np.int64), np.zeros(len(counts), bool)
    wanted = np.maximum(np.round(share * total), 1)
    drawn = np.random.default_rng(seed).permutation(len(counts))
    for group in drawn[np.argsort(counts[drawn].sum(1) > wanted.sum(), kind="stable")]:
        own = counts[group]
        if (out[own > 0] < wanted[own > 0]).any() and (out + own < total)[own > 0].all():
            out, chosen[group] = out + own, True
    held = chosen[members]
    rule = "several, one of which can be held out while each class keeps some images"
    require(bool(held.any()), "groups of the images", rule, len(counts))
    return np.flatnonzero(~held), np.flatnonzero(held)


def complete(splits: Splits) -> Splits:
    """Labelled training and test parts: one without a labelled test split gets a stratified one, and a note."""
    labels = splits.train.labels
    if labels is None:
        instead = "`--labels folders` takes subfolders for classes, `--labels x.csv` a table, `--data` another set"
        raise UserError(f"data {splits.name!r} must have labels to be evaluated, got none; {instead}")
    notes, val, test = list(splits.notes), splits.val, splits.test
    if val is not None and val.labels is None:
        notes.append("the val split has no labels and is left out")
        val = None
    if test is not None and test.labels is not None:
        return replace(splits, val=val, notes=tuple(notes))
    groups = splits.train.groups
    kept, held = hold_out(labels, HELD_OUT, groups=groups)
    what = "no test split" if test is None else "no labels in its test split"
    how = f"{HELD_OUT:.0%}, stratified, seed 0{'' if groups is None else ', whole groups'}"
    told = f"the set has {what}: {len(held)} images ({how}) of its training split are held out as test"
    notes.append(f"{told}; no probe trains on them, but pretraining may have seen them without their labels")
    return replace(splits, train=splits.train.take(kept), val=val, test=splits.train.take(held), notes=tuple(notes))


def draw_labels(labels: np.ndarray, budget: int | float, seed: int) -> np.ndarray:
    """Sorted positions of random images of every class: so many, or such a share, at least one and at most all."""
    rng, drawn = np.random.default_rng(seed), []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        drawn.append(members[: budget if isinstance(budget, int) else max(1, round(budget * len(members)))])
    return np.sort(np.concatenate(drawn))


def short_budgets(labels: np.ndarray, classes: Sequence[str], config: FewLabelsProtocol) -> Iterator[str]:
    """What to know of budgets that not every class can fill; one that none can is refused."""
    counts = dict(zip(*(part.tolist() for part in np.unique(labels, return_counts=True)), strict=True))
    most = max(counts.values())
    for shot in config.shots:
        require(shot <= most, "fewlabels.shots", f"at most {most}, the training images of the largest class", shot)
        fewer = [f"{classes[label]!r} ({count})" for label, count in counts.items() if count < shot]
        if fewer:
            yield f"{shot}-shot: all images of the classes that have fewer, {shown(fewer)}"
    for share in config.fractions:
        if min(counts.values()) * share <= 0.5:
            used = len(draw_labels(labels, share, seed=0))
            yield f"{100 * share:g}% labels: one image of every class at least, in all {used} of {len(labels)}"


def budgets(labels: np.ndarray, config: FewLabelsProtocol, seed: int) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The name of each budget of labels, and the training positions of each of its draws."""
    seeds = [mixed(seed, ORDER, number) for number in range(config.draws)]
    named: dict[str, int | float] = {f"{count}-shot": count for count in config.shots}
    named |= {f"{100 * share:g}% labels": share for share in config.fractions}
    for name, budget in named.items():
        yield name, [draw_labels(labels, budget, own) for own in seeds]
