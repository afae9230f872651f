"""Landmarks: a sample of the images that stands for all of them, and the width of the Gaussian kernel around each."""

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pmae.errors import UserError

SEED = 0
"""Of the draw: a space is a function of the images and its settings, so runs that differ in their seed share it."""
POOL = 4
"""k-means++ looks at every image for every landmark, so it chooses among so many times the landmarks, not among all."""
EDGE = 1e-3
"""How near to 0 or to 1 the mean kernel value of two landmarks may come: beyond, float32 keeps under three digits."""


def choose_landmarks(batches: Iterable[Tensor], count: int, choice: Literal["random", "kmeans++"]) -> Tensor:
    """(M, D) images, M = `count` or all there are, in one pass; the same however the images are batched."""
    rng = np.random.default_rng(SEED)
    pool = _sample(batches, count if choice == "random" else POOL * count, rng)
    return pool if len(pool) <= count else pool[_apart(pool, count, rng)]


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """(A, B) of rows (A, D) and (B, D)."""
    products = torch.addmm(y.square().sum(1), x, y.T, alpha=-2)
    return (products + x.square().sum(1, keepdim=True)).clamp(min=0)


def settled_gamma(gamma: float | None, distances: Tensor) -> float:
    """The kernel's coefficient as given, or 1 over the median squared distance between landmarks.

    One at which all landmarks look alike, or each looks unlike all others, is refused.
    """
    count = len(distances)
    apart = distances[~torch.eye(count, dtype=torch.bool, device=distances.device)]
    median = float(apart.median())
    if gamma is None and median <= 0:
        raise UserError(f"data must differ: the median squared distance between {count} landmarks is {median}")
    gamma = 1 / median if gamma is None else gamma
    mean = float((apart * -gamma).exp().mean())
    if not EDGE < mean < 1 - EDGE:
        kind = "constant: all images look alike" if mean > 0.5 else "the identity: each image looks unlike all others"
        hint = f"; left unset it would be {1 / median:.3g}" if median > 0 else ""
        raise UserError(
            f"space.gamma must tell images apart, got {gamma:g}: the mean kernel value between {count} landmarks is "
            f"{mean:.6g}, so the kernel is {kind}{hint}"
        )
    return gamma


def _sample(batches: Iterable[Tensor], size: int, rng: np.random.Generator) -> Tensor:
    """(S, D) images whose random keys are the smallest, in the order of their keys.

    NumPy's stream of keys does not depend on how many are asked for at a time, so neither does the sample.
    """
    count, keys, pool = 0, np.empty(0), torch.empty(0)
    for batch in batches:
        rows, fresh = batch.flatten(1), rng.random(len(batch))
        keys, pool = np.concatenate([keys, fresh]), torch.cat([pool.to(rows), rows]) if count else rows
        order = keys.argsort()[:size]
        count, keys, pool = count + len(rows), keys[order], pool[torch.from_numpy(order).to(rows.device)]
    if count < 2:
        raise UserError(f"data must be at least 2 images to choose landmarks, got {count}")
    return pool


def _apart(pool: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """(count,) positions in the pool, each drawn with odds by the squared distance to those before (k-means++)."""
    chosen = torch.zeros(count, dtype=torch.long, device=pool.device)
    draws = torch.from_numpy(rng.random(count)).to(pool.device)
    norms = pool.square().sum(1)
    nearest = torch.full_like(norms, torch.inf)
    for step in range(1, count):
        last = chosen[step - 1]
        nearest = torch.minimum(nearest, (norms - 2 * (pool @ pool[last]) + norms[last]).clamp(min=0))
        total = nearest.double().cumsum(0)
        chosen[step] = torch.searchsorted(total, draws[step : step + 1] * total[-1])[0].clamp(max=len(pool) - 1)
    return chosen
