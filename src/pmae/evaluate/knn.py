"""Exact k nearest neighbours: found once for the largest k, in chunks, and counted for every k."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.errors import require, unknown_name

CELLS = 2**26


def nearest(bank: Tensor, queries: Tensor, k: int, metric: str = "cosine") -> Tensor:
    """(Q, k) positions in `bank` of each query's nearest rows, nearest first."""
    require(1 <= k <= len(bank), "k", f"between 1 and the number of training images ({len(bank)})", k)
    if metric not in ("cosine", "euclidean"):
        raise unknown_name("metric", metric, ("cosine", "euclidean"))
    if metric == "cosine":
        # A zero vector stays zero: equally far from everything.
        bank, queries = _unit(bank), _unit(queries)
        offset = bank.new_zeros(len(bank))
    else:
        # About the mean the squares stay small, and |a|^2 - 2ab loses no digits; |b|^2 does not change the order.
        centre = bank.mean(0)
        bank, queries = bank - centre, queries - centre
        offset = bank.square().sum(1)
    rows = max(1, CELLS // len(bank))
    scale = 2 if metric == "euclidean" else 1
    parts = [(offset - scale * (part @ bank.T)).topk(k, largest=False).indices for part in torch.split(queries, rows)]
    return torch.cat(parts)


def votes(neighbour_labels: Tensor, classes: int, ks: tuple[int, ...]) -> dict[int, Tensor]:
    """Share (Q, C) of each class among the k nearest, for each k; argmax is the majority, ties to the lowest class."""
    counts = neighbour_labels.new_zeros(len(neighbour_labels), classes)
    found: dict[int, Tensor] = {}
    done = 0
    for k in sorted(set(ks)):
        counts = counts + F.one_hot(neighbour_labels[:, done:k], classes).sum(1)
        done = k
        found[k] = counts / k
    return {k: found[k] for k in ks}


def _unit(rows: Tensor) -> Tensor:
    length = rows.norm(dim=1, keepdim=True)
    return rows / torch.where(length > 0, length, torch.ones_like(length))
