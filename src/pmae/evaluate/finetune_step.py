"""One step of fine-tuning, eager or captured on a GPU; the EMA of the weights, and stochastic depth.

Everything random about the images comes in as `Noise`, and the loss stays on the device, so no step waits for it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from pmae.data.augment import Standardize
from pmae.evaluate.augment import Noise, augmented, mixed_loss
from pmae.evaluate.protocols import FinetuneProtocol
from pmae.fast import can_capture
from pmae.fast.graph import CapturedStep, compiled


class FinetuneStep:
    """Eager forward, backward, clip and update; `total` adds up the loss."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, standardize: Standardize, config: FinetuneProtocol
    ) -> None:
        self.model, self.optimizer, self.standardize, self.config = model, optimizer, standardize, config
        self.total = torch.zeros((), device=standardize.mean.device)
        self._leaves = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, images: Tensor, labels: Tensor, noise: Noise, rate: float) -> None:
        """Take one step at this fraction of every group's peak rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.measure(images, labels, noise)
        loss.backward()
        self._update(loss, self.optimizer.step)

    def measure(self, images: Tensor, labels: Tensor, noise: Noise) -> Tensor:
        """The loss on one batch of augmented images."""
        x = augmented(images, noise, self.standardize, self.config)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = self.model(x).float()
        if noise.mix is None:
            return nn.functional.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        return mixed_loss(logits, labels, noise.mix, self.config.label_smoothing)

    def _update(self, loss: Tensor, take: Any) -> None:
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self._leaves, self.config.clip_norm)
        take()
        self.total += loss.detach()


class CapturedFinetuneStep(FinetuneStep):
    """The same step with bf16 copies of the weights, compiled, captured in a CUDA graph and replayed."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, standardize: Standardize, config: FinetuneProtocol
    ) -> None:
        super().__init__(model, optimizer, standardize, config)
        groups, device = optimizer.param_groups, standardize.mean.device
        self._peaks = torch.tensor([group["peak"] for group in groups], device=device)
        self._rates = torch.zeros_like(self._peaks)
        for group, rate in zip(groups, self._rates.unbind(0), strict=True):
            group["lr"] = rate
        self._captured = CapturedStep(model, optimizer, compiled(self._measure), self._update, bf16=True)
        self._leaves = self._captured.leaves(self._leaves)

    def __call__(self, images: Tensor, labels: Tensor, noise: Noise, rate: float) -> None:
        torch.mul(self._peaks, rate, out=self._rates)
        self._captured(images, labels, noise)

    def _measure(self, images: Tensor, labels: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        loss = self.measure(images, labels, noise)
        return loss, loss.detach()


def can_be_captured(model: Any, device: torch.device) -> bool:
    """Whether this model's step can be captured: a ViT on a GPU, with the kernels for it."""
    return can_capture(device) and getattr(model.encoder, "is_vit", False)


Model = TypeVar("Model", bound=nn.Module)


class EMA(Generic[Model]):
    """The exponential moving average of a model's weights, as a model of its own."""

    def __init__(self, model: Model, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(model), decay
        # These tensors share memory with the two models, which are only ever changed in place.
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        self._mine = [mine for mine, _ in pairs if mine.is_floating_point()]
        self._theirs = [theirs for mine, theirs in pairs if mine.is_floating_point()]

    def update(self, step: int) -> None:
        """Follow the model after step `step`, the first being 0; early on faster, so that the start is forgotten."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._mine, self._theirs, 1 - decay)
        for mine, theirs in self._counters:
            mine.copy_(theirs)


PLACES = ("drop_path", "drop_path1", "drop_path2")
"""What timm calls the places at the end of a residual branch."""


@contextmanager
def stochastic_depth(encoder: nn.Module, rate: float) -> Iterator[None]:
    """Stochastic depth (Huang et al. 2016) inside: branches are dropped, from never to `rate` at the last block.

    A rate of 0 changes nothing, nor does any rate where the network has no such places.
    """
    blocks = [block for block in encoder.modules() if rate and _places(block)]
    before = [(block, name, module) for block in blocks for name, module in _places(block).items()]
    for position, block in enumerate(blocks):
        for name in _places(block):
            setattr(block, name, DropPath(rate * position / max(1, len(blocks) - 1)))
    try:
        yield
    finally:
        for block, name, module in before:
            setattr(block, name, module)


def _places(block: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in block.named_children() if name in PLACES}
