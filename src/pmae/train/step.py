"""One optimization step: `Plain`, the readable reference; `Graph`, compiled, captured and replayed; `FastEngine`, the
fastest of them that works on a GPU.

Everything random comes in as arguments and everything measured stays on the device, so that no step waits for it.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmae import fast
from pmae.config import Config, OptimConfig
from pmae.data.augment import Standardize, boxes_of, crop
from pmae.errors import UserError
from pmae.fast.graph import WARM_STEPS, CapturedStep, compiled, failure
from pmae.masking import Draw
from pmae.method import MaskedAutoencoder
from pmae.train.distributed import ONE_PROCESS, World, lost_process_errors

TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}
"""How far the first loss may be from the plain one's, relative to it; rounding alone makes some 5e-4 and 1e-6 of it."""
SETTLED = WARM_STEPS + 2  # after so many steps everything is compiled and captured: what fails then is the step itself


class Inputs(NamedTuple):
    """All that a step consumes: raw images, noise for their crops and masks, and the learning rate."""

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

    def read(self, world: World = ONE_PROCESS) -> tuple[dict[str, float], int]:
        """Means since the last reading, and the first bad step of any process since then, from 0; -1 if none. Waits."""
        world.all_reduce(self.sums).div_(world.size)
        loss, error, energy, share, steps, bad = self._all.tolist()
        bad = min((step for step in world.all_gather(int(bad)) if step >= 0), default=-1)
        self._all.zero_(), self.bad_step.fill_(-1)
        r2 = 1 - error / energy if energy > 0 else float("nan")
        return {"loss": loss / steps, "r2": r2, "masked_share": share / steps}, bad


@dataclass(eq=False)
class Plain:
    """Eager forward, backward, clip and update; with several processes, of the mean of their gradients."""

    model: MaskedAutoencoder
    standardize: Standardize
    config: Config
    optimizer: torch.optim.Optimizer
    world: World = ONE_PROCESS

    def __post_init__(self) -> None:
        self.tally = Tally(self.standardize.mean.device)
        self._leaves = [p for p in self.model.parameters() if p.requires_grad]

    def __call__(self, inputs: Inputs) -> None:
        """Take one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = inputs.lr
        self.optimizer.zero_grad(set_to_none=True)
        # Sharded, torch's own hooks talk to the other processes.
        with lost_process_errors(self.world) if self.config.train.shard else nullcontext():
            loss, values = self.measure(inputs.images, inputs.crops, inputs.draw)
            loss.backward()
            self._update(values, self.optimizer.step)

    def measure(self, images: Tensor, crops: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """The loss, and (loss, error, energy, masked share) for the tally."""
        augment, (height, width) = self.config.augment, images.shape[-2:]
        # Two crops of an image where two views of it are wanted.
        images = images.repeat(len(crops) // len(images), 1, 1, 1)
        x = self.standardize(crop(images, boxes_of(crops, height, width, augment), augment.interpolation))
        outcome = self.model(x, draw)
        values = torch.stack([outcome.loss, outcome.error.mean(), outcome.energy.mean(), outcome.masked_share.mean()])
        return outcome.loss, values.detach()

    def _update(self, values: Tensor, take: Callable[[], object]) -> None:
        if not self.config.train.shard:  # whose hooks leave means already
            self.world.average([p.grad for p in self._leaves if p.grad is not None])
        if self.config.optim.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._leaves, self.config.optim.clip_norm, foreach=True)
        take()
        self.tally.add(values)


class Graph(Plain):
    """The same step, compiled, captured once in a CUDA graph and replayed (`pmae.fast.graph`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_bf16 = self.model.precision == torch.bfloat16
        if in_bf16:
            # Crops and projections stay in float32 but may multiply in TF32: 1e-3 of an image, far below R2's
            # resolution, and three times as fast for 12,288 pixels.
            torch.set_float32_matmul_precision("high")
            self.model.space.allow_bf16()
        # With a random ratio an MAE has a graph for each number of visible patches, and none is compiled: half a minute
        # each, for what lies around the blocks.
        many = self.config.masking.ratio_schedule == "uniform" and self.config.space.name == "pixels"
        measure = self.measure if many else compiled(self.measure)
        # A dozen kernels for a few numbers, or one.
        self.tally.add = compiled(self.tally.add)  # type: ignore[method-assign]
        self._captured = CapturedStep(self.model, self.optimizer, measure, self._update, in_bf16)
        self._leaves = self._captured.leaves(self._leaves)

    def __call__(self, inputs: Inputs) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(inputs.lr)
        self._captured(inputs.images, inputs.crops, inputs.draw)


class FastEngine:
    """Graph steps, the first loss of which is checked; plain ones where compiling or capturing fails."""

    def __init__(self, build: Callable[[type[Plain]], Plain], asked: bool, check: bool) -> None:
        self._build, self._asked, self._check = build, asked, check
        self._taken, self.current = 0, build(Graph)

    @property
    def tally(self) -> Tally:
        """What was measured since it was last read."""
        return self.current.tally

    def __call__(self, inputs: Inputs) -> None:
        """Take one step."""
        expected = float(self._plain_loss(inputs)) if self._check and self._taken == 0 else None
        try:
            self.current(inputs)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a compiler may raise anything
            if self._taken >= SETTLED or type(self.current) is Plain:
                raise
            self._fall_back(error)
            self.current(inputs)
        self._taken += 1
        if expected is not None:
            self._compare(float(self.tally.sums[0]), expected)

    def _fall_back(self, error: Exception) -> None:
        if self._asked:
            raise UserError(f"train.engine must be plain or auto here, got 'graph': {failure(error)}") from error
        warnings.warn(
            f"{failure(error)}; training goes on with the plain one, which gives the same numbers and may take a few "
            "times as long",
            stacklevel=2,
        )
        counted = self.tally._all
        self.current = self._build(Plain)
        self.tally._all.copy_(counted)

    @torch.no_grad()
    def _plain_loss(self, inputs: Inputs) -> Tensor:
        """The loss of a step by timm's own code; nothing is trained, and what a forward pass changes is put back."""
        model = self.current.model
        buffers = [(buffer, buffer.clone()) for buffer in model.encoder.buffers()]
        hide = getattr(model, "hide_components", None)
        fast.accelerate(model, "none")
        if hide is not None:
            # The same masks: of components without variance the kernel and the sort may hide other ones.
            model.hide_components = hide
        try:
            loss, _ = Plain.measure(self.current, inputs.images, inputs.crops, inputs.draw)
        finally:
            fast.accelerate(model, self.current.config.train.kernels)
            for buffer, before in buffers:
                buffer.copy_(before)
        return loss

    def _compare(self, found: float, expected: float) -> None:
        tolerance = TOLERANCE[self.current.model.precision]
        # A loss that is not finite has its own message.
        if abs(found - expected) > tolerance * abs(expected):
            raise UserError(
                f"train.kernels must give the plain path's loss at the first step within {tolerance:.1%}, got "
                f"{found:.6g} against {expected:.6g}; --train.kernels none trains without them"
            )


def build_optimizer(model: nn.Module, config: OptimConfig, on_graph: bool) -> torch.optim.AdamW:
    """AdamW with decay on matrices, or on all; under a graph rate and step count are tensors on the device."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("token")
            (decayed if is_matrix else plain).append(parameter)
    rate = torch.zeros((), device=decayed[0].device) if on_graph else 0.0
    decay_plain = config.weight_decay if config.decay_all else 0.0
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": decay_plain}]
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, fused=True, capturable=on_graph)
