"""The online probe, two scores in a second while pretraining: logistic regression and exact k nearest neighbours.

Labels are looked at here and nowhere else in pretraining. The test split is never used: scores come from the val
split, or from a fifth of the training images that the probes do not fit on.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits
from pmae.errors import require, unknown_name
from pmae.evaluate.features import Representation, effective_rank, extract
from pmae.evaluate.splits import hold_out
from pmae.results import PRIMARY

NEIGHBOURS = 20
CELLS = 2**26
"""Distances that are held at once."""


def probe_accuracies(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor
) -> dict[str, float]:
    """Test accuracy of a linear classifier and of 20 nearest neighbours (cosine)."""
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    mean, std = train_features.mean(0), train_features.std(0, correction=0)
    std = torch.where(std > 1e-6 * (std.max() + mean.abs()), std, torch.ones_like(std))
    weights = logistic_regression((train_features - mean) / std, train_labels, classes)
    linear = ((test_features - mean) / std) @ weights[:-1] + weights[-1]
    k = min(NEIGHBOURS, len(train_features))
    found = votes(train_labels[nearest(train_features, test_features, k)], classes, (k,))[k]
    return {"linear": _accuracy(linear, test_labels), "knn": _accuracy(found, test_labels)}


def logistic_regression(x: Tensor, labels: Tensor, classes: int, penalty: float = 1.0, steps: int = 100) -> Tensor:
    """(W + 1, C) weights, biases last, that minimize the summed cross-entropy + penalty / 2 x |weights|^2 (L-BFGS)."""
    weights = x.new_zeros(x.shape[1] + 1, classes).requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=steps, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        fit = F.cross_entropy(x @ weights[:-1] + weights[-1], labels)
        loss = fit + penalty / (2 * len(x)) * weights[:-1].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weights.detach()


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())


MOST_IMAGES = {"cuda": 50_000, "cpu": 4_000}
"""Images that the probes fit on, at most; a quarter of them are scored."""


def online_probe(splits: Splits) -> Callable[[Representation, Standardize, torch.device], dict[str, float]]:
    """A function that scores an encoder on these images; without labels it measures the effective rank alone."""
    fit, score = _parts(splits)

    def probe(encoder: Representation, standardize: Standardize, device: torch.device) -> dict[str, float]:
        most = MOST_IMAGES.get(device.type, MOST_IMAGES["cpu"])
        fitted, scored = _first(fit, most), _first(score, most // 4)
        features = extract(encoder, Batches(fitted.images, device), standardize, compile=False)
        values = {"effective_rank": effective_rank(features[PRIMARY])}
        if fitted.labels is None or scored.labels is None:
            return values
        others = extract(encoder, Batches(scored.images, device), standardize, compile=False)
        labels = [torch.from_numpy(part.labels).to(device) for part in (fitted, scored)]
        return values | probe_accuracies(features[PRIMARY], labels[0], others[PRIMARY], labels[1])

    return probe


def _parts(splits: Splits) -> tuple[ImageSet, ImageSet]:
    """The images to fit probes on and those to score them on."""
    train, val = splits.train, splits.val
    if train.labels is None or (val is not None and val.labels is not None):
        return train, val or train
    kept, held = hold_out(train.labels, 0.2)
    return train.take(kept), train.take(held)


def _first(part: ImageSet, most: int) -> ImageSet:
    """At most so many images, evenly spread over the set so that every class has its share."""
    return part if len(part) <= most else part.take(np.linspace(0, len(part) - 1, most).astype(np.int64))


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
