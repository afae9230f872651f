"""Encoder and linear head trained together on labels: fine-tuning, or from scratch with untrained weights."""

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
from torch import Tensor, nn

from pmae.config_file import to_dict
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.errors import UserError, unknown_name
from pmae.evaluate.augment import draw_noise
from pmae.evaluate.features import Extractor, evaluating
from pmae.evaluate.finetune_step import EMA, CapturedFinetuneStep, FinetuneStep, can_be_captured, stochastic_depth
from pmae.evaluate.protocols import FinetuneProtocol
from pmae.evaluate.splits import HEADS, NOISE, batch_of, generator, mixed, order
from pmae.fast import accelerate
from pmae.files import read_object, read_tensors, write_json, write_tensors
from pmae.train.schedule import rate

UNDECAYED = ("cls_token", "reg_token", "pos_embed")
PAUSE = 20.0
"""Seconds between two savings at least: an epoch on a GPU may take no longer than writing its state."""


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
    """A trained classifier, averaged where that was asked for, and the mean training loss in each epoch."""

    classifier: Classifier
    losses: tuple[float, ...]

    def scores(self, batches: Batches, standardize: Standardize) -> Tensor:
        """Class probabilities (N, C) of all images."""
        found = Extractor(self.classifier, standardize, batches.device, compile=False)(batches)
        return found["logits"].softmax(-1)


def finetune(
    encoder: nn.Module,
    batches: Batches,
    labels: Tensor,
    classes: int,
    standardize: Standardize,
    config: FinetuneProtocol,
    seed: int = 0,
    folder: Path | None = None,
    compile: bool | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> Finetuned:
    """Train a copy of the encoder and a new head; with a folder, go on from the last epoch saved there.

    `labels` and `standardize` are on the device of `batches`. `on_epoch` is called with each epoch and its mean loss.
    """
    device = batches.device
    own = copy.deepcopy(encoder).to(device)
    classifier = Classifier(own, _pooling(own, config.pooling, batches, standardize), classes, seed).to(device)
    optimizer = _optimizer(classifier, config, batch_of(len(batches), config.batch_size), device)
    ema = EMA(classifier, config.average) if config.average else None
    identity = {"settings": to_dict(config), "seed": seed, "classes": classes, "start": _digest(encoder, labels)}
    averaged = ema.model if ema else None
    losses = restore(folder, identity, classifier, optimizer, averaged) if folder else []
    devices, saved = [device] if device.type == "cuda" else [], time.monotonic()
    with torch.random.fork_rng(devices), stochastic_depth(own, config.drop_path):
        take_step = _finetune_step(classifier, optimizer, standardize, config, compile)
        for epoch in range(len(losses), config.epochs):
            losses.append(_epoch(take_step, batches, labels, ema, seed, epoch))
            if folder and (epoch + 1 == config.epochs or time.monotonic() - saved >= PAUSE):
                save(folder, identity, classifier, optimizer, losses, averaged)
                saved = time.monotonic()
            if on_epoch:
                on_epoch(epoch, losses[-1])
    return Finetuned(ema.model if ema else classifier, tuple(losses))


def _epoch(
    take_step: FinetuneStep, batches: Batches, labels: Tensor, ema: EMA[Classifier] | None, seed: int, epoch: int
) -> float:
    """One pass over the training images; its mean loss."""
    config, device, count = take_step.config, batches.device, len(batches)
    positions = order(count, batch_of(count, config.batch_size), seed, epoch, device)
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


def _finetune_step(
    classifier: Classifier,
    optimizer: torch.optim.Optimizer,
    standardize: Standardize,
    config: FinetuneProtocol,
    compile: bool | None,
) -> FinetuneStep:
    """The fastest step there is here; the eager one if `compile` is False."""
    device = standardize.mean.device
    accelerate(classifier)
    if compile is not False and can_be_captured(classifier, device):
        return CapturedFinetuneStep(classifier, optimizer, standardize, config)
    compiled = device.type == "cuda" if compile is None else compile
    model = torch.compile(classifier, mode="reduce-overhead") if compiled else classifier
    return FinetuneStep(model, optimizer, standardize, config)


def _pooling(encoder: Any, wanted: str, batches: Batches, standardize: Standardize) -> str:
    """The wanted pooling, or the mean where the encoder has no [CLS]."""
    first = batches.take(torch.zeros(1, dtype=torch.long, device=batches.device))
    with evaluating(encoder):
        offered = encoder.features(standardize(first))
    if wanted in offered:
        return wanted
    if wanted == "cls" and "mean" in offered:
        return "mean"
    raise unknown_name("finetune.pooling", wanted, offered)


def _digest(encoder: nn.Module, labels: Tensor) -> str:
    """What training starts from, in short: resuming from other weights or labels would be silently wrong."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in (*encoder.state_dict().values(), labels):
        state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _optimizer(classifier: Classifier, config: FinetuneProtocol, batch: int, device: torch.device) -> torch.optim.AdamW:
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


# Checkpoints of fine-tuning: tensors in safetensors; the JSON file names them and is replaced last.

STATE = "finetune.json"


def save(
    folder: Path,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    average: nn.Module | None = None,
) -> None:
    """Write the state after `len(losses)` epochs."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = f"finetune-{len(losses):05d}.safetensors"
    write_tensors(folder / tensors, _tensors(model, optimizer, average))
    write_json(folder / STATE, {"tensors": tensors, "losses": losses, "identity": identity})
    for old in folder.glob("finetune-*.safetensors"):
        if old.name != tensors:
            old.unlink()


def restore(
    folder: Path,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: nn.Module | None = None,
) -> list[float]:
    """Load what the folder holds into all three and return the losses so far; none if it holds nothing."""
    if not (folder / STATE).exists():
        return []
    state = read_object(folder / STATE)
    name, losses = state.get("tensors"), state.get("losses")
    numbers = isinstance(losses, list) and all(isinstance(loss, int | float) for loss in losses)
    if not isinstance(name, str) or Path(name).name != name or not numbers:
        raise UserError(f"folder must hold a readable fine-tuning state, got {str(folder)!r}")
    if state.get("identity") != json.loads(json.dumps(identity)):
        raise UserError(f"folder must hold fine-tuning with the same settings, data and seed, got another in {folder}")
    tensors = read_tensors(folder / name)
    try:
        model.load_state_dict(_below("model.", tensors))
        if average:
            average.load_state_dict(_below("average.", tensors))
        _restore_moments(model, optimizer, tensors)
    except (RuntimeError, KeyError) as error:
        raise UserError(f"folder must hold the tensors of this fine-tuning, got others in {str(folder)!r}") from error
    return list(losses or ())


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None) -> dict[str, Tensor]:
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if average:
        found |= {f"average.{name}": tensor for name, tensor in average.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def _restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters, fused = dict(model.named_parameters()), bool(optimizer.defaults.get("fused"))
    for key, tensor in _below("optimizer.", tensors).items():
        slot, name = key.split(".", 1)
        parameter = parameters[name]
        # Step counters stay where AdamW put them; moments live beside their parameter.
        optimizer.state[parameter][slot] = tensor.to(parameter.device) if tensor.ndim or fused else tensor
