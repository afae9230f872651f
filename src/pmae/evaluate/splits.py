"""Which images are held out, and the seeding of all randomness here."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pmae.data.images import Splits
from pmae.errors import UserError, require


def hold_out(labels: np.ndarray, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sorted positions kept and held out: the same share of every class, at least one image of it on each side.

    A class of a single image stays with the kept ones.
    """
    require(0 < share < 1, "share", "between 0 and 1, both excluded", share)
    rng, held = np.random.default_rng(seed), []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        held.append(members[: min(max(round(share * len(members)), 1), len(members) - 1)])
    out = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    if not len(out):
        raise UserError(f"labels must have a class of at least two images to hold some out, got {len(labels)} images")
    return np.setdiff1d(np.arange(len(labels)), out), out


def complete(splits: Splits, share: float = 0.2, seed: int = 0) -> Splits:
    """Labelled training and test parts: one without a labelled test split gets a stratified one, and a note."""
    labels = splits.train.labels
    if labels is None:
        raise UserError(f"data {splits.name!r} must have labels to be evaluated, got none")
    notes, val, test = list(splits.notes), splits.val, splits.test
    if val is not None and val.labels is None:
        notes.append("the val split has no labels and is left out")
        val = None
    if test is not None and test.labels is not None:
        return replace(splits, val=val, notes=tuple(notes))
    kept, held = hold_out(labels, share, seed)
    what = "no test split" if test is None else "no labels in its test split"
    notes.append(
        f"the set has {what}: {len(held)} images ({share:.0%}, stratified, seed {seed}) of its training split are held "
        "out as test; no probe trains on them, but pretraining may have seen them without their labels"
    )
    return replace(splits, train=splits.train.take(kept), val=val, test=splits.train.take(held), notes=tuple(notes))


ORDER, BOXES, HEADS, NOISE, MAGNITUDES, ERASING, MIXES = range(7)
"""Purposes of random numbers. Seeding: a generator is a function of a key such as (seed, purpose, epoch, step)."""


def mixed(*key: int) -> int:
    """One 63-bit seed out of several non-negative numbers, so that neighbouring keys share nothing."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator for this key; seeding one waits for nothing on the device."""
    return torch.Generator(device).manual_seed(mixed(*key))


def on_host(*key: int) -> np.random.Generator:
    """For the few numbers of this key that the host itself needs."""
    return np.random.default_rng(mixed(*key))


def batch_of(count: int, batch_size: int) -> int:
    """The batch really used: a small set still gets about ten steps an epoch, of at least 16 images if it has them."""
    return min(batch_size, count, max(16, count // 10))


def order(count: int, batch: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    """(steps, batch) positions of the images of one epoch, shuffled; what does not fill a batch is left out."""
    steps = count // batch
    shuffled = torch.randperm(count, generator=generator(device, seed, ORDER, epoch), device=device)
    return shuffled[: steps * batch].view(steps, batch)
