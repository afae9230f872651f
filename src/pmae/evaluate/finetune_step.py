"""One step of fine-tuning: augment, loss, backward, clip, AdamW with layer-wise rates, and the EMA of the weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pmae.data.augment import Standardize
from pmae.evaluate.augment import Loss, Noise, augmented, cross_entropy, mixed_loss
from pmae.evaluate.protocols import FinetuneProtocol
from pmae.fast import accelerate, can_capture
from pmae.fast.graph import COMPILE_FROM, CapturedStep, compiled
from pmae.models.encoder import UNDECAYED, layer_depths


@dataclass(eq=False)
class FinetuneStep:
    """Eager forward, backward, clip and update; `total` adds up the loss."""

    model: Any
    optimizer: torch.optim.Optimizer
    standardize: Standardize
    config: FinetuneProtocol
    loss: Loss = cross_entropy
    compile: bool = False

    def __post_init__(self) -> None:
        self.total = torch.zeros((), device=self.standardize.mean.device)
        self._leaves = [p for p in self.model.parameters() if p.requires_grad]

    def __call__(self, images: Tensor, labels: Tensor, noise: Noise, rate: float) -> None:
        """Take one step at this fraction of every group's peak rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, value = self._measure(images, labels, noise)
        loss.backward()
        self._update(value, self.optimizer.step)

    def _measure(self, images: Tensor, labels: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        x = augmented(images, noise, self.standardize, self.config)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = self.model(x).float()
        if noise.mix is None:
            loss = self.loss(logits, labels, self.config.label_smoothing)
        else:
            loss = mixed_loss(logits, labels, noise.mix, self.config.label_smoothing, self.loss)
        return loss, loss.detach()

    def _update(self, value: Tensor, take: Callable[[], Any]) -> None:
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self._leaves, self.config.clip_norm)
        take()
        self.total += value


class CapturedFinetuneStep(FinetuneStep):
    """The same step with bf16 copies of the weights, captured in a CUDA graph and replayed, compiled before if told."""

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, device = self.optimizer.param_groups, self.standardize.mean.device
        self._peaks = torch.tensor([group["peak"] for group in groups], device=device)
        self._rates = torch.zeros_like(self._peaks)
        for group, own in zip(groups, self._rates.unbind(0), strict=True):
            group["lr"] = own
        measure = compiled(self._measure) if self.compile else self._measure
        self._captured = CapturedStep(self.model, self.optimizer, measure, self._update, bf16=True)
        self._leaves = self._captured.leaves(self._leaves)

    def __call__(self, images: Tensor, labels: Tensor, noise: Noise, rate: float) -> None:
        torch.mul(self._peaks, rate, out=self._rates)
        self._captured(images, labels, noise)


def build_step(
    classifier: Any,
    optimizer: torch.optim.Optimizer,
    standardize: Standardize,
    config: FinetuneProtocol,
    loss: Loss,
    pixels: float,
    plain: bool,
) -> FinetuneStep:
    """Captured where a GPU and a ViT allow it, else eager; both through the fast kernels that there are, and compiled
    on a GPU where a run over so many pixels makes it pay."""
    device, compile = standardize.mean.device, pixels >= COMPILE_FROM
    accelerate(classifier)
    if not plain and can_capture(device) and getattr(classifier.encoder, "is_vit", False):
        return CapturedFinetuneStep(classifier, optimizer, standardize, config, loss, compile)
    may_compile = compile and device.type == "cuda" and not plain
    model = torch.compile(classifier, mode="reduce-overhead") if may_compile else classifier
    return FinetuneStep(model, optimizer, standardize, config, loss)


def build_optimizer(
    classifier: nn.Module, config: FinetuneProtocol, batch: int, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with one group per (depth, decayed or not), each with its own peak rate."""
    peak = config.base_lr * batch / 256
    named = [(name, p) for name, p in classifier.named_parameters() if p.requires_grad]
    depths = layer_depths([name for name, _ in named])
    deepest = max(depths.values())
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in named:
        decayed = parameter.ndim >= 2 and not name.endswith(UNDECAYED)
        scale = (config.layer_decay or 1.0) ** (deepest - depths[name])
        empty = {"params": [], "peak": peak * scale, "weight_decay": config.weight_decay if decayed else 0.0}
        groups.setdefault((depths[name], decayed), empty)["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=peak, betas=config.betas, fused=device.type == "cuda")


class EMA:
    """The exponential moving average of a classifier's weights, as a classifier of its own."""

    def __init__(self, model: Any, decay: float) -> None:
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
