"""Fine-tuning that is kept: a linear head alone, the whole network, or low-rank adapters; then calibrated."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.classify import FinetuneConfig
from pmae.classify.calibrate import fit_reference, fit_temperature, nll
from pmae.classify.labels import LabelledData
from pmae.classify.lora import merged, with_adapters
from pmae.classify.model import READING, Card, ImageClassifier
from pmae.config import DataConfig
from pmae.data.augment import Standardize
from pmae.data.batches import Batches
from pmae.data.images import ImageSet
from pmae.embed import BATCH, Embedder
from pmae.evaluate.augment import Loss, augmented, draw_noise
from pmae.evaluate.features import batch_of, evaluating, extract, order
from pmae.evaluate.finetune import Classifier, EarlyStopping, finetune
from pmae.evaluate.probes import statistics
from pmae.evaluate.progress import Pace
from pmae.evaluate.protocols import FinetuneProtocol, preset
from pmae.models import Encoder
from pmae.train import journal
from pmae.train.environment import pick_device
from pmae.train.given import Start
from pmae.train.journal import ProgressLine

STEPS, EPOCHS = 2000, (20, 200)
"""About how many steps training takes, within so many epochs: a small set needs as many as a large one."""
WARMUP, PATIENCE, FEWEST = 0.1, 0.2, 5
"""Shares of the epochs: of the warm-up, and without progress before training stops, at least so many."""
RATES = {"full": 5e-4, "lora": 2e-3}
"""Peak rates, of any batch: steps that shrink with it teach a small set nothing. Adapters start from zero and take
larger ones."""
PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
"""Of a linear head's squared weights, from which the best on the validation part is chosen."""
MOST_STEPS = 1000
LONG = 300.0  # seconds of training on a CPU that are told before it begins
Say = Callable[[str], None]


class Trained(NamedTuple):
    """An encoder, the head on it and the history of both; where the head alone was trained, also what it saw.

    That is the features of train and val, and the seconds that they took.
    """

    encoder: Encoder
    weight: Tensor
    bias: Tensor
    history: dict[str, Any]
    features: tuple[np.ndarray, np.ndarray] | None = None
    seconds: float = 0.0


def fit(
    start: Start,
    data: LabelledData,
    config: FinetuneConfig,
    device: str = "auto",
    folder: Path | None = None,
    reading: DataConfig | None = None,
    say: Say = lambda message: None,
) -> tuple[ImageClassifier, dict[str, Any]]:
    """Train on data with a validation part, which stops training, sets the temperature and the drift threshold.

    Returns the classifier and how it came about, for results.json.
    """
    val, where = data.val, pick_device(device)
    assert val is not None
    standardize = start.standardize.to(where)
    start = start._replace(standardize=standardize)
    made = _linear(start, data, config, where, say)
    if config.method != "linear":
        made = _network(start, made, data, config, where, folder, say)
    seen, unseen = made.features or _features(start._replace(encoder=made.encoder), data, config, where, say)
    weight, bias = made.weight.double().cpu(), made.bias.double().cpu()
    temperature = fit_temperature(unseen.astype(np.float64) @ weight.numpy().T + bias.numpy(), val.targets)
    reference = fit_reference(seen, unseen)
    images, read = data.train.images, reading or DataConfig()
    card = Card(
        data.classes,
        data.multi_label,
        config.pooling,
        images.shape,
        images.images.dtype.name,
        asdict(replace(start.config, weights=None)),
        threshold=reference.threshold,
        temperature=temperature,
        settings=asdict(config),
        **{name: getattr(read, name) for name in READING},
    )
    head = (weight / temperature).float(), (bias / temperature).float()
    classifier = ImageClassifier(card, made.encoder, standardize, head, reference, where)
    return classifier, {**made.history, "temperature": temperature}


def _linear(start: Start, data: LabelledData, config: FinetuneConfig, device: torch.device, say: Say) -> Trained:
    """Logistic regression on standardized features, with the penalty that is best on the validation part."""
    assert data.val is not None
    began = time.monotonic()
    features = _features(start, data, config, device, say)
    seconds = time.monotonic() - began
    train, held = (part.astype(np.float64) for part in features)
    mean, std = (part.numpy()[0] for part in statistics(torch.from_numpy(train)))
    tried: dict[float, float] = {}
    heads: dict[float, tuple[np.ndarray, np.ndarray]] = {}
    for penalty in PENALTIES:
        weight, bias = regression((train - mean) / std, data.train.targets, penalty, config.class_weights == "balanced")
        heads[penalty] = weight / std, bias - (weight / std) @ mean
        tried[penalty] = nll(held @ heads[penalty][0].T + heads[penalty][1], data.val.targets)
        if config.method == "linear":
            say(f"penalty {penalty:g}: validation loss {tried[penalty]:.4f}")
    best = min(tried, key=lambda penalty: tried[penalty])
    history = {"penalty": best, "validation_losses": {f"{penalty:g}": loss for penalty, loss in tried.items()}}
    weight, bias = heads[best]
    return Trained(start.encoder, torch.from_numpy(weight), torch.from_numpy(bias), history, features, seconds)


def _features(
    start: Start, data: LabelledData, config: FinetuneConfig, device: torch.device, say: Say
) -> tuple[np.ndarray, np.ndarray]:
    """What the head sees of the images of train and val."""
    assert data.val is not None
    embedder = Embedder(start.encoder.eval(), start.standardize, config.pooling, device)
    train, val = data.train.images.images, data.val.images.images
    pace = Pace("features", len(train) + len(val), "images", say)
    return embedder(train, pace.add), embedder(val, pace.add)


def regression(x: np.ndarray, targets: np.ndarray, penalty: float, balanced: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights (C, W) and biases (C,) of logistic regression, multinomial or of every class by itself."""
    from sklearn.linear_model import LogisticRegression

    weights = "balanced" if balanced else None
    if targets.ndim == 2:
        found = [regression(x, column.astype(np.int64), penalty, balanced) for column in targets.T]
        return np.stack([weight[1] - weight[0] for weight, _ in found]), np.array([b[1] - b[0] for _, b in found])
    if len(np.unique(targets)) == 1:
        # All images have this label, or none has: it is likely, not certain, that so have the next.
        odds = np.log(len(x) + 1) * (targets[0] - 0.5)
        return np.zeros((2, x.shape[1])), np.array([-odds, odds])
    with warnings.catch_warnings():
        # So scikit-learn says of two images a class, which may be a regression elsewhere.
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%")
        model = LogisticRegression(C=1 / penalty, class_weight=weights, max_iter=MOST_STEPS).fit(x, targets)
    if len(model.classes_) == 2:  # one row there, for both
        return np.concatenate([-model.coef_, model.coef_]) / 2, np.concatenate(
            [-model.intercept_, model.intercept_]
        ) / 2
    return model.coef_, model.intercept_


def _network(
    start: Start,
    linear: Trained,
    data: LabelledData,
    config: FinetuneConfig,
    device: torch.device,
    folder: Path | None,
    say: Say,
) -> Trained:
    """All weights, or adapters of them, until the validation loss falls no more.

    The head starts from the linear one: through a random head the first gradients distort good features (Kumar et al.
    2022), and on the validation part the result is never worse than that of `linear`.
    """
    val = data.val
    assert val is not None
    lora = config.method == "lora"
    encoder = with_adapters(start.encoder, config.rank, config.seed) if lora else start.encoder
    train, held = (Batches(part.images.images, device) for part in (data.train, val))
    targets, classes = torch.from_numpy(data.train.targets).to(device), len(data.classes)
    loss = loss_for(targets, classes, config.class_weights)
    protocol = protocol_of(config, data.train.images)
    epochs = protocol.epochs
    patience = config.patience or max(FEWEST, round(PATIENCE * epochs))
    stopping = EarlyStopping(lambda model: _loss_on(model, held, start.standardize, val.targets), patience)
    temperature = _first_temperature(linear, train, targets, start, protocol, config)
    head = linear.weight / temperature, linear.bias / temperature
    times = _times(epochs, linear, len(train), len(held)) if device.type == "cpu" else ""
    say(f"at most {epochs} epochs{times}; it stops after {patience} without a lower validation loss")
    # In Python nothing is shown unless it is asked for.
    with ProgressLine(epochs, say=say, live=say is journal.say, left="left at most") as line:
        settings = (start.standardize, protocol, config.seed, folder, _teller(line, epochs, stopping))
        made = finetune(encoder, train, targets, classes, *settings, loss=loss, stopping=stopping, head=head)
    kept = made.classifier
    tuned = merged(kept.encoder, start.encoder.is_vit) if lora else kept.encoder
    losses = [value if math.isfinite(value) else None for value in stopping.losses]
    best = stopping.losses.index(min(stopping.losses))
    say(f"kept: the weights {f'of epoch {best}' if best else 'before training'}, whose validation loss is the lowest")
    history = {"epochs": len(made.losses), "best_epoch": best, "losses": list(made.losses), "validation_losses": losses}
    return Trained(tuned, kept.head.weight.detach(), kept.head.bias.detach(), history)


def _times(epochs: int, linear: Trained, train: int, held: int) -> str:
    """About how long epochs take, from how long features did: a step of training takes three times that."""
    seconds = epochs * linear.seconds * (3 * train + held) / (train + held)
    long, short = (timedelta(seconds=round(value)) for value in (seconds, linear.seconds))
    return f", about {long} on this CPU (a linear head alone took {short}: --method linear)" if seconds > LONG else ""


def _teller(line: ProgressLine, epochs: int, stopping: EarlyStopping) -> Callable[[int, float], None]:
    """What to call after every epoch, to show both losses on a line."""

    def tell(epoch: int, loss: float) -> None:
        if epoch == 0:
            line.note(f"before training, with a linear head: validation loss {stopping.losses[0]:.4f}")
        losses = f"loss {loss:.4f}  validation loss {stopping.losses[-1]:.4f}"
        line.show(f"epoch {epoch + 1}/{epochs}  {losses}", epoch + 1)

    return tell


def _first_temperature(
    linear: Trained, train: Batches, targets: Tensor, start: Start, protocol: FinetuneProtocol, config: FinetuneConfig
) -> float:
    """What makes a linear head as sure as it may be of the images that training shows, cropped and distorted.

    One that separates whole images is so sure that the first losses would be many times those of a guess.
    """
    index = order(len(train), min(len(train), BATCH), config.seed, 0, train.device)[0]
    images, unmixed = train.take(index), replace(protocol, mixup=0.0, cutmix=0.0)
    x = augmented(images, draw_noise(images, unmixed, (config.seed, 0, 0)), start.standardize, unmixed)
    with evaluating(linear.encoder):
        features = linear.encoder.to(x.device).features(x)[config.pooling].double().cpu()
    logits = features @ linear.weight.T + linear.bias
    return max(1.0, fit_temperature(logits.numpy(), targets[index].cpu().numpy()))


def protocol_of(config: FinetuneConfig, images: ImageSet) -> FinetuneProtocol:
    """The settings of the training loop: those of the preset `strong`, as far as they were not given."""
    base, batch = preset("strong").finetune, batch_of(len(images), config.batch_size)
    assert base is not None
    epochs = config.epochs or min(max(EPOCHS[0], round(STEPS / (len(images) // batch))), EPOCHS[1])
    changes: dict[str, Any] = {}
    if config.augment != "strong" or images.vectors:
        changes |= {"randaugment": 0.0, "random_erasing": 0.0, "mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0}
    if config.augment == "none" or images.vectors:
        changes["augment"] = None
    if config.method == "lora":
        changes |= {"layer_decay": None, "drop_path": 0.0}
    changes |= {"epochs": epochs, "warmup_epochs": WARMUP * epochs, "batch_size": config.batch_size}
    # The loop's rates are for batches of 256.
    rate = (config.lr or RATES[config.method]) * 256 / batch
    return replace(base, base_lr=rate, pooling=config.pooling, **changes)


def loss_for(targets: Tensor, classes: int, weights: str) -> Loss:
    """Cross-entropy, or its sum over classes that each image may have or not; weighted against imbalance if asked."""
    balanced, count = weights == "balanced", len(targets)
    if targets.ndim == 2:
        positive = targets.sum(0)
        ratio = (count - positive) / positive.clamp(min=1) if balanced else None

        def binary(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
            soft = labels * (1 - smoothing) + smoothing / 2
            weight = None if ratio is None else ratio.to(logits)
            each = F.binary_cross_entropy_with_logits(logits, soft.to(logits), pos_weight=weight, reduction="none")
            return each.sum(1).mean()

        return binary
    share = count / (classes * torch.bincount(targets, minlength=classes).clamp(min=1)) if balanced else None

    def single(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        weight = None if share is None else share.to(logits)
        return F.cross_entropy(logits, labels, weight, label_smoothing=smoothing)

    return single


def _loss_on(model: Classifier, batches: Batches, standardize: Standardize, targets: np.ndarray) -> float:
    """Of the logits at the temperature that would be set: mixed images and smoothed labels leave them too unsure."""
    logits = extract(model, batches, standardize)["logits"].double().cpu().numpy()
    return nll(logits / fit_temperature(logits, targets), targets)
