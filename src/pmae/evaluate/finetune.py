"""Fine-tuning: encoder and linear head trained together on labels; with untrained weights, training from scratch."""

import copy
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from pmae.config_file import to_dict
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.decode import failing_as
from pmae.errors import UserError, unknown_name
from pmae.evaluate.augment import Noise, augmented, draw_noise, mixed_loss
from pmae.evaluate.features import HEADS, NOISE, batch_of, evaluating, extract, generator, mixed, order
from pmae.evaluate.protocols import FinetuneProtocol
from pmae.fast import accelerate, can_capture
from pmae.fast.graph import CapturedStep, compiled, falls_back
from pmae.files import read_tensors, tensors_digest, write_tensors
from pmae.train.schedule import rate

UNDECAYED = ("cls_token", "reg_token", "pos_embed")
DROP_PATHS = ("drop_path", "drop_path1", "drop_path2")  # what timm calls the places at the end of a residual branch
PAUSE = 20.0  # seconds between two savings at least: an epoch on a GPU may take no longer than writing its state


class Classifier(nn.Module):
    """An encoder with a linear head on one of its poolings."""

    def __init__(self, encoder: nn.Module, pooling: str, classes: int, seed: int = 0) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.pooling = pooling
        self.width = classes
        self.head = nn.Linear(encoder.width, classes)  # type: ignore[arg-type]
        draw = generator(torch.device("cpu"), seed, HEADS)
        with torch.no_grad():
            self.head.weight.copy_(0.01 * torch.randn(self.head.weight.shape, generator=draw))
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder.features(x)[self.pooling])

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """Class logits, by the door through which representations are extracted."""
        return {"logits": self(x)}


@dataclass(frozen=True)
class Finetuned:
    """A trained classifier, its weights averaged where that was asked for, and the mean training loss of each epoch."""

    classifier: Classifier
    losses: tuple[float, ...]

    def scores(self, batches: Batches, standardize: Standardize) -> Tensor:
        """Class probabilities (N, C) of all images."""
        return extract(self.classifier, batches, standardize, compile=False)["logits"].softmax(-1)


@falls_back
def finetune(
    encoder: nn.Module,
    batches: Batches,
    labels: Tensor,
    classes: int,
    standardize: Standardize,
    config: FinetuneProtocol,
    seed: int = 0,
    folder: Path | None = None,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
    plain: bool = False,
) -> Finetuned:
    """Train a copy of the encoder and a new head on images and labels; with a folder, resume what is saved there.

    `on_epoch` is called with each epoch and its mean loss; `plain` compiles and captures nothing.
    """
    device = batches.device
    own = copy.deepcopy(encoder).to(device)
    set_drop_path(own, config.drop_path)
    classifier = Classifier(own, _pooling(own, config.pooling, batches, standardize), classes, seed).to(device)
    optimizer = build_optimizer(classifier, config, batch_of(len(batches), config.batch_size), device)
    ema = EMA(classifier, config.average) if config.average else None
    # What training starts from, and how: going on from anything else would be silently wrong.
    start = tensors_digest({**encoder.state_dict(), "labels": labels})
    said = json.dumps([to_dict(config), seed, classes, start]).encode()
    identity = torch.frombuffer(bytearray(hashlib.blake2b(said, digest_size=16).digest()), dtype=torch.uint8)
    path, saved, losses = folder / "finetune.safetensors" if folder else None, time.monotonic(), list[float]()
    if path and path.exists():
        losses = _restore(path, identity, classifier, optimizer, ema)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        take_step = _build_step(classifier, optimizer, standardize, config, plain)
        for epoch in range(len(losses), config.epochs):
            losses.append(_epoch(take_step, batches, labels, ema, seed, epoch))
            if path and (epoch + 1 == config.epochs or time.monotonic() - saved >= PAUSE):
                so_far = torch.tensor(losses, dtype=torch.float64)
                _save(path, classifier, optimizer, ema, identity=identity, losses=so_far)
                saved = time.monotonic()
            on_epoch(epoch, losses[-1])
    return Finetuned(ema.model if ema else classifier, tuple(losses))


def _epoch(
    take_step: "FinetuneStep", batches: Batches, labels: Tensor, ema: "EMA | None", seed: int, epoch: int
) -> float:
    config, count = take_step.config, len(batches)
    positions = order(count, batch_of(count, config.batch_size), seed, epoch, batches.device)
    # Whatever the encoder itself draws (stochastic depth, dropout) follows from the seed and the epoch too.
    torch.manual_seed(mixed(seed, NOISE, epoch))
    take_step.model.train()
    take_step.total.zero_()
    for step, index in enumerate(positions):
        fraction = rate("cosine", epoch + step / len(positions), config.epochs, config.warmup_epochs)
        images = batches.take(index)
        take_step(images, labels[index], draw_noise(images, config, (seed, epoch, step)), fraction)
        if ema:
            ema.update(epoch * len(positions) + step)
    return float(take_step.total / len(positions))


def _pooling(encoder: Any, wanted: str, batches: Batches, standardize: Standardize) -> str:
    first = batches.take(torch.zeros(1, dtype=torch.long, device=batches.device))
    with evaluating(encoder):
        offered = encoder.features(standardize(first))
    found = "mean" if wanted == "cls" and "cls" not in offered else wanted
    if found not in offered:
        raise unknown_name("finetune.pooling", wanted, offered)
    return found


@dataclass(eq=False)
class FinetuneStep:
    """Eager forward, backward, clip and update; `total` adds up the loss."""

    model: Any
    optimizer: torch.optim.Optimizer
    standardize: Standardize
    config: FinetuneProtocol

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
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        else:
            loss = mixed_loss(logits, labels, noise.mix, self.config.label_smoothing)
        return loss, loss.detach()

    def _update(self, value: Tensor, take: Callable[[], Any]) -> None:
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self._leaves, self.config.clip_norm)
        take()
        self.total += value


class CapturedFinetuneStep(FinetuneStep):
    """The same step with bf16 copies of the weights, compiled, captured in a CUDA graph and replayed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, device = self.optimizer.param_groups, self.standardize.mean.device
        self._peaks = torch.tensor([group["peak"] for group in groups], device=device)
        self._rates = torch.zeros_like(self._peaks)
        for group, own in zip(groups, self._rates.unbind(0), strict=True):
            group["lr"] = own
        self._captured = CapturedStep(self.model, self.optimizer, compiled(self._measure), self._update, bf16=True)
        self._leaves = self._captured.leaves(self._leaves)

    def __call__(self, images: Tensor, labels: Tensor, noise: Noise, rate: float) -> None:
        torch.mul(self._peaks, rate, out=self._rates)
        self._captured(images, labels, noise)


def _build_step(
    classifier: Classifier,
    optimizer: torch.optim.Optimizer,
    standardize: Standardize,
    config: FinetuneProtocol,
    plain: bool,
) -> FinetuneStep:
    device = standardize.mean.device
    accelerate(classifier)
    if not plain and can_capture(device) and getattr(classifier.encoder, "is_vit", False):
        return CapturedFinetuneStep(classifier, optimizer, standardize, config)
    may_compile = device.type == "cuda" and not plain
    model = torch.compile(classifier, mode="reduce-overhead") if may_compile else classifier
    return FinetuneStep(model, optimizer, standardize, config)


def build_optimizer(
    classifier: Classifier, config: FinetuneProtocol, batch: int, device: torch.device
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


def layer_depths(names: list[str]) -> dict[str, int]:
    """How deep each parameter sits: embeddings 0, block i at i + 1, what follows them last; 0 for all but a ViT."""
    blocks = {name: re.search(r"(?:^|\.)blocks\.(\d+)\.", name) for name in names}
    last = max((int(found.group(1)) + 2 for found in blocks.values() if found), default=0)
    first = re.compile(r"patch_embed|norm_pre|" + "|".join(UNDECAYED))
    return {
        name: int(found.group(1)) + 1 if found else 0 if first.search(name) else last for name, found in blocks.items()
    }


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


def set_drop_path(encoder: nn.Module, rate: float) -> None:
    """Stochastic depth (Huang et al. 2016), up to `rate` at the last block, where timm has places for it."""
    places = {block: [name for name, _ in block.named_children() if name in DROP_PATHS] for block in encoder.modules()}
    blocks = [block for block, names in places.items() if rate and names]
    for position, block in enumerate(blocks):
        for name in places[block]:
            setattr(block, name, DropPath(rate * position / max(1, len(blocks) - 1)))


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None, **more: Tensor) -> None:
    tensors = more | {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"average.{name}": value for name, value in ema.model.state_dict().items()} if ema else {}
    for name, parameter in model.named_parameters():
        tensors |= {f"{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors)


def _restore(
    path: Path, identity: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None
) -> list[float]:
    """Load what the file holds into all three and return the losses so far."""
    tensors = read_tensors(path)
    if "identity" not in tensors or not torch.equal(tensors["identity"], identity):
        rule = "fine-tuning with the same settings, data and seed"
        raise UserError(f"folder must hold {rule}, got another in {path.parent}")
    with failing_as(f"folder must hold the tensors of this fine-tuning, got others in {path.parent}"):
        for prefix, module in (("model.", model), ("average.", ema.model if ema else nn.Module())):
            module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        fused = bool(optimizer.defaults.get("fused"))
        for name, parameter in model.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if (value := tensors.get(f"{key}.{name}")) is not None:
                    # Step counters stay where AdamW put them; moments live beside their parameter.
                    optimizer.state[parameter][key] = value.to(parameter.device) if value.ndim or fused else value
        losses: list[float] = tensors["losses"].tolist()
    return losses
