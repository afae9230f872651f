"""Linear and MLP probes: every kind, pooling, rate and decay trained at once, the best chosen on held-out images."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pmae.evaluate.draws import batch_of, order
from pmae.evaluate.heads import Heads, Setting, Trainer
from pmae.evaluate.protocols import ProbeConfig
from pmae.train.schedule import rate

Source = Callable[[int], Tensor]
"""Features (P, N, W) of the training images for an epoch: always the same, or of new crops each time."""
Grid = Mapping[tuple[str, str], tuple[Setting, ...]]
"""(base_lr, weight_decay) to try for each (kind, pooling)."""
ROWS = 2048


@dataclass(frozen=True)
class Task:
    """What the heads learn: the labels of the training images, from these representations."""

    labels: Tensor
    classes: int
    poolings: tuple[str, ...]
    hidden: int
    """Width of the hidden layers of an MLP."""


@dataclass(frozen=True)
class Probes:
    """Trained heads, with the feature statistics they were trained on."""

    poolings: tuple[str, ...]
    stacks: tuple[Heads, ...]
    mean: Tensor
    std: Tensor

    @torch.no_grad()
    def scores(self, features: Tensor) -> dict[tuple[str, str], Tensor]:
        """Class probabilities (R, N, C) of each (kind, pooling) for features (P, N, W)."""
        found = {}
        for stack in self.stacks:
            parts = [stack.logits((x - self.mean) / self.std).softmax(-1) for x in torch.split(features, ROWS, dim=1)]
            whole = torch.cat(parts, dim=2)
            found.update({(stack.kind, pooling): whole[p] for p, pooling in enumerate(self.poolings)})
        return found


def train_probes(source: Source, task: Task, config: ProbeConfig, grid: Grid, seed: int) -> Probes:
    """Train all the heads of a grid for `config.epochs`."""
    return train_together(source, task, config, {seed: grid})[seed]


def train_together(source: Source, task: Task, config: ProbeConfig, grids: Mapping[int, Grid]) -> dict[int, Probes]:
    """The same for several seeds on the same passes of features: they differ in first weights and in order.

    An augmented pass of the encoder costs far more than the heads, so all seeds share it.
    """
    features, count = source(0), len(task.labels)
    mean, std = _statistics(features, config.standardize)
    batch, shown = batch_of(count, config.batch_size), torch.empty_like(features)
    stacks = {seed: _stacks(task, config, grid, seed, features) for seed, grid in grids.items()}
    trainers = {
        seed: Trainer(stack, shown, task.labels, batch, config.momentum, config.clip_norm)
        for seed, stack in stacks.items()
    }
    for epoch in range(config.epochs):
        features = features if epoch == 0 else source(epoch)
        shown.copy_((features - mean) / std)
        for seed, trainer in trainers.items():
            positions = order(count, batch, seed, epoch, features.device)
            moments = [epoch + step / len(positions) for step in range(len(positions))]
            fractions = [rate("cosine", moment, config.epochs, config.warmup_epochs) for moment in moments]
            trainer.epoch(positions, fractions)
    return {seed: Probes(task.poolings, stack, mean, std) for seed, stack in stacks.items()}


def choose(
    source: Source, plain: Tensor, task: Task, parts: tuple[Tensor, Tensor], config: ProbeConfig, seed: int
) -> Grid:
    """For each (kind, pooling) the setting with the best accuracy on the held-out part, trained on the other part.

    `plain` are the unaugmented features of all training images; `parts` the positions to train on and those held out.
    """
    fit, held = parts
    every: Grid = {(kind, pooling): config.grid for kind in config.kinds for pooling in task.poolings}
    if len(config.grid) == 1:
        return every
    part = dataclasses.replace(task, labels=task.labels[fit])
    probes = train_probes(lambda epoch: source(epoch)[:, fit], part, config, every, seed)
    best = {}
    for head, scores in probes.scores(plain[:, held]).items():
        right = (scores.argmax(-1) == task.labels[held]).float().mean(1)
        # A head that diverged has no finite score and is never chosen while another is left.
        right = right.where(scores.isfinite().flatten(1).all(1), -1.0)
        best[head] = (config.grid[int(right.argmax())],)
    return best


def _stacks(task: Task, config: ProbeConfig, grid: Grid, seed: int, features: Tensor) -> tuple[Heads, ...]:
    """Untrained heads of every kind on the features' device."""
    width, scale = features.shape[2], config.batch_size / 256
    return tuple(_stack(kind, width, task, grid, scale, seed).to(features.device) for kind in config.kinds)


def _stack(kind: str, width: int, task: Task, grid: Grid, scale: float, seed: int) -> Heads:
    widths = [width, task.classes] if kind == "linear" else [width, task.hidden, task.hidden, task.classes]
    settings = [[(lr * scale, decay) for lr, decay in grid[kind, pooling]] for pooling in task.poolings]
    return Heads(kind, task.poolings, widths, settings, seed)


def _statistics(features: Tensor, standardize: bool) -> tuple[Tensor, Tensor]:
    """Mean and deviation (P, 1, W) of the training features; 0 and 1 where they are left as they are."""
    mean = features.mean(1, keepdim=True)
    if not standardize:
        return torch.zeros_like(mean), torch.ones_like(mean)
    std = features.std(1, correction=0, keepdim=True)
    # A constant feature carries nothing: dividing by 1 leaves it at 0.
    floor = 1e-6 * (std.amax(2, keepdim=True) + mean.abs())
    return mean, torch.where(std > floor, std, torch.ones_like(std))
