"""Linear and MLP probes: heads of every pooling, rate and decay as one stack of parameters, trained together by SGD.

Each head is what it would be alone; the best is chosen on held-out images.
Shapes: P poolings, R settings (rate and decay) of each, B images, W features, C classes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.evaluate.protocols import ProbeProtocol
from pmae.evaluate.splits import HEADS, batch_of, generator, order
from pmae.fast import can_capture
from pmae.fast.graph import Replay
from pmae.train.schedule import rate

Setting = tuple[float, float]
"""Peak rate and L2 penalty."""


class Heads:
    """P x R heads of one kind on P representations."""

    def __init__(
        self,
        kind: str,
        poolings: Sequence[str],
        widths: Sequence[int],
        settings: Sequence[Sequence[Setting]],
        seed: int,
    ) -> None:
        self.kind = kind
        table = torch.tensor([[list(setting) for setting in row] for row in settings], dtype=torch.float64)
        self.rates, self.decays = table[..., 0].float(), table[..., 1].float()
        drawn = [_draw(kind, pooling, widths, seed) for pooling in poolings]
        # Heads that differ in their settings alone start from the same weights.
        stacks = [torch.stack(layer)[:, None].expand(-1, table.shape[1], -1, -1) for layer in zip(*drawn, strict=True)]
        self.layers = [stack.contiguous().requires_grad_() for stack in stacks]
        self.moments = [torch.zeros_like(layer) for layer in self.layers]

    def to(self, device: torch.device) -> "Heads":
        """The same heads on another device."""
        self.rates, self.decays = self.rates.to(device), self.decays.to(device)
        self.layers = [layer.detach().to(device).requires_grad_() for layer in self.layers]
        self.moments = [moment.to(device) for moment in self.moments]
        return self

    def logits(self, x: Tensor) -> Tensor:
        """(P, R, B, C) from features (P, B, W); the last row of a layer is its bias."""
        first, *rest = self.layers
        out = torch.einsum("pbi,prio->prbo", x, first[:, :, :-1]) + first[:, :, -1:]
        for layer in rest:
            out = torch.relu(out) @ layer[:, :, :-1] + layer[:, :, -1:]
        return out

    def update(self, x: Tensor, labels: Tensor, fraction: Tensor, momentum: float, clip: float | None = None) -> None:
        """One step of every head at this fraction of its peak rate, its gradient cut to a norm of at most `clip`."""
        logits = self.logits(x)
        target = labels.expand(*logits.shape[:2], -1)
        # A sum over heads of means over images: no head's gradient knows of another's.
        loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="sum") / len(labels)
        gradients = torch.autograd.grad(loss, self.layers)
        if clip is not None:
            norm = sum((gradient.square().sum((2, 3), keepdim=True) for gradient in gradients), x.new_zeros(())).sqrt()
            gradients = tuple(gradient * (clip / (norm + 1e-12)).clamp(max=1) for gradient in gradients)
        rate, decay = (self.rates * fraction)[..., None, None], self.decays[..., None, None]
        with torch.no_grad():
            for layer, gradient, moment in zip(self.layers, gradients, self.moments, strict=True):
                gradient[:, :, :-1] += decay * layer[:, :, :-1]
                moment.mul_(momentum).add_(gradient)
                layer.sub_(rate * moment)


class HeadTrainer:
    """Runs epochs of steps over features that lie on the device, captured in a CUDA graph where that is possible."""

    def __init__(
        self,
        stacks: Sequence[Heads],
        features: Tensor,
        labels: Tensor,
        batch: int,
        momentum: float,
        clip: float | None = None,
    ) -> None:
        device, steps = features.device, features.shape[1] // batch
        self.stacks, self.labels, self.momentum, self.clip = stacks, labels, momentum, clip
        self.features = features
        self.order = torch.zeros(steps, batch, dtype=torch.long, device=device)
        self.fractions = torch.zeros(steps, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self._advance = Replay(self._step, lambda: None) if can_capture(device) else self._step

    def epoch(self, order: Tensor, fractions: Sequence[float]) -> None:
        """One epoch over what `features` holds now, in this order, each step at its fraction of the peak rate."""
        self.order.copy_(order)
        self.fractions.copy_(torch.tensor(fractions))
        for _ in range(len(order)):
            self._advance()

    def _step(self) -> None:
        # The position lives on the device, so that the same recorded step can be replayed all through an epoch.
        index = self.order.index_select(0, self.position)[0]
        x, labels = self.features.index_select(1, index), self.labels.index_select(0, index)
        fraction = self.fractions.index_select(0, self.position)
        for stack in self.stacks:
            stack.update(x, labels, fraction, self.momentum, self.clip)
        self.position.add_(1).remainder_(len(self.order))


def _draw(kind: str, pooling: str, widths: Sequence[int], seed: int) -> list[Tensor]:
    """Weights and biases uniform in +-1/sqrt(inputs), as torch's own layers; drawn on the host for all devices."""
    key = (seed, HEADS, *(int.from_bytes(name.encode()) for name in (kind, pooling)))
    source = generator(torch.device("cpu"), *key)
    return [
        (2 * torch.rand(inputs + 1, outputs, generator=source) - 1) / inputs**0.5
        for inputs, outputs in pairwise(widths)
    ]


Source = Callable[[int], Tensor]
"""Features (P, N, W) of the training images for an epoch: always the same, or of new crops each time."""
Grid = Mapping[tuple[str, str], tuple[Setting, ...]]
"""(base_lr, weight_decay) to try for each (kind, pooling)."""
ROWS = 2048
"""Images whose logits are computed at once."""


@dataclass(frozen=True)
class ProbeTask:
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


def train_probes(source: Source, task: ProbeTask, config: ProbeProtocol, grid: Grid, seed: int) -> Probes:
    """Train all the heads of a grid for `config.epochs`."""
    return train_together(source, task, config, {seed: grid})[seed]


def train_together(
    source: Source, task: ProbeTask, config: ProbeProtocol, grids: Mapping[int, Grid]
) -> dict[int, Probes]:
    """The same for several seeds on the same passes of features: they differ in first weights and in order.

    An augmented pass of the encoder costs far more than the heads, so all seeds share it.
    """
    features, count = source(0), len(task.labels)
    mean, std = _statistics(features, config.standardize)
    batch, shown = batch_of(count, config.batch_size), torch.empty_like(features)
    stacks = {seed: _stacks(task, config, grid, seed, features) for seed, grid in grids.items()}
    trainers = {
        seed: HeadTrainer(stack, shown, task.labels, batch, config.momentum, config.clip_norm)
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
    source: Source, plain: Tensor, task: ProbeTask, parts: tuple[Tensor, Tensor], config: ProbeProtocol, seed: int
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


def _stacks(task: ProbeTask, config: ProbeProtocol, grid: Grid, seed: int, features: Tensor) -> tuple[Heads, ...]:
    """Untrained heads of every kind on the features' device."""
    width, scale = features.shape[2], config.batch_size / 256
    return tuple(_stack(kind, width, task, grid, scale, seed).to(features.device) for kind in config.kinds)


def _stack(kind: str, width: int, task: ProbeTask, grid: Grid, scale: float, seed: int) -> Heads:
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
