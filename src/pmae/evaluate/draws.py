"""All randomness of this room: a generator is a function of a key such as (seed, purpose, epoch, step)."""

import numpy as np
import torch
from torch import Tensor

ORDER, BOXES, HEADS, NOISE, AMOUNTS, BLANKS, MIXES = range(7)


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
