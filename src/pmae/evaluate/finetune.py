"""Fine-tuning: encoder and linear head trained together on labels; with untrained weights, training from scratch."""

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmae.config_file import to_dict
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import FINGERPRINT_IMAGES
from pmae.errors import UserError, failing_as, unknown_name
from pmae.evaluate.augment import Loss, cross_entropy, draw_noise
from pmae.evaluate.features import HEADS, NOISE, batch_of, evaluating, extract, generator, mixed, order
from pmae.evaluate.finetune_step import EMA, FinetuneStep, build_optimizer, build_step
from pmae.evaluate.protocols import FinetuneProtocol
from pmae.fast.graph import falls_back
from pmae.files import read_tensors, tensors_digest, write_tensors
from pmae.models.encoder import set_drop_path
from pmae.results import FORMERLY
from pmae.train.schedule import rate

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
        return extract(self.classifier, batches, standardize)["logits"].softmax(-1)


class EarlyStopping:
    """Keeps the weights of the lowest validation loss, that of the start among them.

    Due when `patience` epochs in a row were no better than one before them: what a good start loses while augmentation
    is new to it may come back.
    """

    def __init__(self, validate: Callable[[Classifier], float], patience: int) -> None:
        self.validate, self.patience = validate, patience
        self.losses: list[float] = []
        self.best: dict[str, Tensor] = {}

    def look(self, model: Classifier) -> None:
        loss = self.validate(model)
        if not self.best or loss < min(self.losses):
            self.best = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.losses.append(loss if math.isfinite(loss) else math.inf)

    @property
    def due(self) -> bool:
        trained = self.losses[1:]
        return bool(trained) and len(trained) - 1 - trained.index(min(trained)) >= self.patience


@dataclass(eq=False)
class Progress:
    """All that changes while a classifier is trained, saved in one file to be gone on from."""

    classifier: Classifier
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    stopping: EarlyStopping | None
    losses: list[float] = field(default_factory=list)

    @property
    def kept(self) -> Classifier:
        """What is validated and returned: the average of the weights where there is one."""
        return self.ema.model if self.ema else self.classifier

    def done(self, epochs: int) -> bool:
        """Whether so many epochs are trained, or more no longer help."""
        return len(self.losses) >= epochs or (self.stopping is not None and self.stopping.due)

    def save(self, path: Path, identity: Tensor) -> None:
        """Write weights, their average, the best ones, moments and losses."""
        tensors = {"identity": identity, "losses": torch.tensor(self.losses, dtype=torch.float64)}
        if self.stopping:
            tensors["validation"] = torch.tensor(self.stopping.losses, dtype=torch.float64)
            tensors |= {f"best.{name}": value for name, value in self.stopping.best.items()}
        tensors |= {f"model.{name}": value for name, value in self.classifier.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.ema.model.state_dict().items()} if self.ema else {}
        for name, parameter in self.classifier.named_parameters():
            tensors |= {f"{key}.{name}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors)

    def restore(self, path: Path, identity: Tensor) -> None:
        """Load what the file holds into all of them."""
        tensors = read_tensors(path)
        if "identity" not in tensors or not torch.equal(tensors["identity"], identity):
            rule = "fine-tuning with the same settings, data and seed"
            raise UserError(f"folder must hold {rule}, got another in {path.parent}")
        with failing_as(f"folder must hold the tensors of this fine-tuning, got others in {path.parent}"):
            self.classifier.load_state_dict(_below("model.", tensors))
            if self.ema:
                self.ema.model.load_state_dict(_below("average.", tensors))
            self._restore_moments(tensors)
            if self.stopping:
                self.stopping.losses = tensors["validation"].tolist()
                device = next(self.classifier.parameters()).device
                self.stopping.best = {name: value.to(device) for name, value in _below("best.", tensors).items()}
            self.losses = tensors["losses"].tolist()

    def _restore_moments(self, tensors: dict[str, Tensor]) -> None:
        fused = bool(self.optimizer.defaults.get("fused"))
        for name, parameter in self.classifier.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if (value := tensors.get(f"{key}.{name}")) is not None:
                    # Step counters stay where AdamW put them; moments live beside their parameter.
                    beside = value.ndim or fused
                    self.optimizer.state[parameter][key] = value.to(parameter.device) if beside else value


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


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
    loss: Loss = cross_entropy,
    stopping: EarlyStopping | None = None,
    head: tuple[Tensor, Tensor] | None = None,
) -> Finetuned:
    """Train a copy of the encoder and a new head on images and labels; with a folder, resume what is saved there.

    `on_epoch` is called with each epoch and its mean loss; `plain` compiles and captures nothing. With `stopping` the
    weights are those of the best epoch, 0 being the start, and epochs that no longer help are left out. `head` is what
    the new one starts from, weights and biases.
    """
    device = batches.device
    own = copy.deepcopy(encoder).to(device)
    set_drop_path(own, config.drop_path)
    pooling = _pooling(own, config.pooling, batches, standardize)
    classifier = Classifier(own, pooling, classes, seed).to(device)
    if head is not None:
        classifier.head.load_state_dict({"weight": head[0], "bias": head[1]})
    optimizer = build_optimizer(classifier, config, batch_of(len(batches), config.batch_size), device)
    ema = EMA(classifier, config.ema_decay) if config.ema_decay else None
    progress = Progress(classifier, optimizer, ema, stopping)
    if stopping:  # of a call that failed and is repeated
        stopping.losses, stopping.best = [], {}
    path, saved = folder / "finetune.safetensors" if folder else None, time.monotonic()
    identity = _identity(encoder, batches, labels, classes, config, seed)
    if path and path.exists():
        progress.restore(path, identity)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        pixels = config.epochs * len(batches) * math.prod(batches.shape[1:])
        take_step = build_step(classifier, optimizer, standardize, config, loss, pixels, plain)
        for epoch in _epochs(progress, take_step, batches, labels, seed, keep_statistics=head is not None):
            if path and (progress.done(config.epochs) or time.monotonic() - saved >= PAUSE):
                progress.save(path, identity)
                saved = time.monotonic()
            on_epoch(epoch, progress.losses[-1])
    if stopping and stopping.best:
        progress.kept.load_state_dict(stopping.best)
    return Finetuned(progress.kept, tuple(progress.losses))


def _identity(
    encoder: nn.Module, batches: Batches, labels: Tensor, classes: int, config: FinetuneProtocol, seed: int
) -> Tensor:
    """What training starts from, and how: going on from anything else would be silently wrong."""
    some = torch.linspace(0, len(batches) - 1, min(FINGERPRINT_IMAGES, len(batches))).long()
    start = tensors_digest({**encoder.state_dict(), "labels": labels, "images": batches.take(some)})
    # By the names of older versions, whose states are gone on from.
    settings = {FORMERLY.get(name, name): value for name, value in to_dict(config).items()}
    said = json.dumps([settings, seed, classes, start]).encode()
    return torch.frombuffer(bytearray(hashlib.blake2b(said, digest_size=16).digest()), dtype=torch.uint8)


def _epochs(
    progress: Progress, take_step: FinetuneStep, batches: Batches, labels: Tensor, seed: int, keep_statistics: bool
) -> Iterator[int]:
    """Train and validate one epoch after another until all is done; yields the number of each."""
    stopping = progress.stopping
    if stopping and not progress.losses:
        stopping.look(progress.kept)
    while not progress.done(take_step.config.epochs):
        epoch = len(progress.losses)
        progress.classifier.train()
        for module in progress.classifier.modules() if keep_statistics else ():
            # Where a head was fitted to features of these, batch norms go on with the statistics they have.
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        progress.losses.append(_epoch(take_step, batches, labels, progress.ema, seed, epoch))
        if stopping:
            stopping.look(progress.kept)
        yield epoch


def _epoch(take_step: FinetuneStep, batches: Batches, labels: Tensor, ema: EMA | None, seed: int, epoch: int) -> float:
    config, count = take_step.config, len(batches)
    positions = order(count, batch_of(count, config.batch_size), seed, epoch, batches.device)
    # Whatever the encoder itself draws (stochastic depth, dropout) follows from the seed and the epoch too.
    torch.manual_seed(mixed(seed, NOISE, epoch))
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
