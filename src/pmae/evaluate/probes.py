"""Probes of frozen features: linear and MLP heads, k nearest neighbours, and the quick pair that watches pretraining.

Heads of every seed, pooling, rate and decay are one stack of parameters, trained together by SGD; each is what it would
be alone. Shapes: P poolings, G groups (a seed and a pooling), R settings (rate and decay) of each, B images, W features
and C classes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits
from pmae.errors import require
from pmae.evaluate.features import HEADS, Representation, batch_of, effective_rank, extract, generator, hold_out, order
from pmae.evaluate.protocols import MOST_IMAGES, PROBED, ProbeProtocol
from pmae.fast import can_capture
from pmae.fast.graph import Replay, falls_back
from pmae.results import PRIMARY
from pmae.train.schedule import rate

Head = tuple[str, int, str]  # kind (linear or mlp), seed and pooling
Grid = Mapping[Head, Sequence[tuple[float, float]]]  # (base_lr, weight_decay) to train each head with
Source = Callable[[int], Tensor]
"""Features (P, N, W) of the training images for an epoch: always the same, or of new crops each time."""
ROWS = 2048  # images whose logits are computed at once
CELLS = 2**26  # distances that are held at once
NEIGHBOURS = 20


@dataclass(frozen=True)
class ProbeTask:
    """What the heads learn: the labels of the training images, from these representations, once for every seed."""

    labels: Tensor
    classes: int
    poolings: tuple[str, ...]
    hidden: int  # width of the hidden layers of an MLP
    seeds: tuple[int, ...] = (0,)

    @property
    def groups(self) -> list[tuple[int, str]]:
        return [(seed, pooling) for seed in self.seeds for pooling in self.poolings]

    def grid(self, config: ProbeProtocol) -> Grid:
        """Every head with all the settings there are."""
        return {(kind, *group): config.grid for kind in config.kinds for group in self.groups}


class Heads:
    """G x R heads of one kind, untrained, on the device of the features."""

    def __init__(self, kind: str, features: Tensor, task: ProbeTask, grid: Grid) -> None:
        hidden = [] if kind == "linear" else [task.hidden, task.hidden]
        widths = [features.shape[2], *hidden, task.classes]
        table = torch.tensor([grid[kind, *group] for group in task.groups], device=features.device)
        self.rates, self.decays = table[..., 0], table[..., 1]
        drawn = [_draw(kind, pooling, widths, seed) for seed, pooling in task.groups]
        # Heads that differ in their settings alone start from the same weights.
        stacks = [torch.stack(layer)[:, None].repeat(1, table.shape[1], 1, 1) for layer in zip(*drawn, strict=True)]
        self.layers = [stack.to(features.device).requires_grad_() for stack in stacks]
        self.moments = [torch.zeros_like(layer) for layer in self.layers]

    def logits(self, x: Tensor) -> Tensor:
        """(G, R, B, C) from features (G, B, W); the last row of a layer is its bias."""
        first, *rest = self.layers
        out = torch.einsum("gbi,grio->grbo", x, first[:, :, :-1]) + first[:, :, -1:]
        for layer in rest:
            out = torch.relu(out) @ layer[:, :, :-1] + layer[:, :, -1:]
        return out

    def update(self, x: Tensor, labels: Tensor, scale: Tensor, momentum: float, clip: float | None) -> None:
        """One step of every head at its base rate times `scale`, its gradient cut to a norm of at most `clip`."""
        logits = self.logits(x)
        target = labels[:, None].expand(logits.shape[:3])
        # A sum over heads of means over images: no head's gradient knows of another's.
        loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="sum") / labels.shape[1]
        gradients = torch.autograd.grad(loss, self.layers)
        if clip is not None:
            norm = sum((gradient.square().sum((2, 3), keepdim=True) for gradient in gradients), x.new_zeros(())).sqrt()
            gradients = tuple(gradient * (clip / (norm + 1e-12)).clamp(max=1) for gradient in gradients)
        rate, decay = (self.rates * scale)[..., None, None], self.decays[..., None, None]
        with torch.no_grad():
            for layer, gradient, moment in zip(self.layers, gradients, self.moments, strict=True):
                gradient[:, :, :-1] += decay * layer[:, :, :-1]
                moment.mul_(momentum).add_(gradient)
                layer.sub_(rate * moment)


def _draw(kind: str, pooling: str, widths: Sequence[int], seed: int) -> list[Tensor]:
    """Weights and biases uniform in +-1/sqrt(inputs), as torch's own layers; drawn on the host for all devices."""
    key = (seed, HEADS, *(int.from_bytes(name.encode()) for name in (kind, pooling)))
    source = generator(torch.device("cpu"), *key)
    return [
        (2 * torch.rand(inputs + 1, outputs, generator=source) - 1) / inputs**0.5
        for inputs, outputs in pairwise(widths)
    ]


@dataclass(frozen=True)
class Probes:
    """Trained heads of each kind, with the feature statistics they were trained on."""

    task: ProbeTask
    stacks: Mapping[str, Heads]
    mean: Tensor
    std: Tensor

    @torch.no_grad()
    def scores(self, features: Tensor) -> dict[Head, Tensor]:
        """Class probabilities (R, N, C) of each head for features (P, N, W)."""
        found: dict[Head, Tensor] = {}
        parts = [((x - self.mean) / self.std).repeat(len(self.task.seeds), 1, 1) for x in features.split(ROWS, dim=1)]
        for kind, stack in self.stacks.items():
            whole = torch.cat([stack.logits(x).softmax(-1) for x in parts], dim=2)
            found |= {(kind, *group): scores for group, scores in zip(self.task.groups, whole, strict=True)}
        return found


@falls_back
def train_probes(source: Source, task: ProbeTask, config: ProbeProtocol, grid: Grid, plain: bool = False) -> Probes:
    """Train all the heads of a grid, each step in a CUDA graph where possible; all seeds share the augmented passes."""
    features = source(0)
    count, device = features.shape[1], features.device
    mean, std = statistics(features, config.standardize)
    stacks: dict[str, Heads] = {kind: Heads(kind, features, task, grid) for kind in config.kinds}
    batch, shown = batch_of(count, config.batch_size), torch.empty_like(features)
    steps = count // batch
    orders = torch.zeros(steps, len(task.seeds), batch, dtype=torch.long, device=device)
    scales = torch.zeros(steps, device=device)
    # The position lives on the device, so that the same recorded step can be replayed all through an epoch.
    position = torch.zeros(1, dtype=torch.long, device=device)

    def step() -> None:
        index = orders.index_select(0, position)[0]
        x = shown.index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1).flatten(0, 1)
        labels = task.labels[index][:, None].expand(-1, len(shown), -1).flatten(0, 1)
        for stack in stacks.values():
            stack.update(x, labels, scales.index_select(0, position), config.momentum, config.clip_norm)
        position.add_(1).remainder_(steps)

    advance = Replay(step, lambda: None) if can_capture(device) and not plain else step
    for epoch in range(config.epochs):
        shown.copy_(((features if epoch == 0 else source(epoch)) - mean) / std)
        orders.copy_(torch.stack([order(count, batch, seed, epoch, device) for seed in task.seeds], 1))
        moments = [epoch + number / steps for number in range(steps)]
        fractions = [rate("cosine", moment, config.epochs, config.warmup_epochs) for moment in moments]
        scales.copy_(torch.tensor(fractions) * config.batch_size / 256)
        for _ in range(steps):
            advance()
    return Probes(task, stacks, mean, std)


def choose(
    source: Source, plain: Tensor, task: ProbeTask, parts: tuple[Tensor, Tensor], config: ProbeProtocol
) -> dict[Head, list[tuple[float, float]]]:
    """For each head the setting best on the second of `parts`, trained on the first; `plain` has no crops."""
    fit, held = parts
    part = dataclasses.replace(task, labels=task.labels[fit])
    probes = train_probes(lambda epoch: source(epoch)[:, fit], part, config, task.grid(config))
    best = {}
    for head, scores in probes.scores(plain[:, held]).items():
        right = (scores.argmax(-1) == task.labels[held]).float().mean(1)
        # A head that diverged has no finite score and is never chosen while another is left.
        right = right.where(scores.isfinite().flatten(1).all(1), -1.0)
        best[head] = [config.grid[int(right.argmax())]]
    return best


def statistics(features: Tensor, standardize: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (..., 1, W) of features (..., N, W); 0 and 1 where they are left as they are."""
    mean = features.mean(-2, keepdim=True)
    if not standardize:
        return torch.zeros_like(mean), torch.ones_like(mean)
    std = features.std(-2, correction=0, keepdim=True)
    # A constant feature carries nothing: dividing by 1 leaves it at 0.
    floor = 1e-6 * (std.amax(-1, keepdim=True) + mean.abs())
    return mean, torch.where(std > floor, std, torch.ones_like(std))


def nearest(bank: Tensor, queries: Tensor, k: int) -> Tensor:
    """(Q, k) positions in `bank` of the rows nearest to each query by cosine similarity, nearest first."""
    require(1 <= k <= len(bank), "k", f"between 1 and the number of training images ({len(bank)})", k)
    # A zero vector stays zero: equally far from everything.
    bank, queries = (F.normalize(rows, eps=torch.finfo(rows.dtype).tiny) for rows in (bank, queries))
    parts = torch.split(queries, max(1, CELLS // len(bank)))
    return torch.cat([(part @ bank.T).topk(k).indices for part in parts])


def votes(neighbour_labels: Tensor, classes: int, ks: Sequence[int]) -> dict[int, Tensor]:
    """Share (Q, C) of each class among the k nearest, for each k; argmax is the majority, ties to the lowest class."""
    counts = neighbour_labels.new_zeros(len(neighbour_labels), classes)
    found, done = {}, 0
    for k in sorted(ks):
        counts = counts + F.one_hot(neighbour_labels[:, done:k], classes).sum(1)
        found[k], done = counts / k, k
    return found


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Share of images whose class has the highest score."""
    return float((scores.argmax(1) == labels).float().mean())


def probe_accuracies(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor
) -> dict[str, float]:
    """Test accuracy of logistic regression and of 20 nearest neighbours (cosine), in a second."""
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    mean, std = statistics(train_features)
    weights = logistic_regression((train_features - mean) / std, train_labels, classes)
    linear = ((test_features - mean) / std) @ weights[:-1] + weights[-1]
    k = min(NEIGHBOURS, len(train_features))
    found = votes(train_labels[nearest(train_features, test_features, k)], classes, (k,))[k]
    return {"linear": accuracy(linear, test_labels), "knn": accuracy(found, test_labels)}


def logistic_regression(x: Tensor, labels: Tensor, classes: int, penalty: float = 1.0) -> Tensor:
    """(W + 1, C) weights, biases last, that minimize the summed cross-entropy + penalty / 2 x |weights|^2 (L-BFGS)."""
    weights = x.new_zeros(x.shape[1] + 1, classes).requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=100, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        fit = F.cross_entropy(x @ weights[:-1] + weights[-1], labels)
        loss = fit + penalty / (2 * len(x)) * weights[:-1].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weights.detach()


def online_probe(splits: Splits) -> Callable[[Representation, Standardize, torch.device], dict[str, float]]:
    """A function that scores an encoder while it is pretrained; without labels it measures the effective rank alone.

    The test split is never used: scores come from the val split, or from a fifth of the training images.
    """
    train, val = splits.train, splits.val
    if train.labels is None or (val is not None and val.labels is not None):
        fit, score = train, val or train
    else:
        fit, score = (train.take(part) for part in hold_out(train.labels, PROBED, groups=train.groups))

    def probe(encoder: Representation, standardize: Standardize, device: torch.device) -> dict[str, float]:
        most = MOST_IMAGES.get(device.type, MOST_IMAGES["cpu"])
        fitted, scored = _first(fit, most), _first(score, most // 4)
        features = extract(encoder, Batches(fitted.images, device), standardize)[PRIMARY]
        rule = "finite: a lower optim.base_lr or an optim.clip_norm may help"
        require(bool(features.isfinite().all()), "features", rule, "NaN or infinity")
        values = {"effective_rank": effective_rank(features)}
        if fitted.labels is None or scored.labels is None:
            return values
        others = extract(encoder, Batches(scored.images, device), standardize)[PRIMARY]
        labels = [torch.from_numpy(part.labels).to(device) for part in (fitted, scored)]
        return values | probe_accuracies(features, labels[0], others, labels[1])

    return probe


def _first(part: ImageSet, most: int) -> ImageSet:
    """At most so many images, evenly spread over the set so that every class has its share."""
    return part if len(part) <= most else part.take(np.linspace(0, len(part) - 1, most).astype(np.int64))
