"""One optimization step, in two engines: `Plain`, the readable reference, and `Graph`, compiled, captured and replayed.

Everything random comes in as arguments and everything measured stays on the device, so neither engine waits for it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmae.config import Config, OptimConfig
from pmae.data.augment import Standardize, boxes_of, crop
from pmae.fast.graph import CapturedStep, compiled
from pmae.masking import Draw
from pmae.method import MaskedAutoencoder
from pmae.train.distributed import ONE_PROCESS, World


class Inputs(NamedTuple):
    """All that a step consumes: raw images, noise for their crops and masks, and the rate."""

    images: Tensor
    crops: Tensor
    draw: Draw
    lr: float


class Tally:
    """Sums over steps, on the device: loss, hidden error, energy and share, and the first non-finite step."""

    def __init__(self, device: torch.device) -> None:
        # In one piece, so that reading waits for the device once.
        self._all = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -1.0], device=device, dtype=torch.float64)
        self.sums, self.steps, self.bad_step = self._all[:4], self._all[4], self._all[5]

    def add(self, values: Tensor) -> None:
        """Count a step's (loss, error, energy, masked share)."""
        bad = ~torch.isfinite(values).all() & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(bad, self.steps, self.bad_step))
        self.sums.add_(values)
        self.steps.add_(1)

    def take_over(self, other: "Tally") -> None:
        """Go on from what another has counted."""
        self._all.copy_(other._all)

    def read(self, world: World = ONE_PROCESS) -> tuple[dict[str, float], int]:
        """Means since the last reading, and the first bad step (counted from the last reading; -1 if none). Waits.

        Both are of all processes: a step is bad if one of them found it so.
        """
        world.all_reduce(self.sums).div_(world.size)
        loss, error, energy, share, steps, bad = self._all.tolist()
        bad = min((step for step in world.all_gather(int(bad)) if step >= 0), default=-1)
        self._all.zero_(), self.bad_step.fill_(-1)
        r2 = 1 - error / energy if energy > 0 else float("nan")
        return {"loss": loss / steps, "r2": r2, "masked_share": share / steps}, bad


class Plain:
    """Eager forward, backward, clip and update; with several processes, of the mean of their gradients."""

    def __init__(
        self,
        model: MaskedAutoencoder,
        standardize: Standardize,
        config: Config,
        optimizer: torch.optim.Optimizer,
        world: World = ONE_PROCESS,
    ) -> None:
        self.world = world
        self.model, self.standardize, self.config, self.optimizer = model, standardize, config, optimizer
        self.tally = Tally(standardize.mean.device)
        self._leaves = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, inputs: Inputs) -> None:
        """Take one step."""
        self._set_rate(inputs.lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss, values = self.measure(inputs.images, inputs.crops, inputs.draw)
        loss.backward()
        self._update(values, self.optimizer.step)

    def measure(self, images: Tensor, crops: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """The loss, and (loss, error, energy, masked share) summed up for the tally."""
        augment, (height, width) = self.config.augment, images.shape[-2:]
        # Two crops of an image where two views of it are wanted.
        images = images.repeat(len(crops) // len(images), 1, 1, 1)
        x = self.standardize(crop(images, boxes_of(crops, height, width, augment), augment.interpolation))
        outcome = self.model(x, draw)
        values = torch.stack([outcome.loss, outcome.error.mean(), outcome.energy.mean(), outcome.masked_share.mean()])
        return outcome.loss, values.detach()

    def _average(self) -> None:
        """Make gradients the means of those of all processes."""
        self.world.average([p.grad for p in self._leaves if p.grad is not None])

    def _update(self, values: Tensor, take: Callable[[], object]) -> None:
        self._average()
        if self.config.optim.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._leaves, self.config.optim.clip_norm, foreach=True)
        take()
        self.tally.add(values)

    def _set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


class Graph(Plain):
    """The same step, compiled, captured once in a CUDA graph and replayed (`pmae.fast.graph`).

    With a random ratio an MAE has as many shapes as it can have visible patches, so there is a graph for each number of
    them, and none is compiled: half a minute each, for what lies around the blocks.
    """

    compiles = True

    def __init__(
        self,
        model: MaskedAutoencoder,
        standardize: Standardize,
        config: Config,
        optimizer: torch.optim.Optimizer,
        world: World = ONE_PROCESS,
    ) -> None:
        super().__init__(model, standardize, config, optimizer, world)
        in_bf16 = model.precision == torch.bfloat16
        if in_bf16:
            # Crops and projections stay in float32 but may multiply in TF32: 1e-3 of an image, far below R2's
            # resolution, and three times as fast for 12,288 pixels.
            torch.set_float32_matmul_precision("high")
            model.space.allow_bf16()
        many = config.masking.ratio_schedule == "uniform" and config.space.name == "pixels"
        measure = compiled(self.measure) if self.compiles and not many else self.measure
        if self.compiles:
            # A dozen kernels for a few numbers, or one.
            self.tally.add = compiled(self.tally.add)  # type: ignore[method-assign]
        self._captured = CapturedStep(model, optimizer, measure, self._update, in_bf16)
        self._leaves = self._captured.leaves(self._leaves)

    def __call__(self, inputs: Inputs) -> None:
        self._set_rate(inputs.lr)
        self._captured(inputs.images, inputs.crops, inputs.draw)

    def _set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)


def build_optimizer(model: nn.Module, config: OptimConfig, on_graph: bool) -> torch.optim.AdamW:
    """AdamW with decay on matrices, or on all; under a graph rate and step count are tensors on the device."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("token")
            (decayed if is_matrix else plain).append(parameter)
    device = decayed[0].device
    rate = torch.zeros((), device=device) if on_graph else 0.0
    decay_plain = config.weight_decay if config.decay_all else 0.0
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": decay_plain}]
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, fused=True, capturable=on_graph)
